"""What is special to the delta rule; the common suite is in tests/ops/recurrences."""

import math

import pytest
import torch
from tests.ops.recurrences.cases import delta_decaying
from tests.ops.recurrences.test_every_recurrence import assert_within_limits
from tests.support import Shape, relative_rms

from trellis.ops import delta_rule


@pytest.mark.parametrize("beta", [1.0, 1.99])
def test_equal_keys(beta):
    """The worst conditioned system: every key finds every write before it in full."""
    case = delta_decaying(Shape(tokens=200, batch=1, heads=1))
    case.over_tokens["k"] = case.over_tokens["k"][:, :1].expand_as(case.over_tokens["k"])
    case.over_tokens["beta"].fill_(beta)
    case.over_tokens["log_decay"].zero_()
    assert_within_limits(case)


def test_a_written_value_is_found():
    """With beta = 1 and no decay, reading with the key just written gives its value."""
    inputs = delta_decaying(Shape(tokens=90)).over_tokens
    k, v = inputs["k"], inputs["v"]
    y, _ = delta_rule(k, k, v, torch.ones_like(inputs["beta"]), scale=1.0)
    assert relative_rms(y, v) < 1e-12


def test_the_default_scale():
    inputs = delta_decaying(Shape(tokens=9)).over_tokens
    y, none = delta_rule(**inputs)
    assert none is None
    scaled, _ = delta_rule(**inputs, scale=1.0)
    assert relative_rms(y, scaled / math.sqrt(12)) < 1e-12


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(2, 5, 2, 4)}, ValueError, r"k must have shape \[B,T,H,K\]"),
        ({"v": torch.zeros(2, 5, 4)}, ValueError, r"v must have shape \[B,T,H,V\]"),
        ({"v": torch.zeros(2, 4, 2, 4)}, ValueError, r"v must have shape .* got \[2, 4, 2, 4\]"),
        ({"beta": torch.zeros(2, 5)}, ValueError, r"beta must have shape \[B,T,H\]"),
        ({"log_decay": torch.zeros(2, 5, 3)}, ValueError, r"log_decay must have shape \[B,T,H\]"),
        ({"beta": torch.zeros(2, 5, 2).long()}, TypeError, "beta must be of a floating-point type"),
        ({"log_decay": 0.0}, TypeError, "log_decay must be a tensor; got float"),
        (
            {"initial_state": torch.zeros(2, 2, 4, 3)},
            ValueError,
            r"initial_state must have shape \[N,H,K,V\] = \[2, 2, 3, 4\]; got \[2, 2, 4, 3\]",
        ),
        ({"initial_state": 0}, TypeError, "initial_state must be a tensor; got int"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "the batch size must be 1"),
        ({"backend": "native"}, ValueError, "backend must be one of auto, reference, chunked"),
    ],
)
def test_wrong_arguments(change, error, message):
    q = torch.zeros(2, 5, 2, 3)
    given = {"q": q, "k": q, "v": torch.zeros(2, 5, 2, 4), "beta": torch.zeros(2, 5, 2)}
    with pytest.raises(error, match=message):
        delta_rule(**(given | change))
