"""The choices of Mamba2."""

import pytest
import torch
import torch.nn.functional as F

from trellis.mixers import build_mixer, names_without_weight_decay


@pytest.mark.parametrize(
    ("dim", "fields", "heads", "head_dim"),
    [
        (768, {}, 24, 64),
        (32, {}, 1, 64),
        (24, {}, 1, 48),  # narrower than a head
        (32, {"heads": 4}, 4, 16),
        (32, {"head_dim": 8, "expand": 3}, 12, 8),
    ],
)
def test_heads_follow_from_the_width(dim, fields, heads, head_dim):
    with torch.device("meta"):
        mixer = build_mixer("mamba2", dim, 7, **fields)
    assert (mixer.heads, mixer.head_dim) == (heads, head_dim)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match=r"head_dim must divide the inner width, .* = 96; got 64"):
        build_mixer("mamba2", 48, 2)
    with pytest.raises(ValueError, match=r"heads must divide the inner width, .* = 96; got 7"):
        build_mixer("mamba2", 48, 2, heads=7)
    with pytest.raises(ValueError, match="groups must divide the number of heads, 1; got 2"):
        build_mixer("mamba2", 32, 2, groups=2)
    with pytest.raises(ValueError, match=r"step_limit must be a range .*; got \(2, 1\)"):
        build_mixer("mamba2", 32, 2, step_limit=(2, 1))


def test_parameters_start_as_the_authors_have_them():
    mixer = build_mixer("mamba2", 64, 2, heads=128)
    rate, step = mixer.decay.A_log.exp(), F.softplus(mixer.decay.dt_bias)
    assert 1 <= rate.min() < 2 < 15 < rate.max() <= 16
    assert 0.0009 < step.min() < 0.002 < 0.05 < step.max() < 0.1001
    assert torch.equal(mixer.D, torch.ones(128))
    assert mixer.in_proj.bias is mixer.out_proj.bias is None
    assert mixer.convolution.bias is not None
    for weights in (mixer.convolution.weight, mixer.convolution.bias):
        assert weights.abs().max() <= 0.5
        assert weights.std().item() == pytest.approx(0.5 / 3**0.5, rel=0.1)
    assert names_without_weight_decay(mixer) == {"decay.A_log", "decay.dt_bias", "D"}
    floored = build_mixer("mamba2", 64, 2, heads=128, step_floor=0.01)
    assert F.softplus(floored.decay.dt_bias).min() > 0.0099


def test_the_step_limit_bounds_the_decay():
    torch.manual_seed(0)
    limited = build_mixer("mamba2", 32, 2, step_limit=(0.0, 0.0))
    _, state = limited(torch.randn(2, 20, 32))
    assert not state.memory.any()  # steps of nothing write nothing


def test_state_size():
    mixer = build_mixer("mamba2", 32, 2, heads=4, groups=2, state_dim=24)
    assert mixer.state_size() == 64 * 24 + 3 * (64 + 2 * 2 * 24)
