"""Checkpoints: folders that are whole, or not there.

RUN/checkpoints/step-00000100/
    shards/*.safetensors  weights and AdamW's moments, one file per process that holds a part
    extra.safetensors     the random state, and memory states carried to the next batch
    config.json           the model's configuration, as transformers reads it
    checkpoint.json       step, recipe, versions, counters, and the sha256 of every other file

Shards are written and read by torch.distributed.checkpoint, so that another number of processes, or
another strategy, can go on. Nothing in a checkpoint is code: safetensors and JSON alone.
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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from ..files import sha256_of, sync, write_whole
from .distributed import Processes

FORMAT = "trellis-checkpoint"
VERSION = 1
SHARDS = "shards"
EXTRA = "extra.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Checkpoint:
    """A checkpoint on the disk."""

    path: Path
    content: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.content["step"])


def folder_of(run: Path) -> Path:
    return run / "checkpoints"


def steps_in(run: Path) -> list[int]:
    """Steps of the checkpoints of a run, oldest first; unfinished ones have other names."""
    folder = folder_of(run)
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        int(match[1]) for path in found if (match := re.fullmatch(r"step-(\d+)", path.name))
    )


def path_of(run: Path, step: int) -> Path:
    return folder_of(run) / f"step-{step:08d}"


def open_checkpoint(run: Path, step: int | None = None, verify: bool = True) -> Checkpoint:
    """The newest checkpoint of a run, or that of a step, after every byte of it was verified.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file of it is missing or was changed.
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
    advice = (
        f"delete that folder to go on from step {older[-1]}"
        if older
        else "there is no older checkpoint"
    )
    try:
        content = json.loads((path / "checkpoint.json").read_text())
        files = content["files"]
        known = content["format"] == FORMAT and content["version"] == VERSION
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / 'checkpoint.json'} is damaged ({error}); {advice}") from error
    if not known:
        raise ValueError(
            f"{path} has format {content['format']} version {content['version']}; this version of "
            f"trellis reads {FORMAT} version {VERSION}"
        )
    for name, digest in files.items():
        if not (path / name).is_file():
            raise ValueError(f"{path / name} is missing; {advice}")
        if verify and sha256_of(path / name) != digest:
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
    """Write a checkpoint, then delete older ones beyond the newest `keep`.

    All processes call this with their parts of `tensors`; the first writes the rest. Where
    something fails, the older checkpoints are untouched and nothing new is visible.
    """
    path = path_of(run, step)
    partial = _partial(path)

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / SHARDS).mkdir(parents=True)

    def finish() -> None:
        write_whole(partial / EXTRA, to_safetensors({k: v.contiguous() for k, v in extra.items()}))
        write_whole(partial / "config.json", _json(config))
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
    """The name of a checkpoint that is not whole, or no longer."""
    return path.with_name(f".{path.name}.partial")


def clean(run: Path) -> None:
    """Delete what an interrupted save left."""
    for partial in folder_of(run).glob(".step-*.partial"):
        shutil.rmtree(partial)


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """Weights and moments by name; of a sharded model, this process's parts of them.

    The moments of an optimizer that has not taken a step are made here, as zeros.
    """
    if optimizer is not None and not optimizer.state:
        _start_moments(model, optimizer)
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        if optimizer is not None:
            for moment in MOMENTS:
                tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    return tensors


def _start_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        state = {moment: torch.zeros_like(parameter).detach() for moment in MOMENTS}
        # Fused AdamW counts beside the weights, the others on the CPU.
        device = parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        optimizer.state[parameter] = state


def load_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, whole or sharded, in place from a checkpoint that any processes wrote."""
    with _quiet():
        try:
            reader = dcp.HuggingFaceStorageReader(path=str(checkpoint.path / SHARDS))
            dcp.load(tensors, storage_reader=reader)
        except (CheckpointException, SafetensorError, KeyError, RuntimeError) as error:
            raise ValueError(f"{checkpoint.path} does not fit this model: {error}") from error


def load_extra(checkpoint: Checkpoint) -> dict[str, Tensor]:
    with safe_open(checkpoint.path / EXTRA, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


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
    """torch.distributed.checkpoint remarks that there is one process, which is meant."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return entered
