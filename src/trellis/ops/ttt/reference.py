"""The definition, token after token. Slow, any dtype; autograd does the rest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-6


def ttt_reference(
    inputs: tuple[Tensor, ...], state: tuple[Tensor, ...], minibatch: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Equal-length sequences: q, k, v [N, T, H, D] and eta [N, T, H]; the state as in TTT."""
    q, k, v, eta = inputs
    model, pending, theta, scale, shift, offset = state

    def norm(z: Tensor) -> Tensor:
        return F.layer_norm(z, z.shape[-1:], eps=EPSILON) * scale + shift

    outputs = []
    for t in range(q.shape[1]):
        key, query = with_one(k[:, t]), with_one(q[:, t])
        z = torch.einsum("nhi,nhij->nhj", key, model)
        found, pull_back = torch.func.vjp(norm, z)  # type: ignore[misc]
        (gradient,) = pull_back(found - (v[:, t] - k[:, t]))
        pending = pending + torch.einsum("nh,nhi,nhj->nhij", eta[:, t], key, gradient)

        place = (offset + t).remainder(minibatch)
        factor = theta.gather(2, place.long()[:, None, None].expand(-1, theta.shape[1], 1))
        stepped = model - factor[..., None] * pending
        outputs.append(q[:, t] + norm(torch.einsum("nhi,nhij->nhj", query, stepped)))

        ends = place.eq(minibatch - 1)[:, None, None, None]
        model = torch.where(ends, stepped, model)
        pending = torch.where(ends, torch.zeros_like(pending), pending)
    y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(q)
    return y, (model, pending, theta, scale, shift, offset)


def with_one(x: Tensor) -> Tensor:
    """[..., D] -> [..., D+1]: what the bias, the last row of the model, is multiplied by."""
    return F.pad(x, (0, 1), value=1.0)
