"""`trellis bench gpu`: the memory on a GPU beside its peers, each kernel alone, a whole model.

Without a GPU it runs in Triton's interpreter (TRITON_INTERPRET=1), to show that it works; its times
then mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from ..figures import figure
from ..models.modeling import TrellisForCausalLM
from ..models.presets import preset as preset_of
from ..ops import (
    MemoryState,
    causal_convolution,
    cross_entropy,
    gated_norm,
    trellis_memory,
    trellis_memory_step,
    unit_length,
)
from ..ops.memory import triton as backend
from .measure import Made, both_ways, forward
from .registers import KERNELS

Report = Callable[[str], None]
HEADS, SIZE = 12, 64
#: Configurations that `--tune` tries for the parallel kernels.
BLOCKS, WARPS = (16, 32, 64), (2, 4, 8)
#: Size of the logits in the measurement of the loss.
LOSS_ROWS, VOCABULARY = 4096, 32000


def device() -> torch.device:
    """The GPU, or the CPU in Triton's interpreter.

    Raises OSError where there is neither, ModuleNotFoundError without Triton.
    """
    if backend.missing():
        raise ModuleNotFoundError(f"the benchmark cannot run here: {backend.missing()}")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if backend.interpreted():
        return torch.device("cpu")
    raise OSError(
        "no GPU was found; TRITON_INTERPRET=1 runs the benchmark on a CPU to show that it works "
        "(choose small sizes: --batches 1 --lengths 32 --heads 1 --size 16 --preset none)"
    )


def timed(function: Callable[[], object], rounds: int, where: torch.device) -> list[float]:
    """Seconds of each round, after one to warm up; on a GPU by events, with its cache flushed."""
    function()
    if where.type != "cuda":
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return times
    cache = torch.empty(2**28, dtype=torch.int8, device=where)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in events:
        cache.zero_()
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def peak(function: Callable[[], object], where: torch.device) -> int | None:
    """Bytes of GPU memory that a call needs beyond what was there."""
    if where.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Inputs:
    """Random inputs of the ops, of one shape, on one device."""

    def __init__(self, batch: int, tokens: int, heads: int, size: int, where: torch.device):
        self.lead, self.size, self.where = (batch, tokens, heads), size, where
        self.dtype = torch.bfloat16

    def normal(self, *last: int) -> Tensor:
        return torch.randn(*self.lead, *last, device=self.where)

    def unit(self) -> Tensor:
        return F.normalize(self.normal(self.size), dim=-1).to(self.dtype).requires_grad_()

    def memory(self) -> list[Tensor]:
        """q, k, v of unit length, alpha, log_beta, gamma."""
        alpha = self.normal(self.size).to(self.dtype).requires_grad_()
        gates = [-0.1 * self.normal().sigmoid(), self.normal().sigmoid()]
        return [*(self.unit() for _ in range(3)), alpha, *(gate.requires_grad_() for gate in gates)]


def memory(inputs: Inputs, **options: Any) -> Made:
    leaves = inputs.memory()
    return lambda: trellis_memory(*leaves, **options)[0], leaves


def attention(inputs: Inputs) -> Made:
    leaves = [inputs.unit() for _ in range(3)]
    q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), leaves


def gated_delta_net(inputs: Inputs) -> Made:
    from fla.ops import chunk_gated_delta_rule

    q, k, v, _, decay, step = inputs.memory()
    beta = step.detach().to(inputs.dtype).requires_grad_()
    return (
        lambda: chunk_gated_delta_rule(q, k, v, g=decay, beta=beta)[0], [q, k, v, decay, beta]
    )  # fmt: skip


def gsa(inputs: Inputs) -> Made:
    from fla.ops import chunk_gsa

    q, k, v, _, _, _ = inputs.memory()
    keep = F.logsigmoid(inputs.normal(inputs.size)) / 8
    slots = (1 - keep.exp()).to(inputs.dtype).requires_grad_()
    keep = keep.to(inputs.dtype).requires_grad_()
    return lambda: chunk_gsa(q, k, v, slots, keep)[0], [q, k, v, slots, keep]


def ttt(inputs: Inputs) -> Made:
    from fla.ops.ttt import chunk_ttt_linear

    q, k, v, _, _, step = inputs.memory()
    shape = (inputs.lead[2], inputs.size)
    w, b = (torch.randn(shape, device=inputs.where, dtype=inputs.dtype) for _ in range(2))
    eta = (step.detach()[..., None] / inputs.size).to(inputs.dtype).requires_grad_()
    return lambda: chunk_ttt_linear(q, k, v, w, b, eta)[0], [q, k, v, eta]


OURS: dict[str, Callable[[Inputs], Made]] = {
    "trellis exact": partial(memory, backend="triton"),
    "trellis exact, recompute": partial(memory, backend="triton", recompute=True),
    "trellis exact, decode": partial(memory, backend="triton", value_pass="decode"),
    "trellis stale, b = 16": partial(memory, backend="triton", mode="stale"),
    "trellis exact, chunked": partial(memory, backend="chunked"),
}
PEERS: dict[str, Callable[[Inputs], Made]] = {
    "SDPA causal": attention,
    "Gated DeltaNet (fla)": gated_delta_net,
    "GSA (fla)": gsa,
    "TTT-Linear (fla)": ttt,
}
PASSES = (("forward", forward), ("forward+backward", both_ways))


def run(
    batches: list[int], lengths: list[int], heads: int, size: int, model: str, rounds: int,
    tune: bool, report: Report,
) -> dict[str, Any]:  # fmt: skip
    """All measurements; `report` receives lines of Markdown tables. model: a preset, or "none"."""
    where = device()
    name = torch.cuda.get_device_name() if where.type == "cuda" else "Triton's interpreter"
    report(f"{name}, torch {torch.__version__}, bf16, H={heads} K=V=M={size}, {rounds} rounds\n")
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "heads": heads,
                              "size": size, "rounds": rounds}  # fmt: skip
    result["ops"] = _ops(batches, lengths, heads, size, rounds, where, report)
    last = Inputs(batches[-1], lengths[0], heads, size, where)
    result["kernels"] = _kernels(last, rounds, report)
    result["step"] = _step(batches, heads, size, rounds, where, report)
    result["around"] = _around(last, rounds, report)
    if tune:
        result["tuning"] = _tune(last, rounds, report)
    if model != "none":
        result["model"] = _model(model, lengths[0], rounds, where, report)
    return result


def _ops(
    batches: list[int], lengths: list[int], heads: int, size: int, rounds: int,
    where: torch.device, report: Report,
) -> list[dict[str, Any]]:  # fmt: skip
    rows = []
    report("| B | T | op | pass | median, ms | peak, MiB |\n|---|---|---|---|---|---|")
    for batch in batches:
        for tokens in lengths:
            for name, make in {**OURS, **PEERS}.items():
                try:
                    if "fla" in name and where.type != "cuda":
                        raise RuntimeError("its kernels need a GPU")
                    made = make(Inputs(batch, tokens, heads, size, where))
                    for what, action in PASSES:
                        call = partial(action, made)
                        seconds = timed(call, rounds, where)
                        used = peak(call, where)
                        median = statistics.median(seconds) * 1e3
                        held = "" if used is None else f"{used / 2**20:.0f}"
                        report(f"| {batch} | {tokens} | {name} | {what} | {median:.3f} | {held} |")
                        rows.append({"B": batch, "T": tokens, "op": name, "pass": what,
                                     "seconds": seconds, "peak": used})  # fmt: skip
                except Exception as error:
                    if name in OURS and not isinstance(error, torch.OutOfMemoryError):
                        raise
                    why = (str(error) or type(error).__name__).splitlines()[0][:80]
                    report(f"| {batch} | {tokens} | {name} | | does not run: {why} | |")
    return rows


class _Kept:
    """Stands for a kernel, starts it and keeps how."""

    def __init__(self, name: str, kernel: Any, starts: list[tuple[str, Callable[[], object]]]):
        self.name, self.kernel, self.starts = name, kernel, starts

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def start(*arguments: Any, **constants: Any) -> object:
            again = partial(self.kernel[grid], *arguments, **constants)
            self.starts.append((self.name, again))
            return again()

        return start


@contextmanager
def _kept() -> Iterator[list[tuple[str, Callable[[], object]]]]:
    """Inside, every kernel that is started can be started again from the list."""
    from ..ops.memory.triton import kernels

    starts: list[tuple[str, Callable[[], object]]] = []
    with ExitStack() as stack:
        for name in KERNELS:
            kept = _Kept(name, getattr(kernels, name), starts)
            stack.enter_context(mock.patch.object(kernels, name, kept))
        yield starts


def _kernels(inputs: Inputs, rounds: int, report: Report) -> list[dict[str, Any]]:
    """Every kernel of a forward and a backward, alone."""
    report(f"\nB={inputs.lead[0]} T={inputs.lead[1]}, each kernel alone\n")
    report("| kernel | median, ms |\n|---|---|")
    with _kept() as starts:
        both_ways(OURS["trellis exact"](inputs))
    rows = []
    for name, again in starts:
        seconds = timed(again, rounds, inputs.where)
        report(f"| {name} | {statistics.median(seconds) * 1e3:.4f} |")
        rows.append({"kernel": name, "seconds": seconds})
    return rows


def _step(
    batches: list[int], heads: int, size: int, rounds: int, where: torch.device, report: Report
) -> list[dict[str, Any]]:
    report("\n| B | one decoding step of the op, median, ms |\n|---|---|")
    rows = []
    for batch in batches:
        token = [tensor.detach()[:, 0] for tensor in Inputs(batch, 1, heads, size, where).memory()]
        memories = torch.randn(2, batch, heads, size, size, device=where)
        state = MemoryState(memories[0], memories[1])
        call = partial(trellis_memory_step, *token, initial_state=state, backend="triton")
        seconds = timed(call, rounds, where)
        report(f"| {batch} | {statistics.median(seconds) * 1e3:.4f} |")
        rows.append({"B": batch, "seconds": seconds})
    return rows


def _around(inputs: Inputs, rounds: int, report: Report) -> list[dict[str, Any]]:
    """What stands around the memory, forward and backward: plain, and fused by others."""
    where, (batch, tokens, heads) = inputs.where, inputs.lead
    x, gate = (inputs.normal(inputs.size).to(inputs.dtype).requires_grad_() for _ in range(2))
    taps = torch.randn(heads * inputs.size, 4, device=where).requires_grad_()
    weight = torch.ones(inputs.size, device=where, dtype=inputs.dtype, requires_grad=True)
    logits = torch.randn(min(batch * tokens, LOSS_ROWS), VOCABULARY, device=where)
    targets = torch.randint(0, VOCABULARY, logits.shape[:1], device=where)

    def convolved() -> Tensor:
        return unit_length(causal_convolution(x.flatten(2), taps, activation="silu")[0].view_as(x))

    def normed() -> Tensor:
        return gated_norm(x, gate, weight, 1e-6)

    def loss(devices: tuple[str, ...]) -> None:
        with mock.patch.object(cross_entropy, "LIGER_ON", devices):
            cross_entropy.cross_entropy_(logits, targets, gradient=True)

    ways: list[tuple[str, str, Callable[[], object]]] = []
    for what, call, leaves in (
        ("convolution, SiLU, unit length", convolved, [x, taps]),
        ("gated norm", normed, [x, gate, weight]),
    ):
        ways.append((what, "plain", partial(both_ways, (call, leaves))))
        if where.type == "cuda":
            ways.append((what, "torch.compile", partial(both_ways, (torch.compile(call), leaves))))
    ways.append(("cross-entropy", "plain", partial(loss, ())))
    if where.type == "cuda" and cross_entropy.liger() is not None:
        ways.append(("cross-entropy", "liger-kernel", partial(loss, ("cuda",))))

    report(f"\nB={batch} T={tokens}, forward and backward; the loss of {len(logits)} tokens\n")
    report("| around the memory | by | median, ms |\n|---|---|---|")
    rows = []
    for what, by, action in ways:
        seconds = timed(action, rounds, where)
        report(f"| {what} | {by} | {statistics.median(seconds) * 1e3:.3f} |")
        rows.append({"what": what, "by": by, "seconds": seconds})
    return rows


def _tune(inputs: Inputs, rounds: int, report: Report) -> list[dict[str, Any]]:
    """The parallel kernels with other configurations than `launch.configuration` has."""
    from ..ops.memory.triton import launch

    report("\n| block | warps | kernel | median, ms |\n|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for block in BLOCKS:
        for warps in WARPS:

            def other(kernel: str, *_: Any, b: int = block, w: int = warps) -> dict[str, int]:
                sequential = kernel in ("write", "write_back", "prepare")
                return {"block": b, "num_warps": 1 if sequential else w, "num_stages": 1}

            with mock.patch.object(launch, "configuration", other), _kept() as starts:
                both_ways(OURS["trellis exact"](inputs))
            for name in ("read", "read_back", "finish_back"):
                again = next(start for kernel, start in starts if kernel == name)
                seconds = timed(again, rounds, inputs.where)
                report(f"| {block} | {warps} | {name} | {statistics.median(seconds) * 1e3:.4f} |")
                rows.append({"block": block, "warps": warps, "kernel": name, "seconds": seconds})
    best: dict[str, tuple[float, int, int]] = {}
    for row in rows:
        median = statistics.median(row["seconds"])
        if row["kernel"] not in best or median < best[row["kernel"]][0]:
            best[row["kernel"]] = (median, row["block"], row["warps"])
    for name, (_, block, warps) in best.items():
        report(f"{name}: the fastest is block {block} with {warps} warps")
    return rows


def _model(
    name: str, tokens: int, rounds: int, where: torch.device, report: Report
) -> list[dict[str, Any]]:
    """Training steps and decoding steps of a whole model, in bf16 autocast."""
    report(f"\n| preset {name} | training, tokens/s | decoding a token, ms |\n|---|---|---|")
    rows = []
    for mixer in ("trellis", "transformer", "gated_delta_net"):
        model = TrellisForCausalLM(preset_of(name, mixer)).to(where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=where.type == "cuda")
        ids = torch.randint(0, model.config.vocab_size, (8, tokens), device=where)

        def train(model: Any = model, optimizer: Any = optimizer, ids: Tensor = ids) -> None:
            with torch.autocast(where.type, dtype=torch.bfloat16):
                loss = model(ids, labels=ids, logits_to_keep=1).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        seconds = timed(train, rounds, where)
        model.eval()
        with torch.no_grad(), torch.autocast(where.type, dtype=torch.bfloat16):
            cache = model.read(ids[:1])
            token = partial(model, ids[:1, :1], past_key_values=cache)
            decoding = timed(token, rounds, where)
        rate, each = ids.numel() / statistics.median(seconds), statistics.median(decoding) * 1e3
        report(f"| {mixer} | {rate:,.0f} | {each:.2f} |")
        rows.append({"mixer": mixer, "training": seconds, "decoding": decoding})
    return rows


def draw(result: dict[str, Any], path: Path) -> None:
    """The times of all ops over T, at the largest batch."""
    batch = max(row["B"] for row in result["ops"])
    with figure(path, 2, figsize=(11, 4.5), sharey=True) as axes:
        for axis, (what, _) in zip(axes, PASSES):
            for name in {**OURS, **PEERS}:
                rows = [r for r in result["ops"]
                        if (r["op"], r["pass"], r["B"]) == (name, what, batch)]  # fmt: skip
                if rows:
                    middle = [statistics.median(r["seconds"]) for r in rows]
                    axis.loglog([r["T"] for r in rows], middle, marker="o", label=name, base=2)
            axis.set(xlabel="tokens", title=f"{what}, B = {batch}, {result['device']}")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("seconds (median)")
        axes[1].legend(fontsize=8)
