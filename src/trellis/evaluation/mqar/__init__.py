"""`trellis eval mqar`: trains small models on multi-query associative recall and tests them.

data.py has the sequences and the presets; here are the training, the table and the figure.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ... import figures
from ...mixers import MIXERS, computed_fields
from ...models.config import TrellisConfig
from ...models.loss import IGNORED
from ...models.modeling import TrellisForCausalLM
from ...models.presets import count_parameters, match_parameters, state_bytes
from ...training.optimization import build_optimizer, learning_rate
from ...training.recipe import Recipe, TrainSection
from ..runner import Job, Record, Records, Report, Table, digest
from .data import PRESETS, Examples, Group, Preset, Setting, accuracy, query_logits
from .data import preset as preset_of

#: The MLP of a model whose mixer leaves no parameters for one.
SMALLEST_MLP = 8
#: Called with a line for every look at the validation accuracy.
Say = Callable[[str], None]


def run(
    mixers: Sequence[str],
    preset: Preset,
    out: Path,
    *,
    seeds: Sequence[int] = (0,),
    device: str = "cpu",
    say: Say = lambda line: None,
) -> Report:
    """Trains and tests every mixer at every width of the preset, once for each seed.

    All models of a width have as many parameters as Transformer++ of that width, within 1%; a mixer
    that is larger by itself is named and gets the smallest MLP. The report shows all results in the
    folder that have the preset's numbers and one of the seeds, so that several processes may share
    the work. Raises ValueError if a number is out of range, or a mixer cannot have a width.
    """
    preset.check()
    figures.check()
    for mixer in preset.mixer_config:
        if mixer not in mixers:
            raise ValueError(f"fields are given for {mixer!r}, which is not among the mixers")
    learners = [Learner(mixer, width, preset) for width in preset.widths for mixer in mixers]
    for learner in learners:
        if not learner.matched:
            say(f"{learner.name} has more parameters than Transformer++ of that width")
    tested = {setting for group in preset.groups for setting in group.test}

    def jobs(learner: Learner, seed: int) -> list[Job]:
        found = []
        common = _common(preset, seed)
        tests = {one: preset.examples(one, preset.test_examples, "test", seed) for one in tested}
        for group in preset.groups:
            what = f"{learner.title}, width {learner.config.hidden_size}, seed {seed}"
            if len(preset.groups) > 1:
                sizes = [f"{one.setting.length}/{one.setting.pairs}" for one in group.train]
                what += f", {' '.join(sizes)}"

            def say_here(line: str, what: str = what) -> None:
                say(f"{what}: {line}")

            # Trained when the first result is missing, and then once for all of them.
            trained = cache(partial(
                train, learner.config, preset, group, seed=seed, device=device, say=say_here
            ))  # fmt: skip
            shared = {**common, "train": [[*one.setting, one.examples] for one in group.train]}
            for test in group.test:
                setting = {**shared, "test": list(test), "test_sha256": tests[test].sha256()}
                look = partial(_measure, trained, tests[test], learner.state_size(test), device)
                found.append(Job(setting, look, f"{test.length}-{test.pairs}"))
        return found

    records = Records(out, "mqar")
    for seed in seeds:
        records.measure(learners, partial(jobs, seed=seed))
    order = list(MIXERS)
    wanted = [_common(preset, seed).items() for seed in seeds]
    found = [
        record for record in records.all()
        if any(common <= record["setting"].items() for common in wanted)
    ]  # fmt: skip
    found.sort(key=lambda r: (r["model"]["width"], order.index(r["model"]["mixer"]),
                              r["model"]["name"], r["setting"]["test"]))  # fmt: skip
    picture = records.folder / _picture(preset, seeds)
    _draw(found, picture)
    return Report(found, list(_tables(found)), [picture])


class Learner:
    """A mixer at a width: the configuration that is trained, and what records say about it."""

    def __init__(self, mixer: str, width: int, preset: Preset):
        fields = preset.mixer_config.get(mixer, {})
        shape = {
            "vocab_size": preset.vocab_size, "hidden_size": width,
            "num_hidden_layers": preset.layers, "num_attention_heads": preset.heads,
        }  # fmt: skip
        wanted = TrellisConfig(mixer="transformer", **shape)
        self.config = TrellisConfig(
            mixer=mixer, mixer_config={mixer: fields} if fields else None, **shape
        )
        self.matched = True
        try:
            self.config = match_parameters(self.config, wanted)
        except ValueError:  # the mixer alone is larger than Transformer++ with its MLP
            self.config.intermediate_size = SMALLEST_MLP
            self.matched = False
        self.identity = {
            "mixer": mixer, "width": width, "fields": self.config.mixer_config,
            "computed": computed_fields(mixer, fields),
            "intermediate_size": self.config.intermediate_size,
        }  # fmt: skip
        shown = self.config.mixer_config.get(mixer, {})
        self.title = " ".join([mixer, *(f"{name}={value}" for name, value in shown.items())])
        self.name = f"{self.title} {width}"
        self.about = {
            "name": self.title,
            **self.identity,
            "parameters": count_parameters(self.config),  # raises if it cannot have this width
        }

    def state_size(self, setting: Setting) -> int:
        """The numbers that the model keeps of one sequence."""
        return state_bytes(self.config, setting.length) // 4


def _common(preset: Preset, seed: int) -> dict[str, Any]:
    """The numbers of a preset and the seed, as they are read from a record."""
    return json.loads(json.dumps({**preset.common(), "seed": seed}))


def _picture(preset: Preset, seeds: Sequence[int]) -> str:
    """PRESET.png for the preset's own numbers and seed 0, else with a hash of what they are."""
    chosen = [_common(preset, seed) for seed in seeds]
    if preset.name in PRESETS and chosen == [_common(preset_of(preset.name), seed=0)]:
        return f"{preset.name}.png"
    return f"{preset.name}-{digest(chosen[0] if len(chosen) == 1 else chosen, 8)}.png"


def _measure(
    trained: Callable[[], Trained], data: Examples, state: int, device: str, **_: Any
) -> dict[str, Any]:
    """The accuracy, None if training diverged at every rate, and how the model was trained."""
    model, attempts, best = trained()
    return {
        "accuracy": None if model is None else accuracy(model, data.to(device)),
        "learning_rate": None if best is None else best["learning_rate"],
        "state_size": state,
        "training": attempts,
    }


class Trained(NamedTuple):
    """The best model, the results of all learning rates, and the best of these.

    The model and the best result are None if the training diverged at every rate.
    """

    model: TrellisForCausalLM | None
    attempts: list[dict[str, Any]]
    best: dict[str, Any] | None


def train(
    config: TrellisConfig,
    preset: Preset,
    group: Group,
    *,
    seed: int = 0,
    device: str = "cpu",
    say: Say = lambda line: None,
) -> Trained:
    """Trains a model at one learning rate after the other, until one is good enough.

    With preset.every_rate all are tried. The best on validation examples is kept.
    """
    held_out = [
        preset.examples(setting, preset.validation_examples, "validation", seed).to(device)
        for setting in preset.validated(group)
    ]
    attempts: list[dict[str, Any]] = []
    kept, best = None, None
    for rate in preset.learning_rates:
        model, attempt = _attempt(config, preset, group, rate, held_out, seed, device, say)
        attempts.append(attempt)
        if not attempt["diverged"] and (best is None or attempt["accuracy"] > best["accuracy"]):
            kept, best = model, attempt
        if best is not None and best["accuracy"] > preset.stop_at and not preset.every_rate:
            break
    return Trained(kept, attempts, best)


def _attempt(
    config: TrellisConfig,
    preset: Preset,
    group: Group,
    rate: float,
    held_out: list[Examples],
    seed: int,
    device: str,
    say: Say,
) -> tuple[TrellisForCausalLM, dict[str, Any]]:
    """Trains at one learning rate: the model, and its learning curve."""
    start = time.monotonic()
    with torch.random.fork_rng():  # the same weights at every rate
        torch.manual_seed(seed)
        model = TrellisForCausalLM(config).to(device).train()
    steps = preset.steps_of(group)
    check_every = preset.check_every or preset.epoch_of(group)
    section = TrainSection(
        steps=steps, learning_rate=rate, min_learning_rate=0.0, warmup=preset.warmup,
        weight_decay=preset.weight_decay, betas=list(preset.betas), seed=seed,
    )  # fmt: skip
    recipe = Recipe(train=section)
    optimizer = build_optimizer(model, section, fused=False)
    curve: list[dict[str, float]] = []
    losses: list[float] = []
    diverged = False
    for step, data in zip(range(steps), batches(preset, group, seed)):
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate(recipe, step)
        inputs, labels = data.to(device)
        loss = F.cross_entropy(query_logits(model, inputs, labels), labels[labels != IGNORED])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if preset.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), preset.clip)
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            diverged = True
            say(f"rate {rate:.2g}, step {step + 1}/{steps}: the loss is {losses[-1]}, given up")
            break
        if (step + 1) % check_every == 0 or step + 1 == steps:
            model.eval()
            right = fmean(accuracy(model, data) for data in held_out)
            model.train()
            lost = fmean(losses)
            losses.clear()
            curve.append({"step": step + 1, "loss": lost, "accuracy": right})
            say(f"rate {rate:.2g}, step {step + 1}/{steps}: loss {lost:.3f}, accuracy {right:.1%}")
            if right > preset.stop_at:
                break
    return model.eval(), {
        "learning_rate": rate,
        "diverged": diverged,
        "accuracy": None if diverged else curve[-1]["accuracy"],
        "steps": step + 1,
        "seconds": round(time.monotonic() - start, 2),
        "curve": curve,
    }


def batches(preset: Preset, group: Group, seed: int) -> Iterator[Examples]:
    """Batches of one setting each, without end; an epoch has every training example once.

    With preset.shuffle an epoch has a new order of batches; else one source follows another.
    """
    # A batch: the source of its examples, and its number there.
    entries = [
        (source, number) for source in group.train for number in range(preset.batches(source))
    ]
    easy, epoch = preset.easy_steps(group), 0
    while True:
        ordered = entries
        if preset.shuffle:
            order = np.random.default_rng([seed, epoch]).permutation(len(entries))
            ordered = [entries[place] for place in order]
        # The first of the shortest sequences come before everything else.
        shortest = min(source.setting.length for source, _ in entries)
        front = [entry for entry in ordered if entry[0].setting.length == shortest][:easy]
        for source, number in dict.fromkeys([*front, *ordered]):
            rows = preset.rows(source.setting)
            first = number * rows
            count = min(rows, source.examples - first)
            yield preset.examples(source.setting, count, "train", seed, first)
        easy, epoch = 0, epoch + 1


def _by_width(found: list[Record]) -> dict[int, dict[str, dict[tuple[int, int], list[Record]]]]:
    """The records by width, by the name of the mixer, and by the setting of the test."""
    groups: dict[int, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for record in found:
        model = record["model"]
        groups[model["width"]][model["name"]][tuple(record["setting"]["test"])].append(record)
    return groups


def _tables(found: list[Record]) -> Iterator[Table]:
    """One table for each width, mixers down and settings across."""
    settings = sorted({tuple(record["setting"]["test"]) for record in found})
    heads = [f"{length}/{pairs}" for length, pairs in settings]
    for width, names in _by_width(found).items():
        rows = []
        for name, tested in names.items():
            cells = [_cell(tested[s]) if s in tested else "" for s in settings]
            last = tested[max(tested)]
            state, parameters = last[0]["result"]["state_size"], last[0]["model"]["parameters"]
            rows.append([name, *cells, str(len(last)), f"{4 * state:,}", f"{parameters:,}"])
        title = f"MQAR, width {width}: accuracy in % by tokens/pairs, mean ± deviation over seeds"
        yield Table(title, ["mixer", *heads, "seeds", "state bytes", "parameters"], rows)


def _accuracies(records: list[Record]) -> list[float]:
    """In per cent; a seed with which training diverged has none."""
    found = [record["result"]["accuracy"] for record in records]
    return [100 * accuracy for accuracy in found if accuracy is not None]


def _cell(records: list[Record]) -> str:
    found = _accuracies(records)
    diverged = len(records) - len(found)
    if not found:
        return "diverged"
    text = f"{fmean(found):.1f}" + (f" ± {stdev(found):.1f}" if len(found) > 1 else "")
    return f"{text} ({diverged} diverged)" if diverged else text


def _draw(found: list[Record], path: Path) -> None:
    """Accuracy by the number of pairs, a panel for each width and a line for each mixer."""
    widths = _by_width(found)
    names = dict.fromkeys(record["model"]["name"] for record in found)
    # The axis counts settings: two of them may have the same number of pairs.
    settings = sorted({tuple(record["setting"]["test"]) for record in found},
                      key=lambda setting: (setting[1], setting[0]))  # fmt: skip
    size = (1.5 + 4.5 * len(widths), 4.5)
    with figures.figure(path, len(widths), figsize=size, sharey=True, squeeze=False) as ((*axes,),):
        for axis, (width, tested) in zip(axes, widths.items()):
            for number, name in enumerate(names):
                results = {s: _accuracies(records) for s, records in tested.get(name, {}).items()}
                shown = [s for s in settings if results.get(s)]
                x = [settings.index(setting) for setting in shown]
                y = [fmean(results[setting]) for setting in shown]
                style = "o-" if number < 10 else "s--"
                axis.plot(x, y, style, color=f"C{number % 10}", label=name)
            labels = [f"{pairs}\n({length})" for length, pairs in settings]
            axis.set_xticks(range(len(settings)), labels)
            axis.set(xlabel="pairs (tokens)", title=f"width {width}", ylim=(-3, 103))
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("accuracy, %")
        axes[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
