"""`trellis bench model`, `training` and `stream`: whole models."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from ..figures import figure
from ..machine import peak_bytes
from ..models.config import TrellisConfig
from ..models.modeling import TrellisForCausalLM
from ..models.presets import preset
from ..training.optimization import build_optimizer
from ..training.recipe import Recipe
from . import measure

Report = Callable[[str], None]
#: Operators by kind, for the profile of a training step.
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")
KERNELS = ("trellis::memory", "GeneratedBackwardFor_trellis_memory", "aten::_scaled_dot_product")


def run(name: str, lengths: list[int], rounds: int, report: Report) -> dict[str, Any]:
    """Trellis beside attention: tokens per second in training, for sequences of `lengths` tokens.

    `report` receives lines of Markdown tables.
    """
    mixers = ("trellis", "transformer")
    models = {mixer: TrellisForCausalLM(preset(name, mixer)) for mixer in mixers}
    result: dict[str, Any] = {"preset": name, "training": []}
    report(f"preset {name}, fp32, {torch.get_num_threads()} threads, {rounds} rounds in turn\n")
    report("| training, T | trellis, tokens/s | attention, tokens/s | ratio |\n|---|---|---|---|")
    for tokens in lengths:
        ids = torch.randint(0, 50257, (1, tokens))
        calls: dict[str, Callable[[], object]] = {}
        for mixer, model in models.items():
            loss = partial(_loss, model, ids)
            calls[mixer] = partial(measure.both_ways, (loss, list(model.parameters())))
        timings = measure.alternate(calls, rounds)
        ours, theirs = (tokens / timings[mixer].median for mixer in mixers)
        report(f"| {tokens} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |")
        seconds = {mixer: timing.times for mixer, timing in timings.items()}
        result["training"].append({"T": tokens, **seconds})
    return result


def _loss(model: TrellisForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, labels=ids).loss


def run_training(
    recipe: Recipe, mixers: list[str], vocab_size: int, rounds: int, report: Report
) -> None:
    """Training steps of a recipe's model with several mixers in turn, and where the time goes.

    Random tokens, fp32, the recipe's batch in one piece. The profile sums the time of operators by
    kind: matrix products, the mixer's kernel, and all the rest.
    """
    shape = (recipe.rows, recipe.data.context)
    ids = torch.randint(0, vocab_size, shape)
    steps = {}
    for mixer in mixers:
        recipe.model.mixer = mixer
        steps[mixer] = _training_step(recipe, vocab_size, ids)
    timings = measure.alternate(steps, rounds)
    first = next(iter(timings.values())).median
    report(f"{shape[0]} x {shape[1]} tokens, fp32, {torch.get_num_threads()} threads\n")
    report("| mixer | tokens/s | step | time, of the first | products | kernel | the rest |")
    report("|---|---|---|---|---|---|---|")
    for mixer, timing in timings.items():
        products, kernel, rest = _shares(steps[mixer])
        report(
            f"| {mixer} | {ids.numel() / timing.median:,.0f} | {timing} "
            f"| {timing.median / first:.2f} | {products:.1%} | {kernel:.1%} | {rest:.1%} |"
        )


def _training_step(recipe: Recipe, vocab_size: int, ids: torch.Tensor) -> Callable[[], None]:
    model = TrellisForCausalLM(recipe.model.config(vocab_size))
    optimizer = build_optimizer(model, recipe.train, fused=True)

    def step() -> None:
        model(ids, labels=ids, logits_to_keep=1).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _shares(step: Callable[[], None]) -> tuple[float, float, float]:
    """The shares of a step's time: matrix products, the mixer's kernel, the rest."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    products = sum(e.self_cpu_time_total for e in events if e.key in PRODUCTS)
    kernel = sum(e.self_cpu_time_total for e in events if e.key.startswith(KERNELS))
    return products / total, kernel / total, 1 - (products + kernel) / total


def run_stream(tokens: int, points: int, path: Path | None, report: Report) -> None:
    """Reads many tokens with a small model: neither its cache nor the process must grow.

    The size that the key-value cache of attention would have is computed, not measured. path: of a
    figure.
    """
    torch.manual_seed(0)
    config = TrellisConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = TrellisForCausalLM(config).eval()
    ids = torch.randint(0, 256, (1, tokens))
    cache = model.read(ids[:, : config.segment_size])  # allocates what every segment needs
    cache.reset()
    per_token = 2 * config.num_hidden_layers * config.hidden_size * 4

    report("| tokens read | cache | peak resident size | tokens/s | key-value cache (computed) |")
    report("|---|---|---|---|---|")
    rows = []  # (tokens read, bytes of the cache, peak bytes of the process)
    for part in ids.split(max(tokens // points, 1), dim=1):
        start = time.perf_counter()
        model.read(part, cache)
        rate = part.shape[1] / (time.perf_counter() - start)
        read, size, peak = cache.get_seq_length(), cache.nbytes, peak_bytes()
        rows.append((read, size, peak))
        report(
            f"| {read} | {size} B | {peak / 2**20:.1f} MiB | {rate:.0f} | {read * per_token} B |"
        )
    report(f"\ncache sizes seen: {sorted({size for _, size, _ in rows})}")
    growth = (rows[-1][2] - rows[0][2]) / 2**20
    report(f"peak resident size grew by {growth:.2f} MiB from the first row to the last")
    if path is None:
        return
    tokens_read, sizes, peaks = (np.array(column) for column in zip(*rows))
    with figure(path, 2, figsize=(9, 3.5)) as (left, right):
        left.plot(tokens_read, sizes / 1024, marker="o", label="Trellis cache")
        computed = tokens_read * per_token / 1024
        left.plot(tokens_read, computed, "--", label="key-value cache (computed)")
        left.set(xlabel="tokens read", ylabel="KiB", yscale="log", title="Cache")
        left.legend()
        right.plot(tokens_read, peaks / 2**20, marker="o")
        right.set(xlabel="tokens read", ylabel="MiB", title="Peak resident size of the process")
        right.set_ylim(0, 1.2 * peaks.max() / 2**20)
