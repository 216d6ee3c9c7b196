"""Recipes: TOML files that say which model is trained, on which text, and how.

    include = "base.toml"     # one or several other recipes, relative to this file

    [train]
    steps = 1000              # wins over the included recipe's

The sections and their keys are the classes and fields below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import checks
from ..data.batches import KINDS
from ..models.config import TrellisConfig
from ..models.presets import PRESETS, count_parameters, match_parameters, preset

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]


PRECISIONS = ("auto", "fp32", "bf16")


@dataclass
class ModelSection:
    """[model]: the model.

    start: a folder that `trellis export` wrote; the run begins with its model and weights, and no
        other key of this section may be given.
    preset: a size such as "125m"; or, in its place, hidden_size, num_hidden_layers and
        num_attention_heads.
    intermediate_size: width of the MLPs; without it, the width with which the model has as many
        parameters as Transformer++ of that size.
    mixer: a name, or a list of names that is repeated over the layers.
    mixer_config: fields of the mixer, such as {slots = 32}; with several mixers a table for each.
    The other keys are fields of TrellisConfig.
    """

    start: str | None = None
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
        if self.start is not None:
            plain = ModelSection(start=self.start)
            for name, value in vars(self).items():
                if value != getattr(plain, name):
                    raise ValueError(
                        f"model.{name} must not be given with model.start, whose model has its "
                        f"own; got {value!r}"
                    )
            return
        if self.preset is not None:
            checks.choice("model.preset", self.preset, tuple(PRESETS))
        else:
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
                if getattr(self, name) is None:
                    raise ValueError(f"model.{name} must be given if there is no model.preset")
        checks.at_least("model.norm_eps", self.norm_eps, 0, whole=False)
        checks.at_least("model.initializer_range", self.initializer_range, 0, whole=False)
        count_parameters(self.config(vocab_size=256))  # raises if there can be no such model

    def config(self, vocab_size: int, **fields: Any) -> TrellisConfig:
        """The model's configuration for a vocabulary."""
        if self.start is not None:
            if not (Path(self.start) / "config.json").is_file():
                raise FileNotFoundError(
                    f"model.start must be a folder that `trellis export` wrote; {self.start} has "
                    "no config.json"
                )
            return TrellisConfig.from_pretrained(self.start)
        given = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in ("start", "preset") and value is not None
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
    """[data]: the text.

    path: a folder that `trellis data prepare` wrote.
    batches: "packed" (documents share rows, each starts afresh) or "contiguous" (every row reads
        on where it stopped in the step before).
    context: tokens of a row.
    validation_path: another prepared folder, all of whose training part is validated on; without
        it, the validation part of `path`.
    sources, tokenizer: what `path` is prepared from. If there is no folder at `path` yet, the
        error names the command that makes it of these.
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
    """[train]: how the model is trained.

    steps, or tokens: the length of the run.
    rows, or batch_tokens: rows of a step's batch over all processes, or its tokens.
    micro_tokens: the most tokens that a process reads at once (but at least one row); it sums
        gradients over its micro-batches.
    learning_rate, min_learning_rate, warmup: the rate rises over this share of the steps, then
        falls to the minimum along a cosine.
    weight_decay: not applied to norms, biases, gates, convolutions and embeddings.
    clip: the largest norm of the gradient; 0 leaves it as it is.
    context_warmup: [[share of the steps, tokens], ...]; up to each share, rows are cut into
        sequences of that many tokens: [[0.1, 256]] is 256 for the first tenth of the steps.
    precision: "fp32", "bf16" (autocast), or "auto": bf16 on a GPU, fp32 on a CPU.
    checkpointing: activations are computed again in the backward, which saves memory.
    compile: blocks are compiled by torch.compile.
    strategy: "ddp" or "fsdp", for several processes.
    sequence_parallel: how many processes share a row.
    lora: a rank; only mixers other than attention are then trained whole, and of all else a matrix
        of this rank that is added to each linear map of attention and MLPs. 0 trains all weights.
    max_bad_steps: the run stops after this many steps in a row without a finite loss and gradient.
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
    lora: int = 0
    max_bad_steps: int = 10

    def check(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("exactly one of train.steps and train.tokens must be given")
        if (self.rows is None) == (self.batch_tokens is None):
            raise ValueError("exactly one of train.rows and train.batch_tokens must be given")
        checks.choice("train.precision", self.precision, PRECISIONS)
        checks.choice("train.strategy", self.strategy, ("ddp", "fsdp"))
        checks.choice("train.device", self.device, ("auto", "cpu", "cuda", "mps"))
        for name in ("steps", "rows", "micro_tokens", "sequence_parallel", "max_bad_steps"):
            checks.at_least(f"train.{name}", getattr(self, name), 1, optional=True)
        for name in ("tokens", "batch_tokens"):
            checks.at_least(f"train.{name}", getattr(self, name), 1, whole=False, optional=True)
        for name in ("learning_rate", "min_learning_rate", "weight_decay", "epsilon", "clip"):
            checks.at_least(f"train.{name}", getattr(self, name), 0, whole=False)
        checks.at_least("train.lora", self.lora, 0)
        checks.share("train.warmup", self.warmup)
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
class DistillSection:
    """[distill]: a teacher that the model is compared with, and may learn from.

    teacher: a folder that `trellis export` wrote, of a model of the same width, depth and tokens.
    loss: "text" (the next token, as without a teacher), "logits" (the divergence KL(teacher ||
        model) of the distributions of the next token) or "mixers" (what the teacher's mixers return
        at the teacher's inputs, layer by layer; only mixers other than the teacher's are trained).
    """

    teacher: str | None = None
    loss: str = "text"

    def check(self) -> None:
        checks.choice("distill.loss", self.loss, ("text", "logits", "mixers"))
        if self.teacher is None and self.loss != "text":
            raise ValueError(f"distill.loss = {self.loss!r} needs a distill.teacher; got none")


@dataclass
class LogSection:
    """[log]: what is written about the run.

    every: steps between two records of metrics.jsonl.
    validate_every: steps between two validations; 0 validates at the end alone.
    validation_tokens: about how many tokens a validation reads.
    tensorboard: whether events for TensorBoard are written, too.
    """

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
    """[checkpoint]: when checkpoints are written.

    every: steps between two checkpoints; 0 writes one at the end alone.
    keep: how many checkpoints, the newest, stay on the disk.
    """

    every: int = 0
    keep: int = 2

    def check(self) -> None:
        checks.at_least("checkpoint.every", self.every, 0)
        checks.at_least("checkpoint.keep", self.keep, 1)


@dataclass
class Recipe:
    """All sections of a recipe."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    distill: DistillSection = field(default_factory=DistillSection)
    log: LogSection = field(default_factory=LogSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)

    def check(self) -> None:
        """Raises ValueError if a value is out of range, or two values do not go together."""
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
        if self.distill.loss != "text" and self.data.batches == "contiguous":
            raise ValueError(
                f'distill.loss = "{self.distill.loss}" needs data.batches = "packed": the '
                "teacher's attention starts afresh in every row"
            )
        if self.rows < 1:
            raise ValueError(
                f"train.batch_tokens must hold at least one row of data.context = {context} "
                f"tokens; got {self.train.batch_tokens}"
            )

    @property
    def rows(self) -> int:
        """Rows of a step's batch over all processes."""
        if self.train.rows is not None:
            return self.train.rows
        return int(self.train.batch_tokens or 0) // self.data.context

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        if self.train.steps is not None:
            return self.train.steps
        return math.ceil((self.train.tokens or 0) / (self.rows * self.data.context))

    def as_dict(self) -> dict[str, Any]:
        """The sections as dictionaries, without values that are None; `from_dict` reads them."""
        return {
            section: {k: v for k, v in values.items() if v is not None}
            for section, values in dataclasses.asdict(self).items()
        }


def from_dict(table: Mapping[str, Any]) -> Recipe:
    """A recipe from sections such as {"train": {"steps": 100}}.

    Raises:
        ValueError: a key is unknown (the nearest known one is named), or a value has the wrong
            type or is out of range.
    """
    with _not_too_deep():
        recipe = build(Recipe, table, "")
        recipe.check()
    return recipe


def load_recipe(path: Path, settings: Iterable[str] = ()) -> Recipe:
    """A recipe from a TOML file, with settings such as "train.steps=100" in place of its values.

    The section [compare] is left out: it is for `trellis compare`.
    """
    table = read_table(path, settings)
    table.pop("compare", None)
    return from_dict(table)


def override(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """A copy of a recipe with settings such as "train.steps=100"."""
    with _not_too_deep():
        return from_dict(_changed(recipe.as_dict(), settings))


def read_table(path: Path, settings: Iterable[str] = ()) -> dict[str, Any]:
    """The table of a TOML file with those it includes, and settings such as "train.steps=100"."""
    with _not_too_deep(path):
        return _changed(_read(path, ()), settings)


@contextlib.contextmanager
def _not_too_deep(what: object = "the recipe") -> Iterator[None]:
    """Turns Python's error about tables inside tables, thousands deep, into one about the file."""
    try:
        yield
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None


def _changed(table: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    for setting in settings:
        _merge(table, parsed_setting(setting))
    return table


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """The sections of a file and of those it includes; `above` are the files that include it."""
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
    """Puts the values of `table` into `base`, section by section."""
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
    # Two keys for one thing: the later one replaces the earlier.
    for one, other in (("steps", "tokens"), ("rows", "batch_tokens")):
        for mine, dropped in ((one, other), (other, one)):
            if mine in table and dropped not in table:
                base.pop(dropped, None)


def parsed_setting(setting: str) -> dict[str, Any]:
    """{"train": {"steps": 100}} of "train.steps=100". Words need no quotes."""
    name, equals, text = setting.partition("=")
    if not equals or not name:
        raise ValueError(f"--set must be section.key=value; got {setting!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text.lstrip().startswith(("[", "{", '"', "'")):
            raise ValueError(f"--set {setting}: the value is not valid TOML: {error}") from error
        value = text  # a word or a path
    for part in reversed(name.strip().split(".")):
        value = {part: value}
    return value


def build(cls: type, table: Mapping[str, Any], prefix: str) -> Any:
    """A dataclass, such as a recipe or a section, from a table of its fields.

    prefix: the section's name for errors, such as "train.".
    """
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in table.items():
        if key not in hints:
            hint = checks.did_you_mean(key, hints, form=prefix + "{}")
            for section, inner in typing.get_type_hints(Recipe).items():
                if key in typing.get_type_hints(inner):  # the key stands in a wrong section
                    hint = f"; did you mean {section}.{key}?"
                    break
            what = "section" if not prefix else "key"
            raise ValueError(f"a recipe has no {what} {prefix}{key}{hint}")
        wanted = hints[key]
        if dataclasses.is_dataclass(wanted):
            if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
                raise ValueError(
                    f"{prefix}{key} must be one section, [{key}]; got a list of {len(value)}, "
                    f"as [[{key}]] makes it"
                )
            if not isinstance(value, Mapping):
                raise ValueError(f"{prefix}{key} must be a section; got {value!r}")
            values[key] = build(typing.cast(type, wanted), value, f"{prefix}{key}.")
        else:
            values[key] = _typed(value, wanted, f"{prefix}{key}")
    return cls(**values)


def _typed(value: Any, wanted: Any, name: str) -> Any:
    """A value as the type of its field; raises ValueError if it is of another type."""
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(wanted):
            with contextlib.suppress(ValueError):
                return _typed(value, option, name)
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        return origin(_typed(item, typing.get_args(wanted)[0], name) for item in value)
    elif origin is dict and isinstance(value, Mapping):
        return dict(value)
    elif wanted is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # a whole number beyond the range of floats
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
    """A type in words: "a whole number or a text"."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_said(o) for o in typing.get_args(wanted) if o is not type(None))
    if origin in (list, tuple):
        return f"a list, each {_said(typing.get_args(wanted)[0])}"
    return names.get(wanted, "a section")
