"""`trellis bench decoding`, `weights` and `busy`: tokens one by one, what rounded weights cost, and
work beside another program."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .. import checks
from ..figures import figure
from ..models import decoder
from ..models.config import TrellisConfig
from ..models.modeling import TrellisForCausalLM
from ..models.presets import match_parameters, preset
from ..threads import WAITING
from ..training.run import load_run
from . import measure

Report = Callable[[str], None]
#: What decodes a token: a value of TRELLIS_DECODER.
DECODERS = {"native": "auto", "native, bf16 weights": "bf16", "PyTorch": "torch"}
MIXERS = {"trellis": "Trellis", "transformer": "attention"}


def config(size: str, mixer: str) -> TrellisConfig:
    """A preset such as "125m", or "demo", the size of the model in recipes/demo.toml: with as many
    parameters as Transformer++ has."""
    if size != "demo":
        return preset(size, mixer)
    made, reference = (
        TrellisConfig(vocab_size=2048, hidden_size=128, num_hidden_layers=3,
                      num_attention_heads=2, mixer=name)
        for name in (mixer, "transformer")
    )  # fmt: skip
    return match_parameters(made, reference)


@torch.no_grad()
def run(
    size: str, contexts: list[int], batches: list[int], rounds: int, report: Report
) -> dict[str, Any]:
    """The time of the next token for Trellis and attention, each in every decoder, in turn."""
    copied = measure.copy_rate()
    threads = torch.get_num_threads()
    report(f"{size}, fp32, {threads} threads, medians of {rounds} tokens; a plain large copy moves "
           f"{copied / 1e9:.1f} GB/s\n")  # fmt: skip
    report("| context | batch | mixer | decoder | time of a step | weights, of the copy's rate "
           "| PyTorch's time / this | cache |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    models = {m: TrellisForCausalLM(config(size, m)).eval() for m in MIXERS}
    rows: list[dict[str, Any]] = []
    for context in contexts:
        for batch in batches:
            for mixer, model in models.items():
                rows += _steps(model, mixer, context, batch, rounds, copied, report)
    return {"size": size, "copy": copied, "threads": threads, "steps": rows}


def _steps(
    model: TrellisForCausalLM, mixer: str, context: int, batch: int, rounds: int, copied: float,
    report: Report,
) -> list[dict[str, Any]]:  # fmt: skip
    cache = filled_cache(model, context, batch)
    ids = torch.randint(0, model.config.vocab_size, (batch, 1))
    times: dict[str, list[float]] = {}
    for name, choice in DECODERS.items():
        with _decoder(choice):
            here = cache.clone()
            spent = []
            for _ in range(rounds + 2):  # the first two pack weights and bind states
                start = time.perf_counter()
                model(ids, past_key_values=here)
                spent.append(time.perf_counter() - start)
            times[name] = spent[2:]
    weights = sum(p.numel() * 4 for p in model.parameters())
    rows = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        share = weights / (2 if "bf16" in name else 1) / median / copied
        ratio = statistics.median(times["PyTorch"]) / median
        report(f"| {context} | {batch} | {MIXERS[mixer]} | {name} | {median * 1e3:.3f} ms "
               f"| {share:.0%} | {ratio:.1f} | {cache.nbytes / 2**20:.1f} MiB |")  # fmt: skip
        rows.append({"context": context, "batch": batch, "mixer": mixer, "decoder": name,
                     "seconds": seconds})  # fmt: skip
    return rows


@contextmanager
def _decoder(choice: str) -> Iterator[None]:
    before = os.environ.get(decoder.VARIABLE)
    os.environ[decoder.VARIABLE] = choice
    try:
        yield
    finally:
        if before is None:
            del os.environ[decoder.VARIABLE]
        else:
            os.environ[decoder.VARIABLE] = before


@torch.no_grad()
def filled_cache(model: TrellisForCausalLM, context: int, batch: int) -> Any:
    """A cache after `context` tokens: Trellis reads them; attention's is filled with noise."""
    if model.config.mixer == "trellis":
        return model.read(torch.randint(0, model.config.vocab_size, (batch, context)))
    cache = model.init_cache(batch)
    heads = model.config.num_attention_heads
    shape = (batch, heads, context, model.config.hidden_size // heads)
    length = torch.full((batch,), context)
    cache.states = [
        state._replace(keys=torch.randn(shape), values=torch.randn(shape), length=length)
        for state in cache.states
    ]
    cache.seen = [context] * batch
    return cache


@torch.no_grad()
def run_weights(run: Path, text: Path, tokens: int, report: Report) -> dict[str, Any]:
    """The loss of a trained model on a text that it reads token by token, in every decoder.

    Sixteen sequences of `tokens` tokens, from places that lie evenly over the text.
    """
    checks.at_least("tokens", tokens, 2)
    model, tokenizer = load_run(run)
    encoded = tokenizer.encode(text.read_text(encoding="utf-8"))
    ids = torch.as_tensor(encoded, dtype=torch.long)
    if len(ids) < 16 * tokens:
        raise ValueError(f"{text} must have 16 x {tokens} tokens at least; it has {len(ids)}")
    starts = [i * (len(ids) - tokens) // 15 for i in range(16)]
    rows = torch.stack([ids[start : start + tokens] for start in starts])
    report(f"{run.name}, 16 x {tokens} tokens of {text.name}\n")
    report("| decoder | nats per token | more than in fp32 |\n|---|---|---|")
    losses: dict[str, float] = {}
    for name, choice in DECODERS.items():
        with _decoder(choice):
            cache, total = model.init_cache(16), 0.0
            for t in range(tokens - 1):
                logits = model(rows[:, t : t + 1], past_key_values=cache).logits[:, -1]
                total += float(F.cross_entropy(logits.float(), rows[:, t + 1]))
        losses[name] = total / (tokens - 1)
        report(f"| {name} | {losses[name]:.5f} | {losses[name] - losses['native']:.5f} |")
    return {"run": run.name, "text": text.name, "tokens": tokens, "losses": losses}


def draw(result: dict[str, Any], path: Path) -> None:
    """The time of a token over the context, for the first batch size."""
    batch = result["steps"][0]["batch"]
    with figure(path, figsize=(7, 4.5)) as axes:
        for mixer, label in MIXERS.items():
            for name, style in (("native", "o-"), ("PyTorch", "x--")):
                wanted = (mixer, name, batch)
                found = [r for r in result["steps"]
                         if (r["mixer"], r["decoder"], r["batch"]) == wanted]  # fmt: skip
                axes.plot(
                    [r["context"] for r in found],
                    [statistics.median(r["seconds"]) * 1e3 for r in found],
                    style, color=f"C{list(MIXERS).index(mixer)}", label=f"{label}, {name}",
                )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="tokens read", ylabel="ms",
                 title=f"Time of the next token, {result['size']}")  # fmt: skip
        axes.grid(alpha=0.3, which="both")
        axes.legend()


def run_busy(seconds: float, rounds: int, report: Report) -> dict[str, Any]:
    """Training and decoding of the demo's model on an idle machine and beside one busy process.

    One process after the other measures all kinds of work, with torch's way of waiting and with
    that of the `trellis` command, in turn; medians over rounds are reported. Attention decodes in
    PyTorch, as any model of transformers does.
    """
    ours = {name: os.environ[name] for name in WAITING if name in os.environ}
    ways: dict[str, dict[str, str]] = {"as torch has it": {}, "as trellis sets it": ours}
    found: dict[tuple[str, str], list[dict[str, float]]] = {
        (waiting, load): [] for waiting in ways for load in ("idle", "busy")
    }
    for _ in range(rounds):
        for waiting, variables in ways.items():
            found[waiting, "idle"].append(_rates(seconds, variables))
            with _busy_process():
                found[waiting, "busy"].append(_rates(seconds, variables))
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "rounds": rounds, "rates": []}
    report(f"the demo's model, fp32, {torch.get_num_threads()} threads, {rounds} rounds in turn\n")
    report(
        "| work | threads wait | tokens/s idle | beside one busy process | kept "
        "| of torch's idle rate |"
    )
    report("|---|---|---|---|---|---|")
    for work in found["as torch has it", "idle"][0]:
        medians = {key: statistics.median(one[work] for one in each) for key, each in found.items()}
        for waiting, variables in ways.items():
            idle, busy = medians[waiting, "idle"], medians[waiting, "busy"]
            of_torch = idle / medians["as torch has it", "idle"]
            report(f"| {work} | {waiting} | {idle:,.0f} | {busy:,.0f} | {busy / idle:.0%} "
                   f"| {of_torch:.0%} |")  # fmt: skip
            result["rates"].append({
                "work": work, "waiting": waiting, "variables": variables, "idle": idle,
                "busy": busy, "kept": busy / idle, "of_torch": of_torch,
                "idle_each": [one[work] for one in found[waiting, "idle"]],
                "busy_each": [one[work] for one in found[waiting, "busy"]],
            })  # fmt: skip
    return result


def _rates(seconds: float, variables: dict[str, str]) -> dict[str, float]:
    environment = {k: v for k, v in os.environ.items() if k not in WAITING} | variables
    return measure.in_fresh_process(
        "trellis.bench.decoding", str(seconds), str(torch.get_num_threads()), env=environment
    )


@contextmanager
def _busy_process() -> Iterator[None]:
    """Another program, which keeps one core busy."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def rates(seconds: float) -> dict[str, float]:
    """Tokens per second of every kind of work, each done for so many seconds."""
    found = {}
    for mixer, label in MIXERS.items():
        model = TrellisForCausalLM(config("demo", mixer))
        ids = torch.randint(0, 2048, (8, 256))
        leaves = list(model.parameters())

        def train(model: Any = model, ids: Any = ids, leaves: Any = leaves) -> None:
            measure.both_ways((lambda: model(ids, labels=ids, logits_to_keep=1).loss, leaves))

        found[f"training, {label}"] = ids.numel() * _per_second(train, seconds)
        model.eval()
        name = "native" if mixer == "trellis" else "PyTorch"
        with _decoder(DECODERS[name]), torch.no_grad():
            cache = filled_cache(model, 1000, 1)

            def step(model: Any = model, ids: Any = ids[:1, :1], cache: Any = cache) -> None:
                model(ids, past_key_values=cache)

            found[f"decoding, {label}, {name}"] = _per_second(step, seconds)
    return found


def _per_second(function: Callable[[], None], seconds: float) -> float:
    function()
    function()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        function()
        count += 1
    return count / (time.perf_counter() - start)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(rates(float(sys.argv[1]))))
