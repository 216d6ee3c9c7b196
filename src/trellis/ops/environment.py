"""What surrounds a call: the environment variable, torch.compile, torch.func."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

VARIABLE = "TRELLIS_BACKEND"


def constant_when_compiled(function: Callable[[], str]) -> Callable[[], str]:
    """What torch.compiler.assume_constant_result does, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_compiled
def asked_backend() -> str:
    return os.environ.get(VARIABLE, "auto")


def under_transform() -> bool:
    """Whether torch.func (grad, vmap, jvp) is at work, which cannot see into fused backwards."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
