"""The convolution against its definition."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.support import check_against, normal, relative_rms, run

from trellis.ops import causal_convolution
from trellis.ops.convolution import causal_convolution_reference

pytestmark = pytest.mark.usefixtures("fused_at_every_size")
both_activations = pytest.mark.parametrize("activation", ["identity", "silu"])


def reference_of(activation, bounds=None):
    """The definition, for a batch, or sequence by sequence for a pack."""

    def convolved(x, weight, bias, tail):
        if bounds is None:
            return causal_convolution_reference(x, weight, bias, tail)
        runs = [
            causal_convolution_reference(x[:, begin:end], weight, bias, tail[n : n + 1])
            for n, (begin, end) in enumerate(zip(bounds, bounds[1:]))
        ]
        return torch.cat([y for y, _ in runs], dim=1), torch.cat([t for _, t in runs])

    def whole(x, weight, tail, bias=None):
        y, after = convolved(x, weight, bias, tail)
        return F.silu(y) if activation == "silu" else y, after

    return whole


def op(activation, bounds=None):
    def whole(x, weight, tail, bias=None):
        return causal_convolution(
            x, weight, bias=bias, tail=tail, cu_seqlens=bounds, activation=activation
        )

    return whole


@both_activations
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    width=st.integers(1, 5),
    channels=st.integers(1, 20),
)
def test_packed_and_plain_equal_the_reference(activation, lengths, width, channels):
    x = normal(1, sum(lengths), channels)
    weight = normal(channels, width, seed=1)
    tail = normal(len(lengths), width - 1, channels, seed=2)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    bias = normal(channels, seed=3)
    for more in ((), (bias,)):
        leaves = (x, weight, tail, *more)
        check_against(reference_of(activation, bounds), op(activation, bounds), leaves)
        check_against(reference_of(activation), op(activation), (x, weight, tail[:1], *more))


@both_activations
@pytest.mark.parametrize("lengths", [[63, 64, 65], [200], [0, 130, 0, 1, 2], [128, 3]])
def test_sequences_of_several_parts(activation, lengths):
    """The kernel computes 64 tokens at a time: what crosses a part must not be lost."""
    x, weight = normal(1, sum(lengths), 21), normal(21, 4, seed=1)
    tail, bias = normal(len(lengths), 3, 21, seed=2), normal(21, seed=3)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    leaves = (x, weight, tail, bias)
    check_against(reference_of(activation, bounds), op(activation, bounds), leaves)


@both_activations
@pytest.mark.parametrize(("batch", "tokens"), [(3, 70), (2, 1), (3, 0), (0, 4)])
def test_batches(activation, batch, tokens):
    leaves = (normal(batch, tokens, 17), normal(17, 4, seed=1), normal(batch, 3, 17, seed=2))
    check_against(reference_of(activation), op(activation), leaves)


@pytest.mark.parametrize("width", [16, 17])
def test_wide_windows(width):
    leaves = (normal(2, 40, 5), normal(5, width, seed=1), normal(2, width - 1, 5, seed=2))
    check_against(reference_of("silu"), op("silu"), leaves)


def test_strided_inputs():
    leaves = (normal(9, 2, 30), normal(4, 9, seed=1), normal(9, 3, 2, seed=2))

    def strided(function):
        return lambda x, w, t: function(x.permute(1, 2, 0), w.T, t.permute(2, 1, 0))

    check_against(strided(reference_of("silu")), strided(op("silu")), leaves)


def test_equals_conv1d():
    x, weight, bias = torch.randn(2, 9, 3), torch.randn(3, 4), torch.randn(3)
    y, _ = causal_convolution(x, weight, bias=bias)
    expected = F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], bias, groups=3).mT
    assert relative_rms(y, expected) < 1e-6


def test_what_is_not_finite_stays_in_its_sequence_and_behind_its_token():
    lengths = [70, 90, 5]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    leaves = [normal(1, 165, 18), normal(18, 4, seed=1), normal(3, 3, 18, seed=2)]
    clean = run(op("silu", bounds), leaves, torch.float32)
    leaves[0][0, 100, 5] = float("nan")
    spoilt = run(op("silu", bounds), leaves, torch.float32)
    touched = torch.zeros(1, 165, 18, dtype=torch.bool)
    touched[0, 100:104, 5] = True
    assert torch.equal(torch.isnan(spoilt[0]), touched)
    assert torch.equal(spoilt[0][~touched], clean[0][~touched])
    touched[0, 97:104, 5] = True  # the gradient goes back to what those outputs saw
    assert torch.equal(spoilt[2][~touched], clean[2][~touched])
    assert torch.equal(spoilt[1], clean[1])
    assert torch.equal(spoilt[4], clean[4])


def test_the_new_tail_does_not_hold_on_to_the_input():
    x = torch.randn(2, 30, 4)
    _, tail = causal_convolution(x, torch.randn(4, 4))
    assert tail.untyped_storage().nbytes() == tail.numel() * 4
    assert torch.equal(tail, x[:, -3:])


def test_the_activation_is_checked():
    with pytest.raises(ValueError, match="activation must be one of identity, silu; got 'gelu'"):
        causal_convolution(torch.ones(1, 2, 3), torch.ones(3, 2), activation="gelu")


def test_the_width_is_checked():
    with pytest.raises(ValueError, match=r"weight must be at least 1 wide; got shape \[3, 0\]"):
        causal_convolution(torch.ones(1, 2, 3), torch.ones(3, 0))


def test_the_bias_is_checked():
    with pytest.raises(ValueError, match=r"bias must have shape \[D\] = \[3\]; got \[2\]"):
        causal_convolution(torch.ones(1, 2, 3), torch.ones(3, 4), bias=torch.ones(2))


def test_silu_at_the_end_of_the_numbers_is_as_in_torch():
    x = torch.tensor([-1e38, -1e30, -100.0, 1e38]).expand(1, 3, 4)
    y, _ = causal_convolution(x, torch.ones(4, 1), activation="silu")
    assert torch.allclose(y, F.silu(x), atol=1e-37, rtol=1e-6)


def test_a_tail_of_another_kind_is_named():
    x, weight = torch.randn(2, 9, 3), torch.randn(3, 4)
    with pytest.raises(TypeError, match="tail must be of a floating-point type"):
        causal_convolution(x, weight, tail=torch.zeros(2, 3, 3).long())
    with pytest.raises(ValueError, match="tail must be on cpu like the rest; got meta"):
        causal_convolution(x, weight, tail=torch.zeros(2, 3, 3, device="meta"))
