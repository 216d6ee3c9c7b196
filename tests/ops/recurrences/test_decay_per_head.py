"""What holds for every recurrence that decays by one factor per token and head."""

import math

import pytest
import torch
from tests.ops.recurrences import delta_rule, linear_attention
from tests.ops.recurrences.cases import Shape
from tests.ops.recurrences.test_every_recurrence import assert_within_limits, results
from tests.support import relative_rms

BUILDERS = [delta_rule.decaying, linear_attention.decayed, linear_attention.grouped]
every_decay = pytest.mark.parametrize("build", BUILDERS)


@every_decay
@pytest.mark.parametrize("extreme", [-math.inf, -1e4, -3.0, 0.0])
@pytest.mark.parametrize("every", [1, 7])
def test_extreme_decay(build, extreme, every):
    case = build(Shape(tokens=150))
    case.over_tokens["log_decay"][:, ::every] = extreme
    assert_within_limits(case)


@every_decay
def test_after_forgetting_nothing_of_before_is_left(build):
    case = build(Shape(tokens=100))
    case.over_tokens["log_decay"][:, 70] = -math.inf
    whole, _ = case.call(case.over_tokens, case.states, None, "chunked")
    rest = {name: t[:, 70:] for name, t in case.over_tokens.items()}
    blank = {"memory": torch.zeros_like(case.states["memory"])}
    assert relative_rms(whole[:, 70:], case.call(rest, blank, None, "chunked")[0]) < 1e-12


@every_decay
def test_no_decay_is_a_decay_of_one(build):
    case = build(Shape(tokens=100))
    case.over_tokens["log_decay"].zero_()
    one = results(case, None, "chunked", torch.float64)
    del case.over_tokens["log_decay"]
    other = results(case, None, "chunked", torch.float64)
    for what, value in other.items():
        assert relative_rms(one[what], value) < 1e-12, what
