"""What is special to the slot memory: arguments, and digits under strong decay."""

import pytest
import torch
from tests.support import relative_rms

from trellis.ops import gated_slots

SIZES = {"q": 6, "k": 6, "v": 5, "write": 4, "log_decay": 4}


def tensors(tokens=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    found = {
        name: torch.randn(2, tokens, 3, size, generator=generator).to(dtype)
        for name, size in SIZES.items()
    }
    return found | {"log_decay": -found["log_decay"].abs()}


@pytest.mark.parametrize("name", SIZES)
def test_a_wrong_shape_is_named(name):
    given = tensors()
    for wrong in (given[name][0], given[name][:, :4]):
        # What the others are compared with is q: a short q shows in k.
        named = "k" if name == "q" and wrong.dim() == 4 else name
        with pytest.raises(ValueError, match=rf"^{named} must have shape \[B,T,H"):
            gated_slots(**(given | {name: wrong}))
    with pytest.raises(TypeError, match=f"{name} must be of a floating-point type"):
        gated_slots(**(given | {name: given[name].long()}))


def test_a_wrong_state_is_named():
    given = tensors()
    keys, values = torch.zeros(2, 3, 4, 6), torch.zeros(2, 3, 4, 5)
    with pytest.raises(ValueError, match=r"initial_state.keys must have shape \[N,H,M,K\]"):
        gated_slots(**given, initial_state=(keys.mT, values))
    with pytest.raises(ValueError, match=r"initial_state.values must have shape \[N,H,M,V\]"):
        gated_slots(**given, initial_state=(keys, values[:1]))
    for wrong in (keys, [keys], "state"):
        with pytest.raises(TypeError, match="initial_state must be a SlotState"):
            gated_slots(**given, initial_state=wrong)
    with pytest.raises(TypeError, match=r"initial_state\.values must be a tensor; got NoneType"):
        gated_slots(**given, initial_state=(keys, None))
    with pytest.raises(ValueError, match="backend must be one of"):
        gated_slots(**given, backend="native")


@pytest.mark.parametrize(("name", "axis"), [("q", 2), ("q", 3), ("v", 3), ("write", 3)])
def test_a_size_of_zero_is_named(name, axis):
    given = tensors()
    given[name] = given[name].narrow(axis, 0, 0)
    with pytest.raises(ValueError, match=f"^{name} must have shape .* with sizes of at least 1"):
        gated_slots(**given)


def test_scale_is_that_of_attention():
    given = tensors()
    y, state = gated_slots(**given)
    assert torch.equal(y, gated_slots(**given, scale=6**-0.5)[0])
    assert relative_rms(gated_slots(**given, scale=1.0)[0], y) > 1e-3
    assert state is None


def gradient_of_decay(given, backend):
    given = given | {"log_decay": given["log_decay"].clone().requires_grad_()}
    y, _ = gated_slots(**given, backend=backend)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad((y * weight).sum(), given["log_decay"])[0]


def test_strong_decay_costs_no_digits():
    """A gradient of 1e-6 beside gradients of 1 is as exact as they are."""
    given = tensors(tokens=150, dtype=torch.float64)
    strong = torch.zeros_like(given["log_decay"], dtype=torch.bool)
    strong[:, ::3] = True
    given["log_decay"] = torch.where(strong, -14.0, -0.1)
    expected = gradient_of_decay(given, "reference")
    actual = gradient_of_decay({name: t.float() for name, t in given.items()}, "chunked")
    assert expected[strong].abs().mean() < 1e-5 * expected[~strong].abs().mean()
    assert relative_rms(actual[~strong], expected[~strong]) < 1e-5
    assert relative_rms(actual[strong], expected[strong]) < 1e-5
