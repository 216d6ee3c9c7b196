"""The gate of SwiGLU against its definition."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.support import check_against, normal, run

from trellis.ops import silu_product
from trellis.ops.gates import silu_product_reference

pytestmark = pytest.mark.usefixtures("fused_at_every_size")


@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=4), scale=st.sampled_from([1, 30]))
def test_output_and_gradients_equal_the_reference(shape, scale):
    leaves = (scale * normal(*shape), normal(*shape, seed=1))
    check_against(silu_product_reference, silu_product, leaves)


def test_more_than_one_block():
    check_against(silu_product_reference, silu_product, (normal(3, 3001), normal(3, 3001, seed=1)))


def test_strided_inputs():
    check_against(
        lambda a, b: silu_product_reference(a.T, b[..., ::2]),
        lambda a, b: silu_product(a.T, b[..., ::2]),
        (normal(7, 5), normal(5, 14)),
    )


def test_what_is_not_finite_stays_in_its_place():
    leaves = (normal(40), normal(40, seed=1))
    clean = run(silu_product, leaves, torch.float32)
    leaves[0][7] = float("nan")
    leaves[1][9] = float("inf")
    spoilt = run(silu_product, leaves, torch.float32)
    others = [i for i in range(40) if i not in (7, 9)]
    for one, other in zip(spoilt, clean):
        assert torch.equal(one[others], other[others])
    assert torch.isnan(spoilt[0][7])


def test_large_gates_saturate():
    gate = torch.tensor([-1e30, -200.0, -100.0, 100.0, 1e30])
    y = silu_product(gate, torch.ones(5))
    assert torch.allclose(y, torch.tensor([0.0, 0.0, 0.0, 100.0, 1e30]), atol=1e-8)


def test_gates_at_the_end_of_the_numbers_are_as_in_torch():
    gate = torch.tensor([-float("inf"), -3e38, -1e38, -1e30, -100.0, 1e38, float("inf")])
    y = silu_product(gate, torch.ones(7))
    expected = F.silu(gate)
    assert torch.allclose(y, expected, atol=1e-37, rtol=1e-6, equal_nan=True)
    assert torch.equal(torch.signbit(y), torch.signbit(expected))
    for results in zip(
        run(silu_product, (gate, torch.ones(7)), torch.float32),
        run(silu_product_reference, (gate, torch.ones(7)), torch.float32),
    ):
        assert torch.allclose(*results, atol=1e-6, equal_nan=True)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"up must have shape that of gate = \[2, 4\]; got \[4\]"):
        silu_product(torch.ones(2, 4), torch.ones(4))
