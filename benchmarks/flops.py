"""The FLOP formula of every mixer beside what torch.utils.flop_counter counts.

    python benchmarks/flops.py [--dim 768] [--heads 12] [--tokens 64]

One layer's mixer, forward, operations per token; its linear maps are left out. Nothing is computed.
docs/flops.md says what is counted.
"""

from __future__ import annotations

import argparse

from trellis.bench.flops import definition, elsewhere
from trellis.mixers import MIXERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    print("| mixer | formula | counted: matrix products | on memories | elsewhere | ratio |")
    print("|---|---|---|---|---|---|")
    for name in MIXERS:
        mixer, counted = definition(name, options.dim, options.heads, options.tokens)
        apart = elsewhere(mixer)
        formula = mixer.flops(options.tokens)
        said = ", ".join(f"{what} {count:+,.0f}" for what, count in apart.items())
        ratio = formula / (counted.total + sum(apart.values()))
        print(
            f"| {name} | {formula:,.0f} | {counted.products:,.0f} | {counted.pointwise:,.0f} | "
            f"{said} | {ratio:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
