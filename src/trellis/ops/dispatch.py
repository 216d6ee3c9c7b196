"""What surrounds a call: the environment variable, autocast, torch.compile, torch.func."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch.autograd import forward_ad

from .. import checks

VARIABLE = "TRELLIS_BACKEND"
#: "triton" is the place of a GPU kernel; it is refused until there is one.
BACKENDS = ("auto", "reference", "chunked", "native", "triton")

Result = TypeVar("Result")


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


def uncompiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """What torch.compiler.disable does, without importing the compiler: one break of the graph."""

    @functools.wraps(function)
    def call(*arguments: object) -> Result:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*arguments)
        return function(*arguments)

    return call


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off. Devices that have none, such as meta, have nothing to switch off."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def under_transform() -> bool:
    """Whether torch.func (grad, vmap, jvp) or forward-mode differentiation is at work.

    The first cannot see into fused backwards; to the second a fused op is a constant.
    """
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )
