"""TTT-Linear: its public function. Equations in README.md."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ..recurrence import run
from .chunked import TTT

__all__ = ["TTTState", "ttt_linear"]


class TTTState(NamedTuple):
    """The inner models of N sequences, and what a cut inside a mini-batch needs to go on.

    weight: [N, H, D, D] and bias: [N, H, D], at the start of the mini-batch under way.
    weight_steps, bias_steps: like them, the sum of eta times the gradients of that mini-batch's
        tokens so far; zeros, or None, where it is about to start.
    offset: [N], integer, tokens of that mini-batch already read; None for zeros.
    """

    weight: Tensor
    bias: Tensor
    weight_steps: Tensor | None = None
    bias_steps: Tensor | None = None
    offset: Tensor | None = None


def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    theta: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *,
    initial_state: TTTState | tuple[Tensor, Tensor],
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, TTTState | None]:
    """TTT-Linear: an inner model that learns v from k, one gradient step per mini-batch.

        f(x) = x + LN(x W + bias),   loss_s = 1/2 |f(k_s) - v_s|^2 at the mini-batch's start
        W_t = W - theta_i sum over s <= t of eta_s dloss_s/dW,   y_t = f(q_t) with W_t

    where the sum is over the mini-batch of token t, i is t's place in it, and W_t of its last
    token starts the next. The bias is updated in the same way.

    Args:
        q, k, v: [B, T, H, D]. eta: [B, T, H], the step size of each token.
        theta: [b] or [H, b], the factor of each place in a mini-batch of b tokens.
        norm_weight, norm_bias: [H, D], of the layer norm (epsilon 1e-6).
        initial_state: TTTState, or its weight [N, H, D, D] and bias [N, H, D] alone. It has to be
            given: at zero the gradient is a thousand times the error.
        cu_seqlens: [N+1] bounds of N sequences packed into one row (B = 1), each of which
            starts from its own entry of `initial_state`. Without it N = B.
        backend: "auto", "reference" (the definition) or "chunked" (the dual form).

    Returns:
        y [B, T, H, D] in the dtype of q, and the final TTTState (fp32, fp64 for fp64 inputs), or
        None unless `output_final_state`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message says which and why.
    """
    checks.floats(q=q, theta=theta)
    if theta.dim() not in (1, 2) or theta.shape[-1] < 1:
        raise ValueError(f"theta must have shape [b] or [H,b] with b >= 1; got {list(theta.shape)}")
    checks.sizes(
        q=(q, "B,T,H,D"), k=(k, "B,T,H,D"), v=(v, "B,T,H,D"), eta=(eta, "B,T,H"),
        theta=(theta, "b" if isinstance(theta, Tensor) and theta.dim() == 1 else "H,b"),
        norm_weight=(norm_weight, "H,D"), norm_bias=(norm_bias, "H,D"),
    )  # fmt: skip
    batch, tokens, heads, head_dim = q.shape
    minibatch = theta.shape[-1]
    count = checks.sequences(batch, cu_seqlens, q.device)
    dtype = checks.compute_dtype(q, k, v, eta, theta, norm_weight, norm_bias)
    sizes = (count, heads, head_dim)
    model, steps, offset = _start(initial_state, sizes, minibatch, dtype, q.device)
    constants = (
        x.to(dtype).expand(count, heads, x.shape[-1]) for x in (theta, norm_weight, norm_bias)
    )
    y, final = run(
        TTT(minibatch), (q, k, v, eta), (model, steps, *constants, offset.to(dtype)),
        cu_seqlens=cu_seqlens, offset=offset, backend=backend,
    )  # fmt: skip
    y = y.to(q.dtype)
    if not output_final_state:
        return y, None
    read = tokens if cu_seqlens is None else cu_seqlens.diff()
    weight, weight_steps = (x[:, :, :-1] for x in final[:2])
    bias, bias_steps = (x[:, :, -1] for x in final[:2])
    after = (offset + read).remainder(minibatch)
    return y, TTTState(weight, bias, weight_steps, bias_steps, after)


def _start(
    given: TTTState | tuple[Tensor, Tensor],
    sizes: tuple[int, int, int],
    minibatch: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Model and steps [N, H, D+1, D], the bias their last row, and the offset [N]."""
    parts = checks.parts("initial_state", given, (2, 5), "a TTTState or the pair (weight, bias)")
    state = TTTState(*parts)

    def joined(suffix: str = "") -> Tensor:
        weight_name, bias_name = f"initial_state.weight{suffix}", f"initial_state.bias{suffix}"
        weight, bias = getattr(state, f"weight{suffix}"), getattr(state, f"bias{suffix}")
        checks.floats(**{weight_name: weight, bias_name: bias})
        if weight.device != device:
            raise ValueError(f"{weight_name} must be on {device} like q; got {weight.device}")
        checks.shape(weight_name, weight, (*sizes, sizes[2]), "[N,H,D,D]")
        checks.shape(bias_name, bias, sizes, "[N,H,D]")
        return torch.cat([weight.to(dtype), bias.to(dtype)[:, :, None]], dim=2)

    model = joined()
    # A mini-batch that is about to start has taken no steps, whatever a state says.
    none = model.new_zeros(()).expand_as(model)
    if state.offset is None:
        if state.weight_steps is not None or state.bias_steps is not None:
            raise ValueError("initial_state.offset must be given with weight_steps, bias_steps")
        return model, none, torch.zeros(sizes[0], dtype=torch.long, device=device)
    offset = state.offset
    offsets = checks.offsets(offset, minibatch)
    checks.shape("initial_state.offset", offset, sizes[:1], "[N]")
    if offset.device != device:
        raise ValueError(f"initial_state.offset must be on {device}; got {offset.device}")
    if state.weight_steps is None or state.bias_steps is None:
        if any(offsets):
            raise ValueError(
                "initial_state.weight_steps and bias_steps must be given inside a mini-batch; "
                f"offset is {offsets}"
            )
        return model, none, offset
    steps = torch.where(offset.eq(0)[:, None, None, None], none, joined("_steps"))
    return model, steps, offset
