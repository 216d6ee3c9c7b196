"""The slot memory of GSA and ABC beside the functions of flash-linear-attention."""

import pytest
import torch
import torch.nn.functional as F
from tests.support import projection

from trellis.ops import gated_slots, running_softmax

pytestmark = pytest.mark.fla

BATCH, TOKENS, HEADS, KEY, VALUE, SLOTS = 2, 150, 3, 16, 24, 20


def problem(*names):
    generator = torch.Generator().manual_seed(0)
    lead = (BATCH, TOKENS, HEADS)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    log_decay = F.logsigmoid(normal(*lead, SLOTS)) / 8
    tensors = {
        "q": normal(*lead, KEY),
        "k": normal(*lead, KEY),
        "v": normal(*lead, VALUE),
        "logits": 4 * normal(*lead, SLOTS),
        "write": 1 - log_decay.exp(),
        "log_decay": log_decay,
        "keys": normal(BATCH, HEADS, SLOTS, KEY),
        "values": normal(BATCH, HEADS, SLOTS, VALUE),
    }
    return {name: tensors[name] for name in names}


def results(call, tensors):
    """y, the final states and the gradients of a random function of them."""
    given = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    found = dict(zip(("y", "final keys", "final values"), call(**given)))
    loss = projection(found.values(), torch.float32)
    gradients = torch.autograd.grad(loss, list(given.values()))
    return found | {f"d {name}": gradient for name, gradient in zip(given, gradients)}


def compare(agrees, what, peer, ours, theirs, tensors):
    one, other = results(ours, tensors), results(theirs, tensors)
    agrees(what, peer, {name: (one[name], other[name]) for name in other})


def ours_in_time(q, k, v, logits):
    write, log_decay, _ = running_softmax(logits)
    y, final = gated_slots(q, k, v, write, log_decay, output_final_state=True, backend="chunked")
    return y, final.keys, final.values


def test_gsa(agrees, fla):
    function = fla("ops.gsa.naive").naive_recurrent_gsa

    def ours(q, k, v, write, log_decay, keys, values):
        y, final = gated_slots(
            q, k, v, write, log_decay,
            initial_state=(keys, values), output_final_state=True, backend="chunked",
        )  # fmt: skip
        return y, final.keys, final.values

    def theirs(q, k, v, write, log_decay, keys, values):
        state = (keys.mT, values)  # their keys are [K, M]
        y, (keys, values) = function(
            q, k, v, s=write, g=log_decay, initial_state=state, output_final_state=True
        )
        return y, keys.mT, values

    tensors = problem("q", "k", "v", "write", "log_decay", "keys", "values")
    compare(agrees, "gated slots", "fla naive_recurrent_gsa", ours, theirs, tensors)


def test_abc(agrees, fla):
    function = fla("ops.abc.naive").naive_recurrent_abc

    def theirs(q, k, v, logits):
        q, k, v, logits = (x.transpose(1, 2) for x in (q, k, v, logits))  # heads first
        y, (keys, values) = function(q, k, v, s=logits, output_final_state=True)
        return y.transpose(1, 2), keys.mT, values

    tensors = problem("q", "k", "v", "logits")
    compare(agrees, "ABC from logits", "fla naive_recurrent_abc", ours_in_time, theirs, tensors)


def test_abc_as_in_the_paper(agrees, fla):
    function = fla("ops.abc.naive").naive_cumsum_abc

    def ours(q, k, v, logits):
        return ours_in_time(q, k, v, logits)[:1]

    def theirs(q, k, v, logits):
        y, _ = function(*(x.transpose(1, 2) for x in (q, k, v, logits)))
        return (y.transpose(1, 2),)

    tensors = problem("q", "k", "v", "logits")
    compare(agrees, "ABC from logits", "fla naive_cumsum_abc", ours, theirs, tensors)
