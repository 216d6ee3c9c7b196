"""The choices of linear attention."""

import pytest
import torch
import torch.nn.functional as F
from tests.support import relative_rms

from trellis.mixers import LinearAttentionMixerConfig, build_mixer

AS_IN_ITS_PAPER = {"conv_width": 0, "output_norm": False, "output_gate": False}


def test_is_attention_with_other_weights():
    """The quadratic form of the paper: weights phi(q) . phi(k) in place of exp(q . k)."""
    torch.manual_seed(0)
    mixer = build_mixer("linear_attention", 32, 2, **AS_IN_ITS_PAPER)
    x = torch.randn(2, 70, 32)
    q, k, v = (
        p(x).unflatten(-1, (2, 16)).transpose(1, 2)
        for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    y = weights / weights.sum(-1, keepdim=True) @ v
    assert relative_rms(mixer(x)[0], mixer.o_proj(y.transpose(1, 2).flatten(2))) < 1e-5


def test_the_normaliser_follows_the_feature_map():
    assert LinearAttentionMixerConfig().normalize
    assert LinearAttentionMixerConfig(feature_map="relu").normalize
    assert not LinearAttentionMixerConfig(feature_map="identity").normalize
    with pytest.raises(ValueError, match="normalize must be False with feature_map='identity'"):
        LinearAttentionMixerConfig(feature_map="identity", normalize=True)


def test_sizes():
    mixer = build_mixer("linear_attention", 32, 2, conv_width=0)
    assert mixer.state_size() == 2 * (16 * 16 + 16)
    unnormalised = build_mixer("linear_attention", 32, 2, conv_width=0, normalize=False)
    assert unnormalised.state_size() == 2 * 16 * 16
    assert mixer.flops(100) == 4 * mixer.state_size()
    convolved = build_mixer("linear_attention", 32, 2)
    assert convolved.state_size() == mixer.state_size() + 3 * 3 * 32
    assert convolved.flops(100) == mixer.flops(100) + 2 * 4 * 3 * 32


def test_convolution_norm_and_gate():
    """The whole layer, written out."""
    torch.manual_seed(0)
    mixer = build_mixer("linear_attention", 32, 2)
    x = torch.randn(2, 30, 32)

    def stream(name):
        projected = getattr(mixer, f"{name}_proj")(x)
        padded = F.pad(projected.transpose(1, 2), (3, 0))
        taps = mixer.convolutions[name].weight[:, None]
        return F.conv1d(padded, taps, groups=32).transpose(1, 2).unflatten(-1, (2, 16))

    q, k, v = (stream(name).transpose(1, 2) for name in "qkv")
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    y = (weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2)
    y = F.rms_norm(y, (16,), mixer.out_norm.weight, 1e-6).flatten(2) * F.silu(mixer.g_proj(x))
    assert relative_rms(mixer(x)[0], mixer.o_proj(y)) < 1e-5


def test_choices_are_checked():
    with pytest.raises(ValueError, match="feature_map must be one of elu, relu, identity; got"):
        build_mixer("linear_attention", 32, 2, feature_map="gelu")
