"""The memory of one layer run again by its definition, token after token, and measured."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..mixers.trellis import MemoryInputs, TrellisMixer, TrellisState
from ..ops import MemoryState, PassState, trellis_memory_step
from .memory_measures import (
    Pair,
    answer_cosine,
    effective_rank,
    inner_loss,
    pairs,
    relative_error,
    target_power,
)

#: The two memories; their names stand before those of the quantities.
PASSES = ("keys", "values")
#: Described in inspection.py. The first two are gates, known without the memory.
QUANTITIES = (
    "forget_gate", "step_size", "write_norm", "error_before", "error_decayed", "error_after",
    "target_power", "memory_norm", "effective_rank",
)  # fmt: skip
RECALLS = ("recall_keys", "recall_values", "recall_answer")
#: Tokens whose memories exist at a time.
CHUNK = 32

Arrays = dict[str, np.ndarray]


class Heard(NamedTuple):
    """One call of a mixer: its place among those listened to, and the first of its tokens."""

    place: int
    start: int
    x: Tensor
    before: TrellisState
    inputs: MemoryInputs
    y: Tensor


class Replay:
    """Fills the arrays [layers, heads, T] at the place of one layer.

    state: the memories after what was read. recalls: parts of the arrays of recall, in order.
    """

    def __init__(self, mixer: TrellisMixer, place: int, arrays: Arrays, rank_every: int):
        self.mixer, self.place, self.arrays, self.rank_every = mixer, place, arrays, rank_every
        self.state: MemoryState | None = None
        self.recalls: dict[str, list[np.ndarray]] = {name: [] for name in RECALLS}
        self.asked: tuple[Pair, Pair, Tensor, Tensor] | None = None
        self.squares = torch.zeros(2, dtype=torch.float64)  # of the difference, and of the output

    def ask(self, inputs: list[MemoryInputs]) -> None:
        """Also measure the recall of the tokens with these inputs."""
        # P times [1, H, ...] -> [H, P, ...]: the memory of a head answers all of its probes.
        k, v, alpha = (
            torch.cat([getattr(one, name) for one in inputs]).transpose(0, 1)
            for name in ("k", "v", "alpha")
        )
        keys, values = pairs(self.mixer, inputs[0]._replace(k=k, v=v, alpha=alpha))
        self.asked = keys, values, k, v

    def read(self, heard: Heard) -> None:
        """Tokens that follow on those read before."""
        state = heard.before.memory if self.state is None else self.state
        tokens = heard.x.shape[1]
        outputs = []
        for begin in range(0, tokens, CHUNK):
            chunk = heard.inputs.at(slice(begin, begin + CHUNK))
            states = [state]
            for t in range(chunk.q.shape[1]):
                y, state = trellis_memory_step(
                    *chunk.at(t), initial_state=state, backend="reference", **self.mixer.choices
                )
                states.append(state)
                outputs.append(y)
            self._measure(chunk, heard.start + begin, states)
        self.state = state
        own = self.mixer.project_out(heard.x, torch.stack(outputs, 1)).double()
        there = heard.y.double()
        self.squares += torch.stack([(own - there).square().sum(), there.square().sum()]).cpu()

    def difference(self) -> float:
        """Relative RMS difference of this replay's outputs and the model's own."""
        return float((self.squares[0] / self.squares[1]).sqrt()) if self.squares[1] else 0.0

    def _measure(self, inputs: MemoryInputs, start: int, states: list[MemoryState]) -> None:
        """All of the tokens between the states. `start`: the place of the first in the text."""
        places = start + np.arange(len(states) - 1)
        last = self.arrays["keys_forget_gate"].shape[-1] - 1
        ranked = np.flatnonzero((places % self.rank_every == 0) | (places == last))
        afters = []
        for n, (x, target, phi) in enumerate(pairs(self.mixer, inputs)):
            pair = Pair(x[0, :, :, None], target[0, :, :, None], phi)  # [C, H, 1, ...]
            memory = torch.cat([one.memory for one in _passes(states, n)])  # [C + 1, H, M, D]
            before, after = memory[:-1], memory[1:]
            decayed = inputs.log_beta[n][0].to(memory.dtype).exp()[..., None, None] * before
            found = {
                "write_norm": (after - decayed).norm(dim=(-2, -1)),
                "error_before": inner_loss(_gradient_points(states[:-1], n), pair)[..., 0],
                "error_decayed": inner_loss(decayed, pair)[..., 0],
                "error_after": inner_loss(after, pair)[..., 0],
                "target_power": target_power(pair)[..., 0],
                "memory_norm": after.norm(dim=(-2, -1)),
            }
            for name, value in found.items():
                self._put(f"{PASSES[n]}_{name}", places, value)
            if len(ranked):
                rank = effective_rank(after[ranked])
                self._put(f"{PASSES[n]}_effective_rank", places[ranked], rank)
            afters.append(after)
        if self.asked is not None:
            self._recall(*afters)

    def _put(self, name: str, places: np.ndarray, value: Tensor) -> None:
        """value: [C, H]."""
        self.arrays[name][self.place][:, places] = as_numpy(value.mT)

    def _recall(self, keys: Tensor, values: Tensor) -> None:
        """Ask memories [C, H, ...] for all probes."""
        assert self.asked is not None
        key_pairs, value_pairs, k, v = self.asked
        found = (
            relative_error(keys, key_pairs),
            relative_error(values, value_pairs),
            answer_cosine(self.mixer, keys, values, k, v),
        )
        for name, value in zip(RECALLS, found):  # [C, H, P] -> [H, P, C]
            self.recalls[name].append(as_numpy(value.permute(1, 2, 0)))


def _passes(states: list[MemoryState], n: int) -> list[PassState]:
    return [state.value_pass if n else state.key_pass for state in states]


def _gradient_points(states: list[MemoryState], n: int) -> Tensor:
    """Where the gradients of the tokens after these states are taken, in the n-th pass."""
    points = [one.memory if one.anchor is None else one.anchor for one in _passes(states, n)]
    return torch.cat(points)


def as_numpy(tensor: Tensor) -> np.ndarray:
    """fp32, for arrays that are kept."""
    return tensor.float().cpu().numpy()
