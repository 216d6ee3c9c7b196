"""What holds for every mixer: one suite over the registry."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.mixers.cases import CASES
from tests.support import relative_rms

from trellis.mixers import MIXERS, build_mixer
from trellis.mixers.base import map_tensors, named_tensors

DIM, HEADS = 32, 2
every_mixer = pytest.mark.parametrize("case", CASES)


def build(case, dtype=torch.float32):
    torch.manual_seed(0)
    name, fields = CASES[case]
    return build_mixer(name, DIM, HEADS, **fields).to(dtype)


def run_pieces(mixer, x, pieces):
    outputs, state, begin = [], None, 0
    for length in pieces:
        y, state = mixer(x[:, begin : begin + length], state)
        outputs.append(y)
        begin += length
    return torch.cat(outputs, dim=1), state


def assert_same_state(actual, expected):
    actual, expected = dict(named_tensors(actual)), dict(named_tensors(expected))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_rms(actual[name], value) < 1e-5, name


@every_mixer
@given(pieces=st.lists(st.integers(0, 17), min_size=1, max_size=6))
def test_pieces_equal_the_whole(case, pieces):
    mixer = build(case)
    x = torch.randn(2, sum(pieces), DIM)
    whole, state = mixer(x)
    y, after = run_pieces(mixer, x, pieces)
    assert relative_rms(y, whole) < 1e-5
    assert_same_state(after, state)


@every_mixer
@pytest.mark.parametrize("graded", [True, False])
def test_token_by_token_equals_the_whole(case, graded):
    mixer = build(case)
    x = torch.randn(2, 40, DIM)
    with torch.set_grad_enabled(graded):
        whole, state = mixer(x)
        y, after = run_pieces(mixer, x, [1] * 40)
    assert relative_rms(y, whole) < 1e-5
    assert_same_state(after, state)


@every_mixer
def test_gradients_of_pieces_equal_those_of_the_whole(case):
    mixer = build(case, torch.float64)
    x = torch.randn(2, 21, DIM, dtype=torch.float64, requires_grad=True)

    def gradients(pieces):
        y, _ = run_pieces(mixer, x, pieces)
        loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
        return torch.autograd.grad(loss, [x, *mixer.parameters()])

    for one, other in zip(gradients([9, 1, 1, 10]), gradients([21])):
        if other.abs().max() < 1e-12:  # a window of one: nothing depends on q and k
            assert one.abs().max() < 1e-12
        else:
            assert relative_rms(one, other) < 1e-9


@every_mixer
@given(lengths=st.lists(st.integers(0, 17), min_size=1, max_size=4))
def test_a_pack_equals_its_sequences_apart(case, lengths):
    mixer = build(case)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    first, second = torch.randn(2, 1, sum(lengths), DIM)
    packed, state = mixer(first, None, bounds)
    again, _ = mixer(second, state, bounds)
    for begin, end in zip(bounds, bounds[1:]):
        one, after = mixer(first[:, begin:end])
        assert relative_rms(packed[:, begin:end], one) < 1e-5
        assert relative_rms(again[:, begin:end], mixer(second[:, begin:end], after)[0]) < 1e-5


@every_mixer
def test_init_state_is_where_a_sequence_starts(case):
    mixer = build(case)
    x = torch.randn(3, 7, DIM)
    assert torch.equal(mixer(x)[0], mixer(x, mixer.init_state(3))[0])
    for name, tensor in named_tensors(mixer.init_state(3)):
        assert tensor.shape[0] == 3, name


@every_mixer
def test_state_size_counts_the_numbers_of_a_state(case):
    mixer = build(case)
    bound = mixer.state_size()
    for tokens in (1, 3, 20):
        _, state = mixer(torch.randn(2, tokens, DIM))
        held = sum(tensor.numel() for _, tensor in named_tensors(state)) / 2
        assert held == mixer.state_size(tokens) <= bound
    grows = case == "transformer"
    assert math.isinf(bound) == grows


@every_mixer
def test_a_state_holds_on_to_nothing_else(case):
    """No view into what a long input left behind: the cache would not be bounded."""
    mixer = build(case)
    with torch.no_grad():
        _, state = mixer(torch.randn(1, 400, DIM))
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for _, t in named_tensors(state)
    }
    counted = sum(t.numel() * t.element_size() for _, t in named_tensors(state))
    assert sum(storage.nbytes() for storage in storages.values()) <= 1.1 * counted


@every_mixer
def test_sequences_of_a_state_can_be_picked(case):
    mixer = build(case)
    x, more = torch.randn(3, 9, DIM), torch.randn(2, 4, DIM)
    _, state = mixer(x)
    picked = map_tensors(lambda t: t[[2, 0]], state)
    y, _ = mixer(more, picked)
    for n, source in enumerate((2, 0)):
        _, own = mixer(x[source : source + 1])
        assert relative_rms(y[n : n + 1], mixer(more[n : n + 1], own)[0]) < 1e-5


@every_mixer
def test_nan_stays_in_its_sequence(case):
    mixer = build(case)
    x = torch.randn(3, 9, DIM)
    clean, _ = mixer(x)
    x[1, 4] = math.nan
    y, _ = mixer(x)
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    packed, _ = mixer(x.view(1, 27, DIM), None, torch.tensor([0, 9, 18, 27]))
    assert relative_rms(packed[0, :9], clean[0]) < 1e-5
    assert relative_rms(packed[0, 18:], clean[2]) < 1e-5


@every_mixer
def test_is_causal(case):
    mixer = build(case)
    x = torch.randn(1, 30, DIM)
    before, _ = mixer(x)
    x[:, 20:] += 1
    after, _ = mixer(x)
    assert relative_rms(after[:, :20], before[:, :20]) < 1e-6
    assert relative_rms(after[:, 20:], before[:, 20:]) > 1e-3


@every_mixer
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(case, dtype):
    mixer = build(case, dtype)
    x = torch.randn(2, 11, DIM, dtype=dtype)
    y, state = mixer(x)
    assert y.dtype == dtype
    y, _ = mixer(x[:, :1], state)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in mixer.parameters() if p.grad is not None)


@every_mixer
def test_every_parameter_learns(case):
    mixer = build(case)
    y, _ = mixer(torch.randn(2, 25, DIM))
    (y * torch.randn_like(y)).sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, name
        if case == "transformer window of one" and name in ("q_proj.weight", "k_proj.weight"):
            continue  # a token that sees only itself has nothing to weigh
        assert parameter.grad.abs().max() > 0, name


def test_names_and_fields_are_checked():
    with pytest.raises(ValueError, match=r"mixer must be one of .* did you mean 'trellis'"):
        build_mixer("treliis", DIM, HEADS)
    with pytest.raises(ValueError, match=r"has no field 'slot'; did you mean 'slots'"):
        build_mixer("trellis", DIM, HEADS, slot=3)
    with pytest.raises(ValueError, match="heads must divide the width, 32; got 3"):
        build_mixer("trellis", DIM, 3, shape="model")
    assert {"trellis", "transformer"} <= set(MIXERS)


@pytest.mark.parametrize("name", MIXERS)
def test_compiled(name):
    """torch.compile changes neither the output nor a gradient."""
    mixer = build(name)
    x = torch.randn(2, 20, DIM, requires_grad=True)

    def results(function):
        y, _ = function(x)
        loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
        return y, *torch.autograd.grad(loss, [x, *mixer.parameters()])

    torch.compiler.reset()
    for actual, expected in zip(results(torch.compile(mixer, backend="eager")), results(mixer)):
        assert relative_rms(actual, expected) < 1e-6


@every_mixer
def test_backward_inside_autocast(case):
    mixer = build(case)
    x = torch.randn(2, 20, DIM, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for tokens in (20, 1):
            y, _ = mixer(x[:, :tokens])
            y.float().sum().backward()
    assert torch.isfinite(x.grad).all()


@every_mixer
def test_a_pack_of_nothing(case):
    y, _ = build(case)(torch.randn(1, 0, DIM), None, torch.tensor([0]))
    assert y.shape == (1, 0, DIM)
