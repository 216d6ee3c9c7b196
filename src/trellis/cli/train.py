"""`trellis train`, `compare`, `generate`, `export`, `plot` and `models`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from . import options

Run = Annotated[Path, Argument(help="A run's folder, or one that `trellis export` wrote.")]
Settings = Annotated[
    list[str] | None,
    Option("--set", help="A value in place of the recipe's, such as train.steps=100."),
]
#: Characters of a prompt that takes seconds to read.
LONG_PROMPT = 20_000
Step = Annotated[int | None, Option(help="The checkpoint of this step; default: newest.")]


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Ends the command if training stops: 130 after Ctrl-C, 143 after SIGTERM, else 1."""
    from ..training.loop import Interrupted, TrainingStopped

    try:
        yield
    except Interrupted as stopped:  # the loop has printed how to go on
        sys.exit(stopped.exit_code)
    except TrainingStopped as stopped:
        sys.exit(f"trellis: {stopped}")


def train(
    recipe: Annotated[Path, Argument(help="A recipe (.toml), or a run to resume.")],
    out: Annotated[
        Path | None, Option(help="The run's folder; default: runs/X for a recipe named X.toml.")
    ] = None,
    settings: Settings = None,
    resume: Annotated[bool, Option(help="Go on from the newest checkpoint.")] = False,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Measure a few steps and say what the run takes."),
    ] = False,
) -> dict[str, Any]:
    """Train a model by a recipe; under torchrun, on several processes."""
    from ..machine import gib
    from ..training.metrics import clock, read_metrics
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
    with exit_codes():
        found = train_run(chosen, run, resume, dry_run)
    if found is None:
        # The last records: of training and, if there was one, of validation.
        return {"run": run, **{k: v for last in read_metrics(run)[-2:] for k, v in last.items()}}
    if options.FIRST:
        context = chosen.data.context
        typer.echo(
            f"parameters  {found['parameters']:,}\n"
            f"state       {found['state_bytes']:,} bytes of a sequence after {context:,} tokens\n"
            f"memory      {gib(found['memory_bytes'])} in these steps, of "
            f"{gib(found['available_bytes'])}\n"
            f"tokens      {found['tokens']:,} in {found['steps']:,} steps of {chosen.rows:,} x "
            f"{context:,}, {found['epochs']:.2f} epochs of the text\n"
            f"time        {clock(found['seconds'])} at {found['tokens_per_second']:,.0f} tokens/s, "
            "by a few measured steps of one micro-batch each\n"
            "nothing was written"
        )
    return found


def compare(
    recipe: Annotated[Path, Argument(help="A recipe (.toml), with or without \\[compare].")],
    mixers: Annotated[
        str, Option(help="Names of variants or mixers, separated by commas; default: all.")
    ] = "",
    out: Annotated[
        Path | None, Option(help="The runs' folder; default: runs/X for a recipe named X.toml.")
    ] = None,
    settings: Settings = None,
    workers: Annotated[
        int, Option(help="Runs at the same time, which share the cores.", min=1)
    ] = 1,
) -> dict[str, Any]:
    """Train variants of a model by one recipe, with equal parameters on the same tokens.

    The recipe's section [compare] names the variants, learning rates, seeds and contexts; without
    it, all mixers are compared as they are by default. What is finished is not trained again.
    """
    from ..evaluation.comparison import compare as compare_runs
    from ..evaluation.comparison import load_comparison

    chosen = load_comparison(recipe, settings or ())
    if mixers:
        chosen = chosen.only(options.names(mixers))
    with exit_codes():
        return compare_runs(chosen, out or Path("runs") / recipe.stem, typer.echo, workers)


def generate(
    run: Run,
    prompt: Annotated[str, Option(help="The text to go on from.")] = "",
    prompt_file: Annotated[
        Path | None, Option(help="A file of text that comes before --prompt.")
    ] = None,
    max_tokens: Annotated[int, Option(help="The most new tokens.", min=0)] = 200,
    temperature: Annotated[
        float, Option(help="0 takes the likeliest token; higher is more random.", min=0)
    ] = 0.8,
    top_p: Annotated[
        float,
        Option(
            help="Draw only from the likeliest tokens with this share of the probability.",
            min=0,
            max=1,
        ),
    ] = 0.95,
    top_k: Annotated[
        int | None, Option(help="Draw only from the N likeliest tokens.", min=1)
    ] = None,
    seed: Annotated[int, Option(help="Another number draws other tokens.")] = 0,
    samples: Annotated[int, Option(help="Texts, each of its own seed.", min=1)] = 1,
    interactive: Annotated[
        bool, Option("--interactive", help="Go on after each line you type, until an empty one.")
    ] = False,
    echo: Annotated[bool, Option(help="Print the prompt before the text.")] = True,
    state_in: Annotated[
        Path | None, Option(help="Go on from a state that --state-out saved.")
    ] = None,
    state_out: Annotated[
        Path | None, Option(help="A file to save the state to afterwards.")
    ] = None,
    step: Step = None,
    device: options.Device = "cpu",
) -> dict[str, Any]:
    """Stream text from a trained model."""
    from ..evaluation.runner import progress
    from ..models.cache import TrellisCache
    from ..models.sampling import generate as new_text
    from ..training.run import load_run

    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"--prompt must be UTF-8; its character {error.start + 1} is a byte that is not"
        ) from error
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8") + prompt
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt-file {prompt_file} is not UTF-8: {error}") from error
    if state_out is not None and (state_out.is_dir() or not state_out.parent.is_dir()):
        raise ValueError(f"--state-out must be a file in a folder that exists; got {state_out}")
    if samples > 1 and (interactive or state_out is not None):
        raise ValueError(f"--samples must be 1 with --interactive or --state-out; got {samples}")
    model, tokenizer = load_run(run, step, device)
    cache = model.init_cache(1) if state_in is None else TrellisCache.load(state_in, model)
    before = cache.get_seq_length()
    draw = partial(new_text, model, tokenizer, temperature=temperature, top_p=top_p, top_k=top_k)
    if prompt or not interactive:
        # Where reading takes seconds, a bar shows it.
        total = len(tokenizer.encode(prompt)) if len(prompt) > LONG_PROMPT else None
        with progress("reading the prompt", total) as advance:
            list(draw(prompt, cache, seed=seed, max_tokens=0, progress=advance))
    texts = []
    for number in range(samples if max_tokens and not interactive else 0):
        if samples > 1:
            typer.echo(f"--- {number + 1} of {samples}")
        own = cache.clone() if samples > 1 else cache
        parts = draw("", own, seed=seed + number, max_tokens=max_tokens)
        texts.append(_shown(prompt if echo else "", parts))
    while interactive and (line := _typed()):
        parts = draw(line, cache, seed=seed + len(texts), max_tokens=max_tokens)
        texts.append(_shown("", parts))
    if not max_tokens:
        typer.echo(f"read {cache.get_seq_length() - before:,} tokens")
    if state_out is not None:
        cache.save(state_out)
        typer.echo(
            f"state after {cache.get_seq_length():,} tokens, {cache.nbytes:,} bytes: {state_out}",
            err=True,
        )
    return {"prompt": prompt, "texts": texts, "tokens": cache.get_seq_length(), "state": state_out}


def _shown(prompt: str, parts: Iterable[str]) -> str:
    """Prints a prompt and the text after it as it comes; returns the text."""
    typer.echo(prompt, nl=False)
    text = []
    for part in parts:
        text.append(part)
        typer.echo(part, nl=False)
        sys.stdout.flush()
    typer.echo()
    return "".join(text)


def _typed() -> str:
    """The next line that is typed; empty at the end of the input."""
    typer.echo("> ", nl=False, err=True)
    return sys.stdin.readline().rstrip("\n")


def export(
    run: Run,
    out: Annotated[Path, Option(help="The folder to write.")],
    step: Step = None,
) -> dict[str, Any]:
    """Write a checkpoint for transformers' from_pretrained."""
    from ..training.run import export as export_run

    export_run(run, out, step)
    typer.echo(
        f'AutoModelForCausalLM.from_pretrained("{out}") loads it, after import trellis.models'
    )
    return {"path": out}


def plot(
    runs: Annotated[list[Path], Argument(help="Runs' folders.")],
    out: Annotated[Path, Option(help="The PNG file.")] = Path("loss.png"),
) -> dict[str, Any]:
    """Draw the loss curves of runs."""
    from ..evaluation.comparison import draw_losses

    draw_losses(runs, out)
    typer.echo(f"written to {out}")
    return {"path": out}


def models(
    names: Annotated[list[str] | None, Argument(help="Sizes such as 125m; default: all.")] = None,
    vocab_size: Annotated[int, Option(help="Tokens in the vocabulary.")] = 50257,
    contexts: Annotated[
        str, Option(help="Contexts to count operations at, separated by commas.")
    ] = "2048,32768",
) -> dict[str, Any]:
    """Print parameters, state and operations of every mixer at the paper's sizes."""
    from ..mixers import MIXERS
    from ..models.presets import PRESETS, describe

    lengths = options.numbers("contexts", contexts)
    found: dict[str, Any] = {}
    for name in names or PRESETS:
        rows = {mixer: describe(name, mixer, lengths, vocab_size=vocab_size) for mixer in MIXERS}
        found[name] = {mixer: row._asdict() for mixer, row in rows.items()}
        shape = next(iter(rows.values()))
        heads = ["mixer", "MLP", "parameters", "without embeddings", "state per sequence",
                 *(f"GFLOP/token at {length}" for length in lengths)]  # fmt: skip
        cells = []
        for mixer, row in rows.items():
            grows = f"grows, {row.growth_bytes / 2**10:.0f} KiB/token"
            size = grows if row.state_bytes is None else f"{row.state_bytes / 2**20:.2f} MiB"
            cells.append([
                mixer, row.mlp, f"{row.parameters:,}", f"{row.parameters - row.embeddings:,}",
                size, *(f"{flops / 1e9:.3f}" for flops in row.flops),
            ])  # fmt: skip
        title = f"{name}: {shape.blocks} blocks of width {shape.width}, {shape.heads} heads"
        options.print_table(heads, cells, title)
    typer.echo(
        "Operations of reading a token, on average over the context; a multiply-add counts as two."
    )
    return {"contexts": lengths, "sizes": found}
