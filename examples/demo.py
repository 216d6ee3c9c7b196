"""`make demo`: from text to a trained model, and what its bounded memory is good for.

Prepares the text of Python's standard library, trains a small Trellis and a Transformer++ of the
same size on the same tokens, generates text, and measures the memory and the time that a token
costs both after ever more tokens. Writes to runs/demo.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import NamedTuple

import torch

from trellis.data import Corpus, prepare_corpus, train_tokenizer
from trellis.evaluation.comparison import compare, load_comparison
from trellis.figures import figure
from trellis.models.modeling import TrellisForCausalLM
from trellis.models.sampling import generate
from trellis.training.run import load_run

RECIPE = Path(__file__).parent.parent / "recipes" / "demo.toml"
VOCABULARY = 2048
#: Numbers of tokens read after which memory and time are measured.
MARKS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
#: Attention reads for so long; its time per token grows.
ATTENTION_SECONDS = 60
DECODED = 20  # tokens per measurement
PROMPT = "def read_file(path):\n"


class Point(NamedTuple):
    tokens: int
    cache_bytes: int
    seconds: float  # per decoded token


def main() -> None:
    started = time.monotonic()
    out = _free(Path("runs/demo"))
    corpus = prepare(out)
    train_both(out, corpus)
    trellis, attention = out / "trellis", out / "transformer"
    sample(trellis)
    read_on(out, corpus, {"trellis": trellis, "transformer": attention})
    print(f"\n{time.monotonic() - started:.0f} seconds in all. Try next:\n")
    print(f'  .venv/bin/trellis generate {trellis} --prompt "import "')
    print(f"  .venv/bin/trellis train {trellis} --resume --set train.steps=400")


def _free(path: Path) -> Path:
    """The path, or path-2, path-3, ...: nothing of an earlier demo is overwritten."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(p for p in itertools.chain([path], others) if not p.exists())


def heading(text: str, command: str = "") -> None:
    print(f"\n== {text}" + (f"\n   $ trellis {command}" if command else ""), flush=True)


def prepare(out: Path) -> Corpus:
    heading(
        "Text: the standard library of this Python, with a tokenizer of its own",
        f"data tokenizer stdlib --vocab-size {VOCABULARY} --out {out}/tokenizer.json\n"
        f"   $ trellis data prepare stdlib --tokenizer {out}/tokenizer.json --out {out}/corpus",
    )
    out.mkdir(parents=True)
    train_tokenizer(["stdlib"], VOCABULARY, out / "tokenizer.json")
    corpus = prepare_corpus(
        ["stdlib"], out / "corpus", tokenizer=out / "tokenizer.json", validation=0.03
    )
    splits = corpus.train, corpus.validation
    for split in splits:
        print(f"{split.split}: {split.documents} documents, {split.tokens:,} tokens")
    return corpus


def train_both(out: Path, corpus: Corpus) -> None:
    """Trains both mixers, into OUT/trellis and OUT/transformer, and prints a table of losses."""
    heading(
        "Training: Trellis, and a Transformer++ of the same size on the same tokens",
        f"compare recipes/{RECIPE.name} --out {out}",
    )
    comparison = load_comparison(RECIPE, [f"data.path={json.dumps(str(corpus.path))}"])
    compare(comparison, out, print)


def sample(run: Path) -> None:
    heading("A sample", f"generate {run} --prompt {PROMPT!r}")
    model, tokenizer = load_run(run)
    print(PROMPT, end="")
    for text in generate(model, tokenizer, PROMPT, model.init_cache(1), max_tokens=150):
        print(text, end="", flush=True)
    print()


def read_on(out: Path, corpus: Corpus, runs: dict[str, Path]) -> None:
    heading(
        f"Reading on: Trellis to {MARKS[-1]:,} tokens, attention as far as {ATTENTION_SECONDS} "
        "seconds take it"
    )
    length = min(MARKS[-1], corpus.train.tokens)
    ids = torch.from_numpy(corpus.train.read(0, length))[None]
    points = {}
    for mixer, run in runs.items():
        model, _ = load_run(run)
        limit = ATTENTION_SECONDS if mixer == "transformer" else None
        points[mixer] = measure(model, ids, limit)
    table(points)
    draw(points, out / "reading.png")
    print(f"\nas a picture: {out}/reading.png")


@torch.no_grad()
def measure(model: TrellisForCausalLM, ids: torch.Tensor, limit: float | None) -> list[Point]:
    """The size of the cache and the time of a decoded token at each mark within the time limit."""
    cache, points = model.init_cache(1), []
    start = time.monotonic()
    for mark in (m for m in MARKS if m <= ids.shape[1]):
        while cache.seen < mark:
            if limit is not None and time.monotonic() - start > limit:
                return points
            model.read(ids[:, cache.seen : min(cache.seen + 1024, mark)], cache)
        here = cache.clone()
        times = []
        for token in range(DECODED):
            begin = time.perf_counter()
            model(ids[:, token : token + 1], past_key_values=here)
            times.append(time.perf_counter() - begin)
        points.append(Point(mark, cache.nbytes, sorted(times)[DECODED // 2]))
    return points


def table(points: dict[str, list[Point]]) -> None:
    print("| tokens read | Trellis: memory | time per token | attention: memory | time per token |")
    print("|---|---|---|---|---|")
    attention = {point.tokens: point for point in points["transformer"]}
    for point in points["trellis"]:
        other = attention.get(point.tokens)
        theirs = f"{_size(other)} | {other.seconds * 1e3:.2f} ms" if other else "not reached | "
        print(f"| {point.tokens:,} | {_size(point)} | {point.seconds * 1e3:.2f} ms | {theirs} |")


def _size(point: Point) -> str:
    return f"{point.cache_bytes / 2**20:.2f} MiB"


def draw(points: dict[str, list[Point]], path: Path) -> None:
    with figure(path, 2, figsize=(11, 4.2)) as (left, right):
        for mixer, label in (("trellis", "Trellis"), ("transformer", "attention")):
            series = points[mixer]
            tokens = [point.tokens for point in series]
            left.plot(tokens, [p.cache_bytes / 2**20 for p in series], "o-", label=label)
            right.plot(tokens, [p.seconds * 1e3 for p in series], "o-", label=label)
        last = points["transformer"][-1]
        heights = ((left, last.cache_bytes / 2**20), (right, last.seconds * 1e3))
        for axes, height in heights:
            axes.plot([last.tokens], [height], "X", color="C1", markersize=11)
            axes.annotate(
                f"last point within {ATTENTION_SECONDS} s", (last.tokens, height),
                textcoords="offset points", xytext=(-12, -4), ha="right", color="C1",
            )  # fmt: skip
            axes.set(xscale="log", xlabel="tokens read", ylim=(0, 1.1 * axes.get_ylim()[1]))
            axes.grid(alpha=0.3)
            axes.legend(loc="center left")
        left.set(ylabel="MiB", title="Memory of what was read")
        right.set(ylabel="ms", title="Time of the next token")


if __name__ == "__main__":
    main()
