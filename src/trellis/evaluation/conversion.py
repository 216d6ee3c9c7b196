"""`trellis convert`: a pretrained Transformer becomes a model with a bounded memory, in stages.

RUN/
    options.json   what was asked for; the same command goes on, another one is refused
    teacher/       the pretrained model as ours, with attention: the same logits
    start/         its weights, with the new mixer in the layers that are converted
    align/         stage 1, a run: each new mixer learns its attention's output, layer by layer
    costs.json     with --keep-attention: what the replacement of each layer costs
    aligned/       the student of the next stage; some layers may have their attention again
    distill/       stage 2, a run: the student learns the teacher's distribution of the next token
    distilled/
    extend/        stage 3, a run: the student learns longer texts
    model/         the converted model
    measures.json, measures.png

Every stage is a run of `trellis train`, with its checkpoints; folders of models appear whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from torch import Tensor

from .. import checks, figures
from ..data.shards import Corpus, TokenStream, open_corpus
from ..data.tokenizer import TextTokenizer, load_tokenizer, read_llama2c_tokenizer
from ..files import parse_json, write_json
from ..mixers import TransformerMixer
from ..models.modeling import TrellisForCausalLM
from ..models.presets import state_bytes
from ..models.pretrained import (
    FAMILIES,
    attention_config,
    config_of,
    imported,
    read_llama2c,
    replaced,
)
from ..training import checkpoint as checkpoints
from ..training.distillation import Teacher, check_vocabulary
from ..training.loop import Interrupted, TrainingStopped
from ..training.metrics import read_metrics
from ..training.recipe import PRECISIONS, Recipe, from_dict
from ..training.run import (
    RECIPE,
    check_new,
    export,
    is_empty,
    load_run,
    save_model,
    train,
)
from . import ppl
from .models import EvaluatedModel
from .runner import Report, Table

STAGES = ("align", "distill", "extend")
#: What else a conversion writes, each whole or not at all.
PARTS = (
    "options.json", "teacher", "start", "costs.json", "aligned", "distilled", "model",
    "measures.json",
)  # fmt: skip
#: Tokens after which the bytes of a state are stated.
STATE_TOKENS = (1_000, 100_000)
#: About so many logits are in memory at a time.
LOGITS = 2**26


@dataclass
class Conversion:
    """The choices of a conversion. Of the last four, each has a number for each stage.

    mixer, fields: the new mixer, and fields of its configuration.
    layers: those that are converted; None means all.
    keep_attention: so many of these layers get their attention back after stage 1: those whose
        replacement costs most.
    window: of the attention that stays; 0 leaves it without a limit.
    lora: in stages 2 and 3, the rank of what is trained beside the new mixers; 0 trains all.
    validation_tokens: of the held-out text, about so many are measured on.
    batch_tokens: tokens of a step.
    precision: of training, "fp32", "bf16" or "auto": bf16 on a GPU. What is measured at the end is
        measured in fp32.
    steps, rates, contexts: of the stages; a stage of 0 steps is left out.
    """

    mixer: str = "trellis"
    fields: dict[str, Any] = field(default_factory=dict)
    layers: list[int] | None = None
    keep_attention: int = 0
    window: int = 128
    lora: int = 0
    seed: int = 0
    validation_tokens: int = 32768
    batch_tokens: int = 4096
    precision: str = "auto"
    steps: list[int] = field(default_factory=lambda: [300, 300, 100])
    rates: list[float] = field(default_factory=lambda: [1e-2, 2e-3, 5e-4])
    contexts: list[int] = field(default_factory=lambda: [256, 256, 512])

    def check(self, layers: int) -> None:
        """Raises ValueError if a value is out of range for a model of so many layers."""
        for name in ("steps", "rates", "contexts"):
            values = getattr(self, name)
            if len(values) != len(STAGES):
                raise ValueError(
                    f"--{name} must be {len(STAGES)} numbers, for the stages {', '.join(STAGES)}; "
                    f"got {values}"
                )
        for steps in self.steps:
            checks.at_least("--steps", steps, 0)
        for context in self.contexts:
            checks.at_least("--contexts", context, 2)
        for rate in self.rates:
            checks.positive("--rates", rate)
        checks.at_least("--window", self.window, 0)
        checks.choice("--precision", self.precision, PRECISIONS)
        checks.at_least("--batch-tokens", self.batch_tokens, max(self.contexts))
        for layer in self.chosen(layers):
            if not 0 <= layer < layers:
                raise ValueError(f"--layers must be from 0 to {layers - 1}; got {layer}")
        if not self.chosen(layers):
            raise ValueError("--layers must name at least one layer; got none")
        most = len(self.chosen(layers)) - 1
        if not 0 <= self.keep_attention <= most:
            raise ValueError(
                f"--keep-attention must be from 0 to {most}, so that a layer is converted; got "
                f"{self.keep_attention}"
            )

    def chosen(self, layers: int) -> list[int]:
        return list(range(layers)) if self.layers is None else sorted(set(self.layers))


# The teacher.


def open_pretrained(
    model: Path, tokenizer: Path | None = None
) -> tuple[TrellisForCausalLM, TextTokenizer]:
    """A pretrained Transformer as ours, with the same logits, and its tokenizer.

    model: a folder of transformers with a model of the Llama family; a .gguf file of one; a .bin
        file of llama2.c, with its tokenizer.bin beside it; or a run or an exported folder of ours.
    tokenizer: a file or folder in place of the model's own.

    Raises:
        FileNotFoundError: there is no model, or no tokenizer.
        ValueError: the model is of another kind, or the tokenizer is not its own.
    """
    if not model.exists():
        raise FileNotFoundError(
            f"there is no model at {model}: give a folder, a .gguf or .bin file"
        )
    if model.suffix == ".bin":
        found = read_llama2c(model)
        path = tokenizer or model.with_name("tokenizer.bin")
        if not path.exists():
            raise FileNotFoundError(
                f"{model} needs its tokenizer: there is no {path}. Give one with --tokenizer"
            )
        if path.suffix == ".bin":
            return found, read_llama2c_tokenizer(path, found.config.vocab_size)
        return _fitting(found, load_tokenizer(path), model)
    if model.suffix == ".gguf":
        return _fitting(*_open_gguf(model, tokenizer), model)
    if model.is_file():
        raise ValueError(f"{model} is neither a folder nor a .gguf or .bin file")
    if (model / RECIPE).is_file():
        network, known = load_run(model)
    else:
        network, known = _open_folder(model, tokenizer)
    attention_config(network)
    return _fitting(network, known if tokenizer is None else load_tokenizer(tokenizer), model)


def _open_folder(model: Path, tokenizer: Path | None) -> tuple[TrellisForCausalLM, TextTokenizer]:
    """A folder with a config.json: of transformers, or one that `trellis export` wrote."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (model / "config.json").is_file():
        raise FileNotFoundError(f"there is no model at {model}: it has no config.json")
    try:
        kind = parse_json((model / "config.json").read_text()).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{model / 'config.json'} is damaged: {error}") from error
    if kind == "trellis":
        return load_run(model)
    if kind not in FAMILIES:
        raise ValueError(
            f"a model to convert must be one of the kinds {', '.join(FAMILIES)}; {model} is of the "
            f"kind {kind!r}"
        )
    with _named(model):
        config = AutoConfig.from_pretrained(model)
        if getattr(config, "quantization_config", None):
            raise ValueError("its weights are quantized; give the model as it was before")
        config_of(config)
    # Before the weights, which take long.
    known = _tokenizer_of(model, tokenizer)
    with _named(model):
        loaded, found = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, output_loading_info=True
        )
        for kind, names in (
            ("lacks", found["missing_keys"]),
            ("has no place for", found["unexpected_keys"]),
        ):
            # The frequencies of rotary positions follow from the configuration.
            names = sorted(name for name in names if not name.endswith("inv_freq"))
            if names:
                raise ValueError(f"it {kind} {len(names)} weights: {', '.join(names[:3])}")
        return imported(loaded), known


@contextlib.contextmanager
def _named(model: Path) -> Iterator[None]:
    """What goes wrong in reading a model becomes a ValueError that names it."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError,
            IndexError, SafetensorError, struct.error) as error:  # fmt: skip
        raise ValueError(f"{model} cannot be converted: {error}") from error


def _tokenizer_of(model: Path, tokenizer: Path | None) -> TextTokenizer:
    """The tokenizer of a folder, or another that was given."""
    try:
        return load_tokenizer(tokenizer or model)
    except FileNotFoundError as error:
        if tokenizer is not None:
            raise
        raise FileNotFoundError(f"{error}; give another with --tokenizer") from error


def _open_gguf(model: Path, tokenizer: Path | None) -> tuple[TrellisForCausalLM, TextTokenizer]:
    """A GGUF file, through transformers' own loader."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "GGUF files need the packages gguf and accelerate: pip install "
            "'trellis-memory[convert]'",
            name=error.name,
        ) from error
    from transformers import AutoModelForCausalLM, AutoTokenizer

    known = None if tokenizer is None else load_tokenizer(tokenizer)
    names = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
    with _named(model):
        reader = gguf.GGUFReader(model)
        told = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("tokenizer.") or name.endswith((".pre", ".model"))
        }
        check_gguf(told, [tensor.name for tensor in reader.tensors])
        if known is None:
            if "tokenizer.ggml.model" not in told:
                raise ValueError("it has no tokenizer; give one with --tokenizer")
            known = _gguf_tokenizer(told, AutoTokenizer.from_pretrained(**names), model)
        return imported(AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)), known


def check_gguf(told: dict[str, Any], tensors: Sequence[str]) -> None:
    """Raises ValueError at what transformers' loader of GGUF files would leave out in silence.

    told: the file's own facts about the model, such as "general.architecture".
    """
    family = told.get("general.architecture")
    if family not in FAMILIES:
        raise ValueError(f"it must be of the kind {', '.join(FAMILIES)}; got {family!r}")
    lost = {
        "rotary positions that are scaled": (
            told.get(f"{family}.rope.scaling.type", "none") != "none"
            or "rope_freqs.weight" in tensors
        ),
        "a window of its attention": bool(told.get(f"{family}.attention.sliding_window")),
        "biases": family != "qwen2" and any(name.endswith(".bias") for name in tensors),
    }
    for what, there in lost.items():
        if there:
            raise ValueError(
                f"it has {what}, which would be lost in reading a GGUF file; give the model's "
                "folder of transformers"
            )


def _gguf_tokenizer(told: dict[str, Any], fast: Any, model: Path) -> TextTokenizer:
    """The tokenizer of a GGUF file.

    transformers cuts text into words as GPT-2 does, whatever rule the file names for its model.
    Raises ValueError at a rule that is not known here.
    """
    inner = fast.backend_tokenizer
    rule = told.get("tokenizer.ggml.pre", "default")
    if told["tokenizer.ggml.model"] == "gpt2":
        if rule == "smollm":  # every digit is a word of its own
            digits = pre_tokenizers.Digits(individual_digits=True)
            inner.pre_tokenizer = pre_tokenizers.Sequence([digits, inner.pre_tokenizer])
        elif rule not in ("default", "gpt-2", told["general.architecture"]):
            raise ValueError(
                f"it cuts text into words by the rule {rule!r}, which would be lost in reading a "
                "GGUF file; give the model's tokenizer.json with --tokenizer"
            )
    return TextTokenizer(inner.to_str(), str(model))


def _fitting(
    network: TrellisForCausalLM, tokenizer: TextTokenizer, model: Path
) -> tuple[TrellisForCausalLM, TextTokenizer]:
    if tokenizer.vocab_size > network.config.vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, but {model} "
            f"{network.config.vocab_size}: it is not the one that the model was trained with"
        )
    return network, tokenizer


def import_model(model: Path, out: Path, tokenizer: Path | None = None) -> dict[str, Any]:
    """Writes a pretrained model as a folder of ours, without converting a layer."""
    check_new(out)
    network, known = open_pretrained(model, tokenizer)
    save_model(network, known, out)
    return {
        "path": out,
        "parameters": sum(p.numel() for p in network.parameters()),
        "attention": network.config.mixer_config["transformer"],
    }


# The stages.


def convert(
    model: Path,
    data: Path,
    out: Path,
    chosen: Conversion,
    tokenizer: Path | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Converts a model, or goes on where a conversion was interrupted.

    Raises:
        FileNotFoundError, ValueError: something that is asked for is missing or does not fit;
            nothing was written.
        TrainingStopped: a stage was interrupted or cannot go on; its newest checkpoint is intact.
    """
    figures.check()
    corpus = open_corpus(data)
    asked = {
        "model": str(model.resolve()),
        "data": corpus.fingerprint,
        "tokenizer": None if tokenizer is None else str(tokenizer.resolve()),
        **dataclasses.asdict(chosen),
    }
    asked = json.loads(json.dumps(asked))
    options = out / "options.json"
    if options.is_file():
        before = parse_json(options.read_text())
        changed = [name for name in asked if asked[name] != before.get(name)]
        if changed:
            raise ValueError(
                f"{out} was started with other values of {', '.join(changed)}: give the same, or "
                "another --out"
            )
    elif not is_empty(out):
        check_new(out)
    _remove_partial(out)
    if not (out / "start" / "config.json").is_file():
        _begin(model, tokenizer, corpus, out, chosen, asked)
    network, known = load_run(out / "teacher")
    check_vocabulary(known, corpus, str(out / "teacher"))
    run = _Run(out, corpus, chosen, say)
    run.stage("align", out / "start", "mixers")
    kept = run.keep(network, known)
    run.stage("distill", out / "aligned", "logits")
    run.finished("distill", out / "aligned", out / "distilled")
    run.stage("extend", out / "distilled", "text")
    run.finished("extend", out / "distilled", out / "model")
    return run.measure(network, known, kept)


def _remove_partial(out: Path) -> None:
    """Deletes what a killed process had begun to write: files and folders such as .model.x1y2."""
    for name in PARTS:
        for path in out.glob(f".{name}.*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _begin(
    model: Path,
    tokenizer: Path | None,
    corpus: Corpus,
    out: Path,
    chosen: Conversion,
    asked: dict[str, Any],
) -> None:
    """Checks all that is asked for, then writes the teacher and the student before training."""
    network, known = open_pretrained(model, tokenizer)
    check_vocabulary(known, corpus, str(model))
    chosen.check(network.config.num_hidden_layers)
    if corpus.validation.tokens < 2:
        raise ValueError(
            f"{corpus.path} holds nothing out to measure on: prepare it with --validation 0.1"
        )
    width = network.config.hidden_size
    if chosen.lora > width:
        raise ValueError(f"--lora must be at most the model's width, {width}; got {chosen.lora}")
    longest = max((c for c, steps in zip(chosen.contexts, chosen.steps) if steps), default=0)
    if corpus.train.tokens <= longest:
        raise ValueError(
            f"{corpus.path} must have more tokens to train on than the longest of --contexts, "
            f"{longest}; it has {corpus.train.tokens}"
        )
    layers = chosen.chosen(network.config.num_hidden_layers)
    student = replaced(
        network, layers, chosen.mixer, chosen.fields, chosen.window or None, chosen.seed
    )
    for name, loss in zip(STAGES, ("mixers", "logits", "text")):
        _recipe(out, corpus, chosen, name, out / "start", loss)  # raises at values out of range
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "options.json", asked)
    for folder, one in (("teacher", network), ("start", student)):
        if not (out / folder / "config.json").is_file():
            save_model(one, known, out / folder)


def _recipe(
    out: Path, corpus: Corpus, chosen: Conversion, stage: str, start: Path, loss: str
) -> Recipe:
    """The recipe of a stage."""
    number = STAGES.index(stage)
    steps, context = max(chosen.steps[number], 1), chosen.contexts[number]
    tokens = max(LOGITS // corpus.vocab_size, context)
    return from_dict({
        "model": {"start": str(start.resolve())},
        "data": {"path": str(corpus.path.resolve()), "context": context},
        "train": {
            "steps": steps, "rows": chosen.batch_tokens // context, "seed": chosen.seed,
            "learning_rate": chosen.rates[number], "weight_decay": 0.0,
            "micro_tokens": min(chosen.batch_tokens, tokens),
            "lora": 0 if stage == "align" else chosen.lora,
            "precision": chosen.precision,
        },
        "distill": {"teacher": str((out / "teacher").resolve()), "loss": loss},
        "log": {
            "every": max(1, steps // 20), "validate_every": max(1, -(-steps // 4)),
            "validation_tokens": chosen.validation_tokens,
        },
        "checkpoint": {"every": max(1, steps // 10)},
    })  # fmt: skip


def tokens_of(chosen: Conversion, stage: int) -> int:
    """The tokens of a step of a stage: as many whole rows as there is room for."""
    context = chosen.contexts[stage]
    return chosen.batch_tokens // context * context


class _Run:
    """The stages of one conversion, each of which is skipped if it is done."""

    def __init__(self, out: Path, corpus: Corpus, chosen: Conversion, say: Callable[[str], None]):
        self.out, self.corpus, self.chosen, self.say = out, corpus, chosen, say

    def stage(self, name: str, start: Path, loss: str) -> None:
        """Trains a stage to its last step."""
        steps = self.chosen.steps[STAGES.index(name)]
        folder = self.out / name
        done = checkpoints.steps_in(folder)
        if steps == 0:
            return
        if done and done[-1] >= steps:
            bad = checkpoints.open_checkpoint(folder, verify=False).content["bad_in_a_row"]
            if bad:
                raise TrainingStopped(
                    f"the last {bad} steps of {folder} were not finite, so its model is useless: "
                    "begin again in another --out with a lower rate"
                )
            return
        self.say(f"--- {name}, stage {STAGES.index(name) + 1} of {len(STAGES)}")
        recipe = _recipe(self.out, self.corpus, self.chosen, name, start, loss)
        try:
            train(recipe, folder, resume=(folder / RECIPE).is_file())
        except Interrupted:
            self.say("the same command of `trellis convert` goes on with the whole conversion")
            raise

    def finished(self, name: str, before: Path, after: Path) -> None:
        """Writes the model that a stage ended with; that before it if the stage has no steps."""
        if (after / "config.json").is_file():
            return
        if self.chosen.steps[STAGES.index(name)]:
            export(self.out / name, after)
        else:
            save_model(*load_run(before), after)

    def keep(self, teacher: TrellisForCausalLM, tokenizer: TextTokenizer) -> list[int]:
        """Gives the attention back to the layers whose replacement costs most; returns them."""
        chosen, out = self.chosen, self.out
        layers = chosen.chosen(teacher.config.num_hidden_layers)
        source = out / ("align" if chosen.steps[0] else "start")
        costs: dict[int, float] = {}
        if chosen.keep_attention:
            costs = self._costs(source, layers)
        worst = sorted(costs, key=lambda layer: -costs[layer])
        kept = sorted(worst[: chosen.keep_attention])
        if not (out / "aligned" / "config.json").is_file():
            aligned, _ = load_run(source)
            if kept:
                rest = [layer for layer in layers if layer not in kept]
                student = replaced(
                    teacher, rest, chosen.mixer, chosen.fields, chosen.window or None
                )
                for layer in rest:
                    new, old = (m.model.layers[layer].mixer for m in (student, aligned))
                    new.load_state_dict(old.state_dict())  # type: ignore[union-attr]
                aligned = student
            save_model(aligned, tokenizer, out / "aligned")
        return kept

    def _costs(self, source: Path, layers: list[int]) -> dict[int, float]:
        """For each layer, KL(teacher || teacher with only this layer replaced), nats per token.

        It is measured on text to train on: what is held out has no say in which layers are kept.
        """
        path = self.out / "costs.json"
        if not path.is_file():
            aligned, _ = load_run(source)
            aligned.requires_grad_(False)
            teacher = Teacher(str(self.out / "teacher"), self.corpus, torch.device("cpu"))
            context, rows = self._batch()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.chosen.precision == "bf16"):
                found = teacher.costs(
                    aligned, layers, self.corpus.train, context, self.chosen.validation_tokens, rows
                )
            write_json(path, found)
        costs = {int(layer): cost for layer, cost in parse_json(path.read_text()).items()}
        self.say("KL to the teacher, in nats per token, if one layer alone is replaced:")
        for layer, cost in costs.items():
            self.say(f"  layer {layer}: {cost:.4f}")
        return costs

    def _batch(self) -> tuple[int, int]:
        """The context of the first stage, and how many such rows are read at once."""
        context = self.chosen.contexts[0]
        tokens = min(self.chosen.batch_tokens, LOGITS // self.corpus.vocab_size)
        return context, max(1, tokens // context)

    # What became of it.

    def measure(
        self, teacher: TrellisForCausalLM, tokenizer: TextTokenizer, kept: list[int]
    ) -> Report:
        """Measures teacher and student, unless that was done, and writes and draws the result."""
        path, picture = self.out / "measures.json", self.out / "measures.png"
        if path.is_file():
            result = parse_json(path.read_text())
        else:
            student, _ = load_run(self.out / "model")
            result = self._result(teacher, student, tokenizer, kept)
            write_json(path, result)
        draw(result, self._curve(), picture)
        return Report(result, list(_tables(result)), [path, picture, self.out / "model"])

    def _stages(self, kept: list[int]) -> dict[str, Any]:
        """How far the student was from the teacher after every stage, in fp32, at one context.

        "keep" is the aligned student whose most costly layers have their attention back.
        """
        context, rows = self._batch()
        teacher = Teacher(str(self.out / "teacher"), self.corpus, torch.device("cpu"))
        found: dict[str, Any] = {}
        read = 0
        for number, name in enumerate(STAGES):
            steps = self.chosen.steps[number]
            read += steps * tokens_of(self.chosen, number)
            folders = {name: name} if steps else {}
            if number == 0 and kept:
                folders["keep"] = "aligned"
            for key, folder in folders.items():
                student, _ = load_run(self.out / folder)
                compared = teacher.compare(
                    student, self.corpus.validation, context, self.chosen.validation_tokens, rows,
                    mixers=False,
                )  # fmt: skip
                found[key] = {"tokens": read, "context": context, **compared}
                self.say(f"measured: after {key}")
        return found

    def _curve(self) -> list[dict[str, Any]]:
        """All validations of all stages; `tokens` counts those of the stages before, too."""
        found, before = [], 0
        for name, steps in zip(STAGES, self.chosen.steps):
            if not steps:
                continue
            tokens = tokens_of(self.chosen, STAGES.index(name))
            for record in read_metrics(self.out / name):
                if "validation_loss" in record:
                    at = before + record["step"] * tokens
                    found.append({"stage": name, "tokens": at, **record})
            before += steps * tokens
        return found

    def _result(
        self,
        teacher: TrellisForCausalLM,
        student: TrellisForCausalLM,
        tokenizer: TextTokenizer,
        kept: list[int],
    ) -> dict[str, Any]:
        chosen = self.chosen
        stages = self._stages(kept)
        window = chosen.window or max(chosen.contexts)
        shortest, longest = max(2, chosen.contexts[0] // 2), 2 * max(chosen.contexts)
        contexts = sorted({shortest, *chosen.contexts, longest})
        measures = bypass(teacher, student, tokenizer, self.corpus.validation, contexts, window,
                          chosen.validation_tokens, self.say)  # fmt: skip
        costs = self.out / "costs.json"
        return {
            "options": parse_json((self.out / "options.json").read_text()),
            "mixers": [name for name, _ in student.config.layer_mixers()],
            "kept": kept,
            "costs": parse_json(costs.read_text()) if kept and costs.is_file() else {},
            "parameters": {
                name: sum(p.numel() for p in model.parameters())
                for name, model in (("teacher", teacher), ("student", student))
            },
            "stages": stages,
            "window": window,
            "measures": measures,
            "state_bytes": {
                name: {str(tokens): state_bytes(model.config, tokens) for tokens in STATE_TOKENS}
                for name, model in (("teacher", teacher), ("student", student))
            },
        }


def bypass(
    teacher: TrellisForCausalLM,
    student: TrellisForCausalLM,
    tokenizer: TextTokenizer,
    stream: TokenStream,
    contexts: Sequence[int],
    window: int,
    tokens: int,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Loss by context of teacher and student, as they are and with a part switched off.

    A student whose loss does not rise without its memory does not use it. Every entry has the name
    of the model, the context and what `ppl.perplexity` found, with the loss `beyond` the window:
    of the tokens that are predicted from more than `window` tokens.
    """
    texts = None
    found = []
    cases: list[tuple[str, TrellisForCausalLM, Any]] = [
        ("teacher", teacher, contextlib.nullcontext),
        (f"teacher, window {window}", teacher, lambda: windows(teacher, window)),
        ("student", student, contextlib.nullcontext),
        ("student, memory off", student, lambda: memory_off(student)),
    ]
    if any(isinstance(m, TransformerMixer) for m in student.modules()):
        cases.append(("student, window off", student, lambda: windows(student, 1)))
    for name, network, switched in cases:
        with switched():
            model = EvaluatedModel(name, network, tokenizer, {})
            texts = texts or held_out(model, stream, tokens, max(contexts))
            for context in contexts:
                result = ppl.perplexity(model, texts, context, beyond=window)
                found.append({"model": name, "context": context, **result})
        say(f"measured: {name}")
    return found


def held_out(
    model: EvaluatedModel, stream: TokenStream, tokens: int, longest: int
) -> list[ppl.Text]:
    """The beginnings of documents of a stream, about `tokens` tokens, each after a starting token.

    longest: the longest context that is measured. Of a document no more is taken than that, or its
    share of all tokens if that is more, so that a few long books all have their part.
    """
    texts: list[ppl.Text] = []
    ends = stream.ends.tolist()
    most = max(longest, tokens // len(ends))
    start = 0
    for end in ends:
        stop = min(end, start + min(most, tokens))
        ids = stream.read(start, stop).tolist()
        if ids and ids[-1] == model.tokenizer.end_of_document:
            ids = ids[:-1]
        size = len(model.tokenizer.decode(ids).encode())
        texts.append(ppl.Text([*model.start, *ids], size))
        tokens -= stop - start
        start = end
        if tokens <= 0:
            break
    return texts


@contextlib.contextmanager
def memory_off(model: TrellisForCausalLM) -> Iterator[None]:
    """Mixers other than attention forget all that they have read before every token.

    Each token is then a sequence of its own to them: memory, convolution and positions start anew.
    """
    mixers = [block.mixer for block in _blocks(model)]
    mixers = [mixer for mixer in mixers if not isinstance(mixer, TransformerMixer)]

    def forgetful(mixer: Any) -> Any:
        def forward(x: Tensor, state: Any = None, cu_seqlens: Any = None) -> tuple[Tensor, Any]:
            y, _ = type(mixer).forward(mixer, x.reshape(-1, 1, x.shape[-1]))
            if state is None:
                sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
                state = mixer.init_state(sequences)
            return y.view_as(x), state

        return forward

    try:
        for mixer in mixers:
            mixer.forward = forgetful(mixer)
        yield
    finally:
        for mixer in mixers:
            mixer.__dict__.pop("forward", None)


@contextlib.contextmanager
def windows(model: TrellisForCausalLM, window: int) -> Iterator[None]:
    """Attention sees at most `window` tokens; with 1, each token sees itself alone."""
    mixers = [block.mixer for block in _blocks(model)]
    mixers = [mixer for mixer in mixers if isinstance(mixer, TransformerMixer)]
    before = [mixer.config.window for mixer in mixers]
    try:
        for mixer in mixers:
            mixer.config.window = min(window, mixer.config.window or window)
            mixer.forward = mixer.forward  # the decoder leaves mixers with their own to PyTorch
        yield
    finally:
        for mixer, old in zip(mixers, before):
            mixer.config.window = old
            mixer.__dict__.pop("forward", None)


def _blocks(model: TrellisForCausalLM) -> list[Any]:
    return list(model.model.layers)


def _tables(result: dict[str, Any]) -> Iterator[Table | str]:
    rows = [
        [name, f"{stage['tokens']:,}", f"{stage['validation_loss']:.4f}",
         f"{stage['teacher_validation_loss']:.4f}", f"{stage['validation_kl']:.4f}"]
        for name, stage in result["stages"].items()
    ]  # fmt: skip
    heads = ["after", "tokens so far", "loss", "teacher's loss", "KL to the teacher"]
    context = max((stage["context"] for stage in result["stages"].values()), default=0)
    yield Table(f"nats per token on held-out text, context {context}", heads, rows)
    measures = result["measures"]
    names = list(dict.fromkeys(entry["model"] for entry in measures))
    contexts = list(dict.fromkeys(entry["context"] for entry in measures))
    rows = []
    for name in names:
        own = [entry for entry in measures if entry["model"] == name]
        far = own[-1]["beyond"]
        rows.append([
            name, *(f"{entry['perplexity']:.3f}" for entry in own),
            "none" if far is None else f"{far['perplexity']:.3f}",
        ])  # fmt: skip
    heads = ["model", *map(str, contexts), f"beyond {result['window']} tokens"]
    yield Table("perplexity per token by context", heads, rows)
    rows = [[name, *(f"{size:,}" for size in sizes.values())]
            for name, sizes in result["state_bytes"].items()]  # fmt: skip
    heads = ["model", *(f"after {tokens:,} tokens" for tokens in STATE_TOKENS)]
    yield Table("bytes of the state of one sequence", heads, rows)
    counts = result["parameters"]
    yield f"parameters: teacher {counts['teacher']:,}, student {counts['student']:,}"


def draw(result: dict[str, Any], curve: list[dict[str, Any]], path: Path) -> None:
    """The loss over the tokens of all stages, and by position in the longest context."""
    with figures.figure(path, columns=2, figsize=(11, 4.5)) as (progress, axis):
        for name in dict.fromkeys(record["stage"] for record in curve):
            own = [record for record in curve if record["stage"] == name]
            tokens = [record["tokens"] for record in own]
            progress.plot(tokens, [r["validation_loss"] for r in own], "o-", label=name)
            progress.plot(tokens, [r["teacher_validation_loss"] for r in own], "k--")
        progress.set(xlabel="tokens read", ylabel="loss on held-out text (dashed: the teacher's)")
        progress.grid(alpha=0.3)
        progress.legend()
        longest = max(entry["context"] for entry in result["measures"])
        for entry in result["measures"]:
            if entry["context"] == longest:
                rows = entry["by_position"]
                axis.plot([r["to"] for r in rows], [r["loss"] for r in rows], "o-",
                          label=entry["model"])  # fmt: skip
        figures.count_tokens(axis)
        axis.axvline(result["window"], color="grey", linestyle=":")
        axis.set(xlabel="tokens of context, up to", ylabel="loss, nats per token")
        axis.grid(alpha=0.3)
        axis.legend()
