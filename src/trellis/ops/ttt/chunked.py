"""The dual form: a mini-batch in matrix products, and its backward by hand. See README.md.

Rows of the tensors here are [G, ...], one for each chunk and head of a segment, round by round;
those of states are [sequences * heads, ...]. A chunk is a mini-batch.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..recurrence import Inputs, Recurrence, Rounds, Tensors
from .reference import EPSILON, ttt_reference, with_one


@dataclasses.dataclass(frozen=True)
class TTT(Recurrence):
    """Inputs q, k, v [.., D] and eta. chunk: tokens of a mini-batch, b.

    State: model [N, H, D+1, D] at the start of the mini-batch under way, the bias its last row;
    pending, like it, the sum of that mini-batch's steps so far; then, unchanged by tokens, theta
    [N, H, b], scale and shift [N, H, D] of the norm, and offset [N], tokens of the mini-batch
    under way that were read before these. Where offset is 0, so is pending.
    """

    chunk: int = 16

    def output(self, inputs: Inputs) -> tuple[int, int]:
        q = inputs[0]
        assert q is not None
        return q.shape[2], q.shape[3]

    def reference(self, inputs: Inputs, state: Tensors) -> tuple[Tensor, Tensors]:
        return ttt_reference(cast(Tensors, inputs), state, self.chunk)

    def forward(self, inputs: Inputs, state: Tensors, rounds: Rounds) -> tuple[Tensor, Tensors]:
        segment = _Segment(self.chunk, cast(Tensors, inputs), state, rounds)
        sweep = segment.sweep(keep=False)
        y = torch.addcmul(segment.shift, _norm(segment.read(sweep)).normal, segment.scale)
        y += segment.q
        after = sweep.model, segment.pending_after(sweep.u)
        return y, (*(new.view_as(state[0]) for new in after), *state[2:])

    def backward(
        self, inputs: Inputs, state: Tensors, rounds: Rounds, dy: Tensor, dstate: Tensors
    ) -> tuple[Inputs, Tensors]:
        segment = _Segment(self.chunk, cast(Tensors, inputs), state, rounds)
        return _Backward(segment, segment.sweep(keep=True), dy, dstate).gradients()


class _Normed(NamedTuple):
    """z centred and scaled to unit variance, without the learnable part."""

    z: Tensor
    normal: Tensor
    mean: Tensor
    rate: Tensor

    def pull_back(self, direction: Tensor) -> Tensor:
        """J direction; J is symmetric."""
        return torch.ops.aten.native_layer_norm_backward(
            direction, self.z, self.z.shape[-1:], self.mean, self.rate,
            None, None, [True, False, False],
        )[0]  # fmt: skip

    def part(self, rows: slice) -> _Normed:
        return _Normed(*(x[rows] for x in self))


def _norm(z: Tensor) -> _Normed:
    return _Normed(z, *torch.native_layer_norm(z, z.shape[-1:], None, None, EPSILON))


class _Sweep(NamedTuple):
    """What the walk over the mini-batches leaves.

    u: gradients at z. read: [q, 1] model. model: after the last mini-batch of each sequence.
    norms, before: z under the norm, and the models before each mini-batch, if they are kept.
    """

    u: Tensor
    read: Tensor
    model: Tensor
    norms: _Normed | None
    before: list[Tensor]


class _Segment:
    """What does not depend on the model, for all mini-batches of a segment at once."""

    def __init__(self, minibatch: int, inputs: Tensors, state: Tensors, rounds: Rounds):
        self.q, self.k, self.v, eta = inputs
        model, pending, theta, scale, shift, _ = state
        heads = model.shape[1]
        c = self.q.shape[1]
        self.minibatch = minibatch
        self.parts = rounds.parts(heads)
        self.model, self.pending = model.flatten(0, 1), pending.flatten(0, 1)
        #: The row of its state for each row here.
        self.owner = torch.cat(
            [torch.arange(part.stop - part.start, device=eta.device) for part in self.parts]
        )
        self.eta = eta[:, :, None]
        self.theta = self._owned(theta)[:, :c, None]
        self.scale, self.shift = self._owned(scale)[:, None], self._owned(shift)[:, None]
        self.curvature = scale.square().flatten(0, 1)[:, None]
        #: scale * (scale * normal + shift - target) = curvature * normal + slant
        self.excess = self.shift - self.v + self.k
        self.slant = self.scale * self.excess

        # Keys above queries: the model multiplies both at once.
        self.both = with_one(torch.cat([self.k, self.q], dim=1))
        self.key, self.query = self.both[:, :c], self.both[:, c:]
        self.step = self.eta * self.key
        self.products = torch.bmm(self.query, self.key.transpose(1, 2))
        self.weights = (self.theta * self.products * self.eta.transpose(1, 2)).tril()

        empty, first = rounds.empty, self.parts[0]
        #: Rows whose mini-batch ends here, [G, 1, 1].
        self.ends = eta.new_full((len(eta), 1, 1), float(c == minibatch))
        if empty is not None and c == minibatch:
            self.ends *= (~empty[:, -1]).repeat_interleave(heads)[:, None, None]
        #: The factor of the whole mini-batch's steps.
        self.factor = self.ends * self.theta[:, -1:]
        self.last_step = self.factor * self.step
        #: Whether a mini-batch is continued, which only the first of a sequence can be.
        self.carried = empty is not None and bool(empty[: rounds.counts[0], 0].any())
        self.first = first
        #: The last row of each sequence and head, and whether its mini-batch is left open.
        self.last = torch.empty(first.stop, dtype=torch.long, device=eta.device)
        for part in self.parts:
            self.last[: part.stop - part.start] = torch.arange(
                part.start, part.stop, device=eta.device
            )
        self.open = 1 - self.ends[self.last]
        #: Open still since the call before: the first mini-batch is the last.
        self.still = self.open * self.last.lt(first.stop)[:, None, None] if self.carried else None

    def _owned(self, per_head: Tensor) -> Tensor:
        return per_head.flatten(0, 1).index_select(0, self.owner)

    def sweep(self, keep: bool) -> _Sweep:
        """Mini-batch after mini-batch: the only part that is sequential."""
        c = self.q.shape[1]
        model = self.model.clone()
        u, products, norms, before = [], [], [], []
        for part in self.parts:
            now = model[: part.stop - part.start]
            both = torch.bmm(self.both[part], now)
            norm = _norm(both[:, :c].contiguous())
            error = torch.addcmul(self.slant[part], norm.normal, self.curvature[: len(now)])
            gradient = norm.pull_back(error)
            if keep:
                before.append(now.clone())
                norms.append(norm)
            u.append(gradient)
            products.append(both[:, c:])
            now.baddbmm_(self.last_step[part].transpose(1, 2), gradient, alpha=-1)
            if self.carried and part is self.first:
                now -= self.factor[part] * self.pending
        return _Sweep(
            torch.cat(u), torch.cat(products), model,
            _Normed(*(torch.cat(parts) for parts in zip(*norms))) if keep else None, before,
        )  # fmt: skip

    def read(self, sweep: _Sweep) -> Tensor:
        """[q, 1] times the model after each token's own step."""
        read = torch.baddbmm(sweep.read, self.weights, sweep.u, alpha=-1)
        if self.carried:
            rows = self.first
            read[rows] -= self.theta[rows] * torch.bmm(self.query[rows], self.pending)
        return read

    def pending_after(self, u: Tensor) -> Tensor:
        if not self.open.any():
            return torch.zeros_like(self.pending)
        pending = torch.bmm(self.step[self.last].transpose(1, 2), u[self.last])
        pending *= self.open
        return pending if self.still is None else torch.addcmul(pending, self.still, self.pending)


class _Backward:
    """Gradients of one segment. Names as in _Segment, with a d before them."""

    def __init__(self, segment: _Segment, sweep: _Sweep, dy: Tensor, dstate: Tensors):
        self.segment, self.sweep = segment, sweep
        self.dy, self.dstate = dy, dstate
        self.dmodel = dstate[0].flatten(0, 1).clone()
        self.dpending = torch.zeros_like(segment.pending)
        self.dtheta = torch.zeros_like(segment.theta)
        self.dfactor = torch.zeros_like(segment.factor)

    def gradients(self) -> tuple[Inputs, Tensors]:
        s, u = self.segment, self.sweep.u
        c = s.q.shape[1]
        norm = _norm(s.read(self.sweep))
        dread = norm.pull_back(self.dy * s.scale)
        du = torch.bmm(s.weights.transpose(1, 2), dread).neg_()
        dstep = self._through_pending(du)
        if s.carried:
            dquery_carried = self._through_carried_read(dread)
        derror, dlast_step, dboth = self._sweep_back(du, dread)

        # The weights of steps in reads.
        dweights = torch.bmm(dread, u.transpose(1, 2)).neg_().tril_()
        by_product = dweights * s.products
        self.dtheta += torch.bmm(by_product, s.eta)
        deta = torch.bmm(by_product.transpose(1, 2), s.theta)
        dweights *= s.theta
        dweights *= s.eta.transpose(1, 2)
        dkey = dboth[:, :c].baddbmm_(dweights.transpose(1, 2), s.query)
        dquery = dboth[:, c:].baddbmm_(dweights, s.key)
        if s.carried:
            dquery[s.first] += dquery_carried

        # The steps themselves.
        self.dfactor += _dot(s.step, dlast_step).sum(1, keepdim=True)
        dstep += s.factor * dlast_step
        dkey += s.eta * dstep
        deta += _dot(s.key, dstep)
        self.dtheta[:, -1:] += s.ends * self.dfactor

        # The targets and the norm's parameters.
        normal = cast(_Normed, self.sweep.norms).normal
        dtarget = -s.scale * derror
        dscale = (self.dy * norm.normal).sum(1) + (derror * s.excess).sum(1)
        dscale += 2 * s.scale[:, 0] * (derror * normal).sum(1)
        dshift = self.dy.sum(1) - dtarget.sum(1)
        dinputs = self.dy + dquery[..., :-1], dkey[..., :-1] - dtarget, dtarget, deta[..., 0]
        return dinputs, self._states(dscale, dshift)

    def _sweep_back(self, du: Tensor, dread: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the last mini-batch to the first: gradients of error, last_step and both."""
        s, sweep = self.segment, self.sweep
        norms = cast(_Normed, sweep.norms)
        error = torch.addcmul(s.slant, norms.normal, s.scale.square())
        tilt = norms.normal * error
        tilt = tilt.mean(-1, keepdim=True)
        dlast_step, dboth = torch.empty_like(s.step), torch.empty_like(s.both)
        derror = torch.empty_like(du)
        for part, before in zip(reversed(s.parts), reversed(sweep.before)):
            dmodel = self.dmodel[: len(before)]
            if s.carried and part is s.first:
                self.dfactor[part] -= (s.pending * dmodel).sum((1, 2), keepdim=True)
                self.dpending -= s.factor[part] * dmodel
            norm, u = norms.part(part), sweep.u[part]
            torch.bmm(u, dmodel.transpose(1, 2), out=dlast_step[part])
            w = torch.baddbmm(du[part], s.last_step[part], dmodel, alpha=-1)
            turned = norm.pull_back(w)
            dz = norm.pull_back(s.curvature[: len(before)] * turned)
            # The derivative of J itself, in the direction w.
            bend = norm.normal * (w * u).mean(-1, keepdim=True)
            bend += turned * tilt[part]
            bend += u * (w * norm.normal).mean(-1, keepdim=True)
            dz -= norm.rate * bend
            derror[part] = turned
            both = torch.cat([dz, dread[part]], dim=1)
            torch.bmm(both, before.transpose(1, 2), out=dboth[part])
            dmodel.baddbmm_(s.both[part].transpose(1, 2), both)
        return derror, dlast_step.neg_(), dboth

    def _through_pending(self, du: Tensor) -> Tensor:
        """From the steps that are left open at the end. Adds to du; the gradient of step."""
        s = self.segment
        dstep = torch.zeros_like(s.step)
        if s.open.any():
            dpending = s.open * self.dstate[1].flatten(0, 1)
            du[s.last] += torch.bmm(s.step[s.last], dpending)
            dstep[s.last] += torch.bmm(self.sweep.u[s.last], dpending.transpose(1, 2))
            if s.still is not None:
                self.dpending += s.still * dpending
        return dstep

    def _through_carried_read(self, dread: Tensor) -> Tensor:
        """From the reads of steps of the call before. The gradient of the first queries."""
        s, rows = self.segment, self.segment.first
        query, theta = s.query[rows], s.theta[rows]
        self.dpending.baddbmm_((theta * query).transpose(1, 2), dread[rows], alpha=-1)
        dscaled = torch.bmm(dread[rows], s.pending.transpose(1, 2)).neg_()
        self.dtheta[rows] += _dot(dscaled, query)
        return theta * dscaled

    def _states(self, dscale: Tensor, dshift: Tensor) -> Tensors:
        s = self.segment
        dtheta = torch.nn.functional.pad(
            self.dtheta[..., 0], (0, s.minibatch - self.dtheta.shape[1])
        )
        after = self.dstate
        constants = (
            d + torch.zeros_like(d).flatten(0, 1).index_add_(0, s.owner, rows).view_as(d)
            for d, rows in zip(after[2:5], (dtheta, dscale, dshift))
        )
        moving = (self.dmodel.view_as(after[0]), self.dpending.view_as(after[1]))
        return *moving, *constants, after[5]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)
