"""Pseudo-random numbers and orders that depend only on their arguments and never change."""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A 64-bit hash of some whole numbers (splitmix64)."""
    state = 0
    for number in numbers:
        state = _finish((state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK)
    return state


def _finish(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def mixed_range(count: int, seed: int) -> np.ndarray:
    """Hashes of `seed` with every number below `count`, as uint64; `mix` gives other numbers."""
    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(mix(seed))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def shuffled(index: int, count: int, seed: int) -> int:
    """The place of item `index` in a shuffle of `count` items, without a list of them.

    A Feistel network of four rounds permutes the numbers below the next power of four. It is
    applied again until the result is below `count`.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for number in range(4):
            left, right = right, left ^ (mix(seed, number, right) & low)
        index = left << half | right
        if index < count:
            return index
