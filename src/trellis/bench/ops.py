"""`trellis bench ops` and `chunked`: the memory op beside its peers, in one process.

Every op is made by a function of the sizes and the number of tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import machine
from ..figures import figure
from ..ops import MemoryState, trellis_memory, trellis_memory_step
from . import measure, mixers
from .measure import Made, both_ways, forward

Report = Callable[[str], None]


@dataclass
class Sizes:
    """Batch B, heads H, and the size K = V = M of keys, values and slots, for every op."""

    batch: int = 2
    heads: int = 12
    size: int = 64

    def normal(self, tokens: int, *last: int) -> Tensor:
        return torch.randn(self.batch, tokens, self.heads, *last)


def memory_inputs(sizes: Sizes, tokens: int) -> list[Tensor]:
    """q, k, v of unit length, alpha, log_beta, gamma."""
    vectors = [F.normalize(sizes.normal(tokens, sizes.size), dim=-1) for _ in range(3)]
    gates = [-0.1 * sizes.normal(tokens).sigmoid(), sizes.normal(tokens).sigmoid()]
    return [
        tensor.requires_grad_() for tensor in (*vectors, sizes.normal(tokens, sizes.size), *gates)
    ]


def memory(backend: str, mode: str) -> Callable[[Sizes, int], Made]:
    def make(sizes: Sizes, tokens: int) -> Made:
        leaves = memory_inputs(sizes, tokens)
        call = partial(trellis_memory, *leaves, mode=mode, minibatch=16, backend=backend)
        return lambda: call()[0], leaves

    return make


def attention(sizes: Sizes, tokens: int) -> Made:
    shape = (sizes.batch, sizes.heads, tokens, sizes.size)
    leaves = [torch.randn(shape).requires_grad_() for _ in range(3)]
    q, k, v = leaves
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), leaves


def gated_delta_rule(sizes: Sizes, tokens: int) -> Made:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k, v, _, decay, step = memory_inputs(sizes, tokens)
    return (
        lambda: torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=step)[0],
        [q, k, v, decay, step],
    )


def mamba2(sizes: Sizes, tokens: int) -> Made:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    x, b, c = (sizes.normal(tokens, sizes.size).requires_grad_() for _ in range(3))
    dt = sizes.normal(tokens).sigmoid().detach().requires_grad_()
    a = -torch.rand(sizes.heads)

    def call() -> Tensor:
        out = mamba2_chunk_scan(x, dt, a, b, c, chunk_size=64)
        return out[0] if isinstance(out, tuple) else out

    return call, [x, dt, b, c]


OURS = {
    "trellis exact, native": memory("native", "exact"),
    "trellis stale, native": memory("native", "stale"),
    "trellis exact, chunked": memory("chunked", "exact"),
}
PEERS: dict[str, Callable[[Sizes, int], Made]] = {
    "SDPA causal": attention,
    "Gated DeltaNet (transformers)": gated_delta_rule,
    "Mamba2 (transformers)": mamba2,
}
#: What `trellis bench ops` measures.
ALL = {**PEERS, **OURS}
#: What `trellis bench chunked` measures.
PORTABLE = {
    "SDPA causal": attention,
    "chunked, exact": memory("chunked", "exact"),
    "chunked, stale, b = 16": memory("chunked", "stale"),
}
#: The most tokens that slow ops are measured at, and those not named here; the native ones have no
#: limit.
LONGEST = {"SDPA causal": 16384}
LONGEST_OTHER = 8192


#: What is timed, and its multiplications as a multiple of the forward's: the backward is counted
#: as three forwards, whatever it computes again.
PASSES = (("forward", forward, 1), ("forward+backward", both_ways, 4))


def multiply_adds(sizes: Sizes, tokens: int) -> int:
    """Multiply-adds of a forward: 3 M D + C (D + M) per token, head and pass, with C = 16."""
    each = 3 * sizes.size**2 + 16 * 2 * sizes.size
    return 2 * each * sizes.batch * tokens * sizes.heads


def fits(name: str, tokens: int) -> bool:
    """Whether an op is measured at this number of tokens."""
    return "native" in name or tokens <= LONGEST.get(name, LONGEST_OTHER)


def run(
    lengths: list[int], contexts: list[int], memory_tokens: int, rounds: int, report: Report
) -> dict[str, Any]:
    """All measurements of `trellis bench ops`; `report` receives lines of Markdown tables."""
    sizes = Sizes()
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
            timings = measure.alternate({n: partial(action, op) for n, op in made.items()}, rounds)
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


def _runnable(sizes: Sizes, tokens: int, report: Report) -> dict[str, Made]:
    """The ops at this length. A peer that fails is reported and left out."""
    made = {}
    for name, make in ALL.items():
        if not fits(name, tokens):
            continue
        try:
            one = make(sizes, tokens)
            forward(one)
        except Exception as error:
            if name in OURS:
                raise
            why = (str(error) or type(error).__name__).splitlines()[0][:80]
            report(f"| {tokens} | | {name} | does not run here: {why} | |")
            continue
        made[name] = one
    return made


def _alone(
    sizes: Sizes, lengths: list[int], rate: float, rounds: int, report: Report
) -> list[dict[str, Any]]:
    """The native op without others in turn, the best of many rounds, as the rate of matrix products
    (GEMM) is measured."""
    report("\n| T | pass | native op, alone | best | of the GEMM rate |\n|---|---|---|---|---|")
    rows = []
    for tokens in lengths:
        for what, action, factor in PASSES:
            for name in (n for n in OURS if "native" in n):
                call = partial(action, OURS[name](sizes, tokens))
                best = min(measure.alternate({name: call}, 4 * rounds)[name].times)
                share = factor * multiply_adds(sizes, tokens) / best / rate
                report(f"| {tokens} | {what} | {name} | {best * 1e3:.1f} ms | {share:.0%} |")
                rows.append({"T": tokens, "pass": what, "op": name, "best": best, "share": share})
    return rows


def _decoding(contexts: list[int], rounds: int, report: Report) -> list[dict[str, Any]]:
    """One decoding step of one sequence that has read `context` tokens before."""
    sizes = Sizes(batch=1)
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


def _memory(tokens: int, report: Report) -> list[dict[str, Any]]:
    report(f"\nPeak memory of forward+backward at T = {tokens}, each in a process of its own\n")
    report("| op | beyond inputs, output and their gradients | of the inputs |")
    report("|---|---|---|")
    rows = []
    for name in (n for n in ALL if fits(n, tokens)):
        got = measure.in_fresh_process("trellis.bench.ops", name, str(tokens))
        share = got["beyond"] / got["inputs"]
        report(f"| {name} | {got['beyond'] / 2**20:.0f} MiB | {share:.2f} |")
        rows.append({"op": name, "T": tokens, **got})
    return rows


def peak(name: str, tokens: int) -> dict[str, int]:
    """The memory that a forward and backward of an op need, in bytes; call it in a fresh process.

    whole: all of it. inputs: the size of the inputs. beyond: what remains of the whole without the
    inputs, the output and their gradients.
    """
    make = {**ALL, **PORTABLE}[name]
    both_ways(make(Sizes(), 64))  # loads libraries and starts threads
    start = machine.resident_bytes()
    call, leaves = make(Sizes(), tokens)
    inputs = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    machine.reset_peak()
    before = machine.resident_bytes()
    y = call()
    y.backward(torch.ones_like(y))
    expected = 2 * y.numel() * y.element_size() + inputs
    top = machine.peak_bytes()
    return {"whole": top - start, "beyond": top - before - expected, "inputs": inputs}


def run_portable(lengths: list[int], rounds: int, report: Report) -> None:
    """The portable op, which needs no compiler, beside causal attention: time and peak memory."""
    report("| T | op | forward+backward, median (range) | of SDPA's |\n|---|---|---|---|")
    for tokens in lengths:
        calls = {n: partial(both_ways, make(Sizes(), tokens)) for n, make in PORTABLE.items()}
        timings = measure.alternate(calls, rounds)
        for name, timing in timings.items():
            ratio = timing.median / timings["SDPA causal"].median
            report(f"| {tokens} | {name} | {timing} | {ratio:.2f} |")
    report("\n| T | op | peak | inputs and gradients | ratio |\n|---|---|---|---|---|")
    for name in PORTABLE:
        got = measure.in_fresh_process("trellis.bench.ops", name, str(lengths[-1]))
        used, given = got["whole"] / 2**20, 2 * got["inputs"] / 2**20
        report(
            f"| {lengths[-1]} | {name} | {used:.0f} MiB | {given:.0f} MiB | {used / given:.2f} |"
        )


def draw(result: dict[str, Any], path: Path) -> None:
    """A figure of the times of `run` over T, on logarithmic axes."""
    with figure(path, 2, figsize=(11, 4.5), sharey=True) as axes:
        for axis, what in zip(axes, ("forward", "forward+backward")):
            for name in ALL:
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
