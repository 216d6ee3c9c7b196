"""The other recurrences on a GPU, by the kernels of flash-linear-attention (fla).

fla is a package of its own; it is imported by the first call that its kernels take. A function of
this file translates a call of one recurrence into a call of an op of fla, and its results back:

    delta_rule          chunk_delta_rule, with a decay chunk_gated_delta_rule
    gated_slots         chunk_gsa
    linear_attention    chunk_simple_gla

and one token without gradients into the op's form for decoding, fused_recurrent_*.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from .dispatch import constant_when_compiled, no_autocast, refuse_double_backward, uncompiled

if TYPE_CHECKING:
    from .recurrence import Call, Tensors

log = logging.getLogger("trellis")

DEVICES = ("cuda",)
#: The largest size of keys.
WIDEST = 256
OLDEST_TRITON = (3, 7, 1)
#: fla takes differences of summed logarithms, of which -inf would make NaN. exp(-30) is 1e-13.
LEAST_LOG_DECAY = -30.0


def unfit(call: Call) -> str | None:
    """Why fla's kernels cannot compute a call; None if they can."""
    device = call.first.device
    if device.type not in DEVICES:
        return f"it runs on a GPU, and a tensor is on {device}"
    adapter = type(call.recurrence).adapter
    if isinstance(adapter, str):
        return adapter
    if call.state[0].dtype != torch.float32:
        return f"it computes in fp32, and a tensor is {call.state[0].dtype}"
    if _dtype(call) == torch.float32 and not tf32_allowed():
        return (
            "q, k and v are not all bf16 or all fp16, and it multiplies fp32 in TF32, which keeps "
            "three digits; torch.set_float32_matmul_precision('high') allows that"
        )
    if not call.first.numel():
        return "it needs at least one token"
    if call.first.shape[3] > WIDEST:
        return f"keys must have a size of at most {WIDEST}; got {call.first.shape[3]}"
    return None


@constant_when_compiled
def tf32_allowed() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


@constant_when_compiled
@functools.cache
def missing() -> str:
    """Why fla is not there. If it is, the first call imports it and says so in the log."""
    try:
        compiler = metadata.version("triton")
        version = importlib.import_module("fla").__version__
        importlib.import_module("fla.ops")
    except Exception as error:  # also what fla itself may raise where Triton does not suit it
        return (
            f"flash-linear-attention cannot be imported ({type(error).__name__}: {error}); "
            "pip install 'trellis-memory[gpu]' installs it"
        )
    if tuple(map(int, re.findall(r"\d+", compiler)[:3])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return (
            f"it needs Triton {oldest} or more, because older ones compile it wrongly for H100; "
            f"{compiler} is installed"
        )
    log.warning("recurrences run by the kernels of flash-linear-attention %s", version)
    return ""


@uncompiled
def run(call: Call) -> tuple[Tensor, Tensors]:
    """y in the dtype of q, and the final states in fp32."""
    adapter = cast("Callable[[Call], tuple[Tensor, Tensors]]", type(call.recurrence).adapter)
    if call.cu_seqlens is not None:  # fla would read beyond the tensors
        checks.bounds(call.cu_seqlens, call.first.shape[1])
    with no_autocast(call.first.device):
        y, final = adapter(call)
    for result in (y, *final):
        if result.requires_grad:
            result.register_hook(_refuse_create_graph)
    return y, final


def _refuse_create_graph(gradient: Tensor) -> None:
    """fla's gradients are constants to autograd: a second derivative would be silently wrong."""
    if torch.is_grad_enabled():
        refuse_double_backward(None)


def delta_rule(call: Call) -> tuple[Tensor, Tensors]:
    q, k, v = _alike(call, *call.inputs[:3])
    beta, log_decay = cast("Tensors", call.inputs[3:])
    options = _options(call, call.state[0])
    if log_decay is not None:
        log_decay = log_decay.clamp(min=LEAST_LOG_DECAY)
    if _one_token(call):
        op = load("fused_recurrent_gated_delta_rule")
        y, final = op(q, k, v, g=log_decay, beta=beta, **options)
    elif log_decay is None and q.dtype != torch.float32:  # which chunk_delta_rule refuses
        y, final = load("chunk_delta_rule")(q, k, v, beta=beta, **options)
    else:
        decay = torch.zeros_like(beta) if log_decay is None else log_decay
        y, final = load("chunk_gated_delta_rule")(q, k, v, g=decay, beta=beta, **options)
    return y, (final,)


def gated_slots(call: Call) -> tuple[Tensor, Tensors]:
    """fla's slots of keys are columns, [K, M], ours are rows."""
    q, k, v, write = _alike(call, *call.inputs[:4])
    log_decay = call.inputs[4]
    if log_decay is None:  # without it fla would take `write` for logits
        decay = torch.zeros_like(write, dtype=torch.float32)
    else:
        decay = log_decay.clamp(min=LEAST_LOG_DECAY)
    keys, values = call.state
    op = load("fused_recurrent_gsa" if _one_token(call) else "chunk_gsa")
    options = _options(call, (keys.mT.contiguous(), values))
    y, (keys, values) = op(q, k, v, s=write, g=decay, **options)
    return y, (keys.mT, values)


def linear_attention(call: Call) -> tuple[Tensor, Tensors]:
    """fla has no groups, so the heads of a group get copies of its q and k. Its backward takes even
    sizes only, in half precision."""
    q, k, v = _alike(call, *call.inputs[:3])
    log_decay, memory = call.inputs[3], call.state[0]
    groups, share, value = v.shape[2:]
    key = q.shape[3]
    q, k = (_even(x, 1).repeat_interleave(share, dim=2) for x in (q, k))
    if log_decay is not None:
        log_decay = log_decay.clamp(min=LEAST_LOG_DECAY).flatten(2)
    op = load("fused_recurrent_simple_gla" if _one_token(call) else "chunk_simple_gla")
    options = _options(call, _even(memory.flatten(1, 2), 2))
    y, final = op(q, k, _even(v.flatten(2, 3), 1), g=log_decay, **options)
    y = y[..., :value].unflatten(2, (groups, share)).flatten(3)
    return y, (final[..., :key, :value].unflatten(1, (groups, share)),)


def load(name: str) -> Callable[..., Any]:
    """An op of fla."""
    return cast("Callable[..., Any]", getattr(importlib.import_module("fla.ops"), name))


def _options(call: Call, state: Tensor | Tensors) -> dict[str, Any]:
    return {
        "scale": getattr(call.recurrence, "scale", 1.0),
        "initial_state": state,
        "output_final_state": True,
        "cu_seqlens": None if call.cu_seqlens is None else call.cu_seqlens.long(),
    }


def _one_token(call: Call) -> bool:
    """Whether the form for decoding will do, which has no gradients."""
    leaves = (*call.inputs, *call.state)
    graded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
    return call.cu_seqlens is None and call.first.shape[1] == 1 and not graded


def _dtype(call: Call) -> torch.dtype:
    """The dtype that q, k and v share, else fp32."""
    found = {x.dtype for x in call.inputs[:3] if x is not None}
    return found.pop() if len(found) == 1 else torch.float32


def _alike(call: Call, *tensors: Tensor | None) -> list[Tensor]:
    return [x.to(_dtype(call)) for x in tensors if x is not None]


def _even(x: Tensor, last: int) -> Tensor:
    """x with a zero behind each of its last dimensions, one or two, that has an odd size."""
    odd = [size % 2 for size in reversed(x.shape[-last:])]
    return F.pad(x, [n for size in odd for n in (0, size)]) if any(odd) else x
