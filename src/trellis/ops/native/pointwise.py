"""The fused pointwise kernels of pointwise.cpp: when they are used, and how they are called."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..dispatch import VARIABLE, asked_backend, under_transform
from . import build
from .pages import blank_like

SOURCE = build.Source("pointwise", build.SHARED, headers=(), shared=("simd.h",))
#: The least size of a tensor, in numbers, that the kernels are used for: on smaller ones, as in
#: decoding token by token, the call costs more than the kernel saves.
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
    """The loaded library. Raises build.NoKernel where it cannot be built or loaded."""
    return build.load(SOURCE)


missing_kernel = build.missing(kernel, "norms, gates, convolutions and losses run unfused")


def fresh_like(first: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """Unfilled tensors of these shapes for a kernel to write to; None makes an empty one."""
    return tuple(first.new_empty(0) if t is None else blank_like(t) for t in (first, *others))


def run(
    name: str,
    inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    *numbers: int | float,
) -> None:
    """Call trellis_`name`(inputs, outputs, numbers, number of threads) of pointwise.cpp.

    inputs: made contiguous here; None is a null pointer. outputs: contiguous already.
    """
    contiguous = [t if t is None else t.contiguous() for t in inputs]
    pointers = [c_void_p(None if t is None else t.data_ptr()) for t in (*contiguous, *outputs)]
    sizes = [c_double(n) if isinstance(n, float) else c_int64(n) for n in numbers]
    function = getattr(kernel(), f"trellis_{name}")
    if function(*pointers, *sizes, c_int64(torch.get_num_threads())):
        raise MemoryError(f"the kernel {name} could not allocate its buffers")


def refuse_double_backward(name: str) -> Callable[..., NoReturn]:
    """The backward of a backward, for register_autograd: it raises NotImplementedError."""

    def refuse(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(
            f"the fused {name} cannot be differentiated twice: double backward "
            f"(create_graph=True) needs plain PyTorch, which {VARIABLE}=reference runs"
        )

    return refuse
