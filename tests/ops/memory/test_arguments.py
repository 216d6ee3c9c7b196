"""Wrong arguments: the message names the argument, what it was and what it must be."""

import pytest
import torch
from tests.support import problem

from trellis.ops import (
    MemoryState,
    causal_convolution,
    compress,
    trellis_memory,
    trellis_memory_step,
)

NAMES = ("q", "k", "v", "alpha", "log_beta", "gamma")


def arguments():
    case = problem()
    return {name: case.tensors[name].float() for name in NAMES}


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 20, 2)}, r"q must have shape \[B,T,H,K\]; got \[2, 20, 2\]"),
        ({"k": torch.zeros(2, 20, 2, 9)}, r"k must have shape .* \[2, 20, 2, 12\]; got .* 9\]"),
        ({"v": torch.zeros(2, 19, 2, 10)}, r"v must have shape .*\[2, 20, 2, 10\]; got \[2, 19"),
        ({"alpha": torch.zeros(2, 20, 3, 16)}, r"alpha must have shape .*; got \[2, 20, 3, 16\]"),
        ({"gamma": torch.zeros(2, 20)}, r"gamma must have shape \[B,H?T?,?.*; got \[2, 20\]"),
        ({"log_beta": torch.zeros(2, 20, 1)}, r"log_beta must have shape .*; got \[2, 20, 1\]"),
        ({"phi": "relu"}, "phi must be one of identity, silu.*; got 'relu'"),
        ({"f": "relu"}, "f must be one of ln_silu.*; got 'relu'"),
        ({"psi": "relu"}, "psi must be one of .*; got 'relu'"),
        ({"mode": "fast"}, "mode must be one of exact, stale; got 'fast'"),
        ({"error_at": "during"}, "error_at must be one of before, after; got 'during'"),
        ({"minibatch": 0}, "minibatch must be a whole number of at least 1; got 0"),
        ({"value_pass": "both"}, "value_pass must be one of encode, decode; got 'both'"),
        ({"initial_state": torch.zeros(3)}, "initial_state must be a MemoryState or the pair"),
        (
            {"initial_state": (torch.zeros(2, 2, 16, 9), torch.zeros(2, 2, 16, 10))},
            r"initial_state.keys must have shape .*\[2, 2, 16, 12\]; got \[2, 2, 16, 9\]",
        ),
        ({"cu_seqlens": torch.tensor([0, 20])}, "the batch size must be 1 .*; got 2"),
        ({"cu_seqlens": [0, 20]}, "cu_seqlens must be an int32 or int64 tensor; got list"),
        ({"gamma": (torch.zeros(1),)}, "gamma must be one tensor or a pair .*; got 1"),
    ],
)
def test_message(backend, changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        trellis_memory(**{**arguments(), **changes}, backend=backend)


def test_integer_input():
    with pytest.raises(TypeError, match=r"q must be of a floating-point type .* got torch.int64"):
        trellis_memory(**{**arguments(), "q": torch.zeros(2, 20, 2, 12, dtype=torch.long)})


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"backend must be one of .*; got 'cuda'"):
        trellis_memory(**arguments(), backend="cuda")


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("bounds", [[0, 5, 3, 20], [1, 20], [0, 19]])
def test_bounds_of_a_pack(backend, bounds):
    given = {name: tensor[:1] for name, tensor in arguments().items()}
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to .* 20; got"):
        trellis_memory(**given, cu_seqlens=torch.tensor(bounds), backend=backend)


def test_state_of_another_minibatch():
    _, state = trellis_memory(**arguments(), mode="stale", minibatch=16, output_final_state=True)
    state = state._replace(offset=torch.tensor([9, 9]))
    with pytest.raises(ValueError, match=r"offset must lie in 0 .. minibatch - 1 = 3"):
        trellis_memory(**arguments(), mode="stale", minibatch=4, initial_state=state)


def test_half_a_stale_state():
    state = MemoryState(torch.zeros(2, 2, 16, 12), torch.zeros(2, 2, 16, 10), offset=torch.zeros(2))
    with pytest.raises(ValueError, match="anchor and offset must be given together"):
        trellis_memory(**arguments(), mode="stale", initial_state=state)


def test_a_query_of_the_wrong_side():
    given = arguments()
    with pytest.raises(ValueError, match=r"query must have shape \[B,T,H,M\]"):
        compress(
            given["q"], given["k"], given["alpha"], given["log_beta"], given["gamma"],
            transposed=True,
        )  # fmt: skip


def test_an_unknown_order_of_decay_in_one_pass_and_in_one_step():
    given = arguments()
    message = "error_at must be one of before, after; got 'during'"
    one = [given[name] for name in ("q", "k", "alpha", "log_beta", "gamma")]
    with pytest.raises(ValueError, match=message):
        compress(*one, error_at="during")
    with pytest.raises(ValueError, match=message):
        trellis_memory_step(*(given[name][:, 0] for name in NAMES), error_at="during")


EMPTY = [("heads", "q"), ("key", "q"), ("value", "v"), ("slots", "alpha")]


@pytest.mark.parametrize("backend", ["auto", "native", "chunked", "reference"])
@pytest.mark.parametrize(("size", "named"), EMPTY)
def test_a_size_of_zero(size, named, backend):
    given = {n: t.float() for n, t in problem(**{size: 0}).tensors.items() if n in NAMES}
    with pytest.raises(ValueError, match=rf"{named} must have shape .* with sizes of at least 1"):
        trellis_memory(**given, backend=backend)
    token = {name: tensor[:, 0] for name, tensor in given.items()}
    with pytest.raises(ValueError, match=rf"{named} must have shape \[B,H,.* of at least 1"):
        trellis_memory_step(**token, backend=backend)


@pytest.mark.parametrize("mode", ["exact", "stale"])
def test_on_meta(mode):
    """Shapes without numbers: whole sequences, a step, and the states that they leave."""
    given = {name: tensor.to("meta") for name, tensor in arguments().items()}
    y, state = trellis_memory(**given, mode=mode, output_final_state=True)
    assert (y.device.type, y.shape) == ("meta", (2, 20, 2, 10))
    token = {name: tensor[:, 0] for name, tensor in given.items()}
    y, after = trellis_memory_step(**token, mode=mode, initial_state=state)
    assert (y.device.type, y.shape) == ("meta", (2, 2, 10))
    assert [None if t is None else t.shape for t in after] == [
        None if t is None else t.shape for t in state
    ]


def test_tail_of_a_convolution():
    with pytest.raises(ValueError, match=r"tail must have shape .*\[1, 3, 4\]; got \[1, 2, 4\]"):
        causal_convolution(torch.zeros(1, 5, 4), torch.zeros(4, 4), tail=torch.zeros(1, 2, 4))
