import subprocess
import sys

import pytest

import trellis

pytest.importorskip("typer", reason="the command needs typer")


def run(*arguments):
    command = [sys.executable, "-m", "trellis.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_models_prints_a_row_for_every_mixer():
    out = run("models", "125m")
    assert out.returncode == 0, out.stderr
    assert "123,847,344" in out.stdout  # trellis
    assert "123,551,232" in out.stdout  # transformer
    assert "grows" in out.stdout


def test_the_version():
    out = run("--version")
    assert (out.returncode, out.stdout) == (0, f"trellis {trellis.__version__}\n")


def test_an_unknown_preset_is_named():
    out = run("models", "2b")
    assert out.returncode != 0
    assert "preset must be one of 125m" in out.stderr
    assert "Traceback" not in out.stderr
