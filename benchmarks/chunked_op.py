"""The portable op, both modes, beside causal softmax attention: time, and peak memory.

    python benchmarks/chunked_op.py [--rounds 3] [--threads 2]

B=2 H=12 K=V=M=64, fp32, forward and backward. `trellis bench ops` measures all backends and peers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import torch

from trellis import machine
from trellis.bench import measure, peers

OPS = {
    "SDPA causal": peers.attention,
    "chunked, exact": peers.memory("chunked", "exact"),
    "chunked, stale, b = 16": peers.memory("chunked", "stale"),
}


def peak(name: str, tokens: int) -> None:
    """In a fresh process: all that a forward and backward need, inputs and gradients included."""
    peers.both_ways(OPS[name](peers.Sizes(), 64))  # loads libraries and starts threads
    before = machine.peak_bytes()
    made = OPS[name](peers.Sizes(), tokens)
    peers.both_ways(made)
    given = sum(2 * leaf.numel() * leaf.element_size() for leaf in made[1])
    print(json.dumps({"peak": machine.peak_bytes() - before, "given": given}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak", nargs=2, metavar=("OP", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        peak(options.peak[0], int(options.peak[1]))
        return
    print("| T | op | forward+backward, median (range) | of SDPA's |\n|---|---|---|---|")
    for tokens in (2048, 8192):
        made = {name: make(peers.Sizes(), tokens) for name, make in OPS.items()}
        calls = {name: lambda one=one: peers.both_ways(one) for name, one in made.items()}
        timings = measure.alternate(calls, options.rounds)
        for name, timing in timings.items():
            ratio = timing.median / timings["SDPA causal"].median
            print(f"| {tokens} | {name} | {timing} | {ratio:.2f} |", flush=True)
    print("\n| T | op | peak | inputs and gradients | ratio |\n|---|---|---|---|---|")
    for name in OPS:
        command = [sys.executable, __file__, "--peak", name, "8192"]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used, given = (json.loads(out)[key] / 2**20 for key in ("peak", "given"))
        print(f"| 8192 | {name} | {used:.0f} MiB | {given:.0f} MiB | {used / given:.2f} |")


if __name__ == "__main__":
    main()
