"""The choices of DeltaNet and Gated DeltaNet."""

import pytest
import torch
from tests.support import relative_rms

from trellis.mixers import DeltaNetMixerConfig, build_mixer, names_without_weight_decay


def test_defaults():
    plain, gated = (build_mixer(name, 96, 3) for name in ("delta_net", "gated_delta_net"))
    assert set(plain.convolutions) == set(gated.convolutions) == {"q", "k", "v"}
    extra = {"a_proj.weight", "decay.A_log", "decay.dt_bias"}
    assert plain.g_proj.weight.shape == (144, 96)
    assert set(gated.state_dict()) - set(plain.state_dict()) == extra
    assert plain.state_size() == gated.state_size() == 72 * 144 + 3 * (2 * 72 + 144)


@pytest.mark.parametrize(
    ("shape", "width", "heads", "keys", "values"),
    [
        ("authors", 64, 1, 48, 96),
        ("authors", 128, 1, 96, 192),
        ("authors", 256, 1, 192, 384),
        ("authors", 768, 4, 144, 288),
        ("authors", 1024, 4, 192, 384),
        ("authors", 1536, 6, 192, 384),
        ("authors", 2048, 6, 256, 512),
        ("authors", 516, 3, 129, 258),  # 387 keys: no even number divides them
        ("square", 64, 1, 64, 64),
        ("square", 768, 6, 128, 128),
        ("square", 2048, 16, 128, 128),
        ("model", 768, 12, 64, 64),
    ],
)
def test_sizes_follow_the_width(shape, width, heads, keys, values):
    with torch.device("meta"):
        mixer = build_mixer("gated_delta_net", width, 12, shape=shape)
    assert (mixer.heads, mixer.key_dim, mixer.value_dim) == (heads, keys, values)


def test_fields_stand_above_the_shape():
    def sizes(**fields):
        mixer = build_mixer("delta_net", 64, 2, **fields)
        return mixer.heads, mixer.key_dim, mixer.value_dim

    assert sizes(heads=3) == (3, 16, 32)
    assert sizes(head_dim=12, expand_v=1.0) == (4, 12, 12)
    assert sizes(heads=5, head_dim=7) == (5, 7, 14)
    assert sizes(shape="model", head_dim=8) == (2, 8, 8)
    with pytest.raises(ValueError, match=r"needs a width of which 0.75 is whole; got 30"):
        build_mixer("delta_net", 30, 2)
    assert build_mixer("delta_net", 30, 2, heads=2, head_dim=8).key_dim == 8


def test_gates_start_in_their_ranges():
    mixer = build_mixer("gated_delta_net", 512, 512, shape="model")
    rate = mixer.decay.A_log.exp()
    step = torch.nn.functional.softplus(mixer.decay.dt_bias)
    assert 0 < rate.min() < 1
    assert 15 < rate.max() <= 16
    assert 0.99e-3 <= step.min() < step.max() <= 0.101
    exempt = {"decay.A_log", "decay.dt_bias", "a_proj.weight", "b_proj.weight"}
    assert names_without_weight_decay(mixer) == exempt


def test_a_gated_net_that_keeps_everything_is_a_delta_net():
    torch.manual_seed(0)
    gated = build_mixer("gated_delta_net", 32, 2)
    plain = build_mixer("delta_net", 32, 2)
    plain.load_state_dict(gated.state_dict(), strict=False)
    torch.nn.init.constant_(gated.decay.A_log, -torch.inf)
    x = torch.randn(2, 70, 32)
    assert relative_rms(gated(x)[0], plain(x)[0]) < 1e-6


def test_values_may_be_wider_than_keys():
    mixer = build_mixer("gated_delta_net", 32, 2, shape="model", expand_v=2.0)
    _, state = mixer(torch.randn(1, 5, 32))
    assert state.memory.shape == (1, 2, 16, 32)
    assert state.v_tail.shape == (1, 3, 64)


def test_corrections_reach_two_with_negative_eigenvalues():
    x = 100 * torch.randn(1, 50, 16)
    assert build_mixer("delta_net", 16, 2)._corrections(x).max() <= 1
    wide = build_mixer("delta_net", 16, 2, allow_neg_eigval=True)._corrections(x)
    assert 1.9 < wide.max() <= 2


@pytest.mark.parametrize("name", ["delta_net", "gated_delta_net"])
def test_a_constant_series_stays_bounded(name):
    torch.manual_seed(0)
    mixer = build_mixer(name, 16, 2, allow_neg_eigval=True)
    y, state = mixer(torch.randn(1, 1, 16).expand(1, 3000, 16))
    assert torch.isfinite(y).all()
    assert state.memory.abs().max() < 50
    y[:, -1].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in mixer.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 0}, "heads must be a whole number of at least 1; got 0"),
        ({"conv_on": ["x"]}, "conv_on must be a list of some of"),
        ({"conv_width": -1}, "conv_width must be a whole number of at least 0; got -1"),
        ({"norm_eps": -1.0}, "norm_eps must be a number of at least 0"),
        ({"backend": "native"}, "backend must be one of"),
    ],
)
def test_configuration_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        DeltaNetMixerConfig(**fields)


@pytest.mark.parametrize("expand_v", [0.0, 0.3, -1])
def test_values_of_a_whole_size(expand_v):
    with pytest.raises(ValueError, match="expand_v must"):
        build_mixer("delta_net", 16, 2, expand_v=expand_v)
