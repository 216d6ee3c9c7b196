"""Linear attention: its public function. Equations in README.md."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ..recurrence import run
from .chunked import LinearAttention

__all__ = ["LinearAttentionState", "linear_attention"]


class LinearAttentionState(NamedTuple):
    """memory: [N, H, K, V]. normalizer: [N, H, K], or None without a normaliser."""

    memory: Tensor
    normalizer: Tensor | None = None


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    normalize: bool = False,
    eps: float = 1e-6,
    initial_state: LinearAttentionState | Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, LinearAttentionState | None]:
    """A memory S of keys and values, with an optional decay and an optional normaliser z.

        S <- exp(log_decay) S + k v^T,  y = scale S^T q
        z <- exp(log_decay) z + k,      y = scale S^T q / (scale z . q + eps) if `normalize`

    Args:
        q, k: [B, T, G, K], where G divides H: each group of H / G heads shares its q and k.
        v: [B, T, H, V].
        log_decay: [B, T, H], at most 0; -inf forgets everything. None keeps everything.
        initial_state: LinearAttentionState or its memory alone, [N, H, K, V]; zeros by default.
        cu_seqlens: [N+1] bounds of N sequences packed into one row (B = 1), each of which
            starts from its own entry of `initial_state`. Without it N = B.
        backend: "auto", "reference" (the definition), "chunked" (PyTorch, any device) or "fla"
            (flash-linear-attention's kernels, GPUs).

    Returns:
        y [B, T, H, V] in the dtype of `q`, and the final LinearAttentionState (fp32, fp64 for
        fp64 inputs), or None unless `output_final_state`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message says which and why.
    """
    checks.sizes(v=(v, "B,T,H,V"), q=(q, "B,T,G,K"), k=(k, "B,T,G,K"))
    heads, (groups, key_dim) = v.shape[2], q.shape[2:]
    if heads % groups:
        raise ValueError(f"the groups of q must divide the heads of v, {heads}; got {groups}")
    count = checks.sequences(q.shape[0], cu_seqlens, q.device)
    dtype = checks.compute_dtype(q, k, v, log_decay)
    memory = _start(initial_state, (count, heads, key_dim, v.shape[3]), normalize, dtype, v)
    if log_decay is not None:
        checks.floats(v=v, log_decay=log_decay)
        checks.shape("log_decay", log_decay, v.shape[:3], "[B,T,H]")
        log_decay = log_decay.unflatten(2, (groups, -1))
    if normalize:  # the normaliser is the memory of a value that is always one
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)

    y, (memory,) = run(
        LinearAttention(),
        (q, k, v.unflatten(2, (groups, -1)), log_decay),
        (memory.unflatten(1, (groups, -1)),),
        cu_seqlens=cu_seqlens,
        backend=backend,
    )
    y, memory = y.view(v.shape), memory.flatten(1, 2)
    if scale != 1:
        y = scale * y
    final = LinearAttentionState(memory)
    if normalize:
        y = y[..., :-1] / (y[..., -1:] + eps)
        final = LinearAttentionState(memory[..., :-1], memory[..., -1])
    return y.to(q.dtype), final if output_final_state else None


def _start(
    state: LinearAttentionState | Tensor | None,
    shape: tuple[int, int, int, int],
    normalize: bool,
    dtype: torch.dtype,
    like: Tensor,
) -> Tensor:
    """The memory to start from; the normaliser is its last column."""
    if state is None:
        return like.new_zeros(*shape[:3], shape[3] + normalize, dtype=dtype)
    if isinstance(state, Tensor):
        state = LinearAttentionState(state)
    memory, normalizer = checks.parts(
        "initial_state", state, (2,), "a LinearAttentionState or its memory"
    )
    checks.floats(**{"initial_state.memory": memory})
    memory = checks.state("initial_state.memory", memory, shape, "[N,H,K,V]", like, dtype)
    if (normalizer is not None) != normalize:
        there = "there is none" if normalizer is None else "there is one"
        raise ValueError(
            f"initial_state.normalizer must be given exactly with normalize=True; {there}, and "
            f"normalize is {normalize}"
        )
    if normalizer is None:
        return memory
    name = "initial_state.normalizer"
    normalizer = checks.state(name, normalizer, shape[:3], "[N,H,K]", like, dtype)
    return torch.cat([memory, normalizer[..., None]], dim=-1)
