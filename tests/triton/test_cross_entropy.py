"""liger-kernel's cross-entropy behind ours, in Triton's interpreter. `make test-triton` runs it."""

import os

import pytest
import torch
from tests.ops.test_cross_entropy import check_gradient, targets_of
from tests.support import normal

pytest.importorskip("liger_kernel", reason="liger-kernel is absent; see `make test-triton`")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; see `make test-triton`", allow_module_level=True)

from trellis.ops import cross_entropy, cross_entropy_
from trellis.ops.native import pointwise


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(cross_entropy, "LIGER_ON", ("cpu",))
    monkeypatch.setattr(pointwise, "takes", lambda *tensors: False)


@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (9, 70), (4, 8191)])
def test_loss_and_gradient_equal_the_reference(rows, classes):
    assert cross_entropy._liger_takes(torch.zeros(rows, classes))
    check_gradient(3 * normal(rows, classes), targets_of(rows, classes))


def test_all_ignored():
    logits = normal(3, 5).float()
    logits[1, 2] = float("nan")
    assert cross_entropy_(logits, torch.full((3,), cross_entropy.IGNORED), gradient=True) == 0
    assert torch.equal(logits, torch.zeros(3, 5))
