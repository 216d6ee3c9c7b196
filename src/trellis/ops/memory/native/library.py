"""The fused kernel as custom operators of PyTorch: one node for both passes."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from .... import checks
from ...native import build
from ...native.pages import in_large_pages
from ..library import refuse_double_backward

SOURCE = build.Source(
    "memory",
    Path(__file__).parent,
    headers=("pass.h", "activations.h", "gemm.h", "step.h", "tensors.h"),
    shared=("simd.h",),
)
CODES = {
    name: code
    for code, name in enumerate(
        ("identity", "silu", "gelu", "tanh", "layernorm", "l2norm", "ln_silu", "l2_silu", "softmax")
    )
}
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Sizes of keys, values and codes that the kernel takes.
WIDEST = 256
#: Tokens between two saved memories, where the mini-batch allows.
SEGMENT_TOKENS = 192
CHUNK = 16


class _Tensor(Structure):
    _fields_ = [
        ("data", c_void_p), ("batch", c_int64), ("token", c_int64), ("head", c_int64),
        ("type", c_int64),
    ]  # fmt: skip


class _Sequence(Structure):
    _fields_ = [(n, c_int64) for n in ("batch", "token", "length", "offset", "saved")]


class _State(Structure):
    _fields_ = [(n, c_void_p) for n in ("first", "second", "first_anchor", "second_anchor")]


_INPUTS = ("q", "x1", "t1", "x2", "t2", "log_beta1", "gamma1", "log_beta2", "gamma2")


class _Problem(Structure):
    _fields_ = [
        *((n, c_int64) for n in (
            "sequences", "heads", "threads", "d1", "m1", "d2", "m2", "phi1", "phi2", "f", "psi",
            "transposed", "minibatch", "segment", "shared_target",
        )),
        ("sequence", POINTER(_Sequence)),
        *((n, _Tensor) for n in _INPUTS),
        ("y", _Tensor),
        ("start", _State), ("final", _State), ("origin", _State),
        ("saved", c_void_p),
        *((f"d{n}", _Tensor) for n in _INPUTS),
    ]  # fmt: skip


@functools.cache
def kernel() -> ctypes.CDLL:
    """The loaded library. Raises build.NoKernel where there is none."""
    return declared(build.load(SOURCE))


def declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name in ("trellis_forward", "trellis_backward"):
        getattr(loaded, name).argtypes = [POINTER(_Problem)]
    return loaded


def segment_tokens(minibatch: int) -> int:
    if minibatch == 1:
        return SEGMENT_TOKENS
    return minibatch * max(1, SEGMENT_TOKENS // minibatch)


def _padded(n: int) -> int:
    return -(-n // CHUNK) * CHUNK


def _blank_saved(x1: Tensor, t1: Tensor, x2: Tensor, t2: Tensor, first: Tensor, b: int) -> Tensor:
    """Room for the saved memories: a bound that depends on shapes alone, as tracing needs it."""
    places = x1.shape[0] * x1.shape[1] // segment_tokens(b) + 2 * first.shape[0] + 1
    sizes = [_padded(t.shape[3]) for t in (x1, t1, x2, t2)]
    return first.new_empty(places, x1.shape[2], sizes[0] * sizes[1] + sizes[2] * sizes[3])


def _tensor(x: Tensor) -> _Tensor:
    stride = x.stride()
    return _Tensor(x.data_ptr(), stride[0], stride[1], stride[2], TYPES[x.dtype])


def _state(*parts: Tensor | None) -> _State:
    return _State(*(None if p is None or p.numel() == 0 else p.data_ptr() for p in parts))


class _Call:
    """A filled _Problem, and what its pointers point to."""

    def __init__(
        self,
        inputs: list[Tensor],
        states: tuple[Tensor | None, ...],
        offset: Tensor | None,
        cu_seqlens: Tensor | None,
        choice: tuple[str, str, str, str, bool, int],
    ):
        # The kernel wants the last dimension contiguous, and states as they come from here.
        self.inputs = [t if t.dim() == 3 or t.stride(3) == 1 else t.contiguous() for t in inputs]
        self.states = [None if s is None else s.contiguous() for s in states]
        phi1, phi2, f, psi, transposed, minibatch = choice
        x1, t1, x2, t2 = self.inputs[1:5]
        first = states[0]
        assert first is not None
        sequences = first.shape[0]
        tokens = x1.shape[1]
        if cu_seqlens is None:
            rows = [(n, 0, tokens) for n in range(sequences)]
        else:
            bounds = checks.bounds(cu_seqlens, tokens)
            rows = [(0, begin, end - begin) for begin, end in zip(bounds, bounds[1:])]
        offsets = [0] * sequences if offset is None else checks.offsets(offset, minibatch)
        segment = segment_tokens(minibatch)
        self.table = (_Sequence * max(sequences, 1))()
        place = self.places = 0
        for n, ((batch, token, length), o) in enumerate(zip(rows, offsets)):
            self.table[n] = _Sequence(batch, token, length, o, place)
            place += -(-(o + length) // segment) if length else 0
        self.places = place
        self.problem = _Problem(
            sequences=sequences, heads=x1.shape[2], threads=torch.get_num_threads(),
            d1=x1.shape[3], m1=t1.shape[3], d2=x2.shape[3], m2=t2.shape[3],
            phi1=CODES[phi1], phi2=CODES[phi2], f=CODES[f], psi=CODES[psi],
            transposed=transposed, minibatch=minibatch, segment=segment,
            shared_target=t1 is t2, sequence=self.table,
            **{name: _tensor(t) for name, t in zip(_INPUTS, self.inputs)},
        )  # fmt: skip

    def run(self, name: str) -> None:
        if getattr(kernel(), name)(ctypes.byref(self.problem)):
            raise MemoryError("the memory kernel could not allocate its buffers")


def _inputs(
    q: Tensor, x1: Tensor, t1: Tensor, x2: Tensor, t2: Tensor | None, log_beta1: Tensor,
    gamma1: Tensor, log_beta2: Tensor | None, gamma2: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """None stands for what both passes share."""
    return [
        q, x1, t1, x2, t1 if t2 is None else t2, log_beta1, gamma1,
        log_beta1 if log_beta2 is None else log_beta2, gamma1 if gamma2 is None else gamma2,
    ]  # fmt: skip


@torch.library.custom_op("trellis::memory", mutates_args=(), device_types="cpu")
def memory(
    q: Tensor,
    x1: Tensor,
    t1: Tensor,
    x2: Tensor,
    t2: Tensor | None,
    log_beta1: Tensor,
    gamma1: Tensor,
    log_beta2: Tensor | None,
    gamma2: Tensor | None,
    first: Tensor,
    second: Tensor,
    first_anchor: Tensor | None,
    second_anchor: Tensor | None,
    offset: Tensor | None,
    cu_seqlens: Tensor | None,
    phi1: str,
    phi2: str,
    f: str,
    psi: str,
    transposed: bool,
    minibatch: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = _inputs(q, x1, t1, x2, t2, log_beta1, gamma1, log_beta2, gamma2)
    states = (first, second, first_anchor, second_anchor)
    call = _Call(inputs, states, offset, cu_seqlens, (phi1, phi2, f, psi, transposed, minibatch))
    y = in_large_pages(_blank_y(q, x2, inputs[4], transposed))
    finals = [first.new_empty(0 if s is None else s.shape) for s in states]
    saved = _blank_saved(x1, t1, x2, inputs[4], first, minibatch) if save else first.new_empty(0)
    call.problem.y = _tensor(y)
    call.problem.start, call.problem.final = _state(*call.states), _state(*finals)
    if save:
        saved[call.places :].zero_()  # not used, but part of the result
        call.problem.saved = in_large_pages(saved).data_ptr()
    call.run("trellis_forward")
    return y, finals[0], finals[1], finals[2], finals[3], saved


def _blank_y(q: Tensor, x2: Tensor, t2: Tensor, transposed: bool) -> Tensor:
    return q.new_empty(*x2.shape[:3], (x2 if transposed else t2).shape[3])


@memory.register_fake
def _(
    q, x1, t1, x2, t2, log_beta1, gamma1, log_beta2, gamma2, first, second, first_anchor,
    second_anchor, offset, cu_seqlens, phi1, phi2, f, psi, transposed, minibatch, save,
):  # fmt: skip
    t2 = t1 if t2 is None else t2
    states = (first, second, first_anchor, second_anchor)
    finals = [first.new_empty(0 if s is None else s.shape) for s in states]
    saved = _blank_saved(x1, t1, x2, t2, first, minibatch) if save else first.new_empty(0)
    return (_blank_y(q, x2, t2, transposed), *finals, saved)


@torch.library.custom_op("trellis::memory_backward", mutates_args=(), device_types="cpu")
def memory_backward(
    dy: Tensor,
    dfirst: Tensor,
    dsecond: Tensor,
    dfirst_anchor: Tensor,
    dsecond_anchor: Tensor,
    q: Tensor,
    x1: Tensor,
    t1: Tensor,
    x2: Tensor,
    t2: Tensor | None,
    log_beta1: Tensor,
    gamma1: Tensor,
    log_beta2: Tensor | None,
    gamma2: Tensor | None,
    first: Tensor,
    second: Tensor,
    first_anchor: Tensor | None,
    second_anchor: Tensor | None,
    offset: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    phi1: str,
    phi2: str,
    f: str,
    psi: str,
    transposed: bool,
    minibatch: int,
) -> list[Tensor]:
    inputs = _inputs(q, x1, t1, x2, t2, log_beta1, gamma1, log_beta2, gamma2)
    states = (first, second, first_anchor, second_anchor)
    call = _Call(inputs, states, offset, cu_seqlens, (phi1, phi2, f, psi, transposed, minibatch))
    dy = dy if dy.stride(3) == 1 else dy.contiguous()
    dfinals = [d.contiguous() for d in (dfirst, dsecond, dfirst_anchor, dsecond_anchor)]
    dstarts = [first.new_empty(0 if s is None else s.shape) for s in states]
    grads = [in_large_pages(torch.empty(t.shape, dtype=t.dtype)) for t in inputs]
    if t2 is None:
        grads[4] = grads[3].new_empty(0)  # its gradient is in that of t1
    problem = call.problem
    problem.y = _tensor(dy)
    problem.start, problem.final = _state(*dstarts), _state(*dfinals)
    problem.origin = _state(*call.states)
    problem.saved = saved.data_ptr()
    for name, grad in zip(_INPUTS, grads):
        if grad.dim() > 1:
            setattr(problem, f"d{name}", _tensor(grad))
    call.run("trellis_backward")
    for shared, own, other in ((log_beta2, 5, 7), (gamma2, 6, 8)):
        if shared is None:
            grads[own] += grads[other]
            grads[other] = grads[other].new_empty(0)
    return [*grads, *dstarts]


@memory_backward.register_fake
def _(
    dy, dfirst, dsecond, dfirst_anchor, dsecond_anchor, q, x1, t1, x2, t2, log_beta1, gamma1,
    log_beta2, gamma2, first, second, first_anchor, second_anchor, offset, cu_seqlens, saved,
    phi1, phi2, f, psi, transposed, minibatch,
):  # fmt: skip
    given = (q, x1, t1, x2, t2, log_beta1, gamma1, log_beta2, gamma2)
    grads = [q.new_empty(0) if t is None else t.new_empty(t.shape) for t in given]
    states = (first, second, first_anchor, second_anchor)
    return [*grads, *(first.new_empty(0 if s is None else s.shape) for s in states)]


def _setup(ctx, inputs, output):
    *tensors, phi1, phi2, f, psi, transposed, minibatch, save = inputs
    ctx.save_for_backward(*tensors, output[5])
    ctx.choice = (phi1, phi2, f, psi, transposed, minibatch)
    ctx.saved_memories = save
    ctx.mark_non_differentiable(output[5])
    ctx.set_materialize_grads(True)


def _backward(ctx, dy, dfirst, dsecond, dfirst_anchor, dsecond_anchor, _dsaved):
    if not ctx.saved_memories:
        raise RuntimeError(
            "trellis::memory was called with save=False, so it has no backward; "
            "use trellis.ops.trellis_memory, which sets it when gradients are needed"
        )
    *tensors, saved = ctx.saved_tensors
    grads = memory_backward(
        dy, dfirst, dsecond, dfirst_anchor, dsecond_anchor, *tensors, saved, *ctx.choice
    )
    # A gradient for each tensor that was given; none for offset, cu_seqlens and the choices.
    kept = [None if t is None else g for t, g in zip(tensors, grads)]
    return (*kept, *[None] * 9)


memory.register_autograd(_backward, setup_context=_setup)
memory_backward.register_autograd(refuse_double_backward)
