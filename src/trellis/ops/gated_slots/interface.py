"""The public function of the gated slot memory. Equations in README.md."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ..recurrence import run
from .chunked import GatedSlots


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
        backend: "auto", "reference" (the definition) or "chunked".

    Returns:
        y [B, T, H, V] in the dtype of `q`, and the final SlotState (fp32, fp64 for fp64
        inputs), or None unless `output_final_state`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message says which and why.
    """
    given = {"q": q, "k": k, "v": v, "write": write, **checks.present(log_decay=log_decay)}
    checks.floats(**given)
    checks.dimensions("q", q, "[B,T,H,K]")
    lead = q.shape[:3]
    checks.not_empty("q", q, "[B,T,H,K]")
    checks.shape("k", k, q.shape, "[B,T,H,K]")
    for name, tensor, letter in (("v", v, "V"), ("write", write, "M")):
        checks.dimensions(name, tensor, f"[B,T,H,{letter}]")
        checks.shape(name, tensor, (*lead, tensor.shape[3]), f"[B,T,H,{letter}]")
        checks.not_empty(name, tensor, f"[B,T,H,{letter}]")
    if log_decay is not None:
        checks.shape("log_decay", log_decay, write.shape, "[B,T,H,M]")
    count = checks.sequences(q.shape[0], cu_seqlens, q.device)
    state = _start(initial_state, count, q, v, write, checks.compute_dtype(*given.values()))
    if scale is None:
        scale = q.shape[3] ** -0.5
    y, final = run(
        GatedSlots(scale), (q, k, v, write, log_decay), state,
        cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip
    return y.to(q.dtype), SlotState(*final) if output_final_state else None


def _start(
    given: SlotState | tuple[Tensor, Tensor] | None,
    count: int,
    q: Tensor,
    v: Tensor,
    write: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    heads, slots = write.shape[2:]
    shapes = {
        "keys": (count, heads, slots, q.shape[3]),
        "values": (count, heads, slots, v.shape[3]),
    }
    if given is None:
        keys, values = (torch.zeros(s, dtype=dtype, device=q.device) for s in shapes.values())
        return keys, values
    found = checks.parts("initial_state", given, (2,), "a SlotState or the pair (keys, values)")
    for (name, expected), tensor in zip(shapes.items(), found):
        name = f"initial_state.{name}"
        checks.floats(**{"q": q, name: tensor})
        checks.shape(name, tensor, expected, "[N,H,M,K]" if name.endswith("keys") else "[N,H,M,V]")
    return found[0].to(dtype), found[1].to(dtype)
