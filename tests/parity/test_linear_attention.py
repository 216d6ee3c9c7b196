"""Linear attention beside the definitions of flash-linear-attention."""

import pytest
import torch
from tests.support import projection

from trellis.ops import LinearAttentionState, linear_attention

BATCH, TOKENS, HEADS, KEY, VALUE = 2, 128, 3, 16, 24
SCALE = 0.3


def problem(seed=0):
    """Queries and keys above zero, for the normaliser."""
    generator = torch.Generator().manual_seed(seed)
    lead = (BATCH, TOKENS, HEADS)
    q, k = torch.rand(2, *lead, KEY, generator=generator).unbind()
    v = torch.randn(*lead, VALUE, generator=generator)
    log_decay = -0.3 * torch.rand(*lead, generator=generator)
    memory = torch.randn(BATCH, HEADS, KEY, VALUE, generator=generator)
    normalizer = torch.rand(BATCH, HEADS, KEY, generator=generator)
    names = ("q", "k", "v", "log_decay", "memory", "normalizer")
    return dict(zip(names, (q, k, v, log_decay, memory, normalizer)))


def results(call, tensors):
    """All that `call` returns, and the gradients of a random function of it."""
    given = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    found = call(**given)
    loss = projection(found.values(), torch.float32)
    gradients = torch.autograd.grad(loss, list(given.values()))
    return found | {f"d {name}": gradient for name, gradient in zip(given, gradients)}


def compare(agrees, what, peer, theirs, tensors, **options):
    def ours(q, k, v, log_decay=None, memory=None, normalizer=None):
        y, final = linear_attention(
            q, k, v, log_decay, scale=SCALE,
            initial_state=None if memory is None else LinearAttentionState(memory, normalizer),
            output_final_state=True, backend="chunked", **options,
        )  # fmt: skip
        found = {"y": y, "final memory": final.memory, "final normaliser": final.normalizer}
        return {name: found[name] for name in outputs}

    other = results(theirs, tensors)
    outputs = [name for name in other if not name.startswith("d ")]
    one = results(ours, tensors)
    agrees(what, peer, {name: (one[name], other[name]) for name in other})


def only(*names):
    return {name: tensor for name, tensor in problem().items() if name in names}


@pytest.mark.fla
def test_linear_attention(agrees, fla):
    naive = fla("ops.linear_attn.naive")

    def theirs(q, k, v, memory):
        y, final = naive.naive_recurrent_linear_attn(q, k, v, SCALE, memory, True)
        return {"y": y, "final memory": final}

    peer = "fla naive_recurrent_linear_attn"
    compare(agrees, "linear attention", peer, theirs, only("q", "k", "v", "memory"))


@pytest.mark.fla
def test_normaliser(agrees, fla):
    naive = fla("ops.linear_attn.naive")

    def theirs(q, k, v, memory, normalizer):
        start = (memory, normalizer[:, None])
        y, (final, sums) = naive.naive_recurrent_linear_attn(q, k, v, SCALE, start, True, True)
        return {"y": y, "final memory": final, "final normaliser": sums[:, 0]}

    what, peer = "linear attention, normalised", "fla naive_recurrent_linear_attn"
    tensors = only("q", "k", "v", "memory", "normalizer")
    compare(agrees, what, peer, theirs, tensors, normalize=True, eps=1e-10)


@pytest.mark.fla
@pytest.mark.parametrize("normalize", [False, True])
def test_chunks(agrees, fla, normalize):
    naive = fla("ops.linear_attn.naive")

    def theirs(q, k, v):
        return {"y": naive.naive_chunk_linear_attn(q, k, v, SCALE, normalize)}

    what = "linear attention" + ", normalised" * normalize
    options = {"normalize": normalize, "eps": 1e-10}
    compare(agrees, what, "fla naive_chunk_linear_attn", theirs, only("q", "k", "v"), **options)


@pytest.mark.fla
@pytest.mark.parametrize("name", ["naive_recurrent_simple_gla", "naive_chunk_simple_gla"])
def test_decay(agrees, fla, name):
    function = getattr(fla("ops.simple_gla.naive"), name)

    def theirs(q, k, v, log_decay, memory):
        y, final = function(
            q, k, v, log_decay, scale=SCALE, initial_state=memory, output_final_state=True
        )
        return {"y": y, "final memory": final}

    tensors = only("q", "k", "v", "log_decay", "memory")
    compare(agrees, "linear attention with decay", f"fla {name}", theirs, tensors)
