"""`trellis bench model`: a whole model in training and decoding, Trellis beside attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..models.modeling import TrellisForCausalLM
from ..models.presets import preset
from . import measure


def run(
    name: str,
    lengths: list[int],
    contexts: list[int],
    rounds: int,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Tokens per second of a training step and of decoding; `report` receives table lines."""
    mixers = ("trellis", "transformer")
    models = {mixer: TrellisForCausalLM(preset(name, mixer)) for mixer in mixers}
    result: dict[str, Any] = {"preset": name, "training": [], "decoding": []}
    report(f"preset {name}, fp32, {torch.get_num_threads()} threads, {rounds} rounds in turn\n")
    report("| training, T | trellis, tokens/s | attention, tokens/s | ratio |\n|---|---|---|---|")
    for tokens in lengths:
        ids = torch.randint(0, 50257, (1, tokens))
        timings = measure.alternate(
            {mixer: _step(model, ids) for mixer, model in models.items()}, rounds
        )
        ours, theirs = (tokens / timings[mixer].median for mixer in mixers)
        report(f"| {tokens} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |")
        seconds = {mixer: timing.times for mixer, timing in timings.items()}
        result["training"].append({"T": tokens, **seconds})
    for model in models.values():
        model.zero_grad()
        model.eval()

    copied = measure.copy_rate()
    weights = sum(p.numel() * 4 for p in models["trellis"].parameters())
    report(
        f"\nA plain large copy moves {copied / 1e9:.1f} GB/s; the weights are read once a step\n"
    )
    report("| decoding, context | trellis | cache | of the copy's rate | attention | cache |")
    report("|---|---|---|---|---|---|")
    for context in contexts:
        cells, sizes = [], {}
        calls: dict[str, Callable[[], object]] = {}
        for mixer, model in models.items():
            cache = _filled_cache(model, context)
            sizes[mixer] = cache.nbytes
            calls[mixer] = _decode(model, cache)
        timings = measure.alternate(calls, 4 * rounds)
        for mixer, timing in timings.items():
            cells.append(f"{timing} | {sizes[mixer] / 2**20:.0f} MiB")
            if mixer == "trellis":
                cells.append(f"{weights / timing.median / copied:.0%}")
        report(f"| {context} | " + " | ".join(cells) + " |")
        seconds = {mixer: timing.times for mixer, timing in timings.items()}
        result["decoding"].append({"context": context, **seconds})
    return result


def _step(model: TrellisForCausalLM, ids: torch.Tensor) -> Callable[[], None]:
    def call() -> None:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()

    return call


@torch.no_grad()
def _filled_cache(model: TrellisForCausalLM, context: int) -> Any:
    """A cache as after `context` tokens: read for bounded mixers, random columns for attention."""
    if model.config.mixer == "trellis":
        return model.read(torch.randint(0, model.config.vocab_size, (1, context)))
    cache = model.init_cache(1)
    columns = (1, model.config.num_attention_heads, context)
    size = model.config.hidden_size // model.config.num_attention_heads
    cache.states = [
        state._replace(
            keys=torch.randn(*columns, size),
            values=torch.randn(*columns, size),
            length=torch.tensor([context]),
        )
        for state in cache.states
    ]
    cache.seen = context
    return cache


def _decode(model: TrellisForCausalLM, cache: Any) -> Callable[[], None]:
    token = torch.zeros(1, 1, dtype=torch.long)

    @torch.no_grad()
    def call() -> None:
        model(token, past_key_values=cache)

    return call
