"""What this machine does at best, and how much memory this process takes."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_bytes() -> int:
    """The highest resident size of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux; getrusage would count the parent's size before the exec as well
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """The resident size of this process now; its peak where only that is known."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return peak_bytes()
    return int(pages.read_text().split()[1]) * resource.getpagesize()


def reset_peak() -> None:
    """Start counting the peak from the present size (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def gemm_rate(
    size: int = 2048,
    rounds: int = 10,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> float:
    """Multiply-adds per second of a large matrix product (fp32), the best of some rounds."""
    import torch  # not needed by who only asks for the memory

    source = torch.Generator().manual_seed(0)  # the caller's random numbers stay as they are
    a, b = torch.randn(2, size, size, generator=source).to(device, dtype)
    best = float("inf")
    for _ in range(rounds + 1):
        start = time.perf_counter()
        # Summed, so that the time includes the product on devices that work asynchronously.
        (a @ b)[0].sum().item()
        best = min(best, time.perf_counter() - start)
    return size**3 / best
