"""A million tokens through a small model: the size of its cache and of the process stay flat.

    python benchmarks/stream.py [--tokens 1000000] [--figure docs/figures/stream.png]

For comparison the size that the key-value cache of a softmax model of the same width would have
is computed from its shape, not measured.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from trellis import TrellisConfig, TrellisForCausalLM
from trellis.figures import figure
from trellis.machine import peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    config = TrellisConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = TrellisForCausalLM(config).eval()
    ids = torch.randint(0, 256, (1, options.tokens))
    step = options.tokens // options.points
    cache = model.read(ids[:, : config.segment_size])  # what the first segment needs, once
    cache.reset()
    per_token = 2 * config.num_hidden_layers * config.hidden_size * 4

    print("| tokens read | cache | peak resident size | tokens/s | key-value cache (computed) |")
    print("|---|---|---|---|---|")
    rows = []
    for part in ids.split(step, dim=1):
        start = time.perf_counter()
        model.read(part, cache)
        rate = part.shape[1] / (time.perf_counter() - start)
        row = (cache.get_seq_length(), cache.nbytes, peak_bytes(), rate)
        rows.append(row)
        print(
            f"| {row[0]} | {row[1]} B | {row[2] / 2**20:.1f} MiB | {rate:.0f} "
            f"| {row[0] * per_token} B |",
            flush=True,
        )
    growth = rows[-1][2] - rows[0][2]
    print(f"\ncache sizes seen: {sorted({row[1] for row in rows})}")
    print(f"peak resident size grew by {growth / 2**20:.2f} MiB from the first row to the last")
    if options.figure:
        draw(rows, per_token, options.figure)


def draw(rows: list[tuple[int, int, int, float]], per_token: int, path: Path) -> None:
    read = [row[0] for row in rows]
    with figure(path, 2, figsize=(9, 3.5)) as (left, right):
        left.plot(read, [row[1] / 1024 for row in rows], marker="o", label="Trellis cache")
        left.plot(
            read, [n * per_token / 1024 for n in read], "--", label="key-value cache (computed)"
        )
        left.set(xlabel="tokens read", ylabel="KiB", yscale="log", title="Cache")
        left.legend()
        right.plot(read, [row[2] / 2**20 for row in rows], marker="o")
        right.set(xlabel="tokens read", ylabel="MiB", title="Peak resident size of the process")
        right.set_ylim(0, 1.2 * max(row[2] for row in rows) / 2**20)


if __name__ == "__main__":
    main()
