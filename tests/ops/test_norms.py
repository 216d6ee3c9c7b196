"""The norms against their definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support import check_against, normal, relative_rms, run
from torch import nn

from trellis.ops import gated_norm, norms, rms_norm, unit_length
from trellis.ops.memory.activations import l2norm

pytestmark = pytest.mark.usefixtures("fused_at_every_size")
EPS = 1e-6

CASES = {
    "unit_length": (
        lambda x, gate, weight: unit_length(x),
        lambda x, gate, weight: norms.unit_length_reference(x),
    ),
    "rms_norm": (
        lambda x, gate, weight: rms_norm(x, weight, EPS),
        lambda x, gate, weight: norms.rms_norm_reference(x, weight, EPS),
    ),
    "rms_norm without weight": (
        lambda x, gate, weight: rms_norm(x, None, EPS),
        lambda x, gate, weight: norms.rms_norm_reference(x, None, EPS),
    ),
    "gated_norm": (
        lambda x, gate, weight: gated_norm(x, gate, weight, EPS),
        lambda x, gate, weight: norms.gated_norm_reference(x, gate, weight, EPS),
    ),
    "gated_norm without weight": (
        lambda x, gate, weight: gated_norm(x, gate, None, EPS),
        lambda x, gate, weight: norms.gated_norm_reference(x, gate, None, EPS),
    ),
}
every_norm = pytest.mark.parametrize("name", CASES)


@every_norm
@given(
    lead=st.lists(st.integers(0, 5), max_size=3), size=st.integers(3, 70), seed=st.integers(0, 99)
)
def test_output_and_gradients_equal_the_reference(name, lead, size, seed):
    function, expected = CASES[name]
    shape = (*lead, size)
    leaves = (normal(*shape, seed=seed), 3 * normal(*shape, seed=seed + 1), normal(size, seed=5))
    check_against(expected, function, leaves)


@every_norm
def test_rows_of_one_number(name):
    """Its gradient is the difference of two nearly equal numbers: compared with those."""
    function, expected = CASES[name]
    leaves = (normal(9, 1), normal(9, 1, seed=1), normal(1))
    results = run(function, leaves, torch.float32)
    for one, other in zip(results, run(expected, leaves)):
        assert torch.allclose(one.double(), other, atol=3e-6, rtol=1e-6)


@every_norm
def test_many_rows(name):
    function, expected = CASES[name]
    check_against(expected, function, (normal(7, 500, 5), normal(7, 500, 5, seed=1), normal(5)))


@every_norm
def test_strided_inputs(name):
    function, expected = CASES[name]
    leaves = (normal(3, 9, 4), normal(3, 9, 4, seed=1), normal(3))
    check_against(
        lambda x, g, w: expected(x.permute(1, 2, 0), g.permute(1, 2, 0), w),
        lambda x, g, w: function(x.permute(1, 2, 0), g.permute(1, 2, 0), w),
        leaves,
    )


@every_norm
def test_small_and_large_inputs(name):
    function, expected = CASES[name]
    for factor in (0.0, 1e-6, 1e-3, 1e6):
        check_against(
            expected, function, (factor * normal(6, 33), normal(6, 33, seed=1), normal(33))
        )


@every_norm
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row(name, value):
    function, _ = CASES[name]
    leaves = (normal(5, 20), normal(5, 20, seed=1), normal(20))
    clean = run(function, leaves, torch.float32)
    leaves[0][2, 3] = value
    spoilt = run(function, leaves, torch.float32)
    others = [0, 1, 3, 4]
    assert not torch.isfinite(spoilt[0][2]).all()
    for place in (0, 1, 2):  # y, and the gradients of x and gate
        assert torch.equal(spoilt[place][others], clean[place][others])


@given(x=st.floats(-200, 200))
def test_the_gate_is_the_exact_gelu(x):
    gate = torch.tensor([[x, x / 7, -x]])
    y = gated_norm(torch.ones(1, 3), gate, None, 0.0)
    assert torch.allclose(y.double(), nn.functional.gelu(gate.double()), atol=1e-6, rtol=1e-6)


def test_unit_length_is_the_memorys_l2norm():
    x = normal(4, 17).float()
    assert relative_rms(unit_length(x), l2norm(x)) < 1e-6


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"weight must have shape \[n\] = \[4\]; got \[3\]"):
        rms_norm(torch.ones(2, 4), torch.ones(3), EPS)
    with pytest.raises(ValueError, match=r"gate must have shape \[...,n\] = \[2, 4\]; got \[8\]"):
        gated_norm(torch.ones(2, 4), torch.ones(8), None, EPS)
