"""Which implementation of an op runs; and what it runs in: autocast, torch.compile, torch.func."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch.autograd import forward_ad

from .. import checks

VARIABLE = "TRELLIS_BACKEND"
#: The names that TRELLIS_BACKEND takes. An op without the named backend chooses as for "auto".
BACKENDS = ("auto", "reference", "chunked", "native", "triton", "fla")

Result = TypeVar("Result")


class NoKernel(RuntimeError):
    """The machine has no such kernel; the message says why and what would help."""


class Backend(NamedTuple):
    """One implementation of an op.

    run: computes the op. All backends of an op take the same arguments and give the same results.
    unfit: why it cannot compute a given call, such as "it runs on the CPU, and a tensor is on
        cuda:0"; None if it can.
    missing: why this machine does not have it, such as "no C++ compiler"; empty if it does. It is
        asked last, because the first answer may take seconds: a kernel is compiled.
    one_token: whether "auto" takes it to read a single token, as in decoding.
    """

    name: str
    run: Callable[..., Any]
    unfit: Callable[[Any], str | None] = lambda call: None
    missing: Callable[[], str] = lambda: ""
    one_token: bool = True


class Backends:
    """The implementations of one op, the fastest first; the last, "reference", takes every call."""

    def __init__(self, *table: Backend):
        self.table = table
        self.names = ("auto", *(backend.name for backend in reversed(table)))

    def choose(self, name: str, call: Any, *, one_token: bool) -> Backend:
        """The backend that computes `call`, which is what its `unfit` looks at.

        name: the op's argument `backend`; "auto" asks the environment variable TRELLIS_BACKEND.
        one_token: the call reads one token of each sequence.

        Raises:
            ValueError: the backend that was asked for cannot compute this call.
            NoKernel: it does not exist on this machine.
            RuntimeError: it was asked for by argument inside torch.func or forward-mode
                differentiation.
        """
        source = "backend"
        if name == "auto":
            name, source = asked_backend(), VARIABLE
        if name not in self.names:
            name = "auto"
        if under_transform():
            if source == "backend" and name != "reference":
                raise RuntimeError(
                    f"backend={name!r} cannot run inside torch.func or forward-mode "
                    "differentiation; use 'auto' or 'reference'"
                )
            name = "reference"
        for backend in self.table:
            if name == "auto":
                fast = backend.one_token or not one_token
                if fast and not backend.unfit(call) and not backend.missing():
                    return backend
            elif backend.name == name:
                reason = backend.unfit(call)
                if reason:
                    raise ValueError(f"{source}={name!r} cannot run here: {reason}")
                why = backend.missing()
                if why:
                    raise NoKernel(f"{source}={name!r} cannot run here: {why}")
                return backend
        raise AssertionError("the last backend of an op takes every call")


def constant_when_compiled(function: Callable[[], Result]) -> Callable[[], Result]:
    """What torch.compiler.assume_constant_result does, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_compiled
def asked_backend() -> str:
    """The value of TRELLIS_BACKEND, or "auto". Raises ValueError if it is not one of BACKENDS."""
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
    """A context without autocast; an empty one, which costs less, where autocast is not at work."""
    # Some devices, such as meta, have no autocast.
    if not torch._C._is_any_autocast_enabled() or not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def under_transform() -> bool:
    """Whether torch.func (grad, vmap, jvp) or forward-mode differentiation is at work.

    torch.func cannot see into a backward that is written by hand, and forward-mode differentiation
    would take its result for a constant.
    """
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )


def refuse_double_backward(ctx: Any, *gradients: Any) -> NoReturn:
    """The derivative of every backward that is written by hand: there is none."""
    raise NotImplementedError(
        "this op cannot be differentiated twice: double backward (create_graph=True) needs plain "
        f"PyTorch, which backend='reference' or {VARIABLE}=reference runs"
    )
