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

from trellis.threads import sleep_while_waiting

# Before torch is imported. Other programs on the machine then slow this down in proportion only.
sleep_while_waiting()

import torch

from trellis.data import Corpus, prepare_corpus, train_tokenizer
from trellis.evaluation.comparison import compare, load_comparison
from trellis.figures import figure
from trellis.mixers.transformer import AttentionState
from trellis.models.cache import TrellisCache
from trellis.models.modeling import TrellisForCausalLM
from trellis.models.sampling import generate
from trellis.training.run import load_run

RECIPE = Path(__file__).parent.parent / "recipes" / "demo.toml"
VOCABULARY = 2048
#: Numbers of tokens read after which memory and time are measured.
MARKS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
#: Attention reads for so long; its time per token grows.
ATTENTION_SECONDS = 10
DECODED = 100  # tokens per measurement
#: The sample goes on in the middle of a sentence: a small model that begins anew often begins with
#: empty lines. A low temperature keeps it to words that it knows.
PROMPT = 'def read(self, size=-1):\n    """Return the'
TEMPERATURE = 0.5


class Point(NamedTuple):
    tokens: int
    cache_bytes: int
    seconds: float  # per decoded token, the median
    read: bool  # whether so many tokens were read, or the cache was filled with copies of a part


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
    print(f"\nThe model on a page, at http://127.0.0.1:8000/:\n\n  {serve_command(trellis)}")


def serve_command(run: Path) -> str:
    """The command that serves a run. Its sessions are kept beside the run."""
    return f".venv/bin/trellis serve {run} --state-dir {run.parent / 'states'}"


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
    heading("A sample", f"generate {run} --temperature {TEMPERATURE} --prompt ${PROMPT!r}")
    model, tokenizer = load_run(run)
    print(PROMPT, end="")
    cache = model.init_cache(1)
    for text in generate(model, tokenizer, PROMPT, cache, max_tokens=200, temperature=TEMPERATURE):
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
    """The size of the cache and the time of a decoded token at each mark.

    After the time limit, in seconds, the model reads no further: its cache is filled up with copies
    of what it holds. What is in it makes no difference to the time of a token.
    """
    cache, points = model.init_cache(1), []
    start = time.monotonic()
    for mark in (m for m in MARKS if m <= ids.shape[1]):
        done = cache.seen[0]
        while done < mark and (limit is None or time.monotonic() - start < limit):
            model.read(ids[:, done : min(done + 1024, mark)], cache)
            done = cache.seen[0]
        read = done == mark
        here = cache.clone() if read else stretched(cache, mark)
        size, times = here.nbytes, []
        for token in range(DECODED):
            begin = time.perf_counter()
            model(ids[:, token : token + 1], past_key_values=here)
            times.append(time.perf_counter() - begin)
        points.append(Point(mark, size, sorted(times)[DECODED // 2], read))
    return points


def stretched(cache: TrellisCache, tokens: int) -> TrellisCache:
    """A cache of attention with so many columns, which repeat those of the given one."""
    longer, columns = cache.detach(), torch.arange(tokens) % cache.seen[0]
    longer.states = [
        AttentionState(
            *(part[:, :, columns] for part in (state.keys, state.values)),
            torch.full_like(state.length, tokens),
        )
        for state in longer.states
    ]
    return longer


def table(points: dict[str, list[Point]]) -> None:
    print("| tokens read | Trellis: memory | time per token | attention: memory | time per token |")
    print("|---|---|---|---|---|")
    for ours, theirs in zip(points["trellis"], points["transformer"]):
        cells = (f"{_size(p)} | {p.seconds * 1e3:.2f} ms" for p in (ours, theirs))
        print(f"| {ours.tokens:,} | {' | '.join(cells)}{'' if theirs.read else ' *'} |")
    if not points["transformer"][-1].read:
        print(f"\n* not read within {ATTENTION_SECONDS} seconds: the cache is filled with copies")


def _size(point: Point) -> str:
    return f"{point.cache_bytes / 2**20:.2f} MiB"


def draw(points: dict[str, list[Point]], path: Path) -> None:
    with figure(path, 2, figsize=(11, 4.2)) as (left, right):
        for mixer, label, color in (
            ("trellis", "Trellis", "C0"),
            ("transformer", "attention", "C1"),
        ):
            series = points[mixer]
            read = [point for point in series if point.read]
            for part, style, name in ((series, ":", None), (read, "o-", label)):
                tokens = [point.tokens for point in part]
                sizes = [point.cache_bytes / 2**20 for point in part]
                left.plot(tokens, sizes, style, color=color, label=name)
                times = [point.seconds * 1e3 for point in part]
                right.plot(tokens, times, style, color=color, label=name)
        for axes in (left, right):
            axes.set(xscale="log", yscale="log", xlabel="tokens read")
            axes.grid(alpha=0.3, which="both")
            axes.legend()
        left.set(ylabel="MiB", title="Memory of what was read")
        right.set(ylabel="ms", title="Time of the next token")
        if not points["transformer"][-1].read:
            dotted = f"after {ATTENTION_SECONDS} s of reading: filled with copies"
            right.plot([], [], ":", color="C1", label=dotted)
            right.legend()


if __name__ == "__main__":
    main()
