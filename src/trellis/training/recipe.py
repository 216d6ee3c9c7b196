"""Recipes: typed TOML files that say what is trained, on what, and how.

A recipe may `include` others, given relative to itself; its own keys win.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import checks
from ..data.batches import KINDS
from ..mixers import MIXERS, build_mixer
from ..models.config import TrellisConfig
from ..models.presets import PRESETS, match_parameters, preset

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]

PRECISIONS = ("auto", "fp32", "bf16")
STRATEGIES = ("ddp", "fsdp")
DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass
class ModelSection:
    """The model. Sizes come from `preset`, or from the three numbers.

    mixer: a name, or a list of names repeated over the layers. mixer_config: the mixers' fields.
    intermediate_size: None gives the model the parameter count of Transformer++ at that size.
    """

    preset: str | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    intermediate_size: int | None = None
    mixer: str | list[str] = "trellis"
    mixer_config: dict[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = True
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    loss_tokens: int = 2048

    def check(self) -> None:
        if self.preset is not None:
            checks.choice("model.preset", self.preset, tuple(PRESETS))
        else:
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
                if getattr(self, name) is None:
                    raise ValueError(f"model.{name} must be given where there is no model.preset")
        checks.at_least("model.norm_eps", self.norm_eps, 0, whole=False)
        checks.at_least("model.initializer_range", self.initializer_range, 0, whole=False)
        config = self.config(vocab_size=256)
        with torch.device("meta"):  # raises where a mixer cannot have this width
            for name, fields in config.layer_mixers()[: len(MIXERS)]:
                build_mixer(name, config.hidden_size, config.num_attention_heads, **fields)

    def config(self, vocab_size: int, **fields: Any) -> TrellisConfig:
        """The model's configuration for a vocabulary."""
        given = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name != "preset" and value is not None
        }
        given = {**given, "vocab_size": vocab_size, **fields}
        if self.preset is not None:
            return preset(self.preset, **given)
        config = TrellisConfig(**given)
        if self.intermediate_size is not None:
            return config
        plain = {**given, "mixer": "transformer", "mixer_config": None}
        return match_parameters(config, TrellisConfig(**plain))


@dataclass
class DataSection:
    """The text. `path` is a folder that `trellis data prepare` wrote.

    batches: "packed" or "contiguous". context: tokens of a row. validation_path: another prepared
    folder, whose training part (all of it, prepared with --validation 0) is validated on; None: the
    validation part of `path`. sources, tokenizer: what `path` is made from; said to who does not
    have it yet.
    """

    path: str = ""
    batches: str = "packed"
    context: int = 1024
    validation_path: str | None = None
    sources: list[str] = field(default_factory=list)
    tokenizer: str = "bytes"

    def check(self) -> None:
        if not self.path:
            raise ValueError("data.path must name a folder that `trellis data prepare` wrote")
        checks.choice("data.batches", self.batches, KINDS)
        checks.at_least("data.context", self.context, 2)


@dataclass
class TrainSection:
    """How it is trained.

    steps, or tokens: how long. rows: sequences of a global batch, or batch_tokens: its tokens.
    micro_tokens: a process takes at most so many tokens at once (but a row at least), and
        accumulates gradients over the rest of its rows.
    warmup: share of the steps with a rising learning rate; then a cosine to min_learning_rate.
    weight_decay is not applied to norms, biases, gates, convolutions and embeddings.
    context_warmup: [[share of the steps, tokens], ...]: up to that share, rows are cut into
        sequences of so many tokens.
    precision: "auto" is bf16 autocast on a GPU and fp32 on a CPU. checkpointing: activations are
        computed again in the backward. strategy: for several processes. sequence_parallel:
        processes that share a row. max_bad_steps: non-finite steps in a row that stop the run.
    """

    steps: int | None = None
    tokens: float | None = None
    rows: int | None = None
    batch_tokens: float | None = None
    micro_tokens: int = 32768
    seed: int = 0
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-5
    warmup: float = 0.1
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    epsilon: float = 1e-8
    clip: float = 1.0
    context_warmup: list[list[float]] = field(default_factory=list)
    precision: str = "auto"
    checkpointing: bool = False
    compile: bool = False
    device: str = "auto"
    strategy: str = "ddp"
    sequence_parallel: int = 1
    max_bad_steps: int = 10

    def check(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("exactly one of train.steps and train.tokens must be given")
        if (self.rows is None) == (self.batch_tokens is None):
            raise ValueError("exactly one of train.rows and train.batch_tokens must be given")
        checks.choice("train.precision", self.precision, PRECISIONS)
        checks.choice("train.strategy", self.strategy, STRATEGIES)
        checks.choice("train.device", self.device, DEVICES)
        for name in ("steps", "rows", "micro_tokens", "sequence_parallel", "max_bad_steps"):
            if getattr(self, name) is not None:
                checks.at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("tokens", "batch_tokens"):
            if getattr(self, name) is not None:
                checks.at_least(f"train.{name}", getattr(self, name), 1, whole=False)
        for name in ("learning_rate", "min_learning_rate", "weight_decay", "epsilon", "clip"):
            checks.at_least(f"train.{name}", getattr(self, name), 0, whole=False)
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"train.warmup must be a share from 0 to 1; got {self.warmup}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.betas must be two numbers from 0 to 1; got {self.betas}")
        pairs = [entry for entry in self.context_warmup if len(entry) == 2]
        shares = [share for share, tokens in pairs if 0 <= share <= 1 and tokens >= 1]
        if len(shares) != len(self.context_warmup) or shares != sorted(shares):
            raise ValueError(
                "train.context_warmup must be pairs [share, tokens] with rising shares from 0 to 1 "
                f"and at least one token; got {self.context_warmup}"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"train.seed must be from 0 to 2^63 - 1; got {self.seed}")


@dataclass
class LogSection:
    """every: steps per progress line. validate_every: steps per validation, 0: only at the end.
    validation_tokens: tokens of a validation. tensorboard: also write events for it."""

    every: int = 10
    validate_every: int = 0
    validation_tokens: int = 131072
    tensorboard: bool = False

    def check(self) -> None:
        checks.at_least("log.every", self.every, 1)
        checks.at_least("log.validate_every", self.validate_every, 0)
        checks.at_least("log.validation_tokens", self.validation_tokens, 1)


@dataclass
class CheckpointSection:
    """every: steps per checkpoint, 0: only at the end. keep: how many of the newest are kept."""

    every: int = 0
    keep: int = 2

    def check(self) -> None:
        checks.at_least("checkpoint.every", self.every, 0)
        checks.at_least("checkpoint.keep", self.keep, 1)


@dataclass
class Recipe:
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    log: LogSection = field(default_factory=LogSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)

    def check(self) -> None:
        """Raises ValueError at a value out of range, or at two that do not go together."""
        for section in dataclasses.fields(self):
            getattr(self, section.name).check()
        context, parts = self.data.context, self.train.sequence_parallel
        if context % parts:
            raise ValueError(
                f"train.sequence_parallel must divide data.context, {context}; got {parts}"
            )
        if parts > 1 and self.data.batches == "contiguous":
            raise ValueError(
                'train.sequence_parallel above 1 needs data.batches = "packed": contiguous rows '
                "carry their state from step to step already"
            )
        if parts > 1 and self.train.strategy == "fsdp":
            raise ValueError(
                'train.sequence_parallel above 1 needs train.strategy = "ddp": gathering sharded '
                "weights would make the processes of a row wait for one another"
            )
        if self.rows < 1:
            raise ValueError(
                f"train.batch_tokens must hold at least one row of data.context = {context} "
                f"tokens; got {self.train.batch_tokens}"
            )

    @property
    def rows(self) -> int:
        """Sequences of a global batch."""
        if self.train.rows is not None:
            return self.train.rows
        assert self.train.batch_tokens is not None
        return int(self.train.batch_tokens) // self.data.context

    @property
    def steps(self) -> int:
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.tokens is not None
        return math.ceil(self.train.tokens / (self.rows * self.data.context))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without those that are None: what `from_dict` reads."""
        return {
            section: {k: v for k, v in values.items() if v is not None}
            for section, values in dataclasses.asdict(self).items()
        }


def from_dict(table: Mapping[str, Any]) -> Recipe:
    """A checked recipe.

    Raises:
        ValueError: an unknown key (the nearest right one is named), a value of another type, or
            one out of range.
    """
    recipe = _build(Recipe, table, "")
    recipe.check()
    return recipe


def load_recipe(path: Path, settings: Iterable[str] = ()) -> Recipe:
    """A recipe from a TOML file, with settings such as "train.steps=100" in place of its values."""
    table = _read(path, ())
    for setting in settings:
        _set(table, setting)
    return from_dict(table)


def override(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    table = recipe.as_dict()
    for setting in settings:
        _set(table, setting)
    return from_dict(table)


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in above:
        raise ValueError(f"{path} includes itself")
    if not path.is_file():
        raise FileNotFoundError(f"there is no recipe {path}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    merged: dict[str, Any] = {}
    included = table.pop("include", [])
    names = [included] if isinstance(included, str) else included
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: include must be one or several file names; got {included!r}")
    for name in names:
        _merge(merged, _read(path.parent / name, (*above, path)))
    _merge(merged, table)
    return merged


def _merge(base: dict[str, Any], table: dict[str, Any]) -> None:
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
    # Two ways of saying one thing: the later one counts.
    for one, other in (("steps", "tokens"), ("rows", "batch_tokens")):
        for mine, dropped in ((one, other), (other, one)):
            if mine in table and dropped not in table:
                base.pop(dropped, None)


def _set(table: dict[str, Any], setting: str) -> None:
    name, equals, text = setting.partition("=")
    if not equals or not name:
        raise ValueError(f"--set must be section.key=value; got {setting!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word
    *sections, key = name.strip().split(".")
    nested: dict[str, Any] = {key: value}
    for section in reversed(sections):
        nested = {section: nested}
    _merge(table, nested)


def _build(cls: type, table: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = list(hints)
    values = {}
    for key, value in table.items():
        if key not in hints:
            right = _section_of(key)
            near = checks.did_you_mean(key, known, form=prefix + "{}")
            hint = f"; did you mean {right}?" if right else near
            what = "section" if not prefix else "key"
            raise ValueError(f"a recipe has no {what} {prefix}{key}{hint}")
        wanted = hints[key]
        if dataclasses.is_dataclass(wanted):
            if not isinstance(value, Mapping):
                raise ValueError(f"{prefix}{key} must be a section; got {value!r}")
            values[key] = _build(typing.cast(type, wanted), value, f"{prefix}{key}.")
        else:
            values[key] = _typed(value, wanted, f"{prefix}{key}")
    return cls(**values)


def _section_of(key: str) -> str | None:
    """Where a key belongs that was put into another section."""
    for section in dataclasses.fields(Recipe):
        cls = typing.get_type_hints(Recipe)[section.name]
        if key in typing.get_type_hints(cls):
            return f"{section.name}.{key}"
    return None


def _typed(value: Any, wanted: Any, name: str) -> Any:
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(wanted):
            if option is type(None):
                if value is None:
                    return None
                continue
            try:
                return _typed(value, option, name)
            except ValueError:
                continue
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        return origin(_typed(item, typing.get_args(wanted)[0], name) for item in value)
    elif origin is dict and isinstance(value, Mapping):
        return dict(value)
    elif wanted is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif wanted is int and isinstance(value, float) and value.is_integer():
        return int(value)
    elif isinstance(value, bool):  # to Python, True is a whole number
        if wanted is bool:
            return value
    elif isinstance(wanted, type) and isinstance(value, wanted):
        return value
    raise ValueError(f"{name} must be {_said(wanted)}; got {value!r}")


def _said(wanted: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_said(o) for o in typing.get_args(wanted) if o is not type(None))
    if origin in (list, tuple):
        return f"a list, each {_said(typing.get_args(wanted)[0])}"
    return names.get(wanted, "a section")


def read_table(path: Path, settings: Iterable[str] = ()) -> dict[str, Any]:
    """The table of any TOML file with what it includes, with settings such as "steps=100" in place
    of its values."""
    table = _read(path, ())
    for setting in settings:
        _set(table, setting)
    return table
