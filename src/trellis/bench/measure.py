"""How things are measured: functions timed in turn, and modules run in a fresh process."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

#: Something to time: a function that gives an output, and the tensors whose gradients its backward
#: computes.
Made = tuple[Callable[[], Tensor], list[Tensor]]


def forward(made: Made) -> None:
    with torch.no_grad():
        made[0]()


def both_ways(made: Made) -> None:
    """The forward and the backward."""
    call, leaves = made
    for leaf in leaves:
        leaf.grad = None
    y = call()
    y.backward(torch.ones_like(y))


@dataclass
class Timing:
    """The times of all rounds, in seconds; as text "12.3 ms (11.9 to 15.0)", median and range."""

    times: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def __str__(self) -> str:
        low, high = min(self.times) * 1e3, max(self.times) * 1e3
        digits = 0 if low >= 100 else 1 if low >= 1 else 3
        return f"{self.median * 1e3:.{digits}f} ms ({low:.{digits}f} to {high:.{digits}f})"


def alternate(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Run every function once to warm up, then all in turn, so that noise hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            gc.collect()
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: Timing(seconds) for name, seconds in times.items()}


def in_fresh_process(module: str, *arguments: str, env: Mapping[str, str] | None = None) -> dict:
    """Run `python -m module arguments` and return the JSON in the last line that it prints.

    env: all of its environment variables; by default those of this process.
    """
    command = [sys.executable, "-m", module, *arguments]
    out = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if out.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{out.stderr}")
    return json.loads(out.stdout.splitlines()[-1])


def copy_rate(megabytes: int = 512, rounds: int = 8) -> float:
    """Bytes per second that a large copy in memory reads and writes, best of all rounds."""
    source = torch.ones(megabytes * 2**18)
    target = torch.empty_like(source)
    best = min(alternate({"copy": lambda: target.copy_(source)}, rounds)["copy"].times)
    return 2 * source.numel() * 4 / best
