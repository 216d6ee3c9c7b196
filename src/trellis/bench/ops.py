"""`trellis bench ops`: our op and its peers in turn, in one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .. import machine
from ..figures import figure
from ..ops import MemoryState, trellis_memory_step
from . import measure, mixers, peers

#: Peers whose time would grow beyond reason are left out past so many tokens.
LONGEST = {"SDPA causal": 16384, "trellis exact, chunked": 8192}
LONGEST_OTHER = 8192


#: What is timed, and its multiplications as a multiple of the forward's: the backward is counted
#: as three forwards, whatever it computes again.
PASSES = (("forward", peers.forward, 1), ("forward+backward", peers.both_ways, 4))


def fits(name: str, tokens: int) -> bool:
    return "native" in name or tokens <= LONGEST.get(name, LONGEST_OTHER)


def run(
    lengths: list[int],
    contexts: list[int],
    memory_tokens: int,
    rounds: int,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """All measurements; `report` receives a line of a Markdown table at a time."""
    sizes = peers.Sizes()
    rate = machine.gemm_rate()
    result: dict[str, Any] = {
        "sizes": vars(sizes),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "gemm multiply-adds per second": rate,
        "times": [],
    }
    report(
        f"B={sizes.batch} H={sizes.heads} K=V=M={sizes.size}, fp32, {result['threads']} threads, "
        f"{rounds} rounds in turn; matrix product: {2 * rate / 1e9:.0f} GFLOP/s\n"
    )
    report("| T | pass | op | median (range) | SDPA's time / this |")
    report("|---|---|---|---|---|")
    for tokens in lengths:
        for what, action, _ in PASSES:
            made = _runnable(sizes, tokens, report)
            calls = {name: _bound(action, one) for name, one in made.items()}
            timings = measure.alternate(calls, rounds)
            base = timings.get("SDPA causal")
            for name, timing in timings.items():
                ratio = f"{base.median / timing.median:.2f}" if base else ""
                report(f"| {tokens} | {what} | {name} | {timing} | {ratio} |")
                result["times"].append(
                    {"T": tokens, "pass": what, "op": name, "seconds": timing.times}
                )
    result["mixers"] = mixers.run(lengths, rounds, report)
    result["alone"] = _alone(sizes, lengths, rate, rounds, report)
    result["decoding"] = _decoding(contexts, rounds, report)
    result["memory"] = _memory(memory_tokens, report)
    return result


def _runnable(
    sizes: peers.Sizes, tokens: int, report: Callable[[str], None]
) -> dict[str, peers.Made]:
    """The ops of this length. A peer that fails is named and left out, not fatal."""
    made = {}
    for name, make in peers.ALL.items():
        if not fits(name, tokens):
            continue
        try:
            one = make(sizes, tokens)
            peers.forward(one)
        except Exception as error:
            if name in peers.OURS:
                raise
            why = (str(error) or type(error).__name__).splitlines()[0][:80]
            report(f"| {tokens} | | {name} | does not run here: {why} | |")
            continue
        made[name] = one
    return made


def _alone(
    sizes: peers.Sizes,
    lengths: list[int],
    rate: float,
    rounds: int,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The kernel back to back, best of many, as the matrix product's rate is measured too."""
    report("\n| T | pass | native op, alone | best | of the GEMM rate |\n|---|---|---|---|---|")
    rows = []
    for tokens in lengths:
        for what, action, factor in PASSES:
            for name in (n for n in peers.OURS if "native" in n):
                call = _bound(action, peers.OURS[name](sizes, tokens))
                best = min(measure.alternate({name: call}, 4 * rounds)[name].times)
                share = factor * peers.multiply_adds(sizes, tokens) / best / rate
                report(f"| {tokens} | {what} | {name} | {best * 1e3:.1f} ms | {share:.0%} |")
                rows.append({"T": tokens, "pass": what, "op": name, "best": best, "share": share})
    return rows


def _bound(action: Callable[[peers.Made], None], made: peers.Made) -> Callable[[], None]:
    return lambda: action(made)


def _decoding(
    contexts: list[int], rounds: int, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One decoding step of one sequence, with as many tokens read before."""
    sizes = peers.Sizes(batch=1)
    report("\n| context | trellis step | SDPA step | SDPA's time / this | key-value cache |")
    report("|---|---|---|---|---|")
    shape = (1, sizes.heads, sizes.size)
    rows = []
    for context in contexts:
        token = [F.normalize(torch.randn(shape), dim=-1) for _ in range(3)]
        token += [torch.randn(shape), torch.full(shape[:2], -0.01), torch.full(shape[:2], 0.5)]
        memories = torch.randn(2, *shape, sizes.size)
        state = MemoryState(memories[0], memories[1])
        query = torch.randn(1, sizes.heads, 1, sizes.size)
        cache = torch.randn(2, 1, sizes.heads, context, sizes.size)
        with torch.no_grad():
            timings = measure.alternate(
                {
                    "trellis": partial(trellis_memory_step, *token, initial_state=state),
                    "SDPA": partial(F.scaled_dot_product_attention, query, *cache),
                },
                3 * rounds,
            )
        ratio = timings["SDPA"].median / timings["trellis"].median
        held = cache.numel() * 4 / 2**20
        report(
            f"| {context} | {timings['trellis']} | {timings['SDPA']} | {ratio:.2f} "
            f"| {held:.0f} MiB |"
        )
        rows.append({"context": context, **{n: t.times for n, t in timings.items()}})
    return rows


def _memory(tokens: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    report(f"\nPeak memory of forward+backward at T = {tokens}, each in a process of its own\n")
    report("| op | beyond inputs, output and their gradients | of the inputs |")
    report("|---|---|---|")
    rows = []
    for name in peers.ALL:
        if not fits(name, tokens):
            continue
        got = measure.in_fresh_process("trellis.bench.ops", name, str(tokens))
        share = got["beyond"] / got["inputs"]
        report(f"| {name} | {got['beyond'] / 2**20:.0f} MiB | {share:.2f} |")
        rows.append({"op": name, "T": tokens, **got})
    return rows


def peak(name: str, tokens: int) -> dict[str, int]:
    """In a fresh process: what a forward and backward add to inputs, output and gradients."""
    peers.both_ways(peers.ALL[name](peers.Sizes(), 64))  # loads libraries and starts threads
    made = peers.ALL[name](peers.Sizes(), tokens)
    call, leaves = made
    inputs = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    machine.reset_peak()
    before = machine.resident_bytes()
    y = call()
    y.backward(torch.ones_like(y))
    # The output and its gradient, and one gradient for each input, are expected.
    expected = 2 * y.numel() * y.element_size() + inputs
    return {"beyond": machine.peak_bytes() - before - expected, "inputs": inputs}


def draw(result: dict[str, Any], path: Path) -> None:
    """Time over T, on logarithmic axes."""
    with figure(path, 2, figsize=(11, 4.5), sharey=True) as axes:
        for axis, what in zip(axes, ("forward", "forward+backward")):
            for name in peers.ALL:
                rows = [r for r in result["times"] if r["op"] == name and r["pass"] == what]
                middle = [sorted(r["seconds"])[len(r["seconds"]) // 2] for r in rows]
                style = "-" if "native" in name else "--"
                axis.loglog([r["T"] for r in rows], middle, style, marker="o", label=name, base=2)
            axis.set(xlabel="tokens", title=what)
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("seconds (median)")
        axes[1].legend(fontsize=8)


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(json.dumps(peak(sys.argv[1], int(sys.argv[2]))))
