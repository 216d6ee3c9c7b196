"""The loss of a linear head against logits made whole."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.support import relative_rms, small_model, tokens
from torch import nn
from torch.autograd import forward_ad

from trellis.models import loss as module
from trellis.models.loss import IGNORED, next_token_loss


def problem(batch=2, count=9, dim=6, classes=11, dtype=torch.float32, ignored=0.3):
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(batch, count, dim, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, classes, (batch, count), generator=generator)
    skip = torch.rand(batch, count, generator=generator) < ignored
    head = nn.Linear(dim, classes, bias=False).to(dtype)
    return hidden.requires_grad_(), targets.masked_fill(skip, IGNORED), head


def whole(hidden, targets, head):
    logits = F.linear(hidden.double(), head.weight.double())
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def gradients(loss, *tensors):
    return [loss.detach(), *torch.autograd.grad(3 * loss, tensors)]


def wrapped(head):
    """A head that next_token_loss knows nothing of."""
    return lambda x: head(x)


@given(
    count=st.integers(1, 20), chunk=st.integers(1, 50), classes=st.integers(2, 40),
    backend=st.sampled_from(["auto", "reference"]),
)  # fmt: skip
def test_chunks_equal_the_whole(count, chunk, classes, backend):
    hidden, targets, head = problem(count=count, classes=classes)
    targets[0, 0] = 1
    expected = gradients(whole(hidden, targets, head), hidden, head.weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRELLIS_BACKEND", backend)
        patch.setattr("trellis.ops.native.pointwise.SMALLEST", 0)
        for which in (head, wrapped(head)):
            loss = next_token_loss(hidden, targets, which, chunk=chunk)
            assert loss.dtype == torch.float32
            for one, other in zip(gradients(loss, hidden, head.weight), expected):
                assert relative_rms(one, other) < 2e-5


def test_fp64():
    hidden, targets, head = problem(dtype=torch.float64)
    expected = gradients(whole(hidden, targets, head), hidden, head.weight)
    loss = next_token_loss(hidden, targets, head, chunk=4)
    for one, other in zip(gradients(loss, hidden, head.weight), expected):
        assert relative_rms(one, other) < 2e-5


@pytest.mark.parametrize("which", ["hidden", "weight"])
def test_only_one_gradient(which):
    hidden, targets, head = problem()
    leaf, other = (hidden, head.weight) if which == "hidden" else (head.weight, hidden)
    (expected,) = torch.autograd.grad(whole(hidden, targets, head), leaf)
    other.requires_grad_(False)
    loss = next_token_loss(hidden, targets, head, chunk=5)
    loss.backward()
    assert relative_rms(leaf.grad, expected) < 2e-5
    assert other.grad is None


def test_without_gradients_only_the_logits_are_made(monkeypatch):
    hidden, targets, head = problem()
    expected = next_token_loss(hidden, targets, head, chunk=5)
    seen = []
    original = module.cross_entropy_

    def watched(logits, targets, *, gradient):
        seen.append(gradient)
        return original(logits, targets, gradient=gradient)

    monkeypatch.setattr(module, "cross_entropy_", watched)
    with torch.no_grad():
        loss = next_token_loss(hidden, targets, head, chunk=5)
    assert not loss.requires_grad
    assert torch.equal(loss, expected)
    assert seen == [False] * 4
    assert not next_token_loss(
        hidden.detach(), targets, head.requires_grad_(False), chunk=5
    ).grad_fn


def test_the_backward_can_be_run_again():
    hidden, targets, head = problem()
    loss = next_token_loss(hidden, targets, head, chunk=5)
    first = torch.autograd.grad(loss, [hidden, head.weight], retain_graph=True)
    second = torch.autograd.grad(loss, [hidden, head.weight])
    for one, other in zip(first, second):
        assert torch.equal(one, other)


def test_double_backward_is_refused():
    hidden, targets, head = problem()
    loss = next_token_loss(hidden, targets, head, chunk=5)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        gradient.sum().backward()


def test_nothing_to_predict():
    hidden, targets, head = problem(ignored=2.0)
    loss = next_token_loss(hidden, targets, head, chunk=5)
    assert torch.isnan(loss)
    assert next_token_loss(hidden, targets, head, chunk=5, count=4) == 0


def test_count_replaces_the_divisor():
    hidden, targets, head = problem()
    loss = next_token_loss(hidden, targets, head, chunk=5)
    predicted = int((targets != IGNORED).sum())
    for count in (2 * predicted, torch.tensor(2 * predicted)):
        half = next_token_loss(hidden, targets, head, chunk=5, count=count)
        assert torch.allclose(2 * half, loss)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_as_good_as_the_recomputed_loss(autocast):
    hidden, targets, head = problem(count=40, dim=32, classes=300)
    expected = gradients(whole(hidden, targets, head), hidden, head.weight)
    if not autocast:
        hidden, head = hidden.detach().bfloat16().requires_grad_(), copy.deepcopy(head).bfloat16()
    for which in (head, wrapped(head)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = next_token_loss(hidden, targets, which, chunk=16)
        results = gradients(loss, hidden, head.weight)
        assert results[1].dtype == hidden.dtype
        assert results[2].dtype == head.weight.dtype
        for one, other in zip(results, expected):
            assert relative_rms(one, other) < 1e-2


def test_heads_that_are_more_than_a_product_are_called():
    hidden, targets, head = problem()
    biased = nn.Linear(6, 11)
    hooked, replaced = copy.deepcopy(head), copy.deepcopy(head)
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    replaced.forward = lambda x: 2 * F.linear(x, replaced.weight)
    for which, scale in ((hooked, 2), (replaced, 2), (biased, 1)):
        logits = scale * F.linear(hidden, which.weight, which.bias)
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss = next_token_loss(hidden, targets, which, chunk=5)
        assert torch.allclose(loss, expected)


def test_tied_weights():
    """Gradients of the head and of the embedding meet in one weight."""
    ids = tokens(2, 20)
    fused, recomputed = (small_model(loss_tokens=7).train() for _ in range(2))
    assert fused.lm_head.weight is fused.model.embed_tokens.weight
    recomputed.lm_head.register_forward_hook(lambda module, inputs, output: output)
    losses = [model(ids, labels=ids).loss for model in (fused, recomputed)]
    assert torch.allclose(*losses)
    for loss in losses:
        loss.backward()
    for one, other in zip(fused.parameters(), recomputed.parameters()):
        assert relative_rms(one.grad, other.grad) < 2e-5


def test_arguments_are_checked():
    hidden, targets, head = problem()
    for chunk in (0, -1):
        with pytest.raises(ValueError, match=f"chunk must be at least 1; got {chunk}"):
            next_token_loss(hidden, targets, head, chunk=chunk)
    with pytest.raises(
        ValueError, match=r"targets must have shape \[B,T\] = \[2, 9\]; got \[2, 8\]"
    ):
        next_token_loss(hidden, targets[:, 1:], head, chunk=5)
    with pytest.raises(ValueError, match=r"hidden must have shape \[B,T,dim\]; got \[9, 6\]"):
        next_token_loss(hidden[0], targets, head, chunk=5)


@pytest.mark.parametrize("chunk", [5, 50])
def test_forward_mode(chunk):
    hidden, targets, head = problem()
    (gradient,) = torch.autograd.grad(whole(hidden, targets, head), hidden)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(hidden.detach(), gradient)
        found = forward_ad.unpack_dual(next_token_loss(dual, targets, head, chunk=chunk)).tangent
    assert relative_rms(found, gradient.square().sum()) < 2e-5


def test_torch_func():
    hidden, targets, head = problem()
    (expected,) = torch.autograd.grad(whole(hidden, targets, head), hidden)
    found = torch.func.grad(lambda x: next_token_loss(x, targets, head, chunk=50))(hidden.detach())
    assert relative_rms(found, expected) < 2e-5


def test_compiled():
    hidden, targets, head = problem()

    def run(hidden, targets):
        return next_token_loss(hidden, targets, head, chunk=5)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected = gradients(run(hidden, targets), hidden, head.weight)
    for one, other in zip(gradients(compiled(hidden, targets), hidden, head.weight), expected):
        assert relative_rms(one, other) < 1e-6
