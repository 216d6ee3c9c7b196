"""Which implementation runs: the argument, the environment, or what fits best."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ... import checks
from ..dispatch import BACKENDS, VARIABLE, asked_backend
from ..native.build import NoKernel, missing


def choose(backend: str, tensors: Iterable[Tensor], *, two_passes: bool) -> str:
    """The backend to run. "auto" asks the environment variable TRELLIS_BACKEND first.

    A choice made for all by the variable does not concern `compress`, which has no native form.

    Raises:
        ValueError: a backend that was asked for cannot run on these tensors.
        NotImplementedError, NoKernel: a backend that was asked for does not exist here.
    """
    checks.choice("backend", backend, BACKENDS)
    named = "backend"
    if backend == "auto" and asked_backend() != "auto":
        backend, named = asked_backend(), VARIABLE
    if backend == "triton":
        raise NotImplementedError(
            f"{named}='triton' is not part of this version; use 'auto', 'native', 'chunked' or "
            "'reference'"
        )
    if backend == "native" and named == VARIABLE and not two_passes:
        return "chunked"
    if backend not in ("auto", "native"):
        return backend
    reason = unfit(tensors, two_passes)
    if backend == "native":
        if reason:
            raise ValueError(f"{named}='native' cannot run here: {reason}")
        why = missing_kernel()
        if why:
            raise NoKernel(f"{named}='native' cannot run here: {why}")
        return "native"
    return "chunked" if reason or missing_kernel() else "native"


def unfit(tensors: Iterable[Tensor], two_passes: bool) -> str | None:
    """Why the native kernel cannot take these tensors; None if it can."""
    from .native.library import TYPES, WIDEST

    if not two_passes:
        return "it computes both passes at once; compress has 'chunked' and 'reference'"
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"it runs on the CPU, and a tensor is on {tensor.device}"
        if tensor.dtype not in TYPES:
            return f"it computes in fp32, and a tensor is {tensor.dtype}"
        if tensor.dim() == 4 and not 1 <= tensor.shape[3] <= WIDEST:
            return f"sizes of keys, values and codes must be 1 to {WIDEST}; got {tensor.shape[3]}"
    return None


def _load() -> None:
    from .native.library import kernel

    kernel()


missing_kernel = missing(_load, "the memory runs on the slower chunked backend")
