"""The cross-entropy and its gradient against their definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support import FP32, FP64, normal, relative_rms

from trellis.ops import cross_entropy, cross_entropy_
from trellis.ops.cross_entropy import IGNORED, cross_entropy_reference
from trellis.ops.native import pointwise

pytestmark = pytest.mark.usefixtures("fused_at_every_size")


def targets_of(rows, classes, ignored=0.3):
    generator = torch.Generator().manual_seed(rows)
    targets = torch.randint(0, classes, (rows,), generator=generator)
    return targets.masked_fill(torch.rand(rows, generator=generator) < ignored, IGNORED)


def check(logits, targets):
    losses, gradient = cross_entropy_reference(logits, targets, IGNORED)
    for dtype, bound in ((torch.float32, FP32), (torch.float64, FP64)):
        given_logits = logits.to(dtype)
        kept = given_logits.clone()
        loss = cross_entropy_(kept, targets, gradient=False)
        assert torch.equal(kept, given_logits)
        assert torch.equal(cross_entropy_(kept, targets, gradient=True), loss)
        assert loss.dtype == torch.float32
        assert relative_rms(loss, losses.sum()) < FP32
        assert relative_rms(kept, gradient) < bound


def check_gradient(logits, targets):
    """In fp32, with the gradient, which liger-kernel computes on a GPU."""
    losses, gradient = cross_entropy_reference(logits, targets, IGNORED)
    found = logits.float()
    loss = cross_entropy_(found, targets, gradient=True)
    assert loss.dtype == torch.float32
    assert not loss.requires_grad
    assert relative_rms(loss, losses.sum()) < FP32
    assert relative_rms(found, gradient) < FP32


@given(rows=st.integers(0, 9), classes=st.integers(1, 70), scale=st.sampled_from([0, 1, 50]))
def test_loss_and_gradient_equal_the_reference(rows, classes, scale):
    check(scale * normal(rows, classes), targets_of(rows, classes))


def test_many_classes_and_a_large_offset():
    check(3 * normal(7, 8191) + 1000, targets_of(7, 8191))


def test_a_large_offset_does_not_swallow_a_small_loss():
    logits = normal(64, 1000)
    logits[:, 0] += 12
    logits = (logits + 1e4).float()
    targets = torch.zeros(64, dtype=torch.long)
    expected, _ = cross_entropy_reference(logits.double(), targets, IGNORED)
    assert relative_rms(cross_entropy_(logits, targets, gradient=True), expected.sum()) < FP32


def test_all_ignored():
    logits = normal(3, 5).float()
    assert cross_entropy_(logits, torch.full((3,), IGNORED), gradient=True) == 0
    assert torch.equal(logits, torch.zeros(3, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(dtype, value):
    logits = normal(4, 20).to(dtype)
    clean, targets = logits.clone(), torch.tensor([3, 1, IGNORED, 0])
    cross_entropy_(clean, targets, gradient=True)
    logits[1, 19] = logits[2, 4] = value
    loss = cross_entropy_(logits, targets, gradient=True)
    assert torch.isnan(loss)
    assert torch.isnan(logits[1]).all()
    assert torch.equal(logits[[0, 3]], clean[[0, 3]])
    assert torch.equal(logits[2], torch.zeros(20, dtype=dtype))  # an ignored row asks for nothing


def test_classes_that_are_ruled_out_have_no_gradient():
    logits = torch.tensor([[1.0, float("-inf"), 2.0, *[0.0] * 20]])
    expected = logits.softmax(-1)
    cross_entropy_(logits, torch.tensor([2]), gradient=True)
    assert logits[0, 1] == 0
    assert torch.allclose(logits[0, :2], expected[0, :2])


@pytest.mark.parametrize("target", [5, -1])
def test_targets_are_checked(target):
    with pytest.raises(IndexError, match=r"[Tt]arget"):
        cross_entropy_(torch.ones(2, 5), torch.tensor([0, target]), gradient=True)


def test_strided_logits():
    logits = normal(20, 6).float().T
    expected = cross_entropy_reference(logits.double(), targets_of(6, 20), IGNORED)[1]
    cross_entropy_(logits, targets_of(6, 20), gradient=True)
    assert relative_rms(logits, expected) < FP32


@pytest.mark.parametrize("in_place", [True, False])
def test_on_a_gpu_liger_kernel_computes_it(in_place, monkeypatch):
    """With a stand-in for it and the CPU for a GPU; the kernel itself is in tests/triton."""
    calls = []

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, targets):
            losses, gradient = cross_entropy_reference(logits, targets, IGNORED)
            if in_place and logits.requires_grad:
                gradient = logits.copy_(gradient)
            ctx.save_for_backward(gradient.detach())
            return losses.sum()

        @staticmethod
        def backward(ctx, dloss):
            return ctx.saved_tensors[0], None

    def liger_cross_entropy(logits, targets, *, ignore_index, reduction):
        calls.append((ignore_index, reduction))
        return Loss.apply(logits, targets)

    monkeypatch.setattr(cross_entropy, "LIGER_ON", ("cpu",))
    monkeypatch.setattr(cross_entropy, "liger", lambda: liger_cross_entropy)
    monkeypatch.setattr(pointwise, "takes", lambda *tensors: False)
    check_gradient(normal(9, 70), targets_of(9, 70))
    assert calls == [(IGNORED, "sum")]
    cross_entropy_(torch.zeros(0, 7), torch.zeros(0, dtype=torch.long), gradient=True)
    cross_entropy_(normal(9, 70), targets_of(9, 70), gradient=True)  # fp64
    cross_entropy_(normal(9, 70).float(), targets_of(9, 70), gradient=False)
    monkeypatch.setenv("TRELLIS_BACKEND", "chunked")
    check_gradient(normal(9, 70), targets_of(9, 70))
    assert len(calls) == 1
