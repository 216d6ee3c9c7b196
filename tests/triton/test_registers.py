"""The kernels compiled for GPUs that are not here: registers, spills, shared memory.

`make test-triton` runs this. The table of docs/gpu.md comes from the same function.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here; see `make test-triton`")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter's kernels cannot be compiled", allow_module_level=True)

from trellis.bench import registers

#: Kernels whose every register counts: their time is that of one warp.
WITHOUT_SPILLS = ("prepare", "write", "write_back", "read", "step")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("architecture", registers.ARCHITECTURES)
def test_limits(architecture, dtype):
    found = {}
    for name, arguments, constants in registers.starts_of(
        architecture, dtype, 64, registers.CASES["exact, encode"]
    ):
        found[name, str(constants)] = registers.compiled(name, arguments, constants, architecture)
    assert {name for name, _ in found} == set(registers.KERNELS)
    for (name, _), used in found.items():
        assert used["shared"] <= 48 * 1024, (name, used)
        assert used["fp64"] == 0, (name, used)
        if name in WITHOUT_SPILLS:
            assert used["spills"] == 0, (name, used)
        elif dtype == torch.bfloat16:
            assert used["spills"] <= 128, (name, used)
