"""What is special to linear attention; the common suite is in tests/ops/recurrences."""

import pytest
import torch
from tests.ops.recurrences.cases import linear_groups_decaying
from tests.support import Shape, relative_rms

from trellis.ops import LinearAttentionState, linear_attention


def test_groups_are_repeated_queries_and_keys():
    case = linear_groups_decaying(Shape(tokens=100))
    shared, _ = case.call(case.over_tokens, case.states, None, "chunked")
    repeated = {n: case.over_tokens[n].repeat_interleave(3, dim=2) for n in ("q", "k")}
    apart, _ = case.call(case.over_tokens | repeated, case.states, None, "chunked")
    assert relative_rms(shared, apart) < 1e-12


def test_a_normalised_output_is_a_mean_of_values():
    q, k = torch.rand(2, 2, 90, 3, 8, dtype=torch.float64)
    value = torch.randn(2, 1, 3, 5, dtype=torch.float64)
    y, _ = linear_attention(q, k, value.expand(2, 90, 3, 5), normalize=True, eps=0.0)
    assert relative_rms(y, value.expand_as(y)) < 1e-12


def test_a_state_may_be_its_memory():
    q, v, memory = torch.randn(2, 9, 3, 8), torch.randn(2, 9, 3, 5), torch.randn(2, 3, 8, 5)
    one, none = linear_attention(q, q, v, initial_state=memory)
    other, final = linear_attention(
        q, q, v, initial_state=LinearAttentionState(memory), output_final_state=True
    )
    assert torch.equal(one, other)
    assert none is None
    assert final.normalizer is None


SHAPES = {"q": (2, 9, 2, 8), "k": (2, 9, 2, 8), "v": (2, 9, 6, 5), "log_decay": (2, 9, 6)}
WRONG = [
    ({"q": torch.zeros(2, 9, 8)}, r"q must have shape \[B,T,G,K\]; got \[2, 9, 8\]"),
    ({"q": torch.zeros(2, 9, 2, 8).int()}, "q must be of a floating-point type"),
    ({"k": torch.zeros(2, 9, 2, 7)}, r"k must have shape .* = \[2, 9, 2, 8\]; got"),
    ({"v": torch.zeros(2, 9, 5, 5)}, "groups of q must divide the heads of v, 5; got 2"),
    ({"v": torch.zeros(2, 8, 6, 5)}, r"q must have shape .* = \[2, 8, 2, 8\]; got"),
    ({"log_decay": torch.zeros(2, 9, 2)}, r"log_decay must have shape .* = \[2, 9, 6\]; got"),
    ({"initial_state": torch.zeros(2, 6, 5, 8)}, r"initial_state.memory must .* = \[2, 6, 8, 5\]"),
    ({"initial_state": [1]}, "initial_state must be a LinearAttentionState or its memory; got"),
    (
        {"initial_state": torch.zeros(2, 6, 8, 5), "normalize": True},
        "initial_state.normalizer must be given exactly with normalize=True; there is none",
    ),
    (
        {
            "initial_state": (torch.zeros(2, 6, 8, 5), torch.zeros(2, 6, 5)),
            "normalize": True,
        },
        r"initial_state.normalizer must have shape \[N,H,K\] = \[2, 6, 8\]; got",
    ),
    ({"initial_state": torch.zeros(2, 6, 8, 5).long()}, r"memory must be of a floating-point type"),
    ({"initial_state": (None, None)}, "initial_state.memory must be a tensor; got NoneType"),
    (
        {"q": torch.zeros(2, 9, 0, 8), "k": torch.zeros(2, 9, 0, 8)},
        "q must .* with sizes of at least 1",
    ),
    ({"q": torch.zeros(2, 9, 2, 0), "k": torch.zeros(2, 9, 2, 0)}, "q must .* of at least 1"),
    ({"v": torch.zeros(2, 9, 6, 0)}, "v must have shape .* with sizes of at least 1"),
    ({"backend": "native"}, "backend must be one of auto, reference, chunked, fla; got 'native'"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_arguments_are_checked(wrong, message):
    given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        linear_attention(**given | wrong)
