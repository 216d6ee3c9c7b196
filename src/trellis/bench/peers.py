"""The ops that are measured beside each other, on tensors of one size.

Each entry is made by a function of the number of tokens and returns (call, leaves): `call()` gives
the output, and `leaves` are the tensors whose gradients its backward computes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import trellis_memory

Made = tuple[Callable[[], Tensor], list[Tensor]]


@dataclass
class Sizes:
    """B, H and K = V = M of every op."""

    batch: int = 2
    heads: int = 12
    size: int = 64

    def normal(self, tokens: int, *last: int) -> Tensor:
        return torch.randn(self.batch, tokens, self.heads, *last)


def memory_inputs(sizes: Sizes, tokens: int) -> list[Tensor]:
    """q, k, v of unit length, alpha, log_beta, gamma."""
    vectors = [F.normalize(sizes.normal(tokens, sizes.size), dim=-1) for _ in range(3)]
    gates = [-0.1 * sizes.normal(tokens).sigmoid(), sizes.normal(tokens).sigmoid()]
    return [
        tensor.requires_grad_() for tensor in (*vectors, sizes.normal(tokens, sizes.size), *gates)
    ]


def memory(backend: str, mode: str) -> Callable[[Sizes, int], Made]:
    def make(sizes: Sizes, tokens: int) -> Made:
        leaves = memory_inputs(sizes, tokens)
        q, k, v, alpha, log_beta, gamma = leaves
        return (
            lambda: trellis_memory(
                q, k, v, alpha, log_beta, gamma, mode=mode, minibatch=16, backend=backend
            )[0],
            leaves,
        )

    return make


def attention(sizes: Sizes, tokens: int) -> Made:
    leaves = [
        torch.randn(sizes.batch, sizes.heads, tokens, sizes.size).requires_grad_() for _ in range(3)
    ]
    q, k, v = leaves
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), leaves


def gated_delta_rule(sizes: Sizes, tokens: int) -> Made:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k, v, _, decay, step = memory_inputs(sizes, tokens)
    return (
        lambda: torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=step)[0],
        [q, k, v, decay, step],
    )


def mamba2(sizes: Sizes, tokens: int) -> Made:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    x, b, c = (sizes.normal(tokens, sizes.size).requires_grad_() for _ in range(3))
    dt = sizes.normal(tokens).sigmoid().detach().requires_grad_()
    a = -torch.rand(sizes.heads)

    def call() -> Tensor:
        out = mamba2_chunk_scan(x, dt, a, b, c, chunk_size=64)
        return out[0] if isinstance(out, tuple) else out

    return call, [x, dt, b, c]


def fla_gated_delta_rule(sizes: Sizes, tokens: int) -> Made:
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule

    q, k, v, _, decay, step = memory_inputs(sizes, tokens)
    return (
        lambda: naive_chunk_gated_delta_rule(q, k, v, decay, step)[0],
        [q, k, v, decay, step],
    )


OURS = {
    "trellis exact, native": memory("native", "exact"),
    "trellis stale, native": memory("native", "stale"),
    "trellis exact, chunked": memory("chunked", "exact"),
}
PEERS: dict[str, Callable[[Sizes, int], Made]] = {"SDPA causal": attention}
if importlib.util.find_spec("transformers"):
    PEERS["Gated DeltaNet (transformers)"] = gated_delta_rule
    PEERS["Mamba2 (transformers)"] = mamba2
if importlib.util.find_spec("fla"):
    PEERS["Gated DeltaNet (fla, naive)"] = fla_gated_delta_rule
ALL = {**PEERS, **OURS}


def forward(made: Made) -> None:
    with torch.no_grad():
        made[0]()


def both_ways(made: Made) -> None:
    call, leaves = made
    for leaf in leaves:
        leaf.grad = None
    y = call()
    y.backward(torch.ones_like(y))


def multiply_adds(sizes: Sizes, tokens: int) -> int:
    """Of a forward: 3 M D + C (D + M) per token, head and pass, with C = 16."""
    each = 3 * sizes.size**2 + 16 * 2 * sizes.size
    return 2 * each * sizes.batch * tokens * sizes.heads
