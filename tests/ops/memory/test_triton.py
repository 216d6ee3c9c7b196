"""A small part of `make test-triton`, in a process of its own: Triton's interpreter is for all of
a process or for none."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support import problem

from trellis.ops import trellis_memory

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton, a gigabyte, is not part of `make setup`; `make test-triton` installs it",
)
def test_the_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-m", "small", "tests/triton/test_interpreter.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-1000:]


def test_without_a_gpu_the_reason_is_given():
    case = problem(tokens=2)
    with pytest.raises(ValueError, match=r"backend='triton' cannot run here: it runs on a GPU, "
                       r"and a tensor is on cpu"):  # fmt: skip
        case.run("triton", torch.float32)


def test_recompute_changes_nothing_elsewhere():
    once = problem(tokens=9).run("chunked", torch.float32)
    again = problem(tokens=9, recompute=True).run("chunked", torch.float32)
    assert all(torch.equal(once[name], again[name]) for name in once)
    case = problem(tokens=2)
    given = [case.tensors[n] for n in ("q", "k", "v", "alpha", "log_beta", "gamma")]
    with pytest.raises(ValueError, match="recompute must be true or false; got 'yes'"):
        trellis_memory(*given, recompute="yes")
