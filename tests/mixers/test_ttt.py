"""What is special to TTT-Linear as a mixer: the authors' parameterisation."""

import pytest
import torch
import torch.nn.functional as F
from tests.support import relative_rms

from trellis.mixers import build_mixer
from trellis.ops import ttt_linear

DIM, HEADS, HEAD = 32, 2, 16


def test_the_layer_as_its_authors_write_it():
    """Convolutions without activation, in front and of q and k, places modulo the mini-batch, eta,
    norm, gate."""
    torch.manual_seed(0)
    mixer = build_mixer("ttt", DIM, HEADS, minibatch=5, base_lr=0.7).double()
    with torch.no_grad():
        mixer.theta_offset.copy_(torch.tensor([0.3, -0.9, 0.2, 0.0, -0.1]))
        mixer.norm_weight.normal_(1, 0.3)
        mixer.norm_bias.normal_(std=0.3)
        mixer.initial_bias.normal_()
    given = torch.randn(2, 23, DIM, dtype=torch.float64)

    def convolve(stream, convolution):
        padded = F.pad(stream.transpose(1, 2), (3, 0))
        weight = convolution.weight[:, None]
        return F.conv1d(padded, weight, convolution.bias, groups=DIM).transpose(1, 2)

    def turn(stream):
        pairs = torch.complex(*stream.unflatten(-1, (HEADS, 2, -1)).unbind(-2))
        place = (torch.arange(23) % 5)[:, None, None]
        angle = place * 10000.0 ** -(torch.arange(HEAD // 2, dtype=torch.float64) * 2 / HEAD)
        turned = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1)

    x = given + convolve(given, mixer.pre_convolution)
    shared = mixer.q_proj(x)
    q, k = (turn(convolve(shared, mixer.convolutions[name])) for name in "qk")
    v = mixer.v_proj(x).unflatten(-1, (HEADS, HEAD))
    eta = 0.7 * torch.sigmoid(mixer.eta_proj(x)) / HEAD
    theta = torch.clamp(1 / torch.arange(1, 6, dtype=torch.float64) + mixer.theta_offset, min=0)
    assert theta[1] == 0
    start = [p.expand(2, *p.shape) for p in (mixer.initial_weight, mixer.initial_bias)]
    y, _ = ttt_linear(
        q, k, v, eta, theta, mixer.norm_weight, mixer.norm_bias,
        initial_state=tuple(start), backend="reference",
    )  # fmt: skip
    y = F.layer_norm(y.flatten(2), (DIM,), mixer.out_norm.weight, mixer.out_norm.bias, 1e-6)
    y = mixer.o_proj(y * F.gelu(mixer.g_proj(x), approximate="tanh"))
    assert relative_rms(mixer(given)[0], y) < 1e-10


def test_initialisation():
    torch.manual_seed(0)
    mixer = build_mixer("ttt", 128, 2)
    assert torch.allclose(mixer._theta(), 1 / torch.arange(1.0, 17.0))
    assert mixer.initial_weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not mixer.initial_bias.any()
    assert (mixer.norm_weight == 1).all()
    assert not mixer.norm_bias.any()
    assert not mixer.convolutions["q"].bias.any()
    assert not mixer.pre_convolution.bias.any()
    keys = mixer.convolutions["k"](mixer.q_proj(torch.randn(1, 50, 128)), None, None)[0][0]
    keys = torch.nn.functional.normalize(keys.unflatten(-1, (2, -1)), dim=-1)
    alike = torch.einsum("thd,shd->hts", keys, keys)[:, ~torch.eye(50, dtype=torch.bool)]
    assert alike.mean().abs() < 0.1


def test_fields_are_checked():
    with pytest.raises(ValueError, match=r"conv_width must be at least 1 with share_qk.*; got 0"):
        build_mixer("ttt", DIM, HEADS, conv_width=0)
    with pytest.raises(ValueError, match="minibatch must be a whole number of at least 1; got 0"):
        build_mixer("ttt", DIM, HEADS, minibatch=0)
    with pytest.raises(ValueError, match="rotary positions need an even head size; got 3"):
        build_mixer("ttt", 6, 2)
    assert build_mixer("ttt", 6, 2, rope_theta=None).head_dim == 3
    assert build_mixer("ttt", DIM, HEADS, pre_conv=False).pre_convolution is None
    assert not build_mixer("ttt", DIM, HEADS, share_qk=False, conv_width=0).config.pre_conv
