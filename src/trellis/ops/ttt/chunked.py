"""The dual form: a mini-batch in matrix products, and its backward by hand. See README.md.

Rows of the tensors here are [G, ...], one for each chunk and head of a segment, round by round;
those of states are [sequences * heads, ...]. A chunk is a mini-batch.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from ..recurrence import Inputs, Recurrence, Rounds, Tensors
from .reference import EPSILON, ttt_reference


@dataclasses.dataclass(frozen=True)
class TTT(Recurrence):
    """Inputs q, k, v [.., D] and eta. chunk: tokens of a mini-batch, b.

    State: model [N, H, D+1, D] at the start of the mini-batch under way, the bias its last row;
    pending, like it, the sum of that mini-batch's steps so far; then, unchanged by tokens, theta
    [N, H, b], scale and shift [N, H, D] of the norm, and offset [N], tokens of the mini-batch
    under way that were read before these. Where offset is 0, so is pending.
    """

    chunk: int = 16
    #: The model. No segment after the first continues a mini-batch, so none reads pending.
    changing: ClassVar[int | None] = 1
    adapter = (
        "flash-linear-attention's TTT has a step size for every token that reads the model, not "
        "for every token that is written to it"
    )

    def output(self, inputs: Inputs) -> tuple[int, int]:
        q = cast(Tensors, inputs)[0]
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


def _norm(z: Tensor) -> _Normed:
    return _Normed(z, *torch.native_layer_norm(z, z.shape[-1:], None, None, EPSILON))


class _MiniBatches(NamedTuple):
    """What a backward needs of the mini-batches of one round."""

    model: Tensor  # before them
    norm: _Normed  # of z
    error: Tensor
    u: Tensor
    steps: Tensor


class _Sweep(NamedTuple):
    """What the walk over the mini-batches leaves.

    u: gradients at z. read: [q, 1] model. model: after the last mini-batch of each sequence.
    """

    u: Tensor
    read: Tensor
    model: Tensor
    kept: list[_MiniBatches]


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
        self.slant = torch.addcmul(self.scale * self.shift, self.k - self.v, self.scale)

        # Keys above queries: the model multiplies both at once.
        self.both = self.q.new_empty(len(self.q), 2 * c, self.q.shape[2] + 1)
        self.key, self.query = self.both[:, :c], self.both[:, c:]
        self.key[..., :-1], self.query[..., :-1] = self.k, self.q
        self.both[..., -1] = 1
        self.products = torch.bmm(self.query, self.key.transpose(1, 2))
        self.weights = (self.theta * self.products * self.eta.transpose(1, 2)).tril()

        empty, first = rounds.empty, self.parts[0]
        #: Rows whose mini-batch ends here, [G, 1, 1].
        self.ends = eta.new_full((len(eta), 1, 1), float(c == minibatch))
        if empty is not None and c == minibatch:
            self.ends *= (~empty[:, -1]).repeat_interleave(heads)[:, None, None]
        #: The factor of the whole mini-batch's steps, and what it makes of eta.
        self.factor = self.ends * self.theta[:, -1:]
        self.rate = self.factor * self.eta
        #: Whether a mini-batch is continued, which only the first of a sequence can be.
        self.carried = empty is not None and bool(empty[: rounds.counts[0], 0].any())
        self.first = first
        #: The last row of each sequence and head, and whether its mini-batch is left open.
        self.last = rounds.last_rows(heads, eta.device)
        self.open = 1 - self.ends[self.last]
        #: Open still since the call before: the first mini-batch is the last.
        self.still = self.open * self.last.lt(first.stop)[:, None, None] if self.carried else None

    def _owned(self, per_head: Tensor) -> Tensor:
        return per_head.flatten(0, 1).index_select(0, self.owner)

    def sweep(self, keep: bool) -> _Sweep:
        """Mini-batch after mini-batch: the only part that is sequential."""
        c = self.q.shape[1]
        model = self.model.clone()
        u, products, kept = [], [], []
        for part in self.parts:
            now = model[: part.stop - part.start]
            both = torch.bmm(self.both[part], now)
            norm = _norm(both[:, :c].contiguous())
            error = torch.addcmul(self.slant[part], norm.normal, self.curvature[: len(now)])
            gradient = norm.pull_back(error)
            steps = self.rate[part] * gradient
            if keep:
                kept.append(_MiniBatches(now.clone(), norm, error, gradient, steps))
            u.append(gradient)
            products.append(both[:, c:])
            now.baddbmm_(self.key[part].transpose(1, 2), steps, alpha=-1)
            if self.carried and part is self.first:
                now -= self.factor[part] * self.pending
        return _Sweep(torch.cat(u), torch.cat(products), model, kept)

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
        keys, steps = self.key[self.last], self.open * self.eta[self.last] * u[self.last]
        pending = torch.bmm(keys.transpose(1, 2), steps)
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
        self.deta = torch.zeros_like(segment.eta)

    def gradients(self) -> tuple[Inputs, Tensors]:
        s, u = self.segment, self.sweep.u
        norm = _norm(s.read(self.sweep))
        dread = norm.pull_back(self.dy * s.scale)
        du = torch.bmm(s.weights.transpose(1, 2), dread).neg_()
        dkey_open = self._through_pending(du) if s.open.any() else None
        dquery_carried = self._through_carried_read(dread) if s.carried else None
        derror, dkey, dboth = self._sweep_back(du, dread)

        # The weights of steps in reads.
        dweights = torch.bmm(dread, u.transpose(1, 2)).neg_().tril_()
        by_product = dweights * s.products
        self.dtheta += torch.bmm(by_product, s.eta)
        self.deta += torch.bmm(by_product.transpose(1, 2), s.theta)
        dweights *= s.theta
        dweights *= s.eta.transpose(1, 2)
        dkey.baddbmm_(dweights.transpose(1, 2), s.query)
        dquery = torch.bmm(dweights, s.key)
        c = dkey.shape[1]
        dkey += dboth[:, :c]
        dquery += dboth[:, c:]
        if dkey_open is not None:
            dkey[s.last] += dkey_open
        if dquery_carried is not None:
            dquery[s.first] += dquery_carried
        self.dtheta[:, -1:] += s.ends * self.dfactor

        # The targets and the norm's parameters.
        normal = torch.cat([kept.norm.normal for kept in self.sweep.kept])
        dtarget = -s.scale * derror
        error = torch.addcmul(s.k - s.v, normal, 2 * s.scale)
        dscale = (self.dy * norm.normal).sum(1) + (derror * error.add_(s.shift)).sum(1)
        dshift = self.dy.sum(1) - dtarget.sum(1)
        dinputs = self.dy + dquery[..., :-1], dkey[..., :-1] - dtarget, dtarget, self.deta[..., 0]
        return dinputs, self._states(dscale, dshift)

    def _sweep_back(self, du: Tensor, dread: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the last mini-batch to the first.

        Gradients of error, of key in the steps to the next model, and of both in products with it.
        """
        s = self.segment
        c, size = du.shape[1:]
        dkey, dboth = du.new_empty(*du.shape[:2], size + 1), torch.empty_like(s.both)
        derror, drate = torch.empty_like(du), torch.empty_like(s.rate)
        dproducts = du.new_empty(len(du), 2 * c, size)
        dproducts[:, c:] = dread
        for part, kept in zip(reversed(s.parts), reversed(self.sweep.kept)):
            before, norm, error, u, steps = kept
            dmodel = self.dmodel[: len(before)]
            if s.carried and part is s.first:
                self.dfactor[part] -= (s.pending * dmodel).sum((1, 2), keepdim=True)
                self.dpending -= s.factor[part] * dmodel
            torch.bmm(steps, dmodel.transpose(1, 2), out=dkey[part])
            dsteps = torch.bmm(s.key[part], dmodel)
            drate[part] = _dot(u, dsteps)
            w = torch.addcmul(du[part], s.rate[part], dsteps, value=-1)
            turned = norm.pull_back(w)
            dz = norm.pull_back(s.curvature[: len(before)] * turned)
            # The derivative of J itself, in the direction w.
            bend = norm.normal * _dot(w, u)
            bend.addcmul_(turned, _dot(norm.normal, error))
            bend.addcmul_(u, _dot(w, norm.normal))
            products = dproducts[part]
            torch.addcmul(dz, norm.rate, bend, value=-1 / size, out=products[:, :c])
            derror[part] = turned
            torch.bmm(products, before.transpose(1, 2), out=dboth[part])
            dmodel.baddbmm_(s.both[part].transpose(1, 2), products)
        self.dfactor -= (s.eta * drate).sum(1, keepdim=True)
        self.deta -= s.factor * drate
        return derror, dkey.neg_(), dboth

    def _through_pending(self, du: Tensor) -> Tensor:
        """From the steps that are left open at the end. The gradient of the last keys."""
        s, rows = self.segment, self.segment.last
        u, eta = self.sweep.u[rows], s.eta[rows]
        dpending = s.open * self.dstate[1].flatten(0, 1)
        dsteps = torch.bmm(s.key[rows], dpending)
        du[rows] += eta * dsteps
        self.deta[rows] += _dot(dsteps, u)
        if s.still is not None:
            self.dpending += s.still * dpending
        return torch.bmm(eta * u, dpending.transpose(1, 2))

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
    return torch.linalg.vecdot(a, b)[..., None]
