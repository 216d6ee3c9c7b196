"""Checkpoints: folders that appear under their name only when they are whole.

RUN/checkpoints/step-00000100/
    shards/*.safetensors  weights and AdamW's moments, one file per process that holds a part
    extra.safetensors     the random state, and the states that the relay hands to the next step
    config.json           the model's configuration, as transformers reads it
    checkpoint.json       step, recipe, versions, counters, and the sha256 of every other file

torch.distributed.checkpoint writes and reads the shards, so that a run can be resumed on another
number of processes or with another strategy. All files are safetensors or JSON: none holds code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from ..data.shards import check_layout
from ..files import parse_json, sha256_of, sync, write_whole
from ..models.config import TrellisConfig
from .distributed import Processes

FORMAT = "trellis-checkpoint"
VERSION = 1
SHARDS = "shards"
EXTRA = "extra.safetensors"
CONFIG = "config.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
_LAYOUT = {
    "step": int, "updates": int, "bad_steps": int, "bad_in_a_row": int, "recipe": {}, "data": str,
    "files": {},
}  # fmt: skip


@dataclass
class Checkpoint:
    """A checkpoint on the disk: its folder, and what its checkpoint.json holds."""

    path: Path
    content: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.content["step"])

    def config(self) -> TrellisConfig:
        """The configuration of the model. Raises ValueError if its file is damaged."""
        path = self.path / CONFIG
        try:
            return TrellisConfig.from_dict(parse_json(path.read_text()))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error


def folder_of(run: Path) -> Path:
    return run / "checkpoints"


def steps_in(run: Path) -> list[int]:
    """The steps of a run's whole checkpoints, oldest first."""
    folder = folder_of(run)
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        int(match[1]) for path in found if (match := re.fullmatch(r"step-(\d+)", path.name))
    )


def path_of(run: Path, step: int) -> Path:
    return folder_of(run) / f"step-{step:08d}"


def open_checkpoint(run: Path, step: int | None = None, verify: bool = True) -> Checkpoint:
    """The newest checkpoint of a run, or that of a step.

    verify: compares the sha256 of every file, not only that of the small config.json.

    Raises:
        FileNotFoundError: the run has no such checkpoint.
        ValueError: a file of the checkpoint is missing or was changed.
    """
    steps = steps_in(run)
    if not steps:
        raise FileNotFoundError(f"there is no checkpoint in {folder_of(run)}")
    if step is not None and step not in steps:
        have = ", ".join(map(str, steps))
        raise FileNotFoundError(f"there is no checkpoint of step {step} in {run}; it has {have}")
    chosen = steps[-1] if step is None else step
    path = path_of(run, chosen)
    older = [other for other in steps if other < chosen]
    advice = "there is no older checkpoint"
    if older:
        advice = f"delete that folder to go on from step {older[-1]}"
    try:
        content = parse_json((path / "checkpoint.json").read_text())
        check_layout(content, {"format": str, "version": int})
        if (content["format"], content["version"]) == (FORMAT, VERSION):
            check_layout(content, _LAYOUT)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / 'checkpoint.json'} is damaged ({error}); {advice}") from error
    if (content["format"], content["version"]) != (FORMAT, VERSION):
        raise ValueError(
            f"{path} has format {content['format']} version {content['version']}; this version of "
            f"trellis reads {FORMAT} version {VERSION}"
        )
    files = content["files"]
    # torch reads every file in the folder of shards, listed or not.
    for name in {*files, *(f"{SHARDS}/{file.name}" for file in (path / SHARDS).glob("*"))}:
        if name not in files:
            raise ValueError(f"{path / name} is not of this checkpoint: move it elsewhere")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path / 'checkpoint.json'} names {name}, which lies elsewhere")
    for name, digest in files.items():
        if not (path / name).is_file():
            raise ValueError(f"{path / name} is missing; {advice}")
        if (verify or name == CONFIG) and sha256_of(path / name) != digest:
            raise ValueError(f"{path / name} was changed: its sha256 is not that noted; {advice}")
    return Checkpoint(path, content)


def save(
    run: Path,
    step: int,
    tensors: dict[str, Tensor],
    extra: dict[str, Tensor],
    config: dict[str, Any],
    content: dict[str, Any],
    keep: int,
    group: Processes,
) -> None:
    """Write a checkpoint, then delete all but the newest `keep`.

    All processes call this with their parts of `tensors`; rank 0 writes everything else. If
    anything fails, the older checkpoints are untouched and no new one appears.
    """
    path = path_of(run, step)
    partial = _partial(path)

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / SHARDS).mkdir(parents=True)

    def finish() -> None:
        write_whole(partial / EXTRA, to_safetensors({k: v.contiguous() for k, v in extra.items()}))
        write_whole(partial / CONFIG, _json(config))
        found = sorted(path for path in partial.rglob("*") if path.is_file())
        files = {path.relative_to(partial).as_posix(): sha256_of(path) for path in found}
        for name in files:
            sync(partial / name)
        whole = {"format": FORMAT, "version": VERSION, "step": step, **content, "files": files}
        write_whole(partial / "checkpoint.json", _json(whole))
        sync(partial / SHARDS)
        sync(partial)
        os.rename(partial, path)
        sync(path.parent)
        for old in steps_in(run)[:-keep]:
            # Under another name first: half a checkpoint must not look like one.
            os.rename(path_of(run, old), _partial(path_of(run, old)))
            shutil.rmtree(_partial(path_of(run, old)))

    try:
        group.on_first(begin)
        _write_shards(partial / SHARDS, tensors)
        group.on_first(finish)
    except BaseException:
        if group.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _partial(path: Path) -> Path:
    """The name of a checkpoint that is being written or deleted."""
    return path.with_name(f".{path.name}.partial")


def clean(run: Path) -> None:
    """Delete the partial checkpoints that interrupted saves have left in a run."""
    for partial in folder_of(run).glob(".step-*.partial"):
        shutil.rmtree(partial)


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """Weights and AdamW's moments by name; of a sharded model, this process's parts of them.

    If the optimizer has not taken a step yet, its moments are made here, as zeros.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        if optimizer is None:
            continue
        state = optimizer.state[parameter]
        if not state:
            state.update({moment: torch.zeros_like(parameter).detach() for moment in MOMENTS})
            # Fused AdamW keeps its count of steps on the weights' device, the others on the CPU.
            device = parameter.device if optimizer.defaults.get("fused") else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        tensors.update({f"{moment}.{name}": state[moment] for moment in MOMENTS})
    return tensors


def load_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, whole or sharded, in place; any number of processes may have saved them."""
    with _quiet():
        try:
            reader = dcp.HuggingFaceStorageReader(path=str(checkpoint.path / SHARDS))
            dcp.load(tensors, storage_reader=reader)
        except (CheckpointException, SafetensorError, KeyError, RuntimeError) as error:
            raise ValueError(f"{checkpoint.path} does not fit this model: {error}") from error


def load_extra(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors of extra.safetensors by name."""
    return load_file(checkpoint.path / EXTRA)


def _write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    try:
        with _quiet():
            writer = dcp.HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
            dcp.save(tensors, storage_writer=writer)
    except CheckpointException as error:  # wraps what happened in any process
        causes = "; ".join(f"process {rank}: {cause[0]}" for rank, cause in error.failures.items())
        raise OSError(f"cannot write the checkpoint {folder}: {causes}") from error


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


class _quiet(warnings.catch_warnings):
    """A context without torch's warning that there is only one process: that is intended."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return entered
