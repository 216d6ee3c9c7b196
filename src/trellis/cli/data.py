"""The `trellis data` commands: from text to token shards."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from .options import Program

if TYPE_CHECKING:
    from ..data import Progress
    from ..data.documents import Skip
    from ..data.shards import Corpus

app = Program(no_args_is_help=True, help="Turn text into token shards.")

_SOURCES = (
    "Text files, .jsonl files (or .json with an object on each line), folders or .tar archives of "
    "them, also compressed (.gz, .xz, .bz2, .zst); hub:DATASET:CONFIG@SPLIT, where CONFIG and "
    "SPLIT are optional; or stdlib, the sources and the language reference of this Python."
)
Sources = Annotated[list[str], Argument(help=_SOURCES, metavar="SOURCE...")]
TextField = Annotated[
    str, Option(help="The field that holds the text, in jsonl and in datasets of the hub.")
]
TokenizerName = Annotated[
    str, Option(help="bytes, a tokenizer.json, a folder with one, or a name on the hub.")
]
CorpusFolder = Annotated[Path, Argument(help="A folder that `trellis data prepare` wrote.")]

#: How many skipped inputs are named on the terminal; all of them are in skipped.jsonl.
_NAMED = 5


@app.command()
def prepare(
    sources: Sources,
    out: Annotated[Path, Option(help="The folder to write, which must not exist yet.")],
    tokenizer: TokenizerName = "bytes",
    validation: Annotated[
        float, Option(help="The share of documents to hold out for validation.")
    ] = 0.01,
    seed: Annotated[int, Option(help="Chooses which documents are held out.")] = 0,
    text_field: TextField = "text",
    shard_tokens: Annotated[int, Option(help="The most tokens in a shard.")] = 1 << 27,
    max_documents: Annotated[int | None, Option(help="Stop after this many documents.")] = None,
) -> dict[str, Any]:
    """Turn text into a corpus of token shards.

    If it is interrupted, the same command goes on where it stopped.
    """
    from ..data import prepare_corpus
    from ..data.shards import PROGRESS_FILE
    from ..machine import peak_bytes

    skips = _Skips()
    start = time.monotonic()
    with _progress() as show:
        try:
            corpus = prepare_corpus(
                sources, out, tokenizer=tokenizer, validation=validation, seed=seed,
                text_field=text_field, shard_tokens=shard_tokens, max_documents=max_documents,
                progress=show, skipped=skips,
            )  # fmt: skip
        except KeyboardInterrupt:
            partial = Path(f"{out}.partial")
            begun = (partial / PROGRESS_FILE).exists()
            rest = f"; the same command goes on from {partial}" if begun else ""
            sys.exit(f"trellis: interrupted{rest}")
    seconds = time.monotonic() - start
    manifest = corpus.manifest
    skips.summarize(manifest["skipped"]["count"], out / manifest["skipped"]["file"])
    _name_ignored(Counter(manifest["ignored"]))
    if manifest["tokenizer"]["end_of_document"] is None:
        _say("the tokenizer has no end-of-document token: documents follow without one")
    if manifest["held_out"]:
        _say(f"validation: {manifest['held_out']['why']}")
    text = corpus.train.bytes + corpus.validation.bytes
    tokens = corpus.train.tokens + corpus.validation.tokens
    _say(
        f"{corpus.train.documents:,} + {corpus.validation.documents:,} documents, "
        f"{corpus.train.tokens:,} + {corpus.validation.tokens:,} tokens (training + validation), "
        f"{text / tokens:.2f} bytes per token"
    )
    _say(
        f"{text / 1e6:,.1f} MB of text in {seconds:.1f} s, {text / 1e6 / seconds:.1f} MB/s; "
        f"memory at most {peak_bytes() / 1e6:.0f} MB"
    )
    _say(f"written to {out}")
    return _facts(corpus)


@app.command("tokenizer")
def train_a_tokenizer(
    sources: Sources,
    out: Annotated[Path, Option(help="A folder for tokenizer.json, or a path that ends in .json.")],
    vocab_size: Annotated[int, Option(help="The most tokens in the vocabulary.")] = 32768,
    text_field: TextField = "text",
) -> dict[str, Any]:
    """Train a byte-level BPE tokenizer on text."""
    from ..data import Progress, train_tokenizer

    skips = _Skips()
    ignored: Counter[str] = Counter()
    with _progress() as show:
        result = train_tokenizer(
            sources, vocab_size, out, text_field=text_field, skipped=skips, ignored=ignored.update,
            progress=lambda n, size: show(Progress(documents=n, text_bytes=size)),
        )  # fmt: skip
    skips.summarize(skips.count)
    _name_ignored(ignored)
    if result.vocab_size < vocab_size:
        _say(f"the text gave {result.vocab_size:,} tokens, not {vocab_size:,}: it is short")
    _say(f"written to {out}: {result.vocab_size:,} tokens, sha256 {result.sha256}")
    return {"path": out, "tokens": result.vocab_size, "sha256": result.sha256}


@app.command()
def needles(
    out: Annotated[Path, Option(help="The .jsonl file to write.")],
    variants: Annotated[
        str, Option(help="Kinds of needles, of passkey, number, uuid and word.")
    ] = "passkey,number,uuid",
    lengths: Annotated[
        str, Option(help="The most tokens of a document, 128 of which are kept for its answer.")
    ] = "1024,2048",
    items: Annotated[int, Option(help="How many documents to write.", min=1)] = 10_000,
    haystack: Annotated[
        list[str] | None,
        Option(help="The text that hides the needles, a source as in prepare; else stdlib."),
    ] = None,
    tokenizer: TokenizerName = "bytes",
    brief: Annotated[
        float,
        Option(help="The share of documents that are a needle, a few words, and the answer twice."),
    ] = 0.0,
    seed: Annotated[int, Option(help="Seeds the random choices.")] = 0,
    force: Annotated[bool, Option(help="Replace the file if it exists.")] = False,
) -> dict[str, Any]:
    """Write training text for `trellis eval niah`: needles in haystacks, with their answers.

    The test never uses the keys and values of this text.
    """
    from ..data.needles import write_needles
    from .options import names, numbers

    with _bar("{task.completed:,} documents") as (bar, task):
        bar.update(task, total=items)
        size = write_needles(
            out, names(variants), numbers("lengths", lengths), items, haystack or ["stdlib"],
            tokenizer=tokenizer, brief=brief, seed=seed, force=force,
            progress=lambda: bar.advance(task),
        )  # fmt: skip
    _say(f"{items:,} documents, {size / 1e6:,.1f} MB written to {out}")
    return {"path": out, "documents": items, "bytes": size}


@app.command()
def verify(corpus: CorpusFolder) -> dict[str, Any]:
    """Read a corpus again and compare every file with its recorded hash."""
    from ..data import open_corpus

    opened = open_corpus(corpus)
    with _bar("{task.description}") as (bar, task):
        opened.verify(
            lambda name, done, total: bar.update(
                task, description=name, completed=done, total=total
            )
        )
    count = len(opened.files())
    _say(f"{corpus} is intact: {count} files, fingerprint {opened.fingerprint}")
    return _facts(opened)


@app.command()
def info(corpus: CorpusFolder) -> dict[str, Any]:
    """Show what a corpus is made of."""
    from ..data import open_corpus
    from ..data.sources import kinds
    from .options import print_table

    opened = open_corpus(corpus)
    manifest = opened.manifest
    tokenizer = manifest["tokenizer"]
    rows = []
    for stream in (opened.train, opened.validation):
        shards = len(manifest["splits"][stream.split]["shards"])
        numbers = (stream.documents, stream.tokens, stream.bytes, shards)
        rows.append([stream.split, *(f"{n:,}" for n in numbers)])
    print_table(["split", "documents", "tokens", "bytes of text", "shards"], rows)
    for entry in manifest["sources"]:
        size = f" ({entry['files']:,} files, {entry['bytes']:,} bytes)" if entry["files"] else ""
        _say(f"source: {entry['source']}{size}")
    _say(
        f"tokenizer: {tokenizer['name']}, {tokenizer['vocab_size']:,} tokens, "
        f"sha256 {tokenizer['sha256']}"
    )
    options = ", ".join(f"{key} {value}" for key, value in manifest["options"].items())
    _say(f"options: {options}")
    if manifest["held_out"]:
        _say(f"validation: {manifest['held_out']['why']}")
    for reason, number in manifest["skipped"]["reasons"].items():
        _say(f"skipped: {number:,} {reason}")
    if manifest["ignored"]:
        _say(f"ignored: {kinds(Counter(manifest['ignored']))}")
    _say(f"written by trellis {manifest['library_version']}")
    _say(f"fingerprint: {opened.fingerprint}")
    return _facts(opened)


def _facts(corpus: Corpus) -> dict[str, Any]:
    return {"path": corpus.path, "fingerprint": corpus.fingerprint, "manifest": corpus.manifest}


def _say(line: str, err: bool = False) -> None:
    """Prints a line, with escapes for characters of file names that a terminal cannot show."""
    from ..data.sources import printable

    typer.echo(printable(line), err=err)


class _Skips:
    """Prints the first skipped inputs and counts all of them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, skip: Skip) -> None:
        self.count += 1
        if self.count <= _NAMED:
            _say(f"skipped {skip.name}: {skip.reason}", err=True)

    def summarize(self, count: int, where: Path | None = None) -> None:
        """count: how many inputs the whole run skipped, also before an interruption."""
        if count:
            rest = f"; all are named in {where}" if where else ""
            _say(f"{count:,} inputs were skipped{rest}", err=True)


def _name_ignored(ignored: Counter[str]) -> None:
    from ..data.sources import kinds

    if ignored:
        _say(f"ignored files, by suffix: {kinds(ignored)}")


@contextmanager
def _bar(text: str) -> Iterator[tuple[Any, Any]]:
    """Yields a progress bar with this text and its task; nothing is shown without a terminal."""
    from rich import progress
    from rich.console import Console

    columns = [progress.TextColumn(text), progress.BarColumn(), progress.TaskProgressColumn(),
               progress.TimeRemainingColumn(), progress.TimeElapsedColumn()]  # fmt: skip
    console = Console(stderr=True)
    with progress.Progress(*columns, console=console, transient=True,
                           disable=not console.is_terminal) as bar:  # fmt: skip
        yield bar, bar.add_task("", total=None)


@contextmanager
def _progress() -> Iterator[Any]:
    """Yields a function that shows how far a run has come, if this is a terminal."""
    start, first = time.monotonic(), None
    with _bar("{task.description}") as (bar, task):

        def show(progress: Progress) -> None:
            nonlocal first
            # The bytes that were read before an interruption do not count for the speed.
            if first is None:
                first = progress.text_bytes if progress.resumed else 0
            seconds = max(time.monotonic() - start, 1e-9)
            read = progress.text_bytes - first
            bar.update(
                task,
                description=f"{progress.documents:,} documents, {progress.tokens:,} tokens, "
                f"{read / 1e6 / seconds:,.1f} MB/s",
                completed=progress.source_bytes,
                total=progress.source_total,
            )

        yield show
