"""Runs: folders that hold a recipe, a tokenizer, metrics and checkpoints.

RUN/
    recipe.json, tokenizer.json, metrics.jsonl
    checkpoints/step-.../
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from pathlib import Path
from typing import Any

import torch

from ..data.shards import Corpus, TokenStream, open_corpus
from ..data.tokenizer import TextTokenizer, load_tokenizer
from ..files import locked, write_whole
from ..models.config import TrellisConfig
from ..models.modeling import TrellisForCausalLM
from . import checkpoint as checkpoints
from .distributed import Processes, processes
from .loop import Trainer
from .metrics import check_tensorboard
from .recipe import Recipe, from_dict

RECIPE = "recipe.json"
TOKENIZER = "tokenizer.json"
#: What may differ when a run is resumed; anything else would make it another run.
CHANGEABLE = (
    "train.steps", "train.tokens", "train.micro_tokens", "train.precision", "train.checkpointing",
    "train.compile", "train.device", "train.strategy", "train.sequence_parallel",
    "train.max_bad_steps", "data.path", "data.validation_path", "data.sources", "log.",
    "checkpoint.",
)  # fmt: skip


def train(recipe: Recipe, run: Path, resume: bool = False) -> Path:
    """Train a new run, or go on with one. All is checked before anything is written.

    Raises:
        ValueError, FileNotFoundError: what is asked for does not fit together, or is not there.
        FileExistsError: a new run would write into a folder that has something in it.
        TrainingStopped: the run cannot go on.
    """
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(processes(recipe))

        def hold() -> None:
            """Two trainers would write over each other."""
            stack.enter_context(locked(run))

        corpus = _open_data(recipe, recipe.data.path)
        validation = validation_part(recipe, corpus)
        if recipe.log.tensorboard:
            check_tensorboard()
        resumed = None
        if resume:
            _check_unchanged(recipe, run)
            group.on_first(hold)
            resumed = _newest_checkpoint(recipe, run, corpus, group)
        elif run.exists() and not _is_empty(run):
            raise FileExistsError(
                f"{run} exists already: give another --out, or --resume to go on with it"
            )
        trainer = Trainer(recipe, run, corpus, validation, group, resumed)
        group.barrier()
        group.on_first(lambda: _set_up(recipe, run, corpus))
        if not resume:
            group.on_first(hold)
        trainer.run()
        # DDP holds on to the processes' connections: it has to go first, and everywhere.
        del trainer
        gc.collect()
        group.barrier()
    return run


def validation_part(recipe: Recipe, corpus: Corpus) -> TokenStream | None:
    """The text to validate on; None where the corpus was prepared without."""
    path = recipe.data.validation_path
    if path is None:
        return corpus.validation if corpus.validation.tokens > 1 else None
    other = open_corpus(path)
    ours, theirs = (c.manifest["tokenizer"]["sha256"] for c in (corpus, other))
    if ours != theirs:
        raise ValueError(
            f"data.validation_path {path} was prepared with another tokenizer than data.path: "
            f"its sha256 is {theirs[:12]}..., not {ours[:12]}..."
        )
    return other.train


def _is_empty(folder: Path) -> bool:
    """Nothing but what an interrupted start may have left, a file that had no name yet."""
    return folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir())


def _open_data(recipe: Recipe, path: str) -> Corpus:
    if not Path(path).exists() and recipe.data.sources:
        sources = " ".join(recipe.data.sources)
        raise FileNotFoundError(
            f"there is no prepared text at {path}; make it with: trellis data prepare {sources} "
            f"--tokenizer {recipe.data.tokenizer} --out {path}"
        )
    return open_corpus(path)


def _set_up(recipe: Recipe, run: Path, corpus: Corpus) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
        for left in run.glob(f".{RECIPE}.*"):  # of a start that was interrupted
            left.unlink()
        write_whole(run / RECIPE, (json.dumps(recipe.as_dict(), indent=1) + "\n").encode())
        if not (run / TOKENIZER).exists():
            corpus.tokenizer().save(run)
    except OSError as error:
        raise ValueError(f"the run's folder {run} cannot be written: {error}") from error


def recipe_of(run: Path) -> Recipe:
    """The recipe that a run was started with.

    Raises:
        FileNotFoundError: the folder is not a run.
    """
    path = run / RECIPE
    if not path.is_file():
        raise FileNotFoundError(f"{run} is not a run: it has no {RECIPE}")
    return from_dict(json.loads(path.read_text()))


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
    """The checkpoint to go on from; None where the run has not got as far as its first."""
    if not checkpoints.steps_in(run):
        return None
    # One process reads all of it.
    group.on_first(lambda: _verify(run))
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


def _verify(run: Path) -> None:
    checkpoints.open_checkpoint(run)


def load_run(
    path: Path, step: int | None = None, device: torch.device | str = "cpu"
) -> tuple[TrellisForCausalLM, TextTokenizer]:
    """The model and the tokenizer of a run's checkpoint, or of a folder that `export` wrote.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: a file of it is damaged.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"there is no run or exported model at {path}")
    tokenizer = load_tokenizer(path / TOKENIZER)
    if (path / "config.json").is_file():
        if step is not None:
            raise ValueError(f"{path} is an exported model without steps; got step {step}")
        model = TrellisForCausalLM.from_pretrained(path)
    else:
        found = checkpoints.open_checkpoint(path, step)
        config = TrellisConfig.from_dict(json.loads((found.path / "config.json").read_text()))
        model = TrellisForCausalLM(config)
        checkpoints.load_tensors(found, checkpoints.training_tensors(model, None))
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
    from transformers import PreTrainedTokenizerFast

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists already: give another --out")
    model, tokenizer = load_run(run, step)
    partial = out.with_name(f".{out.name}.partial")
    model.save_pretrained(partial)
    end = _token_name(tokenizer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.inner, eos_token=end).save_pretrained(
        partial
    )
    if out.is_dir():
        out.rmdir()
    os.rename(partial, out)


def _token_name(tokenizer: TextTokenizer) -> Any:
    end = tokenizer.end_of_document
    return None if end is None else tokenizer.inner.id_to_token(end)
