"""`trellis train`, `compare`, `generate`, `export` and `plot`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import names

Run = Annotated[Path, typer.Argument(help="A run's folder, or one that `trellis export` wrote.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value, in place of the recipe's.")
]
Step = Annotated[int | None, typer.Option(help="The checkpoint of this step; default: newest.")]


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe (.toml), or a run to resume.")],
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; default: runs/NAME of the recipe.")
    ] = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint.")] = False,
) -> None:
    """Train a model by a recipe; under torchrun, on several processes."""
    from ..training.loop import TrainingStopped
    from ..training.recipe import load_recipe, override
    from ..training.run import recipe_of
    from ..training.run import train as train_run

    if recipe.is_dir():
        if not resume:
            raise ValueError(
                f"{recipe} is a folder: give a recipe, or --resume to go on with a run"
            )
        if out is not None:
            raise ValueError(f"--out must not be given with a run to resume, {recipe}; got {out}")
        run = recipe
        chosen = override(recipe_of(run), settings or ())
    else:
        chosen = load_recipe(recipe, settings or ())
        run = out or Path("runs") / recipe.stem
    try:
        train_run(chosen, run, resume)
    except TrainingStopped as error:
        sys.exit(f"trellis: {error}")


def compare(
    recipe: Annotated[Path, typer.Argument(help="A recipe (.toml).")],
    mixers: Annotated[str, typer.Option(help="Names separated by commas; default: all.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="The runs' folder; default: runs/NAME of the recipe.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Train several mixers by one recipe, with equal parameters on the same tokens."""
    from ..mixers import MIXERS
    from ..mixers.registry import check_name
    from ..training.comparison import compare as compare_runs
    from ..training.loop import TrainingStopped
    from ..training.recipe import load_recipe

    compared = names(mixers) if mixers else list(MIXERS)
    for name in compared:
        check_name(name)
    chosen = load_recipe(recipe, settings or ())
    try:
        compare_runs(chosen, compared, out or Path("runs") / recipe.stem, typer.echo)
    except TrainingStopped as error:
        sys.exit(f"trellis: {error}")


def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "",
    prompt_file: Annotated[Path | None, typer.Option(help="A file with the prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(help="At most so many tokens.", min=0)] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest.", min=0)] = 0.8,
    top_p: Annotated[
        float, typer.Option(help="Of the likeliest tokens only.", min=0, max=1)
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    state_in: Annotated[Path | None, typer.Option(help="Go on from a saved state.")] = None,
    state_out: Annotated[Path | None, typer.Option(help="Save the state afterwards.")] = None,
    step: Step = None,
) -> None:
    """Stream text from a trained model."""
    from ..models.cache import TrellisCache
    from ..training import sampling
    from ..training.run import load_run

    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8") + prompt
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt-file {prompt_file} is not UTF-8: {error}") from error
    if state_out is not None and (state_out.is_dir() or not state_out.parent.is_dir()):
        raise ValueError(f"--state-out must be a file in a folder that exists; got {state_out}")
    model, tokenizer = load_run(run, step)
    cache = model.init_cache(1) if state_in is None else TrellisCache.load(state_in, model)
    if state_in is None:
        typer.echo(prompt, nl=False)
    for text in sampling.generate(
        model, tokenizer, prompt, cache,
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed,
    ):  # fmt: skip
        typer.echo(text, nl=False)
        sys.stdout.flush()
    typer.echo()
    if state_out is not None:
        cache.save(state_out)
        typer.echo(
            f"state after {cache.seen:,} tokens, {cache.nbytes:,} bytes: {state_out}", err=True
        )


def export(
    run: Run,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    step: Step = None,
) -> None:
    """Write a checkpoint for transformers' from_pretrained."""
    from ..training.run import export as export_run

    export_run(run, out, step)
    typer.echo(f'AutoModelForCausalLM.from_pretrained("{out}") loads it, after import trellis')


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Runs' folders.")],
    out: Annotated[Path, typer.Option(help="The PNG file.")] = Path("loss.png"),
) -> None:
    """Draw the loss curves of runs."""
    from ..training.plot import draw_losses

    draw_losses(runs, out)
    typer.echo(f"written to {out}")
