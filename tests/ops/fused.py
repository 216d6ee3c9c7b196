"""What the tests of the fused pointwise ops share."""

import torch
from tests.support import projection, relative_rms

#: Largest relative RMS error of fp32 against fp64.
FP32 = 2e-5
FP64 = 1e-12


def run(function, leaves, dtype=torch.float64):
    """Outputs of a function, and the gradients of a random linear function of all of them."""
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    projection(outputs).backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [*(o.detach() for o in outputs), *gradients]


def check_against(reference, function, leaves):
    """`function` in fp32 and in fp64 is the reference in fp64."""
    expected = run(reference, leaves)
    for dtype, bound in ((torch.float32, FP32), (torch.float64, FP64)):
        for place, (one, other) in enumerate(zip(run(function, leaves, dtype), expected)):
            assert one.dtype == dtype
            assert relative_rms(one, other) < bound, f"result {place} in {dtype}"


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
