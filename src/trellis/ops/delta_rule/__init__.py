"""The delta rule, with or without a decay: its public function. Equations in README.md."""

from __future__ import annotations

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
        backend: "auto", "reference" (the definition), "chunked" (PyTorch, any device) or "fla"
            (flash-linear-attention's kernels, GPUs).

    Returns:
        y [B, T, H, V] in the dtype of `q`, and the final state [N, H, K, V] (fp32, fp64 for fp64
        inputs), or None unless `output_final_state`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message says which and why.
    """
    size = checks.sizes(
        q=(q, "B,T,H,K"), k=(k, "B,T,H,K"), v=(v, "B,T,H,V"), beta=(beta, "B,T,H"),
        log_decay=(log_decay, "B,T,H?"),
    )  # fmt: skip
    dtype = checks.compute_dtype(q, k, v, beta, log_decay)
    count = checks.sequences(size["B"], cu_seqlens, q.device)
    expected = (count, size["H"], size["K"], size["V"])
    start = checks.state("initial_state", initial_state, expected, "[N,H,K,V]", q, dtype)
    recurrence = DeltaRule(size["K"] ** -0.5 if scale is None else scale)
    inputs = (q, k, v, beta, log_decay)
    y, (final,) = run(recurrence, inputs, (start,), cu_seqlens=cu_seqlens, backend=backend)
    return y.to(q.dtype), final if output_final_state else None
