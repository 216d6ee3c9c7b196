"""The choices of GSA and ABC."""

import pytest
import torch
from tests.support import relative_rms

from trellis.mixers import build_mixer, names_without_weight_decay


def test_gsa_has_four_heads_unless_told():
    assert build_mixer("gsa", 48, 6).heads == 4
    assert build_mixer("gsa", 48, 6, heads=2).heads == 2
    assert build_mixer("gsa", 42, 6).heads == 6
    assert names_without_weight_decay(build_mixer("gsa", 48, 6)) == {"f_proj.weight"}


def test_abc_has_four_heads_and_narrow_keys_unless_told():
    mixer = build_mixer("abc", 48, 6)
    assert (mixer.heads, mixer.key_dim, mixer.head_dim) == (4, 6, 12)
    mixer = build_mixer("abc", 48, 6, heads=6, expand_k=1.0)
    assert (mixer.heads, mixer.key_dim, mixer.head_dim) == (6, 8, 8)
    assert build_mixer("abc", 24, 6, heads=6, expand_k=1.5).key_dim == 6
    assert build_mixer("abc", 60, 5, expand_k=2.0).heads == 4
    assert build_mixer("abc", 50, 5, expand_k=1.0).heads == 5


def test_the_gate_multiplies_gsa():
    torch.manual_seed(0)
    gated = build_mixer("gsa", 16, 2)
    plain = build_mixer("gsa", 16, 2, output_gate=False)
    plain.load_state_dict(gated.state_dict(), strict=False)
    seen = {}
    for name, mixer in (("gated", gated), ("plain", plain)):
        mixer.o_proj.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.__setitem__(name, inputs[0])
        )
    x = torch.randn(1, 20, 16)
    gated(x), plain(x)
    gate = torch.nn.functional.silu(gated.g_proj(x))
    assert relative_rms(seen["gated"], seen["plain"] * gate) < 1e-5


def test_gsa_keeps_longer_at_a_higher_temperature():
    """With the gate closed a slot keeps f = 2 ** (-1 / temperature) of itself per token."""
    for temperature in (1.0, 8.0):
        mixer = build_mixer("gsa", 16, 2, slots=3, decay_temperature=temperature)
        torch.nn.init.zeros_(mixer.f_proj.weight)
        state = mixer.init_state(1)
        state.keys.fill_(1.0)
        with torch.no_grad():
            for projection in (mixer.k_proj, mixer.v_proj):
                projection.weight.zero_()
            _, after = mixer(torch.randn(1, 5, 16), state)
        expected = torch.full_like(after.keys, 2 ** (-5 / temperature))
        assert relative_rms(after.keys, expected) < 1e-6


def test_abc_averages_in_time_and_adds_over_slots():
    x = torch.randn(1, 30, 16)
    kept = {}
    for write in ("time", "slots"):
        mixer = build_mixer("abc", 16, 2, write=write, slots=4, heads=2)
        torch.nn.init.zeros_(mixer.s_proj.weight)
        with torch.no_grad():
            _, state = mixer(x)
            values = mixer.v_proj(x).view(30, 2, 8)
        kept[write] = state.memory.values[0], values
    values, tokens = kept["time"]
    assert torch.allclose(values, tokens.mean(0)[:, None].expand_as(values), atol=1e-6)
    values, tokens = kept["slots"]
    assert torch.allclose(values, tokens.sum(0)[:, None].expand_as(values) / 4, atol=1e-5)


def test_abc_sees_the_order_of_tokens_through_positions():
    torch.manual_seed(0)
    x = torch.randn(1, 12, 16)
    swapped = x[:, [1, 0, *range(2, 12)]]
    for theta, differs in ((10000.0, True), (None, False)):
        mixer = build_mixer("abc", 16, 2, rope_theta=theta)
        error = relative_rms(mixer(swapped)[0][:, 2:], mixer(x)[0][:, 2:])
        assert (error > 1e-4) == differs


def test_a_logit_out_of_bounds_is_clamped():
    mixer = build_mixer("abc", 16, 2)
    torch.nn.init.normal_(mixer.s_proj.weight, std=1e3)
    y, state = mixer(torch.randn(2, 80, 16))
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(p.grad).all() for p in mixer.parameters())
    assert torch.isfinite(state.total).all()


@pytest.mark.parametrize("name", ["gsa", "abc"])
def test_fields_are_checked(name):
    with pytest.raises(ValueError, match="slots must be a whole number of at least 1; got 0"):
        build_mixer(name, 16, 2, slots=0)
    with pytest.raises(ValueError, match="backend must be one of"):
        build_mixer(name, 16, 2, backend="native")
    with pytest.raises(ValueError, match="decay_temperature must be a number above 0; got 0"):
        build_mixer("gsa", 16, 2, decay_temperature=0)
    with pytest.raises(ValueError, match="write must be one of time, slots; got 'space'"):
        build_mixer("abc", 16, 2, write="space")
    with pytest.raises(ValueError, match="even head size; got 3"):
        build_mixer("abc", 6, 2, expand_k=1.0)
