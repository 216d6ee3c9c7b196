"""The sequences of multi-query associative recall, and the presets that say which are learned.

A sequence of L tokens over a vocabulary of V begins with n pairs of a key and its value; later
every key comes again, and the model must say its value there. With V = 12, L = 12 and n = 2:

    tokens  3 9 5 7 | 3 0 0 0 5 0 0 0     key 3 has value 9, key 5 has value 7
    labels          | 9       7

Keys are different numbers from [1, V/2), values from [V/2, V). A key is asked for at place
2n + 2 gap; the n gaps are drawn without replacement from the (L - 2n) / 2 there are, gap i with a
chance in proportion to (i + 1)^(a - 1), so that most keys come soon. All other places hold 0, or
random tokens, and have no label. Zoology (Arora et al., 2023) builds its sequences in the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import checks
from ...mixers import MIXERS
from ...models.loss import IGNORED
from ...models.modeling import TrellisForCausalLM
from ...training.recipe import build, read_table

#: Presets that come with the package: recipes/mqar/NAME.toml.
PRESETS = ("zoology", "based", "small")
#: Two keys for one thing: where the first is asked for, the second of the preset is dropped.
REPLACES = {"steps": "epochs", "epochs": "steps", "batch_tokens": "batch_rows"}
#: The exponent a of the gaps: the smaller it is, the sooner keys come again.
POWER = 0.01
#: Examples of different splits are drawn from different random numbers.
SPLITS = ("train", "validation", "test")
#: Examples are drawn in blocks of this size, so that none depends on how many are asked for.
BLOCK = 64


class Setting(NamedTuple):
    """The tokens of a sequence, and its pairs of key and value."""

    length: int
    pairs: int

    def check(self, vocab_size: int) -> None:
        """Raises ValueError if no such sequence exists over this vocabulary."""
        checks.at_least("the length of a sequence", self.length, 1)
        checks.at_least("the number of pairs", self.pairs, 1)
        if vocab_size < 4 or vocab_size % 2:
            raise ValueError(f"vocab_size must be even and at least 4; got {vocab_size}")
        if self.pairs > vocab_size // 2 - 1:
            raise ValueError(
                f"a vocabulary of {vocab_size} has {vocab_size // 2 - 1} keys, which must be at "
                f"least the number of pairs; got {self.pairs} pairs"
            )
        if (self.length - 2 * self.pairs) // 2 < self.pairs:
            raise ValueError(
                f"{self.pairs} pairs and their queries take at least {4 * self.pairs} tokens; got "
                f"a length of {self.length}"
            )


class Examples(NamedTuple):
    """inputs [N, L]; labels [N, L]: the value where a key is asked for, IGNORED elsewhere."""

    inputs: Tensor
    labels: Tensor

    def to(self, device: str) -> Examples:
        return Examples(self.inputs.to(device), self.labels.to(device))

    def sha256(self) -> str:
        """A hash by which a result says what it was measured on."""
        digest = hashlib.sha256(str(tuple(self.inputs.shape)).encode())
        for part in self:
            digest.update(part.numpy().astype("<i8").tobytes())
        return digest.hexdigest()


def examples(
    setting: Setting,
    vocab_size: int,
    count: int,
    *,
    split: str,
    seed: int = 0,
    first: int = 0,
    random_non_queries: bool = True,
) -> Examples:
    """`count` examples from number `first` on; each depends on its number and the other arguments.

    random_non_queries: places without a pair or a query hold random tokens instead of 0.
    """
    setting.check(vocab_size)
    checks.at_least("count", count, 1)
    checks.at_least("first", first, 0)
    checks.at_least("seed", seed, 0)
    checks.choice("split", split, SPLITS)
    begin, end = first // BLOCK, -(-(first + count) // BLOCK)
    blocks = [
        _block(setting, vocab_size, random_non_queries, split, seed, number)
        for number in range(begin, end)
    ]
    skipped = first - begin * BLOCK
    inputs, labels = (
        torch.from_numpy(np.concatenate(parts)[skipped : skipped + count]) for parts in zip(*blocks)
    )
    return Examples(inputs, labels)


# The last blocks are kept, since a small batch ends inside of one. Callers must not change them.
@lru_cache(maxsize=16)
def _block(
    setting: Setting, vocab_size: int, random_non_queries: bool, split: str, seed: int, number: int
) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng([seed, SPLITS.index(split), *setting, vocab_size, number])
    length, pairs = setting
    half = vocab_size // 2
    keys = 1 + _sample(generator, np.ones(half - 1), pairs)
    values = half + _sample(generator, np.ones(half), pairs)
    weights = np.arange(1, (length - 2 * pairs) // 2 + 1) ** (POWER - 1)
    places = 2 * pairs + 2 * _sample(generator, weights, pairs)
    inputs = np.zeros((BLOCK, length), dtype=np.int64)
    labels = np.full((BLOCK, length), IGNORED, dtype=np.int64)
    inputs[:, 0 : 2 * pairs : 2] = keys
    inputs[:, 1 : 2 * pairs : 2] = values
    np.put_along_axis(inputs, places, keys, axis=1)
    np.put_along_axis(labels, places, values, axis=1)
    if random_non_queries:
        other = generator.integers(vocab_size, size=inputs.shape)
        inputs = np.where(inputs == 0, other, inputs)
    return inputs, labels


def _sample(generator: np.random.Generator, weights: np.ndarray, count: int) -> np.ndarray:
    """[BLOCK, count] indices, drawn one after the other without replacement, by weight.

    Among independent exponential times, the first is number i with a chance in proportion to its
    rate; so the order of the times is the order of such draws.
    """
    times = generator.standard_exponential((BLOCK, len(weights))) / weights
    first = np.argpartition(times, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(times, first, axis=1), axis=1)
    return np.take_along_axis(first, order, axis=1)


#: One of our models, or a function from ids [B, T] to logits [B, T, V].
Answers = TrellisForCausalLM | Callable[[Tensor], Tensor]


def query_logits(model: Answers, inputs: Tensor, labels: Tensor) -> Tensor:
    """Logits [queries, V] at the places of queries; our models compute no others."""
    asked = labels != IGNORED
    if isinstance(model, TrellisForCausalLM):
        hidden = model.model(inputs, use_cache=False).last_hidden_state
        return model.lm_head(hidden[asked])
    return model(inputs)[asked]


@torch.no_grad()
def accuracy(model: Answers, data: Examples, batch_tokens: int = 16384) -> float:
    """The share of queries whose likeliest token, of the whole vocabulary, is the value."""
    rows = max(1, batch_tokens // data.inputs.shape[1])
    right = asked = 0
    for inputs, labels in zip(data.inputs.split(rows), data.labels.split(rows)):
        found = query_logits(model, inputs, labels).argmax(-1)
        right += int((found == labels[labels != IGNORED]).sum())
        asked += len(found)
    return right / asked


class Source(NamedTuple):
    """A setting, and how many different training examples of it there are."""

    setting: Setting
    examples: int


class Group(NamedTuple):
    """The examples that one model is trained on, and the settings that it is tested on."""

    train: tuple[Source, ...]
    test: tuple[Setting, ...]


@dataclass(frozen=True)
class Preset:
    """The numbers of an experiment, as a TOML file such as recipes/mqar/small.toml has them.

    groups: a model is trained for each; `train` is a list of [tokens, pairs, examples], `test` of
        [tokens, pairs].
    widths: a model is trained for each. layers, heads: the shape of all models.
    learning_rates: tried in turn, until one reaches `stop_at`; with `every_rate` all are tried. The
        best on validation examples is tested.
    steps, or epochs over the training examples: the most that a training takes.
    batch_tokens: tokens of a batch, whose sequences have one setting. batch_rows: [[tokens of a
        sequence, sequences of a batch], ...] for lengths whose batches are counted in sequences.
    shuffle: a new order of batches in each epoch, instead of one source of examples after another.
    easy_first: the share of steps, at the beginning, that see only the shortest sequences: small
        models leave their first plateau sooner.
    warmup: the share of steps in which the rate rises; then it falls as a cosine to 0.
    clip: the largest norm of a gradient; left out, gradients are not clipped. betas: of AdamW.
    check_every: steps between looks at the validation accuracy; left out, one look at the end of
        each epoch. validation_examples: examples of each setting in `train`, or in `test` if
        validate_on = "test". stop_at: a mean accuracy above this ends the training.
    test_examples: examples of each setting in `test`.
    random_non_queries: places where nothing is asked hold random tokens instead of 0.
    mixer_config: fields of mixers, in sections of their names: [trellis] slots = 64.
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
    check_every: int | None = None
    stop_at: float = 0.99
    layers: int = 2
    heads: int = 1
    warmup: float = 0.1
    weight_decay: float = 0.1
    clip: float | None = None
    random_non_queries: bool = True
    batch_rows: tuple[tuple[int, int], ...] = ()
    shuffle: bool = True
    every_rate: bool = False
    validate_on: str = "train"
    betas: tuple[float, float] = (0.9, 0.95)
    mixer_config: dict[str, dict[str, Any]] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ValueError at a value out of range, or at settings without sequences."""
        for group in self.groups:
            if not group.train or not group.test:
                raise ValueError("every group must have something to train and to test on")
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
            shortest = min(source.setting.length for source in group.train)
            short = sum(self.batches(s) for s in group.train if s.setting.length == shortest)
            steps, needed = self.steps_of(group), self.easy_steps(group)
            if needed > short:
                raise ValueError(
                    f"easy_first = {self.easy_first} of {steps} steps are {needed} batches of the "
                    f"shortest sequences, and an epoch has {short}; easy_first, the steps or the "
                    "rows of a batch must be smaller"
                )

    def rows(self, setting: Setting) -> int:
        """The number of sequences in a batch."""
        tokens_allow = max(1, self.batch_tokens // setting.length)
        return dict(self.batch_rows).get(setting.length, tokens_allow)

    def batches(self, source: Source) -> int:
        """The number of batches of a source in an epoch."""
        return -(-source.examples // self.rows(source.setting))

    def epoch_of(self, group: Group) -> int:
        """The number of steps in an epoch."""
        return sum(self.batches(source) for source in group.train)

    def steps_of(self, group: Group) -> int:
        """The most steps that a training takes."""
        return self.steps or (self.epochs or 0) * self.epoch_of(group)

    def easy_steps(self, group: Group) -> int:
        """The number of steps at the beginning that see the shortest sequences only."""
        return round(self.easy_first * self.steps_of(group))

    def examples(
        self, setting: Setting, count: int, split: str, seed: int, first: int = 0
    ) -> Examples:
        """Examples of a setting over the preset's vocabulary."""
        return examples(
            setting, self.vocab_size, count, split=split, seed=seed, first=first,
            random_non_queries=self.random_non_queries,
        )  # fmt: skip

    def validated(self, group: Group) -> list[Setting]:
        """The settings of the validation examples."""
        if self.validate_on == "test":
            return list(group.test)
        return [source.setting for source in group.train]

    def changed(self, **values: Any) -> Preset:
        """A checked copy with other values; a value of None keeps the preset's own."""
        given = {name: value for name, value in values.items() if value is not None}
        for name, other in REPLACES.items():
            if name in given:
                given.setdefault(other, () if other == "batch_rows" else None)
        preset = dataclasses.replace(self, **given)
        preset.check()
        return preset

    def common(self) -> dict[str, Any]:
        """The numbers that results must share to be shown in one table."""
        numbers = dataclasses.asdict(self)
        for apart in ("groups", "widths", "mixer_config"):
            del numbers[apart]
        return {"preset": numbers.pop("name"), **numbers}


def preset(name: str, settings: Iterable[str] = ()) -> Preset:
    """A preset by its name, or from a TOML file of one's own ("mine.toml").

    settings: values in place of the file's, such as "steps=100", "widths=[64]", "trellis.slots=64".

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an unknown name or key, a value of another type, or one out of range.
    """
    path = Path(name)
    if path.suffix != ".toml":
        checks.choice("preset", name, PRESETS)
        path = _presets() / f"{name}.toml"
    values: dict[str, Any] = {"name": path.stem, "mixer_config": {}}
    known = [one.name for one in dataclasses.fields(Preset) if one.name not in values]
    settings = list(settings)
    table = read_table(path, settings)
    asked = {setting.partition("=")[0].strip() for setting in settings}
    for key, other in REPLACES.items():
        if key in asked and other not in asked:
            table.pop(other, None)
    for key, value in table.items():
        if key in MIXERS:
            if not isinstance(value, dict):
                raise ValueError(f"{key} must be a section of the mixer's fields; got {value!r}")
            values["mixer_config"][key] = value
        elif key not in known:
            near = checks.did_you_mean(key, [*known, *MIXERS], form="{}")
            raise ValueError(f"a preset of MQAR has no key {key}{near}")
        else:
            values[key] = _groups(value) if key == "groups" else value
    for key in ("vocab_size", "groups", "widths", "learning_rates"):
        if key not in values:
            raise ValueError(f"{path} must have the key {key}")
    found: Preset = build(Preset, values, "")
    found.check()
    return found


def _presets() -> Path:
    """recipes/mqar of a checkout; a wheel has a copy of that folder beside this file."""
    packaged = Path(__file__).with_name("presets")
    return packaged if packaged.is_dir() else Path(__file__).parents[4] / "recipes" / "mqar"


def _groups(tables: Any) -> tuple[Group, ...]:
    """Raises ValueError unless every group has lists of three, and of two, whole numbers."""
    found = []
    try:
        for table in tables:
            train = [Source(Setting(length, pairs), n) for length, pairs, n in table["train"]]
            test = [Setting(length, pairs) for length, pairs in table["test"]]
            found.append(Group(tuple(train), tuple(test)))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            "groups must have train, a list of [tokens, pairs, examples], and test, a list of "
            f"[tokens, pairs]; got {tables!r}"
        ) from error
    return tuple(found)
