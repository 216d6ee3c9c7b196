"""A sequence read whole, in pieces, token by token or in a pack: always the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support import problem, relative_rms

from trellis.ops import MemoryState, compress, trellis_memory, trellis_memory_step

MODES = ["exact", "stale"]
PASSES = ["encode", "decode"]
every_order = pytest.mark.parametrize("error_at", ["before", "after"])
NAMES = ("q", "k", "v", "alpha", "log_beta", "gamma")


def inputs(case, dtype=torch.float32):
    return [case.tensors[name].to(dtype) for name in NAMES]


def start(case, dtype=torch.float32):
    return MemoryState(case.tensors["keys"].to(dtype), case.tensors["values"].to(dtype))


def assert_same_state(actual, expected):
    for name, one, other in zip(expected._fields, actual, expected):
        assert (one is None) == (other is None), name
        if one is not None:
            assert relative_rms(one, other) < 1e-5, name


@every_order
@pytest.mark.parametrize("value_pass", PASSES)
@pytest.mark.parametrize("mode", MODES)
@given(pieces=st.lists(st.integers(0, 20), min_size=1, max_size=6), minibatch=st.integers(1, 9))
def test_segments_chained_equal_the_whole(mode, value_pass, error_at, pieces, minibatch):
    options = {"mode": mode, "value_pass": value_pass, "minibatch": minibatch}
    case = problem(tokens=sum(pieces), error_at=error_at, **options)
    tensors, state = inputs(case), start(case)
    whole, final = trellis_memory(
        *tensors, initial_state=state, output_final_state=True, **case.options
    )
    outputs, begin = [], 0
    for length in pieces:
        part = [t[:, begin : begin + length] for t in tensors]
        y, state = trellis_memory(
            *part, initial_state=state, output_final_state=True, **case.options
        )
        outputs.append(y)
        begin += length
    assert relative_rms(torch.cat(outputs, dim=1), whole) < 1e-5
    assert_same_state(state, final)


@every_order
@pytest.mark.parametrize("backend", ["auto", "reference", "chunked"])
@pytest.mark.parametrize("value_pass", PASSES)
@pytest.mark.parametrize("mode", MODES)
def test_token_by_token_equals_the_whole(mode, value_pass, backend, error_at):
    options = {"mode": mode, "value_pass": value_pass, "error_at": error_at}
    case = problem(tokens=23, minibatch=5, backend=backend, **options)
    tensors, state = inputs(case), start(case)
    whole, final = trellis_memory(
        *tensors, initial_state=state, output_final_state=True, **case.options
    )
    outputs = []
    for t in range(23):
        token = [tensor[:, t] for tensor in tensors]
        y, state = trellis_memory_step(*token, initial_state=state, **case.options)
        outputs.append(y)
    assert relative_rms(torch.stack(outputs, dim=1), whole) < 1e-5
    assert_same_state(state, final)


@every_order
@pytest.mark.parametrize("mode", MODES)
def test_a_step_equals_the_op_at_one_token(mode, error_at):
    case = problem(tokens=1, mode=mode, error_at=error_at)
    tensors = inputs(case, torch.float64)
    state = start(case, torch.float64)
    whole, final = trellis_memory(
        *tensors, initial_state=state, output_final_state=True, **case.options
    )
    y, after = trellis_memory_step(*(t[:, 0] for t in tensors), initial_state=state, **case.options)
    assert relative_rms(y, whole[:, 0]) < 1e-14
    assert_same_state(after, final)


def test_stale_memory_cut_inside_a_minibatch_needs_its_anchor():
    """Without the anchors the continuation differs: why the state carries them."""
    case = problem(tokens=20, mode="stale", minibatch=16)
    tensors = inputs(case)
    whole, _ = trellis_memory(*tensors, **case.options)
    _, state = trellis_memory(
        *(t[:, :10] for t in tensors), output_final_state=True, **case.options
    )
    rest = [t[:, 10:] for t in tensors]
    with_anchor, _ = trellis_memory(*rest, initial_state=state, **case.options)
    without, _ = trellis_memory(*rest, initial_state=(state.keys, state.values), **case.options)
    assert relative_rms(with_anchor, whole[:, 10:]) < 1e-5
    assert relative_rms(without, whole[:, 10:]) > 1e-3


@every_order
@pytest.mark.parametrize("mode", MODES)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_pack_equals_its_sequences_apart(mode, error_at, lengths, seed):
    case = problem(lengths=lengths, mode=mode, error_at=error_at, minibatch=7, seed=seed)
    tensors, state = inputs(case), start(case)
    packed, final = trellis_memory(
        *tensors, initial_state=state, output_final_state=True,
        cu_seqlens=case.cu_seqlens, **case.options,
    )  # fmt: skip
    begin = 0
    for n, length in enumerate(lengths):
        rows = slice(begin, begin + length)
        y, after = trellis_memory(
            *(t[:, rows] for t in tensors),
            initial_state=(state.keys[n : n + 1], state.values[n : n + 1]),
            output_final_state=True,
            **case.options,
        )
        assert relative_rms(packed[:, rows], y) < 1e-5
        assert relative_rms(final.keys[n : n + 1], after.keys) < 1e-5
        begin += length


@every_order
def test_gradients_through_segments_equal_those_of_the_whole(error_at):
    """Full back-propagation through time over segments."""
    case = problem(tokens=50, batch=1, error_at=error_at)

    def gradients(cuts):
        tensors = [t.clone().requires_grad_() for t in inputs(case, torch.float64)]
        keys = case.tensors["keys"].clone().requires_grad_()
        state, outputs = (keys, case.tensors["values"]), []
        for begin, end in zip(cuts, cuts[1:]):
            y, state = trellis_memory(
                *(t[:, begin:end] for t in tensors),
                initial_state=state, output_final_state=True, **case.options,
            )  # fmt: skip
            outputs.append(y)
        torch.cat(outputs, dim=1)[:, -1].sum().backward()
        return [t.grad for t in (*tensors, keys)]

    for one, other in zip(gradients([0, 13, 14, 50]), gradients([0, 50])):
        assert relative_rms(one, other) < 1e-12


@every_order
@pytest.mark.parametrize("mode", MODES)
def test_the_memory_is_two_passes_with_f_between(mode, error_at):
    case = problem(mode=mode, error_at=error_at)
    q, k, v, alpha, log_beta, gamma = inputs(case)
    common = {"mode": mode, "minibatch": case.options["minibatch"], "error_at": error_at}
    yhat, _ = compress(q, k, alpha, log_beta, gamma, **common)
    r = torch.nn.functional.layer_norm(torch.nn.functional.silu(yhat), yhat.shape[-1:])
    y, _ = compress(r, v, alpha, log_beta, gamma, transposed=True, **common)
    expected, _ = trellis_memory(q, k, v, alpha, log_beta, gamma, **case.options)
    assert relative_rms(y, expected) < 1e-6


@every_order
def test_a_minibatch_of_one_is_exact_mode(error_at):
    case = problem()
    exact, _ = trellis_memory(*inputs(case), mode="exact", error_at=error_at)
    stale, _ = trellis_memory(*inputs(case), mode="stale", minibatch=1, error_at=error_at)
    assert torch.equal(exact, stale)


def test_write_comes_before_read():
    """y_t sees token t: the first output of an empty memory is not zero."""
    case = problem(tokens=1)
    y, _ = trellis_memory(*inputs(case), f="silu")
    assert y.abs().max() > 0
