"""The gated slot memory of GSA and ABC: its public functions. Equations in README.md."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import checks
from ..dispatch import no_autocast
from ..recurrence import run
from .chunked import GatedSlots

__all__ = ["LOGIT_BOUND", "SlotState", "gated_slots", "running_softmax"]

#: Logits must stay within these bounds: sums of their exponentials, and inverses, fit in fp32.
LOGIT_BOUND = 32.0

#: Tokens whose running sums are one product with a triangle of ones.
BLOCK = 64


class SlotState(NamedTuple):
    """keys [N, H, M, K] and values [N, H, M, V]."""

    keys: Tensor
    values: Tensor


def gated_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: SlotState | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, SlotState | None]:
    """Write every token into M slots of keys and of values, then attend over the slots.

        keys   <- Diag(exp(log_decay)) keys + write k^T
        values <- Diag(exp(log_decay)) values + write v^T
        y = values^T softmax(scale keys q)

    Args:
        q, k: [B, T, H, K]. v: [B, T, H, V].
        write: [B, T, H, M], how much of the token each slot takes.
        log_decay: [B, T, H, M], the log of what each slot keeps, at most 0; -inf empties the
            slot. None keeps everything, at less cost.
        scale: of the scores; K ** -0.5 by default.
        initial_state: SlotState or the pair (keys, values); zeros by default.
        cu_seqlens: [N+1] bounds of N sequences packed into one row (B = 1), each of which
            starts from its own entry of `initial_state`. Without it N = B.
        backend: "auto", "reference" (the definition), "chunked" (PyTorch, any device) or "fla"
            (flash-linear-attention's kernels, GPUs).

    Returns:
        y [B, T, H, V] in the dtype of `q`, and the final SlotState (fp32, fp64 for fp64
        inputs), or None unless `output_final_state`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message says which and why.
    """
    size = checks.sizes(
        q=(q, "B,T,H,K"), k=(k, "B,T,H,K"), v=(v, "B,T,H,V"), write=(write, "B,T,H,M"),
        log_decay=(log_decay, "B,T,H,M?"),
    )  # fmt: skip
    count = checks.sequences(q.shape[0], cu_seqlens, q.device)
    dtype = checks.compute_dtype(q, k, v, write, log_decay)
    keys = values = None
    if initial_state is not None:
        what = "a SlotState or the pair (keys, values)"
        keys, values = checks.parts("initial_state", initial_state, (2,), what)
        checks.floats(**{"initial_state.keys": keys, "initial_state.values": values})
    lead = (count, size["H"], size["M"])
    state = (
        checks.state("initial_state.keys", keys, (*lead, size["K"]), "[N,H,M,K]", q, dtype),
        checks.state("initial_state.values", values, (*lead, size["V"]), "[N,H,M,V]", q, dtype),
    )
    if scale is None:
        scale = size["K"] ** -0.5
    y, final = run(
        GatedSlots(scale), (q, k, v, write, log_decay), state,
        cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip
    return y.to(q.dtype), SlotState(*final) if output_final_state else None


def running_softmax(
    logits: Tensor, total: Tensor | None = None, *, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights with which `gated_slots` keeps softmax-weighted means of all tokens so far.

        total_t = total_{t-1} + exp(logits_t)
        write_t = exp(logits_t) / total_t
        log_decay_t = log(total_{t-1} / total_t)

    Args:
        logits: [B, T, H, M], within -32 and 32 (LOGIT_BOUND). That is not checked, which would
            wait for the device: clamp them, as the mixer does. Beyond about 88 fp32 gives NaN.
        total: [N, H, M], what the sums have come to; zeros, the start, by default. Where it is 0
            the memory is empty, and log_decay is finite only for the sake of gradients.
        cu_seqlens: [N+1] bounds of N sequences packed into one row. Without it N = B.

    Returns:
        write and log_decay [B, T, H, M], total [N, H, M], in fp32 (fp64 for fp64 logits).

    Raises:
        ValueError, TypeError: an argument does not fit; the message says which and why.
    """
    checks.sizes(logits=(logits, "B,T,H,M"))
    count = checks.sequences(logits.shape[0], cu_seqlens, logits.device)
    dtype = checks.compute_dtype(logits)
    total = checks.state("total", total, (count, *logits.shape[2:]), "[N,H,M]", logits, dtype)
    with no_autocast(logits.device):
        weights = logits.to(dtype).exp()
        if cu_seqlens is None:
            return _running_softmax(weights, total)
        bounds = checks.bounds(cu_seqlens, logits.shape[1])
        if count == 0:
            return weights, weights, total
        runs = [
            _running_softmax(weights[:, begin:end], total[n : n + 1])
            for n, (begin, end) in enumerate(zip(bounds, bounds[1:]))
        ]
        write, log_decay, totals = zip(*runs)
        return torch.cat(write, dim=1), torch.cat(log_decay, dim=1), torch.cat(totals)


def _running_softmax(weights: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    totals = _cumulated(weights, before)
    kept = torch.cat([before[:, None], totals], dim=1)
    # At a sequence's start nothing was kept; log 0 would make a gradient of NaN.
    ratio = (kept[:, :-1] / totals).clamp(min=torch.finfo(totals.dtype).tiny)
    # A copy: a state must not hold on to the whole input.
    return weights / totals, ratio.log(), kept[:, -1].clone()


def _cumulated(x: Tensor, before: Tensor) -> Tensor:
    """x summed over the tokens up to each, [N, T, ...], and `before`, [N, ...].

    Products with triangles of ones are several times as fast as cumsum along a middle dimension.
    """
    sequences, tokens = x.shape[:2]
    size = max(1, min(BLOCK, tokens))
    blocks = -(-tokens // size)
    x = F.pad(x.flatten(2), (0, 0, 0, blocks * size - tokens)).unflatten(1, (blocks, size))
    ones = x.new_ones(size, size).tril().expand(sequences * blocks, size, size)
    within = (ones @ x.flatten(0, 1)).view_as(x)
    starts = torch.cat([before.flatten(1)[:, None], within[:, :, -1]], dim=1).cumsum(1)
    totals = within + starts[:, :-1, None]
    return totals.flatten(1, 2)[:, :tokens].unflatten(2, before.shape[1:])
