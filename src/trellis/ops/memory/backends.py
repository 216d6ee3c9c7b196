"""Which implementation runs: the argument, the environment, or what fits best."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable

from torch import Tensor

from .. import checks

#: "triton" is the place of a GPU kernel; it is refused until there is one.
BACKENDS = ("auto", "reference", "chunked", "native", "triton")

log = logging.getLogger("trellis")


def choose(backend: str, tensors: Iterable[Tensor], *, two_passes: bool) -> str:
    """The backend to run. "auto" asks the environment variable TRELLIS_BACKEND first.

    Raises:
        ValueError: a backend that was asked for cannot run on these tensors.
        NotImplementedError, NoKernel: a backend that was asked for does not exist here.
    """
    checks.choice("backend", backend, BACKENDS)
    named = "backend"
    if backend == "auto" and "TRELLIS_BACKEND" in os.environ:
        backend, named = os.environ["TRELLIS_BACKEND"], "TRELLIS_BACKEND"
        checks.choice(named, backend, BACKENDS)
    if backend == "triton":
        raise NotImplementedError(
            f"{named}='triton' is not part of this version; use 'auto', 'native', 'chunked' or "
            "'reference'"
        )
    if backend == "native" and not (named == "TRELLIS_BACKEND" and not two_passes):
        reason = unfit(tensors, two_passes)
        if reason:
            raise ValueError(f"{named}='native' cannot run here: {reason}")
        from .native.library import kernel

        kernel()
    elif backend in ("auto", "native"):
        return "native" if unfit(tensors, two_passes) is None and _have_kernel() else "chunked"
    return backend


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


@functools.cache
def _have_kernel() -> bool:
    from .native.build import NoKernel
    from .native.library import kernel

    try:
        kernel()
    except NoKernel as error:
        log.warning("the memory runs on the slower chunked backend: %s", error)
        return False
    return True
