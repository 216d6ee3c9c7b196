"""A training step of a recipe's model, Trellis beside attention, and where its time goes.

    python benchmarks/training_step.py recipes/books.toml

Random tokens, fp32, the recipe's batch in one piece; steps of both models in turn. The profile sums
the time of operators by kind: matrix products, the mixer's kernel, and all the rest.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from trellis.bench import measure
from trellis.models.modeling import TrellisForCausalLM
from trellis.training.optimizer import build_optimizer
from trellis.training.recipe import Recipe, load_recipe

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")
KERNELS = ("trellis::memory", "GeneratedBackwardFor_trellis_memory", "aten::_scaled_dot_product")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--mixers", default="trellis,transformer")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    recipe = load_recipe(options.recipe)
    shape = (recipe.rows, recipe.data.context)
    ids = torch.randint(0, options.vocab_size, shape)
    steps = {}
    for mixer in options.mixers.split(","):
        recipe.model.mixer = mixer
        steps[mixer] = make_step(recipe, options.vocab_size, ids)
    timings = measure.alternate(steps, options.rounds)
    first = next(iter(timings.values())).median
    print(f"{shape[0]} x {shape[1]} tokens, fp32, {torch.get_num_threads()} threads\n")
    print("| mixer | tokens/s | step | time, of the first | products | kernel | the rest |")
    print("|---|---|---|---|---|---|---|")
    for mixer, timing in timings.items():
        products, kernel, rest = shares(steps[mixer])
        print(
            f"| {mixer} | {ids.numel() / timing.median:,.0f} | {timing} "
            f"| {timing.median / first:.2f} | {products:.1%} | {kernel:.1%} | {rest:.1%} |"
        )


def make_step(recipe: Recipe, vocab_size: int, ids: torch.Tensor) -> Callable[[], None]:
    model = TrellisForCausalLM(recipe.model.config(vocab_size))
    optimizer = build_optimizer(model, recipe.train, fused=True)

    def step() -> None:
        model(ids, labels=ids, logits_to_keep=1).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def shares(step: Callable[[], None]) -> tuple[float, float, float]:
    """Of a step's time: matrix products, the mixer's kernel, the rest."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    products = sum(e.self_cpu_time_total for e in events if e.key in PRODUCTS)
    kernel = sum(e.self_cpu_time_total for e in events if e.key.startswith(KERNELS))
    return products / total, kernel / total, 1 - (products + kernel) / total


if __name__ == "__main__":
    main()
