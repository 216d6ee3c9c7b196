"""The choices of the Trellis mixer."""

import math

import pytest
import torch
from tests.support import relative_rms

from trellis.mixers import TrellisMixerConfig, build_mixer, names_without_weight_decay

#: The rows of the paper's ablation table.
ABLATION = {
    "Trellis": {"mode": "stale"},
    "w/o forget gate": {"mode": "stale", "forget_gate": False},
    "f = L2-SiLU": {"mode": "stale", "f": "l2_silu"},
    "f = Softmax": {"mode": "stale", "f": "softmax"},
    "linear, f = Softmax": {"mode": "stale", "phi": "identity", "f": "softmax"},
    "linear, f = LN-SiLU": {"mode": "stale", "phi": "identity", "f": "ln_silu"},
    "m = 32": {"mode": "stale", "slots": 32},
    "m = 128": {"mode": "stale", "slots": 128},
    "b = 1": {"mode": "exact"},
}


@pytest.mark.parametrize("row", ABLATION)
def test_rows_of_the_ablation(row):
    torch.manual_seed(0)
    mixer = build_mixer("trellis", 64, 1, **ABLATION[row])
    default = build_mixer("trellis", 64, 1)
    shapes = {name: tensor.shape for name, tensor in default.state_dict().items()}
    shared = {n: t for n, t in mixer.state_dict().items() if shapes.get(n) == t.shape}
    default.load_state_dict(shared, strict=False)
    x = torch.randn(1, 40, 64)
    y, _ = mixer(x)
    y.sum().backward()
    assert torch.isfinite(y).all()
    if row != "b = 1":
        assert relative_rms(y, default(x)[0]) > 1e-3


def test_defaults_follow_the_width():
    mixer = build_mixer("trellis", 96, 3)
    assert (mixer.heads, mixer.head_dim, mixer.slots) == (3, 32, 32)
    assert set(mixer.convolutions) == {"q", "k"}
    assert mixer.state_size() == 2 * 3 * 32 * 32 + 2 * 3 * 96


def test_stale_mode_divides_the_step_by_the_minibatch():
    torch.manual_seed(0)
    exact = build_mixer("trellis", 16, 2)
    stale = build_mixer("trellis", 16, 2, mode="stale", minibatch=8)
    stale.load_state_dict(exact.state_dict())
    x = torch.randn(1, 5, 16)
    k = v = torch.randn(1, 5, 2, 8)
    one, other = exact._steps(x, k, v)[0], stale._steps(x, k, v)[0]
    assert torch.allclose(one / 8, other)


def test_gates_start_in_their_ranges():
    mixer = build_mixer("trellis", 64, 64, decay_rate=(2, 3), decay_step=(0.01, 0.02))
    rate, step = mixer.decay.A_log.exp(), torch.nn.functional.softplus(mixer.decay.dt_bias)
    assert 2 <= rate.min() <= rate.max() <= 3
    assert 0.0099 <= step.min() <= step.max() <= 0.0201
    exempt = {"decay.A_log", "decay.dt_bias", "gamma_proj.weight", "beta_proj.weight"}
    assert names_without_weight_decay(mixer) == exempt


def test_step_ranges():
    x = torch.randn(1, 50, 16)
    k = v = torch.randn(1, 50, 2, 8)
    wide = build_mixer("trellis", 16, 2, step_max=1.5, step_bias=2.0)
    gamma = wide._steps(x, k, v)[0]
    assert 0 < gamma.min() < gamma.max() < 1.5
    assert gamma.mean() > 1.5 * 0.6
    fixed = build_mixer("trellis", 16, 2, step="constant", step_max=0.3)
    assert torch.equal(fixed._steps(x, k, v)[0], torch.full((1, 50, 2), 0.3))
    lms = build_mixer("trellis", 16, 2, lms_step=True)
    keys, values = lms._steps(x, k, 2 * v)
    assert relative_rms(4 * values, keys) < 1e-5
    assert (keys * k.square().sum(-1)).max() <= 1


def test_one_gate_or_one_for_each_pass():
    x = torch.randn(1, 5, 16)
    shared = build_mixer("trellis", 16, 2)
    apart = build_mixer("trellis", 16, 2, separate_gates=True)
    keys, values = shared._decays(x)
    assert keys is values
    keys, values = apart._decays(x)
    assert keys.shape == values.shape == (1, 5, 2)
    assert not torch.equal(keys, values)


def test_without_a_forget_gate_nothing_decays():
    mixer = build_mixer("trellis", 16, 2, forget_gate=False)
    assert not mixer._decays(torch.randn(1, 5, 16))[0].any()
    assert not any("beta" in name or "decay" in name for name, _ in mixer.named_parameters())


def test_initial_memory_is_learned_where_phi_is_degenerate():
    assert build_mixer("trellis", 16, 2).initial_keys is None
    assert build_mixer("trellis", 16, 2, phi="layernorm").initial_keys is not None
    plain = build_mixer("trellis", 16, 2, phi="layernorm", learn_initial_memory=False)
    assert plain.initial_keys is None
    assert build_mixer("trellis", 16, 2, learn_initial_memory=True).initial_keys is not None


@pytest.mark.parametrize("mode", ["exact", "stale"])
def test_huge_inputs_stay_finite(mode):
    mixer = build_mixer("trellis", 32, 2, mode=mode)
    y, state = mixer(1e4 * torch.randn(2, 60, 32))
    assert torch.isfinite(y).all()
    assert torch.isfinite(state.memory.keys).all()


@pytest.mark.parametrize("mode", ["exact", "stale"])
def test_a_constant_series_stays_bounded(mode):
    torch.manual_seed(0)
    mixer = build_mixer("trellis", 16, 2, mode=mode)
    x = torch.randn(1, 1, 16).expand(1, 3000, 16)
    y, state = mixer(x)
    assert torch.isfinite(y).all()
    assert state.memory.keys.abs().max() < 50
    y[:, -1].sum().backward()
    assert all(math.isfinite(p.grad.norm()) for p in mixer.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"phi": "relu"}, "phi must be one of"),
        ({"slots": 0}, "slots must be a whole number of at least 1; got 0"),
        ({"conv_on": ["q", "x"]}, "conv_on must be a list of some of"),
        ({"conv_on": "qk"}, "conv_on must be a list"),
        ({"conv_width": -1}, "conv_width must be a whole number of at least 0; got -1"),
        ({"decay_rate": (3, 1)}, "decay_rate must be a range"),
        ({"step_max": math.nan}, "step_max must be a number of at least 0; got nan"),
        ({"backend": "gpu"}, "backend must be one of"),
        ({"decay_temperature": 0}, "decay_temperature must be a number above 0"),
    ],
)
def test_configuration_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        TrellisMixerConfig(**fields)
