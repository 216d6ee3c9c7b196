"""`trellis eval mqar`: trains and tests every mixer at every width; the table and the figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ..figures import figure
from ..mixers import MIXERS, Mixer
from ..models.config import TrellisConfig
from ..models.modeling import TrellisForCausalLM
from ..models.presets import weightless
from .mqar import Examples, Setting, accuracy, examples
from .mqar_preset import Group, Preset
from .mqar_presets import PRESETS
from .mqar_training import Trained, train
from .output import print_table
from .record import Records, digest


def run(
    mixers: Sequence[str],
    preset: Preset,
    out: Path,
    *,
    fields: Mapping[str, dict[str, Any]] | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Train and test every mixer at every width of the preset; print, keep and draw.

    fields: of the mixers' configurations, by mixer. What is shown are all results in the folder
    with the preset's numbers and this seed, so that several processes may share the work. The
    figure is PRESET.png; with other numbers or another seed, a hash of them is in its name.
    """
    preset.check()
    for mixer in fields or {}:
        if mixer not in mixers:
            raise ValueError(f"fields are given for {mixer!r}, which is not among the mixers")
    plans = [
        (mixer, width, _config(mixer, width, preset, (fields or {}).get(mixer, {})))
        for width in preset.widths
        for mixer in mixers
    ]
    models = [weightless(config) for _, _, config in plans]  # raises before any training
    common = _common(preset, seed)
    records = Records(out, "mqar")
    for group in preset.groups:
        tests = {setting: _test_set(setting, preset, seed) for setting in group.test}
        for (mixer, width, config), model in zip(plans, models):
            identity = {"mixer": mixer, "width": width, "fields": config.mixer_config}
            about = {
                "name": _name(mixer, config),
                **identity,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
            }
            # Trained when the first result is missing, and then once for all of them.
            trained = cache(partial(_train, about["name"], config, preset, group, seed, device))
            for setting, data in tests.items():
                setting_of_record = {
                    **common,
                    "train": [[*source.setting, source.examples] for source in group.train],
                    "test": list(setting),
                    "test_sha256": data.sha256(),
                }
                state = _state_size(model, setting.length)
                measure = partial(_measure, trained, data, state, device)
                name = f"{about['name']}-{width}-{setting.length}-{setting.pairs}"
                records.kept(name, identity, about, setting_of_record, measure)
    found = [r for r in records.all() if _shared(r["setting"]) == common]
    order = list(MIXERS)
    found.sort(key=lambda r: (r["model"]["width"], order.index(r["model"]["mixer"]),
                              r["model"]["name"], r["setting"]["test"]))  # fmt: skip
    _print(found)
    _draw(found, records.folder / _picture(preset, common))
    return found


def _common(preset: Preset, seed: int) -> dict[str, Any]:
    """As it is read from a record."""
    return json.loads(json.dumps({**preset.common(), "seed": seed}))


def _shared(setting: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in setting.items() if k not in ("train", "test", "test_sha256")}


def _picture(preset: Preset, common: dict[str, Any]) -> str:
    """PRESET.png for the preset's own numbers and seed 0, else with a hash of what they are."""
    known = PRESETS.get(preset.name)
    if known is not None and common == _common(known, seed=0):
        return f"{preset.name}.png"
    return f"{preset.name}-{digest(common, 8)}.png"


def _config(mixer: str, width: int, preset: Preset, fields: dict[str, Any]) -> TrellisConfig:
    return TrellisConfig(
        vocab_size=preset.vocab_size, hidden_size=width, num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads, mixer=mixer,
        mixer_config={mixer: fields} if fields else None,
    )  # fmt: skip


def _state_size(model: TrellisForCausalLM, tokens: int) -> int:
    """Numbers that the model keeps of one sequence of so many tokens."""
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    return int(sum(mixer.state_size(tokens) for mixer in mixers))


def _name(mixer: str, config: TrellisConfig) -> str:
    fields = config.mixer_config.get(mixer, {})
    return " ".join([mixer, *(f"{name}={value}" for name, value in fields.items())])


def _test_set(setting: Setting, preset: Preset, seed: int) -> Examples:
    return examples(
        setting, preset.vocab_size, preset.test_examples, split="test", seed=seed,
        random_non_queries=preset.random_non_queries,
    )  # fmt: skip


def _train(
    name: str, config: TrellisConfig, preset: Preset, group: Group, seed: int, device: str
) -> Trained:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    what = f"{name}, width {config.hidden_size}"
    if len(preset.groups) > 1:
        what += ", " + " ".join(f"{s.setting.length}/{s.setting.pairs}" for s in group.train)
    say = lambda line: console.print(f"{what}: {line}", markup=False)  # noqa: E731
    return train(config, preset, group, seed=seed, device=device, say=say)


def _measure(trained: Any, data: Examples, state: int, device: str) -> dict[str, Any]:
    """The accuracy, None if training diverged at every rate, and how the model was trained."""
    model, attempts, best = trained()
    return {
        "accuracy": None if model is None else accuracy(model, data.to(device)),
        "learning_rate": None if best is None else best["learning_rate"],
        "state_size": state,
        "training": attempts,
    }


def _print(found: list[dict[str, Any]]) -> None:
    """One table for each width: mixers by settings."""
    settings = sorted({tuple(record["setting"]["test"]) for record in found})
    for width in dict.fromkeys(record["model"]["width"] for record in found):
        here = [record for record in found if record["model"]["width"] == width]
        rows = []
        for name in dict.fromkeys(record["model"]["name"] for record in here):
            of_name = {tuple(r["setting"]["test"]): r for r in here if r["model"]["name"] == name}
            cells = [_per_cent(of_name[s]["result"]) if s in of_name else "" for s in settings]
            last = of_name[max(of_name)]
            state, parameters = last["result"]["state_size"], last["model"]["parameters"]
            rows.append([name, *cells, f"{state:,}", f"{parameters:,}"])
        heads = [f"{length}/{pairs}" for length, pairs in settings]
        title = f"MQAR, width {width}: accuracy in % by tokens/pairs"
        print_table(["mixer", *heads, "state", "parameters"], rows, title)


def _per_cent(result: dict[str, Any]) -> str:
    return "diverged" if result["accuracy"] is None else f"{100 * result['accuracy']:.1f}"


def _draw(found: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over the number of pairs, a panel for each width and a line for each mixer."""
    widths = list(dict.fromkeys(record["model"]["width"] for record in found))
    names = list(dict.fromkeys(record["model"]["name"] for record in found))
    # Settings of the same number of pairs are one place each: the axis counts settings.
    settings = sorted({tuple(record["setting"]["test"]) for record in found},
                      key=lambda setting: (setting[1], setting[0]))  # fmt: skip
    size = (1.5 + 4.5 * len(widths), 4.5)
    with figure(path, len(widths), figsize=size, sharey=True) as drawn:
        axes = [drawn] if len(widths) == 1 else list(drawn)
        lines: dict[str, Any] = {}
        for axis, width in zip(axes, widths):
            for number, name in enumerate(names):
                points = [
                    (settings.index(tuple(r["setting"]["test"])), 100 * r["result"]["accuracy"])
                    for r in found
                    if (r["model"]["width"], r["model"]["name"]) == (width, name)
                    and r["result"]["accuracy"] is not None
                ]
                if points:
                    style = "o-" if number < 10 else "s--"
                    colour = f"C{number % 10}"
                    (lines[name],) = axis.plot(*zip(*sorted(points)), style, color=colour)
            labels = [f"{pairs}\n({length})" for length, pairs in settings]
            axis.set_xticks(range(len(settings)), labels)
            axis.set(xlabel="pairs (tokens)", title=f"width {width}", ylim=(-3, 103))
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("accuracy, %")
        # A mixer may be missing at some widths, so one legend is made for all panels.
        if lines:
            shown = [name for name in names if name in lines]
            axes[-1].legend([lines[name] for name in shown], shown,
                            loc="center left", bbox_to_anchor=(1.0, 0.5))  # fmt: skip
