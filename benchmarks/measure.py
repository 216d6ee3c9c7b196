"""Timing in alternation, and the peak memory of a function in a process of its own."""

from __future__ import annotations

import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Timing:
    median: float  # seconds
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median * 1e3:.0f} ms ({self.low * 1e3:.0f} to {self.high * 1e3:.0f})"


def alternate(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Run all functions once to warm up, then in turn for some rounds. Noise hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            gc.collect()
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {n: Timing(statistics.median(t), min(t), max(t)) for n, t in times.items()}


def peak_bytes() -> int:
    """The highest resident size of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux; getrusage would count the parent's size before the exec as well
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def in_fresh_process(script: str, *arguments: str) -> dict:
    """Run `script arguments`, which prints one line of JSON last, and return that."""
    command = [sys.executable, script, *arguments]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    if out.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{out.stderr}")
    return json.loads(out.stdout.splitlines()[-1])
