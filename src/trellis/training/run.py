"""Runs: folders that hold a recipe, a tokenizer, metrics and checkpoints.

RUN/
    recipe.json, tokenizer.json, metrics.jsonl
    checkpoints/step-.../
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..data.shards import Corpus, TokenStream, open_corpus
from ..data.tokenizer import TextTokenizer, load_tokenizer
from ..files import locked, naming, parse_json, usual_mode, write_json
from ..models.modeling import TrellisForCausalLM
from . import checkpoint as checkpoints
from .distillation import add_low_rank, merge_low_rank
from .distributed import Processes, processes
from .estimate import check_fits
from .loop import Trainer
from .metrics import check_tensorboard
from .recipe import Recipe, from_dict

RECIPE = "recipe.json"
TOKENIZER = "tokenizer.json"
#: In recipe.json, beside the recipe's sections: where its paths led when the run was started.
ABSOLUTE = "absolute_paths"
#: Keys of [data] that are paths.
PATHS = ("path", "validation_path")
#: What may differ when a run is resumed; anything else would make it another run.
CHANGEABLE = (
    "train.steps", "train.tokens", "train.micro_tokens", "train.precision", "train.checkpointing",
    "train.compile", "train.device", "train.strategy", "train.sequence_parallel",
    "train.max_bad_steps", "data.path", "data.validation_path", "data.sources", "log.",
    "checkpoint.",
)  # fmt: skip


def train(
    recipe: Recipe, run: Path, resume: bool = False, dry_run: bool = False
) -> dict[str, Any] | None:
    """Train a new run, or resume one. All inputs are checked before anything is written.

    dry_run: a few steps are measured instead and nothing is written; returns what the whole run
        would take, by `Trainer.dry_run`.

    Raises:
        ValueError, FileNotFoundError: the recipe, the text and the run do not fit together, or one
            of them is missing.
        FileExistsError: a new run's folder has something in it.
        TrainingStopped: the run cannot go on (the newest checkpoint is intact), a signal stopped
            it, or its last steps were not finite.
    """
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(processes(recipe))
        if resume:
            _check_unchanged(recipe, run)
        corpus = _open_data(recipe, "path", run if resume else None)
        validation = validation_part(recipe, corpus, run if resume else None)
        check_fits(recipe, corpus.vocab_size, group)
        if recipe.log.tensorboard:
            check_tensorboard()
        resumed = None
        if resume:
            # Keeps others out: two trainers would overwrite each other's files.
            group.on_first(lambda: stack.enter_context(locked(run)))
            resumed = _newest_checkpoint(recipe, run, corpus, group)
        elif run.exists() and not is_empty(run) and not dry_run:
            raise FileExistsError(
                f"{run} exists already: give another --out, or --resume to go on with it"
            )
        trainer = Trainer(recipe, run, corpus, validation, group, resumed)
        if dry_run:
            return trainer.dry_run()
        group.barrier()
        group.on_first(lambda: _set_up(recipe, run, corpus))
        if not resume:
            group.on_first(lambda: stack.enter_context(locked(run)))
        stopped = trainer.run()
        # DDP holds on to the processes' connections: all processes let go of it before they end.
        del trainer
        gc.collect()
        group.barrier()
        if stopped is not None:
            raise stopped
    return None


def validation_part(
    recipe: Recipe, corpus: Corpus, resumed: Path | None = None
) -> TokenStream | None:
    """The text to validate on; None if the corpus was prepared without a validation part."""
    path = recipe.data.validation_path
    if path is None:
        return corpus.validation if corpus.validation.tokens > 1 else None
    other = _open_data(recipe, "validation_path", resumed)
    ours, theirs = (c.manifest["tokenizer"]["sha256"] for c in (corpus, other))
    if ours != theirs:
        raise ValueError(
            f"data.validation_path {path} was prepared with another tokenizer than data.path: "
            f"its sha256 is {theirs[:12]}..., not {ours[:12]}..."
        )
    return other.train


def is_empty(folder: Path) -> bool:
    """Whether a folder has no files but those, with a dot, that an interrupted start may leave."""
    return folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir())


def _open_data(recipe: Recipe, key: str, resumed: Path | None) -> Corpus:
    """The prepared text at data.path or data.validation_path; `resumed` is the run to resume."""
    path = getattr(recipe.data, key)
    sources = recipe.data.sources if key == "path" else []
    if Path(path).exists() or not (sources or resumed):
        return open_corpus(path)
    text = f"there is no prepared text at {path}"
    if sources:
        text += (
            f"; make it with: trellis data prepare {' '.join(sources)} "
            f"--tokenizer {recipe.data.tokenizer} --out {path}"
        )
    if resumed is not None:
        text = f"{resumed} cannot go on: {text}. If it has moved, add --set data.{key}=FOLDER"
    raise FileNotFoundError(text)


def _set_up(recipe: Recipe, run: Path, corpus: Corpus) -> None:
    """Writes the recipe and the tokenizer into the run's folder."""
    paths = {key: getattr(recipe.data, key) for key in PATHS}
    absolute = {key: str(Path(path).resolve()) for key, path in paths.items() if path is not None}
    content = {**recipe.as_dict(), ABSOLUTE: absolute}
    try:
        run.mkdir(parents=True, exist_ok=True)
        for left in run.glob(f".{RECIPE}.*"):  # by a start that was interrupted
            left.unlink()
        write_json(run / RECIPE, content)
        if not (run / TOKENIZER).exists():
            corpus.tokenizer().save(run)
    except OSError as error:
        raise ValueError(f"the run's folder {run} cannot be written: {error}") from error


def recipe_of(run: Path) -> Recipe:
    """The recipe of a run, as it was last started or resumed.

    Its relative paths are replaced by absolute ones if they lead elsewhere from the present
    working directory.

    Raises:
        FileNotFoundError: the folder is not a run.
        ValueError: the file is damaged.
    """
    path = run / RECIPE
    if not path.is_file():
        raise FileNotFoundError(f"{run} is not a run: it has no {RECIPE}")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it must hold an object, not {type(content).__name__}")
        absolute = content.pop(ABSOLUTE, {})
        recipe = from_dict(content)
        places = {key: Path(absolute[key]) for key in PATHS if key in absolute}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    for key, place in places.items():
        if Path(getattr(recipe.data, key) or "").resolve() != place and place.exists():
            setattr(recipe.data, key, str(place))
    return recipe


def _check_unchanged(recipe: Recipe, run: Path) -> None:
    before = recipe_of(run).as_dict()
    changed = [
        f"{section}.{key}"
        for section, values in recipe.as_dict().items()
        for key in {**before.get(section, {}), **values}
        if values.get(key) != before.get(section, {}).get(key)
    ]
    refused = [name for name in changed if not name.startswith(CHANGEABLE)]
    if refused:
        raise ValueError(
            f"{run} was started with other values of {', '.join(refused)}: resume it without "
            "changing them, or start a new run"
        )


def _newest_checkpoint(
    recipe: Recipe, run: Path, corpus: Corpus, group: Processes
) -> checkpoints.Checkpoint | None:
    """The checkpoint to resume from; None if the run was stopped before its first."""
    if not checkpoints.steps_in(run):
        return None
    # One process reads every byte, and the others trust it.
    group.on_first(lambda: checkpoints.open_checkpoint(run))
    found = checkpoints.open_checkpoint(run, verify=False)
    if found.content["data"] != corpus.fingerprint:
        raise ValueError(
            f"{recipe.data.path} is not the text that {run} was trained on: its manifest's hash is "
            f"{corpus.fingerprint[:12]}..., the checkpoint's {found.content['data'][:12]}..."
        )
    if found.step >= recipe.steps:
        raise ValueError(
            f"{run} has finished its {recipe.steps} steps already; give it more with "
            "--set train.steps=..."
        )
    return found


def load_run(
    path: Path, step: int | None = None, device: torch.device | str = "cpu"
) -> tuple[TrellisForCausalLM, TextTokenizer]:
    """The model and the tokenizer of a run's checkpoint, or of a folder that `export` wrote.

    Raises:
        FileNotFoundError: the folder is neither.
        ValueError: a file in it is damaged.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"there is no run or exported model at {path}")
    exported = (path / "config.json").is_file()
    if not exported and not (path / RECIPE).is_file():
        raise FileNotFoundError(
            f"{path} is neither a run nor an exported model: it has no {RECIPE} and no config.json"
        )
    tokenizer = load_tokenizer(path / TOKENIZER)
    if exported:
        if step is not None:
            raise ValueError(f"{path} is an exported model without steps; got step {step}")
        model = TrellisForCausalLM.from_pretrained(path)
    else:
        found = checkpoints.open_checkpoint(path, step)
        model = TrellisForCausalLM(found.config())
        rank = found.content["recipe"].get("train", {}).get("lora", 0)
        if rank:
            add_low_rank(model, rank)
        checkpoints.load_tensors(found, checkpoints.training_tensors(model, None))
        if rank:
            merge_low_rank(model)
    if model.config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the tokenizer in {path} has {tokenizer.vocab_size} tokens, but the model "
            f"{model.config.vocab_size}: it is not the one that the model was trained with"
        )
    return model.to(device).eval(), tokenizer


def export(run: Path, out: Path, step: int | None = None) -> None:
    """Write a checkpoint as a folder for from_pretrained: weights, configuration, tokenizer.

    Raises:
        FileExistsError: `out` has something in it.
    """
    check_new(out)
    save_model(*load_run(run, step), out)


def check_new(out: Path) -> None:
    """Raises FileExistsError if a folder to write has something in it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists already: give another --out")


def save_model(model: TrellisForCausalLM, tokenizer: TextTokenizer, out: Path) -> None:
    """Write a model as a folder for from_pretrained, whole or not at all."""
    from transformers import PreTrainedTokenizerFast

    end = tokenizer.end_of_document
    name = None if end is None else tokenizer.inner.id_to_token(end)
    # Padding needs a token of the vocabulary; the attention mask keeps it from being read.
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer.inner, eos_token=name, pad_token=name)
    model.config.pad_token_id = model.generation_config.pad_token_id = end
    try:
        with _whole_folder(out) as folder, naming(out):
            model.save_pretrained(folder)
            fast.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(f"{out} cannot be written: {error}") from error


@contextlib.contextmanager
def _whole_folder(path: Path) -> Iterator[Path]:
    """A new folder to write into that gets its name at the end, and is deleted on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield folder
        os.chmod(folder, usual_mode(0o777))  # mkdtemp's is for its owner alone
        if path.is_dir():
            path.rmdir()
        os.rename(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
