"""The relays of training: they hand states from step to step, or from process to process.

StepRelay: rows that go on in the next batch start there from their final states of this one, which
are cut off from the graph (truncated back-propagation).
ProcessRelay: the parts of a row lie on successive processes. Each process sends its final states to
the next one, and in the backward receives their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..data.batches import Batch
from ..mixers.base import State, map_tensors, named_tensors, rebuild
from ..models.relay import RelayedStates, select
from .distributed import Processes


def _states_for(batch: Batch, rows: State) -> RelayedStates:
    return RelayedStates(rows, batch.first, batch.goes_on, batch.sequences)


class StepRelay:
    """Hands the final states of the last step's rows to this step's batch.

    states: those of every layer, as the relay of the last step collected them; None at the start.
    """

    def __init__(self, states: list[State] | None, batch: Batch):
        self.given = states if bool(batch.goes_on.any()) else None
        self.batch = batch
        #: The final states of every layer, for the relay of the next step.
        self.states: list[State] = []

    def before(self, layer: int) -> RelayedStates | None:
        return None if self.given is None else _states_for(self.batch, self.given[layer])

    def after(self, layer: int, state: State, x: Tensor) -> Tensor:
        rows = select(state, self.batch.last)
        self.states.append(map_tensors(Tensor.detach, rows))
        return x


#: The prefix of states in a checkpoint's extra.safetensors, as in "relay.0.memory.keys".
PREFIX = "relay."


def gathered(relayed: list[list[State] | None], group: Processes) -> dict[str, Tensor]:
    """The states of all rows of the global batch by name, for a checkpoint.

    relayed: for each micro-batch of this process, the states that its StepRelay collected. Only
    rank 0 gets tensors.
    """
    present = [states for states in relayed if states is not None]
    tensors: dict[str, Tensor] = {}
    if len(present) < len(relayed):
        return tensors
    for layer in range(len(present[0])):
        parts = [dict(named_tensors(states[layer])) for states in present]
        for name in parts[0]:
            rows = group.all_rows([part[name] for part in parts])
            if rows is not None:
                tensors[f"{PREFIX}{layer}.{name}"] = rows.cpu()
    return tensors


def restored(
    tensors: dict[str, Tensor], micro: list[range], templates: list[State], device: torch.device
) -> list[list[State] | None]:
    """The states of each micro-batch's rows from a checkpoint; None if it has no states."""
    # Checkpoints of earlier versions have "lanes." in place of "relay.".
    named = {name.replace("lanes.", PREFIX): tensor for name, tensor in tensors.items()}
    saved = {name: tensor for name, tensor in named.items() if name.startswith(PREFIX)}
    if not saved:
        return [None] * len(micro)
    found: list[list[State] | None] = []
    for rows in micro:
        # Copied, so that nothing holds on to the rows of the whole batch.
        mine = {n: t[rows.start : rows.stop].clone().to(device) for n, t in saved.items()}
        found.append([rebuild(t, mine, f"{PREFIX}{i}") for i, t in enumerate(templates)])
    return found


class ProcessRelay:
    """Receives the states of rows from the process with the part before, and sends them on.

    Layer by layer: while one process computes layer l of its part, the process before it computes
    layer l + 1 of its own. In the backward the gradients come back in the reverse order.
    """

    def __init__(self, group: Processes, batch: Batch, templates: list[State]):
        self.batch, self.templates = batch, templates
        index, parts = group.part
        self.source = group.rank - 1 if index > 0 else None
        self.target = group.rank + 1 if index < parts - 1 else None
        self.group, self.device = group.relay_group, group.device

    def before(self, layer: int) -> RelayedStates | None:
        if self.source is None:
            return None
        # The anchor requires a gradient, so that autograd calls the backward of the receiving.
        anchor = torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())
        names = [name for name, _ in named_tensors(self.templates[layer])]
        tensors = _Receive.apply(anchor, len(names), self.source, self.group)
        rows = rebuild(self.templates[layer], dict(zip(names, tensors)))
        return _states_for(self.batch, rows)

    def after(self, layer: int, state: State, x: Tensor) -> Tensor:
        if self.target is None:
            return x
        tensors = [tensor for _, tensor in named_tensors(select(state, self.batch.last))]
        return _Send.apply(x, self.target, self.group, *tensors)


class _Send(torch.autograd.Function):
    """Sends tensors, and returns x; the backward receives the gradients of the tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: int, group: Any, *tensors: Tensor) -> Tensor:
        ctx.target, ctx.group, ctx.kinds = target, group, [(t.dtype, t.shape) for t in tensors]
        # The receiver does not know types and shapes: attention's caches grow.
        dist.send_object_list(ctx.kinds, target, group, x.device)
        for tensor in tensors:
            if tensor.numel():
                dist.send(tensor.detach().contiguous(), dst=target, group=group)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grads = [
            torch.empty(shape, dtype=dtype, device=grad.device) if dtype.is_floating_point else None
            for dtype, shape in ctx.kinds
        ]
        for received in grads:
            if received is not None and received.numel():
                dist.recv(received, src=ctx.target, group=ctx.group)
        return (grad, None, None, *grads)


class _Receive(torch.autograd.Function):
    """Receives tensors; the backward sends their gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, count: int, source: int, group: Any
    ) -> tuple[Tensor, ...]:
        ctx.source, ctx.group, ctx.device = source, group, anchor.device
        kinds: list[Any] = [None] * count
        dist.recv_object_list(kinds, source, group, anchor.device)
        received = [torch.empty(shape, dtype=dtype, device=anchor.device) for dtype, shape in kinds]
        for tensor in received:
            if tensor.numel():
                dist.recv(tensor, src=source, group=group)
        ctx.mark_non_differentiable(*(t for t in received if not t.is_floating_point()))
        ctx.kinds = kinds
        return tuple(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        for grad, (dtype, shape) in zip(grads, ctx.kinds):
            if not dtype.is_floating_point or not shape.numel():
                continue
            assert grad is not None  # torch fills in zeros
            dist.send(grad.to(dtype).reshape(shape).contiguous(), dst=ctx.source, group=ctx.group)
        return torch.zeros((), device=ctx.device), None, None, None
