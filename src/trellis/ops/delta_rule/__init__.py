"""The delta rule, with or without a decay: its public function. Equations in README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ..recurrence import run
from .chunked import DeltaRule

__all__ = ["delta_rule"]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """A memory S that every token decays, corrects towards k -> v, and reads.

        S <- exp(log_decay) S
        S <- S + beta k (v - S^T k)^T
        y = scale S^T q

    Without log_decay this is the rule of DeltaNet, with it that of Gated DeltaNet.

    Args:
        q, k: [B, T, H, K]. v: [B, T, H, V]. Keys are to have unit length, or the rule may
            diverge; the function does not normalise them.
        beta: [B, T, H], how much of the error is corrected: in [0, 1], or [0, 2] for
            corrections that overshoot.
        log_decay: [B, T, H], at most 0; -inf forgets everything. None keeps everything.
        scale: factor on y; K^-1/2 by default.
        initial_state: [N, H, K, V]; zeros by default.
        cu_seqlens: [N+1] bounds of N sequences packed into one row (B = 1), each of which
            starts from its own entry of `initial_state`. Without it N = B.
        backend: "auto", "reference" (the definition) or "chunked" (PyTorch, any device).

    Returns:
        y [B, T, H, V] in the dtype of `q`, and the final state [N, H, K, V] (fp32, fp64 for fp64
        inputs), or None unless `output_final_state`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message says which and why.
    """
    given = {"q": q, "k": k, "v": v, "beta": beta, **checks.present(log_decay=log_decay)}
    checks.floats(**given)
    checks.dimensions("q", q, "[B,T,H,K]")
    checks.dimensions("v", v, "[B,T,H,V]")
    batch, tokens, heads, key_dim = q.shape
    lead = (batch, tokens, heads)
    checks.shape("k", k, q.shape, "[B,T,H,K]")
    checks.shape("v", v, (*lead, v.shape[3]), "[B,T,H,V]")
    checks.shape("beta", beta, lead, "[B,T,H]")
    if log_decay is not None:
        checks.shape("log_decay", log_decay, lead, "[B,T,H]")

    checks.not_empty("q", q, "[B,T,H,K]")
    checks.not_empty("v", v, "[B,T,H,V]")
    dtype = checks.compute_dtype(*given.values())
    expected = (checks.sequences(batch, cu_seqlens, q.device), heads, key_dim, v.shape[3])
    if initial_state is None:
        initial_state = torch.zeros(expected, dtype=dtype, device=q.device)
    checks.floats(q=q, initial_state=initial_state)
    checks.shape("initial_state", initial_state, expected, "[N,H,K,V]")

    recurrence = DeltaRule(key_dim**-0.5 if scale is None else scale)
    inputs = (q, k, v, beta, log_decay)
    y, (final,) = run(
        recurrence, inputs, (initial_state.to(dtype),), cu_seqlens=cu_seqlens, backend=backend
    )
    return y.to(q.dtype), final if output_final_state else None
