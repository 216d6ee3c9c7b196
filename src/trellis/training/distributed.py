"""Processes: who this one is, and how a model is spread over them.

Started by `torchrun`; without it there is one process and nothing here communicates. With
`sequence_parallel` = S, ranks d*S to d*S + S - 1 share the d-th slice of the rows, each a part of
every row.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ..models.carry import aligned
from ..models.modeling import TrellisForCausalLM
from .recipe import Recipe


@dataclass(frozen=True)
class Processes:
    rank: int
    world: int
    device: torch.device
    sequence_parallel: int
    relay_group: Any  # the process group that hands states on; None with one part per row

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def part(self) -> tuple[int, int]:
        """(index, count): the part of every row that is this process's."""
        return self.rank % self.sequence_parallel, self.sequence_parallel

    def rows(self, rows: int) -> range:
        """The rows of a global batch that are this process's."""
        groups = self.world // self.sequence_parallel
        count = rows // groups
        index = self.rank // self.sequence_parallel
        return range(index * count, (index + 1) * count)

    def micro_rows(self, recipe: Recipe) -> list[range]:
        """The rows of this process in equal parts of at most train.micro_tokens, a row at least."""
        rows = self.rows(recipe.rows)
        tokens = recipe.data.context // self.sequence_parallel
        fitting = max(1, recipe.train.micro_tokens // tokens)
        size = max(n for n in range(1, min(fitting, len(rows)) + 1) if len(rows) % n == 0)
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def on_first(self, function: Callable[[], None]) -> None:
        """Rank 0 calls it; where that fails, all processes raise the same error."""
        failed: tuple[str, str] | None = None
        if self.first:
            try:
                function()
            except (ValueError, OSError) as error:
                if self.world == 1:
                    raise
                failed = ("ValueError" if isinstance(error, ValueError) else "OSError", str(error))
        if self.world > 1:
            box = [failed]
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
            if box[0] is not None:
                kind, text = box[0]
                raise ValueError(text) if kind == "ValueError" else OSError(text)

    def union(self, names: list[str]) -> list[str]:
        """Names from any process, in the order of this one's first."""
        if self.world == 1:
            return names
        parts: list[list[str]] = [[] for _ in range(self.world)]
        dist.all_gather_object(parts, names)
        return list(dict.fromkeys(name for part in parts for name in part))

    def summed(self, values: Tensor) -> Tensor:
        if self.world > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def all_rows(self, tensors: list[Tensor]) -> Tensor | None:
        """The rows of some tensors of all processes in order, on rank 0; None elsewhere.

        Caches of attention differ in length. They are aligned at their ends: zeros go in front.
        """
        shape = torch.tensor([list(tensor.shape[1:]) for tensor in tensors]).amax(0)
        if self.world > 1:
            shape = shape.to(self.device)
            dist.all_reduce(shape, dist.ReduceOp.MAX)
        tensor = torch.cat([aligned(tensor, shape.tolist()) for tensor in tensors])
        if self.world == 1:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts) if self.first else None


@contextlib.contextmanager
def processes(recipe: Recipe) -> Iterator[Processes]:
    """This process among those that torchrun started, if it did.

    Raises:
        ValueError: the rows of a batch, or the parts of a row, do not divide evenly.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    device = _device(recipe.train.device)
    _check(recipe, world)
    if world == 1:
        yield Processes(0, 1, device, 1, None)
        return
    started = not dist.is_initialized()
    if started:
        # gloo beside nccl: small things, such as what went wrong, travel on the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        parts = recipe.train.sequence_parallel
        relay_group = None
        if parts > 1:  # every process takes part in making every group
            starts = range(0, world, parts)
            groups = [dist.new_group(list(range(start, start + parts))) for start in starts]
            relay_group = groups[rank // parts]
        yield Processes(rank, world, device, parts, relay_group)
    finally:
        if started:
            dist.destroy_process_group()


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("train.device is cuda, but this torch finds no such device")
        index = int(os.environ.get("LOCAL_RANK", 0))
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device(name)


def _check(recipe: Recipe, world: int) -> None:
    parts, rows = recipe.train.sequence_parallel, recipe.rows
    if world % parts:
        raise ValueError(
            f"train.sequence_parallel must divide the number of processes, {world}; got {parts}"
        )
    groups = world // parts
    if rows % groups:
        raise ValueError(
            f"the {rows} rows of a batch must divide evenly among {groups} (groups of) processes"
        )


def spread(model: TrellisForCausalLM, recipe: Recipe, group: Processes) -> nn.Module:
    """The model as it is called: itself, in DDP, or sharded in place by FSDP2.

    With parts of rows on several processes it is itself: DDP would exchange gradients while other
    processes still wait for states. `reduce_gradients` does it afterwards.
    """
    if group.world == 1 or group.sequence_parallel > 1:
        return model
    if recipe.train.strategy == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(group.device.type, (group.world,))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    return DistributedDataParallel(
        model, device_ids=[group.device.index] if group.device.type == "cuda" else None
    )


@contextlib.contextmanager
def synchronised(called: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are exchanged in the backward of the last micro-batch only."""
    if isinstance(called, DistributedDataParallel) and not last:
        with called.no_sync():
            yield
        return
    if isinstance(called, FSDPModule):
        called.set_requires_gradient_sync(last)
    yield


def reduce_gradients(model: nn.Module, group: Processes) -> None:
    """The mean over processes, after the backward, where DDP and FSDP do not see to it."""
    if group.sequence_parallel == 1:
        return
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for work in [dist.all_reduce(grad, async_op=True) for grad in grads]:
        work.wait()
    for grad in grads:
        grad.div_(group.world)


def reshard(model: nn.Module) -> None:
    """Sharded weights as the optimizer knows them, also after a forward without a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, as one. Every process must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
