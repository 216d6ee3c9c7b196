"""The fused pointwise kernels: when they run, and how they are called."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_double, c_int64, c_void_p
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..dispatch import VARIABLE, asked_backend, under_transform
from . import build

SOURCE = build.Source(
    "pointwise",
    build.SHARED,
    headers=("convolution.h", "cross_entropy.h", "gates.h", "lanes.h", "norms.h"),
    shared=("simd.h",),
)
#: Below so many numbers a call costs more than it saves, as in decoding token by token.
SMALLEST = 2**15


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels are to compute on these tensors, the first of which is the largest.

    If not, plain PyTorch does: on other devices, in other dtypes, without a compiler, inside
    torch.func or forward-mode differentiation, or where TRELLIS_BACKEND asks for it.
    """
    backend = asked_backend()
    for tensor in tensors:
        # Subclasses, such as sharded tensors, have rules of their own.
        if type(tensor) not in (Tensor, nn.Parameter):
            return False
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
            return False
    return (
        tensors[0].numel() >= SMALLEST
        and backend in ("auto", "native")
        and not under_transform()
        and not missing_kernel()
    )


@functools.cache
def kernel() -> ctypes.CDLL:
    """The loaded library. Raises build.NoKernel where there is none."""
    return build.load(SOURCE)


missing_kernel = build.missing(kernel, "norms, gates, convolutions and losses run unfused")


def run(name: str, *arguments: Tensor | int | float | None) -> None:
    """Call the kernel `name`; tensors must be contiguous, None is a null pointer."""
    threads = c_int64(torch.get_num_threads())
    if getattr(kernel(), f"trellis_{name}")(*map(_as_c, arguments), threads):
        raise MemoryError(f"the kernel {name} could not allocate its buffers")


def _as_c(value: Tensor | int | float | None) -> Any:
    if isinstance(value, Tensor):
        return c_void_p(value.data_ptr())
    if value is None:
        return c_void_p(None)
    return c_double(value) if isinstance(value, float) else c_int64(value)


def refuse_double_backward(name: str) -> Callable[..., NoReturn]:
    def refuse(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(
            f"the fused {name} cannot be differentiated twice: double backward "
            f"(create_graph=True) needs plain PyTorch, which {VARIABLE}=reference runs"
        )

    return refuse
