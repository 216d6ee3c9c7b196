"""The fused pointwise kernels of pointwise.cpp: when they are used, and how they are called."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from ..dispatch import asked_backend, refuse_double_backward, under_transform
from . import build

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
    return tuple(map(build.in_large_pages, _unfilled(first, *others)))


def _unfilled(first: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(first.new_empty(0 if t is None else t.shape) for t in (first, *others))


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


def differentiable(forward: Any, backward: Any, *, like: Sequence[int], graded: int) -> None:
    """Tells PyTorch the shapes and the gradients of a kernel's custom operator.

    forward: the operator; its tensors (or None) come before its other arguments. backward: an
    operator that takes the gradients of the results and all arguments of `forward`, and gives the
    gradients of the first `graded` of them. like: the arguments whose shapes the results have.
    """

    def shapes(*arguments: Any) -> Any:
        found = _unfilled(*(arguments[n] for n in like))
        return found if len(found) > 1 else found[0]

    def gradient_shapes(*arguments: Any) -> tuple[Tensor, ...]:
        return _unfilled(*arguments[len(like) : len(like) + graded])

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        count = sum(x is None or isinstance(x, Tensor) for x in inputs)
        ctx.save_for_backward(*inputs[:count])
        ctx.rest = inputs[count:]
        ctx.set_materialize_grads(True)

    def gradients(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # asked for once: activation checkpointing allows no more
        found = backward(*given, *tensors, *ctx.rest)
        wanted = [None if x is None else d for x, d in zip(tensors, found)]
        return *wanted, *[None] * (len(tensors) + len(ctx.rest) - graded)

    forward.register_fake(shapes)
    forward.register_autograd(gradients, setup_context=keep)
    backward.register_fake(gradient_shapes)
    backward.register_autograd(refuse_double_backward)
