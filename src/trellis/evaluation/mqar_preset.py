"""What a preset of multi-query associative recall says; those there are: mqar_presets.py."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import checks
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
    steps, or epochs over the training examples: how long, at most.
    batch_tokens: of a batch, which has one setting. batch_rows: (length, sequences of a batch)
        for the lengths where it is not batch_tokens that counts.
    shuffle: batches in a new order in each epoch, instead of source after source.
    easy_first: share of the steps that see only the shortest training sequences, before the others
        join them: small models leave the plateau at the beginning sooner.
    learning_rates: tried in turn, until one reaches `stop_at` unless `every_rate`; the best on
        validation examples is tested.
    warmup: share of the steps with a rising rate, then a cosine to 0. clip: of the gradient's norm,
        None for none. betas: of AdamW.
    check_every: steps between looks at `validation_examples` examples of every setting of training
        or test, as `validate_on` says; None: after each epoch.
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
    check_every: int | None = 200
    stop_at: float = 0.99
    layers: int = 2
    heads: int = 1
    warmup: float = 0.1
    weight_decay: float = 0.1
    clip: float | None = 1.0
    random_non_queries: bool = True
    batch_rows: tuple[tuple[int, int], ...] = ()
    shuffle: bool = True
    every_rate: bool = False
    validate_on: str = "train"
    betas: tuple[float, float] = (0.9, 0.95)

    def check(self) -> None:
        """Raises ValueError at a value out of range, or at sequences that do not exist."""
        for group in self.groups:
            for setting in (*(source.setting for source in group.train), *group.test):
                setting.check(self.vocab_size)
        for name in ("batch_tokens", "test_examples", "validation_examples", "layers", "heads"):
            checks.at_least(name, getattr(self, name), 1)
        for name in ("steps", "epochs", "check_every"):
            checks.at_least(name, getattr(self, name), 1, optional=True)
        if self.steps is None and self.epochs is None:
            raise ValueError("one of steps and epochs must be given")
        if not self.widths or not self.learning_rates:
            raise ValueError("widths and learning_rates must have at least one number each")
        for width in self.widths:
            checks.at_least("each of widths", width, 1)
        for rate in self.learning_rates:
            checks.positive("each of learning_rates", rate)
        for length, rows in self.batch_rows:
            checks.at_least(f"batch_rows of length {length}", rows, 1)
        if self.clip is not None:
            checks.positive("clip", self.clip)
        if self.validate_on not in ("train", "test"):
            raise ValueError(f"validate_on must be train or test; got {self.validate_on!r}")
        if not 0 <= self.easy_first <= 1:
            raise ValueError(f"easy_first must be from 0 to 1; got {self.easy_first}")
        for group in self.groups:
            self._check_easy_first(group)

    def _check_easy_first(self, group: Group) -> None:
        shortest = min(source.setting.length for source in group.train)
        short = sum(self.batches(s) for s in group.train if s.setting.length == shortest)
        steps, needed = self.steps_of(group), self.easy_steps(group)
        if needed > short:
            raise ValueError(
                f"easy_first = {self.easy_first} of {steps} steps are {needed} batches of the "
                f"shortest sequences, and an epoch has {short}; easy_first, the steps or the rows "
                "of a batch must be smaller"
            )

    def rows(self, setting: Setting) -> int:
        """Sequences of a batch."""
        tokens_allow = max(1, self.batch_tokens // setting.length)
        return dict(self.batch_rows).get(setting.length, tokens_allow)

    def batches(self, source: Source) -> int:
        """Of an epoch."""
        return -(-source.examples // self.rows(source.setting))

    def epoch_of(self, group: Group) -> int:
        """Its steps."""
        return sum(self.batches(source) for source in group.train)

    def steps_of(self, group: Group) -> int:
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * self.epoch_of(group)

    def easy_steps(self, group: Group) -> int:
        """At the beginning, with the shortest sequences only."""
        return round(self.easy_first * self.steps_of(group))

    def validated(self, group: Group) -> list[Setting]:
        """Of what the validation examples are."""
        if self.validate_on == "test":
            return list(group.test)
        return [source.setting for source in group.train]

    def changed(self, **values: Any) -> Preset:
        """With the values that are not None in place of its own, checked."""
        given = {name: value for name, value in values.items() if value is not None}
        if "steps" in given:
            given["epochs"] = None
        if "batch_tokens" in given:
            given.setdefault("batch_rows", ())
        preset = dataclasses.replace(self, **given)
        preset.check()
        return preset

    def common(self) -> dict[str, Any]:
        """What results must share to be shown together."""
        apart = ("name", "groups", "widths")
        shared = {
            name: value for name, value in dataclasses.asdict(self).items() if name not in apart
        }
        return {"preset": self.name, **shared}
