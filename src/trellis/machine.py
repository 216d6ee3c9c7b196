"""The speed of this machine, and the memory of this process."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_bytes() -> int:
    """The largest resident size of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux, where getrusage would count the parent's size as well
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """The present resident size of this process; on systems that do not tell it, its peak."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return peak_bytes()
    return int(pages.read_text().split()[1]) * resource.getpagesize()


def total_bytes() -> int:
    """The memory of this machine, or what the process's container may use of it."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of Linux; "max" where there is none
    allowed = limit.read_text().strip() if limit.is_file() else ""
    return min(installed, int(allowed)) if allowed.isdigit() else installed


def gib(size: float) -> str:
    """Bytes as "1.25 GiB"; "2.3e+09 GiB" where there are more than any machine has."""
    return f"{size / 2**30:{'.2f' if size < 2**50 else '.1e'}} GiB"


def reset_peak() -> None:
    """Makes `peak_bytes` count from the present size; works on Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


def describe() -> dict[str, object]:
    """The processor, its cores, and the versions that matter."""
    import torch

    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        named = [x for x in information.read_text().splitlines() if x.startswith("model name")]
        cpu = named[0].partition(":")[2].strip() if named else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def gemm_rate(
    size: int = 2048,
    rounds: int = 10,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> float:
    """Multiply-adds per second of a large matrix product, the best of all rounds."""
    import torch  # here, so that the functions above work without it

    source = torch.Generator().manual_seed(0)  # leaves the caller's random numbers alone
    a, b = torch.randn(2, size, size, generator=source).to(device, dtype)
    best = float("inf")
    for _ in range(rounds + 1):
        start = time.perf_counter()
        # Summed, so that the time includes the product on devices that work asynchronously.
        (a @ b)[0].sum().item()
        best = min(best, time.perf_counter() - start)
    return size**3 / best
