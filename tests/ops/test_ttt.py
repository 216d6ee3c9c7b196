"""What is special to TTT-Linear: its arguments, and what its step sizes do."""

import pytest
import torch
from tests.support import relative_rms

from trellis.ops import TTTState, ttt_linear

B, T, H, D, MINIBATCH = 2, 21, 3, 6, 4


def arguments(**changes):
    torch.manual_seed(0)
    given = {name: torch.randn(B, T, H, D) for name in ("q", "k", "v")}
    given |= {
        "eta": torch.rand(B, T, H) / D,
        "theta": torch.rand(MINIBATCH),
        "norm_weight": torch.rand(H, D),
        "norm_bias": torch.randn(H, D),
        "initial_state": TTTState(torch.randn(B, H, D, D), torch.randn(B, H, D)),
    }
    return given | changes


STATE = arguments()["initial_state"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(B, T, H, D + 1)}, r"k must have shape \[B,T,H,D\] = \[2, 21, 3, 6\]"),
        ({"eta": torch.zeros(B, T)}, r"eta must have shape \[B,T,H\]"),
        ({"theta": torch.zeros(H + 1, 4)}, r"theta must have shape \[H,b\] = \[3, 4\]; got \[4, 4"),
        ({"theta": torch.zeros(0)}, r"theta must have shape \[b\] or \[H,b\] with b >= 1; got \[0"),
        ({"norm_bias": torch.zeros(D)}, r"norm_bias must have shape \[H,D\]"),
        ({"initial_state": STATE._replace(bias=torch.zeros(B, D))}, "initial_state.bias must have"),
        (
            {"initial_state": STATE._replace(offset=torch.tensor([0, 4]))},
            r"initial_state.offset must lie in 0 .. minibatch - 1 = 3; got \[0, 4\]",
        ),
        (
            {"initial_state": STATE._replace(offset=torch.tensor([0, 1]))},
            "weight_steps and bias_steps must be given inside a mini-batch",
        ),
        (
            {"initial_state": STATE._replace(weight_steps=STATE.weight)},
            "initial_state.offset must be given with weight_steps",
        ),
        ({"backend": "native"}, "backend must be one of auto, reference, chunked"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        ttt_linear(**arguments(**changes))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, r" must be a TTTState or the pair \(weight, bias\); got NoneType"),
        (STATE.weight, " must be a TTTState .*; got Tensor"),
        ((STATE.weight,), " must be a TTTState .*; got tuple of 1"),
        ((*STATE, None), " must be a TTTState .*; got tuple of 6"),
        ((STATE.weight, None), r"\.bias must be a tensor; got NoneType"),
        (STATE._replace(offset=[0, 0]), r"\.offset must be a tensor; got list"),
        (STATE._replace(offset=torch.zeros(2)), r"\.offset must be of an integer type; got"),
        (STATE._replace(offset=torch.zeros(2).bool()), r"\.offset must be of an integer type; got"),
    ],
)
def test_a_state_of_the_wrong_kind_is_named(state, message):
    with pytest.raises(TypeError, match="initial_state" + message):
        ttt_linear(**arguments(initial_state=state))


def test_devices_of_a_state():
    with pytest.raises(ValueError, match=r"initial_state\.weight must be on cpu like q; got meta"):
        ttt_linear(**arguments(initial_state=tuple(t.to("meta") for t in STATE[:2])))


def test_any_fp64_argument_makes_it_fp64():
    for name in ("theta", "norm_bias"):
        given = arguments()
        given[name] = given[name].double()
        assert ttt_linear(**given, output_final_state=True)[1].weight.dtype == torch.float64


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_theta_is_for_all_heads_or_for_each(backend):
    theta = torch.rand(MINIBATCH)
    one, _ = ttt_linear(**arguments(theta=theta), backend=backend)
    each, _ = ttt_linear(**arguments(theta=theta.expand(H, MINIBATCH)), backend=backend)
    assert torch.equal(one, each)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_without_steps_the_model_stays(backend):
    y, final = ttt_linear(
        **arguments(theta=torch.zeros(MINIBATCH)), output_final_state=True, backend=backend
    )
    assert torch.equal(final.weight, STATE.weight)
    assert torch.equal(final.bias, STATE.bias)
    again, final = ttt_linear(
        **arguments(eta=torch.zeros(B, T, H)), output_final_state=True, backend=backend
    )
    assert relative_rms(again, y) < 1e-6
    assert torch.equal(final.weight, STATE.weight)


def test_steps_that_no_token_took_are_dropped():
    """At a mini-batch's start its sum of steps is zero, whatever a state says."""
    whole = STATE._replace(
        weight_steps=torch.ones(B, H, D, D), bias_steps=torch.ones(B, H, D),
        offset=torch.zeros(B, dtype=torch.long),
    )  # fmt: skip
    for backend in ("reference", "chunked"):
        expected, _ = ttt_linear(**arguments(), backend=backend)
        y, _ = ttt_linear(**arguments(initial_state=whole), backend=backend)
        assert torch.equal(y, expected)


def test_a_mini_batch_of_one_token_steps_at_every_token():
    y, final = ttt_linear(**arguments(theta=torch.ones(1)), output_final_state=True)
    expected, _ = ttt_linear(**arguments(theta=torch.ones(1)), backend="reference")
    assert relative_rms(y, expected) < 1e-5
    assert final.offset.tolist() == [0, 0]
    assert final.weight_steps.abs().max() == 0
