"""Compiling on first use: the cache, the compiler, several processes at once."""

import logging
import os
import stat
import subprocess
import sys

import pytest
import torch
from tests.support import problem

from trellis.ops import trellis_memory
from trellis.ops.memory import custom_op
from trellis.ops.native import build

NAMES = ("q", "k", "v", "alpha", "log_beta", "gamma")


@pytest.fixture
def fresh(monkeypatch):
    """As in a new process: nothing loaded, nothing decided."""
    custom_op.kernel.cache_clear()
    custom_op.missing_kernel.cache_clear()
    yield
    custom_op.kernel.cache_clear()
    custom_op.missing_kernel.cache_clear()


def inputs():
    case = problem(tokens=4)
    return {name: case.tensors[name].float() for name in NAMES}


def test_the_cache_is_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TRELLIS_CACHE", str(tmp_path / "cache"))
    path = build.library(custom_op.SOURCE, "portable")
    assert path.parent == tmp_path / "cache"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    changed = path.stat().st_mtime_ns
    assert build.library(custom_op.SOURCE, "portable") == path
    assert path.stat().st_mtime_ns == changed  # not compiled again


def test_a_folder_that_others_can_write_to_is_refused(tmp_path, monkeypatch, fresh):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("TRELLIS_CACHE", str(folder))
    with pytest.raises(build.NoKernel, match="others can write to the cache folder"):
        build.library(custom_op.SOURCE)
    with pytest.raises(build.NoKernel, match="backend='native' cannot run here: others can write"):
        trellis_memory(**inputs(), backend="native")
    assert list(folder.iterdir()) == []


def test_without_a_compiler_the_chunked_path_runs_and_says_so_once(monkeypatch, caplog, fresh):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING, logger="trellis"):
        first, _ = trellis_memory(**inputs())
        trellis_memory(**inputs())
    assert torch.equal(first, trellis_memory(**inputs(), backend="chunked")[0])
    assert len(caplog.records) == 1
    assert "no C++ compiler" in caplog.text
    assert "apt install g++" in caplog.text
    with pytest.raises(build.NoKernel, match=r"no C\+\+ compiler"):
        trellis_memory(**inputs(), backend="native")


@pytest.mark.parametrize(
    ("variable", "value"), [("TRELLIS_CACHE", "/proc/1/trellis"), ("CXX", "/bin/false")]
)
def test_auto_falls_back_whatever_goes_wrong(variable, value, tmp_path, monkeypatch, fresh):
    monkeypatch.setenv("TRELLIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(variable, value)
    assert torch.isfinite(trellis_memory(**inputs())[0]).all()


def test_targets_are_checked():
    with pytest.raises(ValueError, match=r"TRELLIS_NATIVE_TARGET must be one of .*; got 'sse9'"):
        build.library(custom_op.SOURCE, "sse9")


FIRST_USE = """
from trellis.ops.memory import custom_op
from trellis.ops.native import build
build.open_library(build.library(custom_op.SOURCE, "portable"))
"""


def test_several_processes_at_once(tmp_path):
    environment = {**os.environ, "TRELLIS_CACHE": str(tmp_path / "cache")}
    started = [
        subprocess.Popen([sys.executable, "-c", FIRST_USE], env=environment) for _ in range(3)
    ]
    assert [process.wait(timeout=300) for process in started] == [0, 0, 0]
    names = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert names == ["", ".so"]  # the lock and one library
