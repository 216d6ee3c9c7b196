"""A softmax over the tokens read so far, and its start at nothing."""

import pytest
import torch
from tests.support import relative_rms

from trellis.ops import gated_slots, running_softmax
from trellis.ops.gated_slots import LOGIT_BOUND


def draw(tokens, batch=2, spread=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)
    return (spread * torch.randn(batch, tokens, 3, 4, generator=generator)).to(dtype)


@pytest.mark.parametrize("tokens", [1, 64, 65, 200])
def test_it_is_a_softmax_over_the_past(tokens):
    logits = draw(tokens)
    write, log_decay, total = running_softmax(logits)
    z = logits.logcumsumexp(1)
    assert relative_rms(write, (logits - z).exp()) < 1e-12
    assert relative_rms(log_decay[:, 1:], z[:, :-1] - z[:, 1:]) < 1e-9
    assert relative_rms(total.log(), z[:, -1]) < 1e-12
    assert log_decay[:, 0].exp().max() < 1e-300


def test_means_in_slots():
    """With write and decay of the op, a slot's value is the mean, so constants stay as they are."""
    write, log_decay, _ = running_softmax(draw(100))
    q = k = torch.randn(2, 100, 3, 5, dtype=torch.float64)
    v = torch.full((2, 100, 3, 6), 1.5, dtype=torch.float64)
    y, _ = gated_slots(q, k, v, write, log_decay)
    assert torch.allclose(y, v)


def test_pieces_and_packs_with_gradients():
    logits = draw(150, batch=1).requires_grad_()
    weight = draw(150, batch=1, spread=1.0)

    def gradient(write, log_decay):
        # What the first token decays is nothing, and its gradient from the op is 0.
        loss = (write * weight).sum() + (log_decay[:, 1:] * weight[:, 1:]).sum()
        return torch.autograd.grad(loss, logits)[0]

    write, log_decay, total = running_softmax(logits)
    first, second = logits.split([70, 80], dim=1)
    one = running_softmax(first)
    other = running_softmax(second, one[2])
    joined = [torch.cat(parts, dim=1) for parts in zip(one[:2], other[:2])]
    assert relative_rms(joined[0], write) < 1e-12
    assert relative_rms(other[2], total) < 1e-12
    assert relative_rms(gradient(*joined), gradient(write, log_decay)) < 1e-10

    packed = running_softmax(logits, cu_seqlens=torch.tensor([0, 70, 70, 150]))
    assert relative_rms(packed[0][:, :70], one[0]) < 1e-12
    assert relative_rms(packed[0][:, 70:], running_softmax(second)[0]) < 1e-12
    assert torch.equal(packed[2][1], torch.zeros(3, 4, dtype=torch.float64))


def test_logits_at_their_bounds():
    """The whole range in fp32: from the lowest to the highest logit in one step, and back."""
    logits = draw(130, dtype=torch.float32).sign() * LOGIT_BOUND
    logits[:, :70] = -LOGIT_BOUND
    logits.requires_grad_()
    q = k = v = torch.randn(2, 130, 3, 4)
    write, log_decay, _ = running_softmax(logits)
    y, _ = gated_slots(q, k, v, write, log_decay)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad.abs().max() > 0


def test_a_pack_of_nothing():
    write, log_decay, total = running_softmax(torch.randn(1, 0, 2, 3), cu_seqlens=torch.tensor([0]))
    assert write.shape == log_decay.shape == (1, 0, 2, 3)
    assert total.shape == (0, 2, 3)
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0"):
        running_softmax(torch.randn(1, 5, 2, 3), cu_seqlens=torch.tensor([0]))


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"logits must have shape \[B,T,H,M\]"):
        running_softmax(draw(3)[0])
    with pytest.raises(ValueError, match=r"total must have shape \[N,H,M\] = \[2, 3, 4\]"):
        running_softmax(draw(3), torch.zeros(1, 3, 4))
