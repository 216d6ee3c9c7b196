"""What is trained and tested for multi-query associative recall, by name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..mixers.base import at_least, positive
from .mqar import Setting


class Source(NamedTuple):
    """So many different training examples of a setting."""

    setting: Setting
    examples: int


class Group(NamedTuple):
    """What one model is trained on, and what it is tested on."""

    train: tuple[Source, ...]
    test: tuple[Setting, ...]


@dataclass(frozen=True)
class Preset:
    """Sizes, data and training.

    groups: each trains models of its own. test_examples: of each setting tested.
    steps, or epochs over the training examples: how long, at most. batch_tokens: of a batch, which
        has one setting.
    easy_first: share of the steps that see only the shortest training sequences, before the others
        join them: small models leave the plateau at the beginning sooner.
    learning_rates: tried in turn until one reaches `stop_at`; the best on validation examples is
        tested.
    warmup: share of the steps with a rising rate, then a cosine to 0. clip: of the gradient's norm.
    check_every: steps between looks at `validation_examples` examples of every training setting;
    stop_at: a mean accuracy above it ends the training.
    """

    name: str
    vocab_size: int
    groups: tuple[Group, ...]
    widths: tuple[int, ...]
    learning_rates: tuple[float, ...]
    steps: int | None = None
    epochs: int | None = None
    batch_tokens: int = 65536
    easy_first: float = 0.0
    test_examples: int = 1000
    validation_examples: int = 500
    check_every: int = 200
    stop_at: float = 0.99
    layers: int = 2
    heads: int = 1
    warmup: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    random_non_queries: bool = True

    def check(self) -> None:
        """Raises ValueError at a value out of range, or at sequences that do not exist."""
        for group in self.groups:
            for setting in (*(source.setting for source in group.train), *group.test):
                setting.check(self.vocab_size)
        for name in ("batch_tokens", "test_examples", "validation_examples", "check_every",
                     "layers", "heads"):  # fmt: skip
            at_least(name, getattr(self, name), 1)
        for name in ("steps", "epochs"):
            at_least(name, getattr(self, name), 1, optional=True)
        if self.steps is None and self.epochs is None:
            raise ValueError("one of steps and epochs must be given")
        if not 0 <= self.easy_first <= 1:
            raise ValueError(f"easy_first must be from 0 to 1; got {self.easy_first}")
        if not self.widths or not self.learning_rates:
            raise ValueError("widths and learning_rates must have at least one number each")
        for width in self.widths:
            at_least("each of widths", width, 1)
        for rate in self.learning_rates:
            positive("each of learning_rates", rate)

    def rows(self, setting: Setting) -> int:
        """Sequences of a batch."""
        return max(1, self.batch_tokens // setting.length)

    def batches(self, source: Source) -> int:
        """Of an epoch."""
        return -(-source.examples // self.rows(source.setting))

    def steps_of(self, group: Group) -> int:
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * sum(self.batches(source) for source in group.train)

    def changed(self, **values: Any) -> Preset:
        """With the values that are not None in place of its own, checked."""
        given = {name: value for name, value in values.items() if value is not None}
        if "steps" in given:
            given["epochs"] = None
        preset = dataclasses.replace(self, **given)
        preset.check()
        return preset

    def common(self) -> dict[str, Any]:
        """What results must share to be shown together."""
        apart = ("groups", "widths")
        shared = {k: v for k, v in dataclasses.asdict(self).items() if k not in apart}
        return {"preset": shared.pop("name"), **shared}


def _settings(*pairs: tuple[int, int]) -> tuple[Setting, ...]:
    return tuple(Setting(*pair) for pair in pairs)


def _alone(length: int, pairs: int, examples: int) -> Group:
    setting = Setting(length, pairs)
    return Group((Source(setting, examples),), (setting,))


_ZOOLOGY_RATES = (1e-4, 10 ** (-10 / 3), 10 ** (-8 / 3), 1e-2)

PRESETS = {
    preset.name: preset
    for preset in (
        # Figure 2 of Zoology: a model for each setting.
        Preset(
            "zoology",
            vocab_size=8192,
            groups=(
                _alone(64, 4, 100_000),
                _alone(128, 8, 100_000),
                _alone(256, 16, 100_000),
                _alone(512, 64, 100_000),
            ),
            widths=(64, 128, 256, 512),
            learning_rates=_ZOOLOGY_RATES,
            epochs=64,
            test_examples=3000,
            random_non_queries=False,
        ),
        # Figure 2 of Based: one model for all settings, some longer than any in training.
        Preset(
            "based",
            vocab_size=8192,
            groups=(
                Group(
                    (
                        Source(Setting(64, 4), 100_000),
                        Source(Setting(128, 8), 20_000),
                        Source(Setting(256, 16), 20_000),
                        Source(Setting(256, 32), 20_000),
                        Source(Setting(256, 64), 20_000),
                    ),
                    _settings((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128),
                              (1024, 256)),
                ),
            ),
            widths=(64, 128, 256, 512),
            learning_rates=_ZOOLOGY_RATES,
            epochs=64,
        ),
        # For a CPU: minutes for a model. No training example comes twice.
        Preset(
            "small",
            vocab_size=192,
            groups=(
                Group(
                    (
                        Source(Setting(64, 4), 20_000),
                        Source(Setting(64, 8), 20_000),
                        Source(Setting(128, 16), 8_000),
                        Source(Setting(256, 32), 8_000),
                    ),
                    _settings((64, 4), (64, 8), (128, 16), (256, 32), (256, 64)),
                ),
            ),
            widths=(32, 64),
            learning_rates=(1e-2, 3e-3),
            steps=1500,
            batch_tokens=2048,
            easy_first=0.4,
            test_examples=500,
            validation_examples=32,
            check_every=100,
            random_non_queries=False,
        ),
    )
}  # fmt: skip


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}")
    return PRESETS[name]
