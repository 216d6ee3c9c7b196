"""The memory on a GPU: both passes by Triton kernels, with f and psi between and behind them.

This file needs no Triton: it says which calls the kernels take, and hands them over.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from .... import checks
from ...dispatch import constant_when_compiled, no_autocast
from ..activations import FUNCTIONS
from ..state import Call, MemoryState, Pass, PassState, tokens_read

#: The largest size of keys, values and codes, and of a mini-batch.
WIDEST, LONGEST_MINIBATCH = 128, 64
PHI = ("identity", "silu", "gelu", "tanh")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@constant_when_compiled
def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@constant_when_compiled
@functools.cache
def missing() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'trellis-memory[gpu]')"
    return ""


def unfit(call: Call) -> str | None:
    """Why the kernels cannot compute a call; None if they can."""
    return _unfit(call.tensors, (call.keys.phi, call.values.phi), call.minibatch)


def unfit_pass(
    one: Pass, query: Tensor, minibatch: int, error_at: str, cu_seqlens: Tensor | None
) -> str | None:
    return _unfit((query, *one[:4]), (one.phi,), minibatch)


def _unfit(tensors: Sequence[Tensor], phis: Sequence[str], minibatch: int) -> str | None:
    device = tensors[0].device
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return (
            f"it runs on a GPU, and a tensor is on {device} (TRITON_INTERPRET=1 runs it on a CPU, "
            "thousands of times slower, to test it)"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"it needs a GPU of compute capability 8.0 or more, and {device} has {found}"
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            return f"it computes in fp32, and a tensor is {tensor.dtype}"
    size = max(tensor.shape[3] for tensor in tensors if tensor.dim() == 4)
    if size > WIDEST:
        return f"sizes of keys, values and codes must be 1 to {WIDEST}; got {size}"
    if minibatch > LONGEST_MINIBATCH:
        return f"mini-batches must have at most {LONGEST_MINIBATCH} tokens; got {minibatch}"
    for phi in phis:
        if phi not in PHI:
            return f"phi must act on each slot alone ({', '.join(PHI)}); got {phi!r}"
    return None


def run(call: Call) -> tuple[Tensor, MemoryState]:
    """Both passes."""
    passes = (call.keys, call.values)
    leaves = (*call.tensors, *(s for one in passes for s in one.start[:2] if s is not None))
    graded = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    if call.q.shape[1] == 1 and call.cu_seqlens is None and not graded:
        return _step(call)
    if graded and call.recompute:
        from torch.utils.checkpoint import checkpoint

        found = checkpoint(_both, call, graded, use_reentrant=False, preserve_rng_state=False)
        assert found is not None
        return found
    return _both(call, graded)


def _both(call: Call, graded: bool) -> tuple[Tensor, MemoryState]:
    passes = (call.keys, call.values)
    dtype = _dtype(call)
    with no_autocast(call.q.device):
        written = _Written(
            [_ready(one, dtype) for one in passes], call.minibatch, call.error_at,
            call.cu_seqlens, graded,
        )  # fmt: skip
        yhat = written.read(0, call.q, wide=True)
        y = written.read(1, FUNCTIONS[call.f](yhat), wide=call.psi != "identity")
        y = FUNCTIONS[call.psi](y).to(call.q.dtype)
        return y, MemoryState.join(written.final(0), written.final(1))


def run_pass(
    one: Pass, query: Tensor, minibatch: int, error_at: str, cu_seqlens: Tensor | None
) -> tuple[Tensor, PassState]:
    """One pass; y is in fp32."""
    states = [s for s in one.start[:2] if s is not None]
    graded = torch.is_grad_enabled() and any(
        leaf.requires_grad for leaf in (query, *one[:4], *states)
    )
    dtype = _common_dtype(query, one.x, one.target)
    with no_autocast(query.device):
        written = _Written([_ready(one, dtype)], minibatch, error_at, cu_seqlens, graded)
        return written.read(0, query, wide=True), written.final(0)


class _Written:
    """The writes of one or two passes, ready to be read."""

    def __init__(
        self, passes: list[Pass], minibatch: int, error_at: str, cu: Tensor | None, graded: bool
    ):
        from . import launch

        self.passes, self.minibatch, self.launch = passes, minibatch, launch
        x, offset = passes[0].x, passes[0].start.offset
        self.moved = None
        if offset is not None:
            self.moved = passes[0].start.moved_on(tokens_read(x, cu), minibatch)
            offset = offset.long()
        if cu is not None:
            if cu.device.type == "cpu" and not torch.compiler.is_compiling():
                checks.bounds(cu, x.shape[1])  # on a GPU this would wait for the device
            cu = cu.long().contiguous()
        owner = None if cu is None else launch.owners(x, minibatch, cu)
        self.where = (offset, cu, owner)
        made = launch.write(
            _tensors(passes), " ".join(one.phi for one in passes), minibatch, error_at == "after",
            graded, *self.where,
        )  # fmt: skip
        each = len(made) // len(passes)
        self.made = [made[i * each : (i + 1) * each] for i in range(len(passes))]

    def read(self, i: int, query: Tensor, *, wide: bool) -> Tensor:
        """wide: y is wanted in fp32."""
        one, (writes, _, saved, *_) = self.passes[i], self.made[i]
        return self.launch.read(
            query.to(one.x.dtype).contiguous(), one.x, writes, one.log_decay, saved,
            one.transposed, self.minibatch, wide, *self.where,
        )  # fmt: skip

    def final(self, i: int) -> PassState:
        _, _, _, memory, *anchor = self.made[i]
        return PassState(memory, anchor[0], self.moved) if anchor else PassState(memory)


def _step(call: Call) -> tuple[Tensor, MemoryState]:
    """One token, without gradients."""
    from . import launch

    dtype = _dtype(call)
    passes = [_ready(one, dtype) for one in (call.keys, call.values)]
    offset = call.keys.start.offset
    phis = f"{call.keys.phi} {call.values.phi}"
    y, *final = launch.step(
        call.q.to(dtype).contiguous(), _tensors(passes), phis, call.f, call.psi,
        call.values.transposed, call.minibatch, call.error_at == "after",
        None if offset is None else offset.long(),
    )  # fmt: skip
    y = y.to(call.q.dtype)
    if offset is None:
        return y, MemoryState(final[0], final[1])
    moved = call.keys.start.moved_on(1, call.minibatch)
    return y, MemoryState(final[0], final[2], final[1], final[3], moved)


def _dtype(call: Call) -> torch.dtype:
    """The dtype that q, k, v and alpha share, else fp32."""
    values = call.values.x if call.values.transposed else call.values.target
    return _common_dtype(call.q, call.keys.x, call.keys.target, values)


def _common_dtype(*tensors: Tensor) -> torch.dtype:
    found = {tensor.dtype for tensor in tensors}
    return found.pop() if len(found) == 1 else torch.float32


def _ready(one: Pass, dtype: torch.dtype) -> Pass:
    """The pass as the kernels want it: contiguous, x and target in one dtype."""
    memory, anchor, offset = one.start
    start = PassState(memory.contiguous(), None if anchor is None else anchor.contiguous(), offset)
    return one._replace(
        x=one.x.to(dtype).contiguous(), target=one.target.to(dtype).contiguous(),
        log_decay=one.log_decay.contiguous(), step_size=one.step_size.contiguous(), start=start,
    )  # fmt: skip


def _tensors(passes: Sequence[Pass]) -> list[Tensor]:
    states = ([s for s in one.start[:2] if s is not None] for one in passes)
    return [tensor for one, state in zip(passes, states) for tensor in (*one[:4], *state)]
