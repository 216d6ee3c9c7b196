"""What surrounds a call: the environment variable, torch.compile, torch.func, forward mode."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from . import checks

VARIABLE = "TRELLIS_BACKEND"
#: "triton" is the place of a GPU kernel; it is refused until there is one.
BACKENDS = ("auto", "reference", "chunked", "native", "triton")


def constant_when_compiled(function: Callable[[], str]) -> Callable[[], str]:
    """What torch.compiler.assume_constant_result does, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_compiled
def asked_backend() -> str:
    """What the environment asks for. Raises ValueError if that is not one of BACKENDS."""
    asked = os.environ.get(VARIABLE, "auto")
    checks.choice(VARIABLE, asked, BACKENDS)
    return asked


def under_transform() -> bool:
    """Whether torch.func (grad, vmap, jvp) or forward-mode differentiation is at work.

    The first cannot see into fused backwards; to the second a fused op is a constant.
    """
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )
