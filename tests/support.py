"""What many tests share: the measure of error, and inputs of the memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from trellis.ops import MemoryState, trellis_memory


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in root mean square; 0 where both are empty or zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    if expected.numel() == 0:
        return 0.0
    error = (actual - expected).square().mean().sqrt()
    scale = expected.square().mean().sqrt()
    if scale == 0:
        return float(error)
    return float(error / scale)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


@dataclasses.dataclass
class Problem:
    """Inputs of the memory in fp64, and how to call it."""

    tensors: dict[str, Tensor]
    cu_seqlens: Tensor | None
    offset: Tensor
    options: dict

    def run(self, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """y, the final state and all gradients of a random linear function of them."""
        given = {
            name: tensor.to(dtype).clone().requires_grad_() for name, tensor in self.tensors.items()
        }
        stale = self.options["mode"] == "stale"
        state = MemoryState(given["keys"], given["values"])
        if stale:
            state = state._replace(
                key_anchor=given["key_anchor"],
                value_anchor=given["value_anchor"],
                offset=self.offset,
            )
        y, final = trellis_memory(
            given["q"], given["k"], given["v"], given["alpha"],
            (given["log_beta"], given["log_beta2"]), (given["gamma"], given["gamma2"]),
            initial_state=state, output_final_state=True, cu_seqlens=self.cu_seqlens,
            backend=backend, **self.options,
        )  # fmt: skip
        assert final is not None
        results = {"y": y, "final keys": final.keys, "final values": final.values}
        if stale:
            results |= {"final key anchor": final.key_anchor}
            results |= {"final value anchor": final.value_anchor}
        generator = torch.Generator().manual_seed(7)
        loss = sum(
            (out * torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)).sum()
            for out in results.values()
        )
        assert isinstance(loss, Tensor)
        loss.backward()
        for name, tensor in given.items():
            # Without tokens the reference does not touch its inputs.
            grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            results[f"gradient of {name}"] = grad
        if stale:
            results["final offset"] = final.offset.double()
        return results


def problem(
    *,
    batch: int = 2,
    tokens: int = 20,
    heads: int = 2,
    key: int = 12,
    value: int = 10,
    slots: int = 16,
    lengths: list[int] | None = None,
    seed: int = 0,
    **options,
) -> Problem:
    """|k| = |v| = 1, alpha normal, gamma in (0, 1), random initial memories.

    `lengths` packs sequences of these lengths into one row.
    """
    options = {"mode": "exact", "minibatch": 4, "value_pass": "encode", **options}
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    cu_seqlens = None
    sequences = batch
    if lengths is not None:
        batch, tokens, sequences = 1, sum(lengths), len(lengths)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    lead = (batch, tokens, heads)
    keys = normal(sequences, heads, slots, key)
    encode = options["value_pass"] == "encode"
    values = normal(sequences, heads, *((slots, value) if encode else (value, slots)))
    tensors = {
        "q": unit(normal(*lead, key)),
        "k": unit(normal(*lead, key)),
        "v": unit(normal(*lead, value)),
        "alpha": normal(*lead, slots),
        "log_beta": -0.3 * uniform(*lead),
        "log_beta2": -0.3 * uniform(*lead),
        "gamma": uniform(*lead),
        "gamma2": uniform(*lead),
        "keys": keys,
        "values": values,
        "key_anchor": normal(*keys.shape),
        "value_anchor": normal(*values.shape),
    }
    offset = torch.randint(0, options["minibatch"], (sequences,), generator=generator)
    return Problem(tensors, cu_seqlens, offset, options)


# The recurrences: shapes and random inputs of tests/ops/recurrences.


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes that are all different, so that a transposed product shows. `lengths` makes a pack."""

    batch: int = 2
    tokens: int = 20
    heads: int = 2
    key: int = 12
    value: int = 10
    slots: int = 7
    lengths: tuple[int, ...] | None = None
    seed: int = 0

    @property
    def lead(self) -> tuple[int, int, int]:
        """B, T, H"""
        if self.lengths is not None:
            return 1, sum(self.lengths), self.heads
        return self.batch, self.tokens, self.heads

    @property
    def sequences(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor | None:
        if self.lengths is None:
            return None
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def draw(self) -> Draw:
        return Draw(self.seed)


class Draw:
    """Random tensors in fp64, always the same for a seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def unit(self, *shape: int) -> Tensor:
        x = self.normal(*shape)
        return x / x.norm(dim=-1, keepdim=True)


@dataclasses.dataclass
class Case:
    """A problem: its tensors, and the op on them.

    over_tokens: inputs [B, T, ...]. states: initial states [N, ...]. call(inputs, states,
    cu_seqlens, backend) returns y and the final states, named as the initial ones. What no token
    changes, such as a parameter, is among the initial states only.
    """

    over_tokens: dict[str, Tensor]
    states: dict[str, Tensor]
    call: Callable[
        [dict[str, Tensor], dict[str, Tensor], Tensor | None, str],
        tuple[Tensor, dict[str, Tensor]],
    ]
