"""The fused kernel as custom operators of PyTorch: one node of the graph for both passes.

A call is a list of tensors with their names, and options in a text such as "phi1=silu f=softmax".
The kernel finds both by name (native/call.h): a new one is named here and where it is used.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_int64
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import checks
from ..dispatch import constant_when_compiled, refuse_double_backward
from ..native import build
from .state import Call, MemoryState

SOURCE = build.Source(
    "memory",
    Path(__file__).parent / "native",
    headers=("activations.h", "call.h", "pass.h", "step.h"),
    shared=("simd.h",),
)

#: What both passes read of the tokens. What they share is given once: target2, log_decay2 and
#: step_size2 may be left out.
PAIRS = ("x", "target", "log_decay", "step_size")
INPUTS = ("q", *(f"{name}{i}" for i in (1, 2) for name in PAIRS))
#: The memories of both passes. The anchors, and the offset, are given in stale mode only.
STATES = ("memory1", "memory2", "anchor1", "anchor2")

#: The letter that stands for a type. The kernel computes on the first three.
TYPES = {
    torch.float32: ord("f"), torch.bfloat16: ord("b"), torch.float16: ord("h"),
    torch.int32: ord("i"), torch.int64: ord("q"),
}  # fmt: skip
FLOATS = tuple(TYPES)[:3]


@functools.cache
def kernel() -> ctypes.CDLL:
    """The loaded library. Raises build.NoKernel where there is none."""
    return declared(build.load(SOURCE))


def declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name in ("trellis_forward", "trellis_backward"):
        getattr(loaded, name).argtypes = [c_char_p, c_char_p, ctypes.c_void_p, c_int64]
    for name, count in (("widest", 0), ("segment", 1), ("saved", 2)):
        function = getattr(loaded, f"trellis_{name}")
        function.argtypes, function.restype = [c_int64] * count, c_int64
    return loaded


missing_kernel = build.missing(kernel, "the memory runs on the slower chunked backend")


@constant_when_compiled
def widest() -> int:
    """The largest size of keys, values and codes that the kernel takes."""
    return kernel().trellis_widest()


def unfit(call: Call) -> str | None:
    """Why the kernel cannot compute a call; None if it can."""
    for tensor in call.tensors:
        if tensor.device.type != "cpu":
            return f"it runs on the CPU, and a tensor is on {tensor.device}"
        if tensor.dtype not in FLOATS:
            return f"it computes in fp32, and a tensor is {tensor.dtype}"
    if not missing_kernel():
        size = max(tensor.shape[3] for tensor in call.tensors if tensor.dim() == 4)
        if size > widest():
            return f"sizes of keys, values and codes must be 1 to {widest()}; got {size}"
    return None


def run(call: Call) -> tuple[Tensor, MemoryState]:
    """Both passes, with f between them and psi behind them."""
    keys, values = call.keys, call.values
    given: dict[str, Tensor | None] = {"q": call.q}
    for i, one in ((1, keys), (2, values)):
        given |= {f"{name}{i}": tensor for name, tensor in zip(PAIRS, one[:4])}
        given |= {f"memory{i}": one.start.memory, f"anchor{i}": one.start.anchor}
    for name in PAIRS[1:]:
        if given[f"{name}2"] is given[f"{name}1"]:
            given[f"{name}2"] = None
    offset = keys.start.offset
    given |= {"offset": None if offset is None else offset.long(), "cu_seqlens": call.cu_seqlens}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    options = (
        f"phi1={keys.phi} phi2={values.phi} f={call.f} psi={call.psi} "
        f"transposed={int(values.transposed)} minibatch={call.minibatch} error_at={call.error_at}"
    )
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
    y, *final = memory(list(tensors.values()), " ".join(tensors), options, graded)
    if offset is None:
        return y, MemoryState(final[0], final[1])
    offset = keys.start.moved_on(call.read, call.minibatch)
    return y, MemoryState(final[0], final[1], final[2], final[3], offset)


@torch.library.custom_op("trellis::memory", mutates_args=(), device_types="cpu")
def memory(tensors: list[Tensor], names: str, options: str, save: bool) -> list[Tensor]:
    """y, the final states, and if `save` the memories at the starts of the backward's segments."""
    given = dict(zip(names.split(), tensors))
    if "cu_seqlens" in given:
        checks.bounds(given["cu_seqlens"], given["q"].shape[1])
    if "offset" in given:
        checks.offsets(given["offset"], int(_parsed(options)["minibatch"]))
    made = _results(tensors, names, options, save)
    finals = [f"final_{name}" for name in STATES if name in given]
    _call("forward", options, given | dict(zip(["y", *finals, "saved"], made)), made)
    return made


def _results(tensors: list[Tensor], names: str, options: str, save: bool) -> list[Tensor]:
    """Unfilled. The sizes depend on shapes alone, as tracing needs it."""
    given, chosen = dict(zip(names.split(), tensors)), _parsed(options)
    x1, x2, target1, memory1 = (given[name] for name in ("x1", "x2", "target1", "memory1"))
    target2 = given.get("target2", target1)
    y_dim = (x2 if chosen["transposed"] == "1" else target2).shape[3]
    made = [given["q"].new_empty(*x2.shape[:3], y_dim)]
    made += [memory1.new_empty(given[name].shape) for name in STATES if name in given]
    if save:
        places = x1.shape[0] * x1.shape[1] // kernel().trellis_segment(int(chosen["minibatch"]))
        places += 2 * memory1.shape[0] + 1  # at least as many as all sequences have segments
        saved = kernel().trellis_saved
        size = saved(x1.shape[3], target1.shape[3]) + saved(x2.shape[3], target2.shape[3])
        made.append(memory1.new_empty(places, x1.shape[2], size))
    return made


@torch.library.custom_op("trellis::memory_backward", mutates_args=(), device_types="cpu")
def memory_backward(
    tensors: list[Tensor], names: str, options: str, saved: Tensor, gradients: list[Tensor]
) -> list[Tensor]:
    """The gradients of the inputs and states among `tensors`.

    gradients: those of y and the final states. saved: what `memory` has saved.
    """
    given = dict(zip(names.split(), tensors))
    finals = [f"dfinal_{name}" for name in STATES if name in given]
    known = {"saved": saved, **dict(zip(["dy", *finals], gradients))}
    made = _blank_gradients(tensors, names)
    results = zip((f"d{name}" for name in given if _graded(name)), made)
    _call("backward", options, given | known | dict(results), made)
    return made


def _graded(name: str) -> bool:
    return name in INPUTS or name in STATES


def _blank_gradients(tensors: list[Tensor], names: str, *_: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for name, t in zip(names.split(), tensors) if _graded(name)]


@functools.cache
def _parsed(options: str) -> dict[str, str]:
    return dict(option.split("=") for option in options.split())


def _call(function: str, options: str, tensors: dict[str, Tensor], filled: list[Tensor]) -> None:
    """Call the kernel. filled: those of the tensors that it is to fill."""
    for x in filled:
        build.in_large_pages(x)
    ready: list[Tensor] = []
    numbers: list[int] = []
    for name, x in tensors.items():
        # Of [B, T, H, n] only the last dimension has to be contiguous, of [B, T, H] none.
        strided = name in INPUTS or name == "dy"
        if not (strided and (x.dim() == 3 or x.stride(3) == 1)):
            x = x.contiguous()
        ready.append(x)  # holds the copy until the kernel has run
        padding = (1,) * (4 - x.dim())
        numbers += (x.data_ptr(), TYPES[x.dtype], *x.shape, *padding, *x.stride(), *padding)
    table = (c_int64 * len(numbers))(*numbers)
    failed = getattr(kernel(), f"trellis_{function}")(
        options.encode(), " ".join(tensors).encode(), table, torch.get_num_threads()
    )
    if failed == 1:
        raise MemoryError("the memory kernel could not allocate its buffers")
    if failed:
        raise ValueError(f"the memory kernel does not know all of the options {options!r}")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, names, options, save = inputs
    ctx.save_for_backward(*tensors, output[-1] if save else None)
    ctx.call = names, options
    if save:
        ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(True)


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    *tensors, saved = ctx.saved_tensors
    names, options = ctx.call
    if saved is None:
        raise RuntimeError(
            "trellis::memory was called with save=False, so it has no backward; "
            "use trellis.ops.trellis_memory, which sets it when gradients are needed"
        )
    found = iter(memory_backward(tensors, names, options, saved, gradients[:-1]))
    return [next(found) if _graded(name) else None for name in names.split()], None, None, None


memory.register_fake(_results)
memory.register_autograd(_backward, setup_context=_setup)
memory_backward.register_fake(_blank_gradients)
memory_backward.register_autograd(refuse_double_backward)
