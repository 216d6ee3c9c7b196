"""The processes of a run, and how a model is spread over them.

`torchrun` starts several processes; without it there is one, and nothing here communicates. With
train.sequence_parallel = S, the processes of rank d*S to d*S + S - 1 share the d-th slice of the
rows: each of them has a part of every row.
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

from ..models.modeling import TrellisForCausalLM
from ..models.relay import aligned
from .recipe import Recipe


@dataclass(frozen=True)
class Processes:
    """This process (its rank) among all processes of the run (world)."""

    rank: int
    world: int
    device: torch.device
    sequence_parallel: int  # processes that share a row
    relay_group: Any  # torch's group of those processes; None if there is one per row

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def part(self) -> tuple[int, int]:
        """(index, count): this process has part `index` of the `count` parts of every row."""
        return self.rank % self.sequence_parallel, self.sequence_parallel

    def micro_rows(self, recipe: Recipe) -> list[range]:
        """The rows of this process in equal micro-batches of at most train.micro_tokens tokens.

        A micro-batch has at least one row, even if that is longer.
        """
        index, groups = (n // self.sequence_parallel for n in (self.rank, self.world))
        count = recipe.rows // groups
        tokens = recipe.data.context // self.sequence_parallel
        fitting = max(1, recipe.train.micro_tokens // tokens)
        size = max(n for n in range(1, min(fitting, count) + 1) if count % n == 0)
        starts = range(index * count, (index + 1) * count, size)
        return [range(start, start + size) for start in starts]

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def on_first(self, function: Callable[[], object]) -> None:
        """Calls a function on rank 0; if it fails there, all processes raise the same error."""
        failed: Exception | None = None
        if self.first:
            try:
                function()
            except (ValueError, OSError) as error:
                if self.world == 1:
                    raise
                failed = error
        if self.world > 1:
            box = [failed]
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
            if box[0] is not None:
                raise box[0]

    def union(self, names: list[str]) -> list[str]:
        """The names that any process gives, each once, in the order of ranks."""
        if self.world == 1:
            return names
        parts: list[list[str]] = [[] for _ in range(self.world)]
        dist.all_gather_object(parts, names)
        return list(dict.fromkeys(name for part in parts for name in part))

    def summed(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.world > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def all_rows(self, tensors: list[Tensor]) -> Tensor | None:
        """The rows of all processes' tensors, joined in order, on rank 0; None on the others.

        Attention's caches may differ in length: zeros go in front of the shorter ones.
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
    """This process among those that torchrun started; the only one without torchrun.

    Raises:
        ValueError: the rows of a batch, or the parts of a row, cannot be shared evenly.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    device = _device(recipe.train.device)
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
    if world == 1:
        yield Processes(0, 1, device, 1, None)
        return
    started = not dist.is_initialized()
    if started:
        # gloo beside nccl: small things, such as error messages, are sent on the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        relay_group = None
        if parts > 1:  # every process takes part in making every group
            relay_group, _ = dist.new_subgroups(parts)
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


def spread(model: TrellisForCausalLM, recipe: Recipe, group: Processes) -> nn.Module:
    """The module to call in training: the model itself, or DDP around it; FSDP2 shards in place.

    With sequence_parallel it is the model itself, and `reduce_gradients` averages the gradients
    after the backward: DDP would exchange them while other processes still wait for states.
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


def synchronised(called: nn.Module, last: bool) -> contextlib.AbstractContextManager[None]:
    """A context in which the backward exchanges gradients only for the last micro-batch."""
    if isinstance(called, FSDPModule):
        called.set_requires_gradient_sync(last)
    if isinstance(called, DistributedDataParallel) and not last:
        return called.no_sync()
    return contextlib.nullcontext()


def reduce_gradients(model: nn.Module, group: Processes) -> None:
    """Averages gradients over all processes where DDP and FSDP do not: with sequence_parallel."""
    if group.sequence_parallel == 1:
        return
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for work in [dist.all_reduce(grad, async_op=True) for grad in grads]:
        work.wait()
    for grad in grads:
        grad.div_(group.world)


def reshard(model: nn.Module) -> None:
    """Frees the whole weights that FSDP gathered for a forward without a backward.

    The optimizer works on the shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; every process must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
