"""The memory op beside causal softmax attention: time and peak memory, forward and backward.

    python benchmarks/memory_op.py [--rounds 3] [--threads 2]

B=2 H=12 K=V=M=64, fp32. Everything is timed in one process, in turn. Peak memory is the maximum
resident size of a fresh process, less what it had before the inputs were made.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as F
from measure import alternate, in_fresh_process, peak_bytes

from trellis.ops import trellis_memory

BATCH, HEADS, SIZE = 2, 12, 64


def inputs(tokens: int) -> list[torch.Tensor]:
    shape = (BATCH, tokens, HEADS)
    unit = [F.normalize(torch.randn(*shape, SIZE), dim=-1) for _ in range(3)]
    gates = [-0.1 * torch.rand(shape), torch.rand(shape)]
    return [t.requires_grad_() for t in (*unit, torch.randn(*shape, SIZE), *gates)]


def both_ways(tensors: list[torch.Tensor], mode: str) -> None:
    y, _ = trellis_memory(*tensors, mode=mode, backend="chunked")
    y.backward(torch.ones_like(y))


def forward(tensors: list[torch.Tensor], mode: str) -> None:
    with torch.no_grad():
        trellis_memory(*tensors, mode=mode, backend="chunked")


def timings(tokens: int, rounds: int) -> None:
    tensors = inputs(tokens)
    heads_first = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in tensors[:3]]

    def attention() -> torch.Tensor:
        return F.scaled_dot_product_attention(*heads_first, is_causal=True)

    def attention_forward() -> None:
        with torch.no_grad():
            attention()

    def attention_both() -> None:
        y = attention()
        y.backward(torch.ones_like(y))

    rows = {
        "forward": {
            "SDPA": attention_forward,
            "exact": lambda: forward(tensors, "exact"),
            "stale, b = 16": lambda: forward(tensors, "stale"),
        },
        "forward+backward": {
            "SDPA": attention_both,
            "exact": lambda: both_ways(tensors, "exact"),
            "stale, b = 16": lambda: both_ways(tensors, "stale"),
        },
    }
    for what, functions in rows.items():
        results = alternate(functions, rounds)
        for name, result in results.items():
            ratio = result.median / results["SDPA"].median
            print(f"| {tokens} | {what} | {name} | {result} | {ratio:.2f} |", flush=True)


def peak(tokens: int, mode: str) -> None:
    """In a fresh process: what a forward and backward need, inputs and gradients included."""
    both_ways([t[:, :64].detach().requires_grad_() for t in inputs(64)], mode)  # load libraries
    before = peak_bytes()
    tensors = inputs(tokens)
    both_ways(tensors, mode)
    given = sum(2 * t.numel() * t.element_size() for t in tensors)
    print(json.dumps({"peak": peak_bytes() - before, "inputs and gradients": given}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak", nargs=2, metavar=("TOKENS", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.peak:
        peak(int(options.peak[0]), options.peak[1])
        return
    print(f"chunked backend, B={BATCH} H={HEADS} K=V=M={SIZE}, fp32, {options.threads} threads\n")
    print("| T | pass | op | time (range) | of SDPA's |\n|---|---|---|---|---|")
    for tokens in (2048, 8192):
        timings(tokens, options.rounds)
    print("\n| T | mode | peak | inputs and gradients | ratio |\n|---|---|---|---|---|")
    for mode in ("exact", "stale"):
        result = in_fresh_process(__file__, "--peak", "8192", mode)
        used, given = (result[key] / 2**20 for key in ("peak", "inputs and gradients"))
        print(f"| 8192 | {mode} | {used:.0f} MiB | {given:.0f} MiB | {used / given:.2f} |")


if __name__ == "__main__":
    main()
