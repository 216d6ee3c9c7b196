"""`trellis eval`: one command for each task. Each calls the task and prints what it found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from .options import Device, Program, Threads, names, numbers, print_table

if TYPE_CHECKING:
    from ..evaluation.models import EvaluatedModel
    from ..evaluation.runner import Report

app = Program(no_args_is_help=True, help="Measure models: ours, or any of transformers.")

Models = Annotated[
    list[str],
    Argument(help="Runs, exported folders, or models of transformers.", metavar="MODEL..."),
]
Out = Annotated[
    Path, Option(help="The folder of results; a result that is there is not measured again.")
]
Limit = Annotated[int | None, Option(help="Take only the first N items.", min=1)]
BatchTokens = Annotated[int, Option(help="About how many tokens a batch has.", min=1)]
DocumentBytes = Annotated[
    int | None, Option(help="Take only the first N bytes of each document.", min=1)
]


OUT = Path("runs/eval")


@app.command()
def inspect(
    model: Annotated[str, Argument(help="A run or an exported folder of ours.")],
    text: Annotated[str | None, Argument(help="The text that the model reads.")] = None,
    file: Annotated[Path | None, Option(help="A file to read instead of TEXT.")] = None,
    tokens: Annotated[int | None, Option(help="Read only the first N tokens.", min=1)] = None,
    layer: Annotated[
        int | None, Option(help="Draw the heads of this layer; else a few layers.", min=0)
    ] = None,
    head: Annotated[int | None, Option(help="Draw only this head of --layer.", min=0)] = None,
    probes: Annotated[int, Option(help="Tokens whose recall is measured, at most.", min=1)] = 64,
    rank_every: Annotated[
        int, Option(help="Compute the effective rank at every N-th token.", min=1)
    ] = 1,
    out: Out = OUT,
    threads: Threads = 0,
    device: Device = "cpu",
) -> Any:
    """What the memory does while it reads: a picture, arrays and a table."""
    from ..evaluation import inspection

    if (text is None) == (file is None):
        raise ValueError("give either a TEXT or --file FILE")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} must be text in UTF-8: {error}") from error
    assert text is not None
    (opened,) = _opened([model], device)
    source = "the command line" if file is None else str(file)
    return show(inspection.run(
        opened, text, out, source=source, tokens=tokens, layer=layer, head=head, probes=probes,
        rank_every=rank_every,
    ))  # fmt: skip


@app.command()
def mqar(
    mixers: Annotated[str, Option(help="Names separated by commas, or all.")] = "all",
    preset: Annotated[
        str, Option(help="small, zoology or based; or a TOML file like recipes/mqar/*.toml.")
    ] = "small",
    widths: Annotated[str | None, Option(help="Widths instead of the preset's.")] = None,
    heads: Annotated[int | None, Option(help="Heads, where the mixer has them.")] = None,
    layers: Annotated[int | None, Option(help="Layers of a model.")] = None,
    vocab_size: Annotated[
        int | None, Option(help="Tokens: half of them keys, half values.")
    ] = None,
    steps: Annotated[int | None, Option(help="The most steps of a training.")] = None,
    batch_tokens: Annotated[int | None, Option(help="Tokens in a batch.")] = None,
    easy_first: Annotated[
        float | None, Option(help="Share of the steps with the shortest sequences only.")
    ] = None,
    learning_rates: Annotated[
        str | None, Option(help="Tried in turn; the best on validation is tested.")
    ] = None,
    check_every: Annotated[
        int | None, Option(help="Steps between looks at the validation accuracy.")
    ] = None,
    random_non_queries: Annotated[
        bool | None, Option(help="Random tokens, instead of 0, where nothing is asked.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", help="Any key of the preset, steps=100, or of a mixer, trellis.slots=64."),
    ] = None,
    limit: Limit = None,
    out: Out = OUT,
    threads: Threads = 0,
    seed: Annotated[str, Option(help="Seeds of examples and weights, separated by commas.")] = "0",
    device: Device = "cpu",
) -> Any:
    """Multi-query associative recall: trains small models of every mixer and tests them.

    All models of a width have equally many parameters, where the mixer leaves room for an MLP.
    --limit counts test examples. Weights are not kept: another --limit trains again. Processes with
    different --mixers or --widths may share a folder: table and figure show all results in it that
    have the same preset and options and one of the seeds. The figure is PRESET.png; with other
    options or seeds its name has a hash of them.
    """
    from ..evaluation import mqar as task
    from ..evaluation.mqar.data import preset as preset_of
    from ..mixers import MIXERS
    from ..mixers.registry import check_name

    chosen = list(MIXERS) if mixers == "all" else names(mixers)
    for name in chosen:
        check_name(name)
    base = preset_of(preset, settings or ())
    changed = base.changed(
        widths=tuple(numbers("widths", widths)) if widths else None,
        learning_rates=_rates(learning_rates) if learning_rates else None,
        test_examples=min(limit, base.test_examples) if limit else None,
        heads=heads, layers=layers, vocab_size=vocab_size, steps=steps,
        batch_tokens=batch_tokens, easy_first=easy_first, check_every=check_every,
        random_non_queries=random_non_queries,
    )  # fmt: skip
    say = partial(typer.echo, err=True)
    seeds = numbers("seed", seed, least=0)
    return show(task.run(chosen, changed, out, seeds=seeds, device=device, say=say))


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"--learning-rates must be numbers separated by commas; got {text!r}"
        ) from None


@app.command()
def niah(
    models: Models,
    haystack: Annotated[
        list[str] | None,
        Option(help="Text that hides needles: files, folders, archives; else stdlib."),
    ] = None,
    variants: Annotated[
        str, Option(help="passkey (S-NIAH-1), number (S-NIAH-2), uuid (S-NIAH-3), word.")
    ] = "passkey,number,uuid",
    lengths: Annotated[
        str, Option(help="Tokens of a prompt and 128 for its answer, at most.")
    ] = "1024,2048,4096,8192,16384,32768",
    depths: Annotated[
        str, Option(help="Per cent of the text before the needle, in turn; or random.")
    ] = "0,10,20,30,40,50,60,70,80,90,100",
    items: Annotated[int, Option(help="Items of each variant and length.", min=1)] = 100,
    limit: Limit = None,
    seed: Annotated[int, Option(help="Seed of keys, values and random depths.")] = 42,
    batch_tokens: BatchTokens = 8192,
    out: Out = OUT,
    threads: Threads = 0,
    device: Device = "cpu",
) -> Any:
    """Needles in a haystack (RULER's S-NIAH): accuracy by length and depth."""
    from ..evaluation import niah as task

    places = None
    if depths != "random":
        places = numbers("depths", depths, least=0, most=100, instead="random")
    tokens = numbers("lengths", lengths)
    left_out: list[str] = []
    return show(task.run(
        _opened(models, device, max(tokens), left_out), haystack or ["stdlib"], names(variants),
        tokens, out, items=items, depths=places, limit=limit, seed=seed, batch_tokens=batch_tokens,
    ), left_out)  # fmt: skip


@app.command()
def ppl(
    models: Models,
    data: Annotated[
        list[str], Option(help="Text: files, folders, archives, jsonl, stdlib, hub:NAME.")
    ],
    contexts: Annotated[str, Option(help="Context lengths.")] = "512,1024,2048,4096,8192",
    stride: Annotated[
        int | None, Option(help="Windows slide by N tokens; else they are disjoint.", min=1)
    ] = None,
    document_bytes: DocumentBytes = None,
    limit: Limit = None,
    batch_tokens: BatchTokens = 8192,
    out: Out = OUT,
    threads: Threads = 0,
    device: Device = "cpu",
) -> Any:
    """Perplexity by context length, and by position in the context. --limit counts documents."""
    from ..evaluation import ppl as task

    lengths = numbers("contexts", contexts)
    left_out: list[str] = []
    return show(task.run(
        _opened(models, device, max(lengths), left_out), data, lengths, out,
        stride=stride, document_bytes=document_bytes, limit=limit, batch_tokens=batch_tokens,
    ), left_out)  # fmt: skip


@app.command()
def reasoning(
    models: Models,
    data: Annotated[
        Path | None, Option(help="A folder of the publishers' files; else the hub is asked.")
    ] = None,
    tasks: Annotated[
        str | None,
        Option(
            help="Some of lambada,piqa,hellaswag,winogrande,arc_easy,arc_challenge,siqa; else all."
        ),
    ] = None,
    limit: Limit = None,
    batch_tokens: BatchTokens = 8192,
    out: Out = OUT,
    threads: Threads = 0,
    device: Device = "cpu",
) -> Any:
    """Common-sense tasks through lm-eval: accuracies and their average."""
    from ..evaluation import reasoning as task

    left_out: list[str] = []
    return show(task.run(
        _opened(models, device, left_out=left_out), out, data=data,
        tasks=None if tasks is None else names(tasks), limit=limit, batch_tokens=batch_tokens,
    ), left_out)  # fmt: skip


_FORMS = ".jsonl, .json or .parquet, or hub:NAME"


@app.command()
def recall(
    models: Models,
    squad: Annotated[
        str | None, Option(help=f"SQuAD: completions ({_FORMS}), or SQuAD 1.1's own .json.")
    ] = None,
    swde: Annotated[str | None, Option(help=f"SWDE: {_FORMS}.")] = None,
    fda: Annotated[str | None, Option(help=f"FDA: {_FORMS}.")] = None,
    context_tokens: Annotated[
        int | None, Option(help="Cut documents to N tokens around the answer, such as 950.", min=1)
    ] = None,
    limit: Limit = None,
    batch_tokens: BatchTokens = 8192,
    out: Out = OUT,
    threads: Threads = 0,
    device: Device = "cpu",
) -> Any:
    """Recall of an answer from its text: SQuAD completion, SWDE and FDA, in per cent."""
    from ..evaluation import recall as task

    given = {"squad": squad, "swde": swde, "fda": fda}
    left_out: list[str] = []
    return show(task.run(
        _opened(models, device, left_out=left_out),
        {name: source for name, source in given.items() if source is not None},
        out, context_tokens=context_tokens, limit=limit, batch_tokens=batch_tokens,
    ), left_out)  # fmt: skip


@app.command()
def scaling(
    runs: Annotated[list[Path], Argument(help="Folders of `trellis train`.", metavar="RUN...")],
    data: Annotated[
        list[str] | None,
        Option(help="Measure the newest checkpoints on this text, with --context."),
    ] = None,
    context: Annotated[int | None, Option(help="Tokens of a window, with --data.", min=1)] = None,
    bits_per_byte: Annotated[
        bool, Option("--bits-per-byte", help="Draw and fit bits per byte.")
    ] = False,
    document_bytes: DocumentBytes = None,
    limit: Limit = None,
    batch_tokens: Annotated[
        int | None, Option(help="About how many tokens a batch has; 8192 unless given.", min=1)
    ] = None,
    out: Out = OUT,
    threads: Threads = 0,
    device: Device = "cpu",
) -> Any:
    """Perplexity over training FLOPs: the validations that runs recorded, or of --data."""
    from ..evaluation import scaling as task

    return show(task.run(
        runs, out, data=data or [], context=context, bits_per_byte=bits_per_byte,
        document_bytes=document_bytes, limit=limit, batch_tokens=batch_tokens, device=device,
    ))  # fmt: skip


def _opened(
    models: list[str], device: str, context: int = 0, left_out: list[str] | None = None
) -> Iterator[EvaluatedModel]:
    from ..evaluation.models import open_models

    return open_models(models, device, context, left_out)


def show(report: Report, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Prints the tables and lines of a report, and the files that were written.

    Returns the result of the command. left_out: why some models were not measured.
    """
    for part in report.shown:
        if isinstance(part, str):
            typer.echo(part)
        else:
            print_table(part.heads, part.rows, part.title)
    for path in report.files:
        typer.echo(f"written to {path}")
    return {"found": report.found, "files": report.files, "left_out": left_out}
