"""What can be said of a memory: its error, its rank, and how long its writes live."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import compute_dtype
from ..mixers.trellis import MemoryInputs, TrellisMixer
from ..ops.memory import value_write
from ..ops.memory.activations import FUNCTIONS


class Pair(NamedTuple):
    """What one pass is to learn of a token: phi(M x) = target. x [..., D], target [..., M]."""

    x: Tensor
    target: Tensor
    phi: str


def pairs(mixer: TrellisMixer, inputs: MemoryInputs) -> tuple[Pair, Pair]:
    """Of the key pass and of the value pass. Decoding, the value pass learns v from the code."""
    config = mixer.config
    x, target, phi, _ = value_write(inputs.v, inputs.alpha, config.phi, config.value_pass)
    dtype = compute_dtype(inputs.k, inputs.alpha)  # of the memories
    return (
        Pair(inputs.k.to(dtype), inputs.alpha.to(dtype), config.phi),
        Pair(x.to(dtype), target.to(dtype), phi),
    )


def inner_loss(memory: Tensor, pair: Pair) -> Tensor:
    """1/2 |phi(M x) - target|^2, what a write descends: memory [..., M, D] -> [..., P].

    Here and below a memory is asked for P tokens: x [..., P, D], target [..., P, M].
    """
    code = FUNCTIONS[pair.phi](pair.x @ memory.mT)
    return (code - pair.target).square().sum(-1) / 2


def target_power(pair: Pair) -> Tensor:
    """1/2 |target|^2, the inner loss of an answer of zeros: [..., P]."""
    return pair.target.square().sum(-1) / 2


def relative_error(memory: Tensor, pair: Pair) -> Tensor:
    """The inner loss over that of zeros: 0 is a perfect answer, 1 is as good as none."""
    return inner_loss(memory, pair) / target_power(pair).clamp_min(1e-30)


def answer_cosine(
    mixer: TrellisMixer, keys: Tensor, values: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Cosine of v [..., P, V] and what both passes answer to the query k [..., P, K].

    keys, values: the two memories. The mixer normalises the answer, so only its direction counts.
    """
    config = mixer.config
    code = FUNCTIONS[config.f](k.to(keys.dtype) @ keys.mT)
    answer = FUNCTIONS[config.psi](code @ (values if config.value_pass == "encode" else values.mT))
    return F.cosine_similarity(answer, v.to(answer.dtype), dim=-1)


def effective_rank(memory: Tensor) -> Tensor:
    """exp(entropy) of the singular values over their sum, [..., M, D] -> [...]; 0 for zeros."""
    values = torch.linalg.svdvals(memory)
    total = values.sum(-1, keepdim=True)
    share = values / total.clamp_min(torch.finfo(values.dtype).tiny)
    return torch.special.entr(share).sum(-1).exp() * (total[..., 0] > 0)


def retention(forget_gate: np.ndarray, written: np.ndarray) -> np.ndarray:
    """How much is left at token t of what token i wrote: the product of the gates after i up to t.

    forget_gate [..., T], written [P] -> [..., P, T], NaN before the write. This is exact: the
    memory is the sum of all writes, each times this factor. Later writes may cancel it further,
    which the error of a recall shows.
    """
    tokens = forget_gate.shape[-1]
    found = np.full((*forget_gate.shape[:-1], len(written), tokens), np.nan, forget_gate.dtype)
    left = found[..., 0].copy()
    for t in range(tokens):
        left = left * forget_gate[..., None, t]
        left[..., written == t] = 1.0
        found[..., t] = left
    return found


def half_life(forget_gate: np.ndarray) -> float:
    """Tokens after which the mean gate (its geometric mean) has halved a write; may be inf."""
    with np.errstate(divide="ignore"):
        mean = float(np.mean(np.log(forget_gate.astype(np.float64))))
    return math.inf if mean == 0 else math.log(0.5) / mean


def by_age(recalled: np.ndarray, written: np.ndarray, most: int) -> np.ndarray:
    """Mean of recalled [P, T] over tokens by t - i, from -most to most; NaN where there is none."""
    tokens = recalled.shape[-1]
    found = np.full(2 * most + 1, np.nan)
    for place, age in enumerate(range(-most, most + 1)):
        rows = np.flatnonzero((written + age >= 0) & (written + age < tokens))
        if len(rows):
            found[place] = recalled[rows, written[rows] + age].mean()
    return found


def gained(knows: np.ndarray, written: np.ndarray) -> np.ndarray:
    """What a write gained, and what is left of it later: [P, T], NaN before each write.

    knows [P, T]: how well the memory knows token `written[i]` at time t, more is better. The gain
    is knows[i, t] less its value just before the write, less the mean change over the same time of
    tokens that are still unwritten at t: what passing time does to any token. NaN where too few of
    these are left, and for a write at time 0, before which there is nothing.
    """
    probes, tokens = knows.shape
    least = max(1, probes // 8)
    found = np.full(knows.shape, np.nan)
    for t in range(tokens):
        unwritten = knows[written > t]
        if len(unwritten) < least:
            break
        rows = np.flatnonzero((written > 0) & (written <= t))
        before = written[rows] - 1
        control = (unwritten[:, t, None] - unwritten[:, before]).mean(0)
        found[rows, t] = knows[rows, t] - knows[rows, before] - control
    return found


def over_age(values: np.ndarray, written: np.ndarray, most: int) -> np.ndarray:
    """values [P, T] from time to age: [P, most + 1], NaN beyond the text."""
    place = written[:, None] + np.arange(most + 1)
    inside = place < values.shape[1]
    rows = np.arange(len(written))[:, None]
    return np.where(inside, values[rows, np.minimum(place, values.shape[1] - 1)], np.nan)
