"""Who hands states into and out of the layers while a batch is read.

Carrier: from step to step, for rows that go on in the next batch (truncated back-propagation).
SegmentRelay: from process to process, for rows that are shared; gradients travel back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..data.batches import Batch
from ..mixers.base import State, map_tensors, named_tensors, rebuild
from ..models.carry import Carried, select
from .distributed import Processes


class Carrier:
    """Keeps the final states of a batch's rows for the next batch."""

    def __init__(self, states: list[State] | None, batch: Batch):
        self.given = states if bool(batch.goes_on.any()) else None
        self.batch = batch
        self.states: list[State] = []

    def before(self, layer: int) -> Carried | None:
        if self.given is None:
            return None
        batch = self.batch
        return Carried(self.given[layer], batch.first, batch.goes_on, batch.sequences)

    def after(self, layer: int, state: State, x: Tensor) -> Tensor:
        rows = select(state, self.batch.last)
        self.states.append(map_tensors(Tensor.detach, rows))
        return x


class SegmentRelay:
    """Receives the states of a row from the process with the part before; sends them on.

    Layer after layer: while one process computes layer l of its part, the one before it is at
    layer l + 1 of its own. In the backward the gradients come back in the reverse order.
    """

    def __init__(self, group: Processes, batch: Batch, templates: list[State]):
        self.batch, self.templates = batch, templates
        index, parts = group.part
        self.source = group.rank - 1 if index > 0 else None
        self.target = group.rank + 1 if index < parts - 1 else None
        self.group, self.device = group.relay_group, group.device

    def before(self, layer: int) -> Carried | None:
        if self.source is None:
            return None
        # Something that requires a gradient, so that the received states do.
        anchor = torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())
        names = [name for name, _ in named_tensors(self.templates[layer])]
        tensors = _Receive.apply(anchor, len(names), self.source, self.group)
        rows = rebuild(self.templates[layer], dict(zip(names, tensors)))
        batch = self.batch
        return Carried(rows, batch.first, batch.goes_on, batch.sequences)

    def after(self, layer: int, state: State, x: Tensor) -> Tensor:
        if self.target is None:
            return x
        tensors = [tensor for _, tensor in named_tensors(select(state, self.batch.last))]
        return _Send.apply(x, self.target, self.group, *tensors)


class _Send(torch.autograd.Function):
    """Sends tensors, and returns x; the backward receives their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: int, group: Any, *tensors: Tensor) -> Tensor:
        ctx.target, ctx.group = target, group
        ctx.likes = [(t.shape, t.dtype, t.device) for t in tensors]
        for tensor in tensors:
            _send(tensor, target, group)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grads: list[Tensor | None] = []
        for shape, dtype, device in ctx.likes:
            if not dtype.is_floating_point:
                grads.append(None)
                continue
            buffer = torch.empty(shape, dtype=dtype, device=device)
            if buffer.numel():
                dist.recv(buffer, src=ctx.target, group=ctx.group)
            grads.append(buffer)
        return (grad, None, None, *grads)


class _Receive(torch.autograd.Function):
    """Receives tensors; the backward sends their gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, count: int, source: int, group: Any
    ) -> tuple[Tensor, ...]:
        ctx.source, ctx.group, ctx.device = source, group, anchor.device
        received = tuple(_receive(anchor.device, source, group) for _ in range(count))
        ctx.mark_non_differentiable(*(t for t in received if not t.is_floating_point()))
        ctx.likes = [(t.shape, t.dtype) for t in received]
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        for grad, (shape, dtype) in zip(grads, ctx.likes):
            if not dtype.is_floating_point or not shape.numel():
                continue
            assert grad is not None  # torch fills in zeros
            dist.send(grad.to(dtype).reshape(shape).contiguous(), dst=ctx.source, group=ctx.group)
        return torch.zeros((), device=ctx.device), None, None, None


#: What a state may consist of.
_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
_MOST_DIMENSIONS = 8


def _send(tensor: Tensor, target: int, group: Any) -> None:
    header = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    header += [0] * (_MOST_DIMENSIONS + 2 - len(header))
    dist.send(torch.tensor(header, device=tensor.device), dst=target, group=group)
    if tensor.numel():
        dist.send(tensor.detach().contiguous(), dst=target, group=group)


def _receive(device: torch.device, source: int, group: Any) -> Tensor:
    header = torch.empty(_MOST_DIMENSIONS + 2, dtype=torch.int64, device=device)
    dist.recv(header, src=source, group=group)
    kind, dimensions, *shape = header.tolist()
    tensor = torch.empty(shape[:dimensions], dtype=_DTYPES[kind], device=device)
    if tensor.numel():
        dist.recv(tensor, src=source, group=group)
    return tensor
