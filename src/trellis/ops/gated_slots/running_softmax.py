"""The write weights of ABC: a softmax over the tokens read so far, for every slot."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import checks
from ..dispatch import no_autocast

#: Logits must stay within these bounds: sums of their exponentials, and inverses, fit in fp32.
LOGIT_BOUND = 32.0

#: Tokens whose running sums are one product with a triangle of ones.
BLOCK = 64


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
    checks.floats(logits=logits, **({} if total is None else {"total": total}))
    checks.dimensions("logits", logits, "[B,T,H,M]")
    checks.not_empty("logits", logits, "[B,T,H,M]")
    count = checks.sequences(logits.shape[0], cu_seqlens, logits.device)
    dtype = checks.compute_dtype(logits)
    expected = (count, *logits.shape[2:])
    if total is None:
        total = torch.zeros(expected, dtype=dtype, device=logits.device)
    checks.shape("total", total, expected, "[N,H,M]")
    total = total.to(dtype)
    with no_autocast(logits.device):
        weights = logits.to(dtype).exp()
        if cu_seqlens is None:
            return _run(weights, total)
        bounds = checks.bounds(cu_seqlens, logits.shape[1])
        if count == 0:
            return weights, weights, total
        runs = [
            _run(weights[:, begin:end], total[n : n + 1])
            for n, (begin, end) in enumerate(zip(bounds, bounds[1:]))
        ]
        write, log_decay, totals = zip(*runs)
        return torch.cat(write, dim=1), torch.cat(log_decay, dim=1), torch.cat(totals)


def _run(weights: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
