"""The choices of the Trellis mixer."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.support import relative_rms

from trellis.mixers import TrellisMixerConfig, build_mixer, names_without_weight_decay
from trellis.mixers.trellis import FORMS
from trellis.ops import delta_rule, trellis_memory

#: The paper's Trellis as its ablation starts from it, with our phi and psi.
PAPER = {
    "form": "paper",
    "phi": "silu",
    "f": "ln_silu",
    "psi": "identity",
    "value_pass": "encode",
    "mode": "stale",
    "minibatch": 16,
    "slots": 64,
}
#: The rows of the ablation: what each changes, and the row that it changes.
ABLATION = {
    "w/o forget gate": ({"forget_gate": False}, "Trellis"),
    "f = L2-SiLU": ({"f": "l2_silu"}, "Trellis"),
    "f = Softmax": ({"f": "softmax"}, "Trellis"),
    "linear, f = Softmax": ({"phi": "identity", "f": "softmax"}, "f = Softmax"),
    "linear, f = LN-SiLU": ({"phi": "identity"}, "Trellis"),
    "m = 32": ({"slots": 32}, "Trellis"),
    "m = 128": ({"slots": 128}, "Trellis"),
    "b = 1": ({"minibatch": 1}, "Trellis"),
}
ROWS = {"Trellis": PAPER} | {row: PAPER | change for row, (change, _) in ABLATION.items()}
#: phi by name with its derivative, and f by name, as the paper writes them; epsilons are ours.
PHI = {
    "silu": (F.silu, lambda z: z.sigmoid() * (1 + z * (1 - z.sigmoid()))),
    "identity": (lambda z: z, torch.ones_like),
}
INTERMEDIATE = {
    "ln_silu": lambda x: F.layer_norm(F.silu(x), x.shape[-1:]),
    "l2_silu": lambda x: F.silu(x) / (F.silu(x).square().sum(-1, keepdim=True) + 1e-6).sqrt(),
    "softmax": lambda x: x.softmax(-1),
}
#: Two mini-batches of 16 and half of a third.
X = torch.randn(2, 40, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def with_shared_weights(**fields):
    """A mixer of one head of 64 in fp64. Every call gives the same weights, cut to the slots.

    Codes are 16 times as large as at initialisation, so that phi is not nearly linear.
    """
    torch.manual_seed(0)
    weights = build_mixer("trellis", 64, 1, form="paper", slots=128).double().state_dict()
    weights["alpha_proj.weight"] *= 16
    mixer = build_mixer("trellis", 64, 1, **fields).double()
    own = {
        name: weights[name][tuple(slice(size) for size in tensor.shape)]
        for name, tensor in mixer.state_dict().items()
    }
    mixer.load_state_dict(own)
    return mixer


def memory_inputs(mixer):
    return mixer.project(X, mixer.init_state(len(X)))[0]


def compress_token_by_token(query, x, target, log_beta, gamma, phi, minibatch, read):
    """One pass as the paper writes it: a gradient step at the memory before the mini-batch."""
    function, derivative = PHI[phi]
    memory = x.new_zeros(*x.shape[::2], target.shape[-1], x.shape[-1])  # [B, H, m, d]
    outputs = []
    for t in range(x.shape[1]):
        if t % minibatch == 0:
            anchor = memory
        z = torch.einsum("bhmd,bhd->bhm", anchor, x[:, t])
        u = derivative(z) * (function(z) - target[:, t])
        write = torch.einsum("bh,bhm,bhd->bhmd", gamma[:, t], u, x[:, t])
        memory = log_beta[:, t, :, None, None].exp() * memory - write
        outputs.append(torch.einsum(read, memory, query[:, t]))
    return torch.stack(outputs, dim=1), memory


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_ablation_is_the_recurrence_that_it_names(row):
    fields = ROWS[row]
    mixer = with_shared_weights(**fields)
    q, k, v, alpha, log_beta, gamma = memory_inputs(mixer)
    assert log_beta[0].any() == (row != "w/o forget gate")
    assert alpha.shape[-1] == fields["slots"]
    options = (fields["phi"], fields["minibatch"])
    f = INTERMEDIATE[fields["f"]]
    yhat, keys = compress_token_by_token(
        q, k, alpha, log_beta[0], gamma[0], *options, "bhmd,bhd->bhm"
    )
    y, values = compress_token_by_token(
        f(yhat), v, alpha, log_beta[1], gamma[1], *options, "bhmd,bhm->bhd"
    )
    actual, state = mixer(X)
    assert relative_rms(actual, mixer.project_out(X, y, v)) < 1e-9
    assert relative_rms(state.memory.keys, keys) < 1e-9
    assert relative_rms(state.memory.values, values) < 1e-9


@pytest.mark.parametrize(("row", "other"), [(row, other) for row, (_, other) in ABLATION.items()])
def test_a_row_of_the_ablation_differs_from_the_row_that_it_changes(row, other):
    mixer, unchanged = with_shared_weights(**ROWS[row]), with_shared_weights(**ROWS[other])
    y, _ = mixer(X)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(p.grad).all() for p in mixer.parameters())
    assert relative_rms(y, unchanged(X)[0]) > 0.01


@pytest.mark.parametrize("mode", ["exact", "stale"])
def test_without_its_forget_gate_the_memory_has_a_log_decay_of_zero(mode):
    fields = PAPER | {"mode": mode}
    gated = with_shared_weights(**fields)
    inputs = memory_inputs(gated)
    assert inputs.log_beta[0].max() < 0
    zeros = torch.zeros_like(inputs.log_beta[0])
    y, final = trellis_memory(
        *inputs._replace(log_beta=(zeros, zeros)), output_final_state=True, **gated.choices
    )
    ungated, state = with_shared_weights(**fields, forget_gate=False)(X)
    assert relative_rms(ungated, gated.project_out(X, y, inputs.v)) < 1e-9
    assert relative_rms(state.memory.keys, final.keys) < 1e-9
    assert relative_rms(state.memory.values, final.values) < 1e-9


@pytest.mark.parametrize("gates", [{"forget_gate": False}, {"error_at": "after"}])
@pytest.mark.parametrize("f", ["softmax", "ln_silu"])
def test_linear_passes_are_the_delta_rule(f, gates):
    """Without a forget gate, or with the error at the decayed memory, as the delta rule takes it.

    The keys of the delta rule are k in the key pass and v in the value pass, its values are alpha.
    """
    change = {"phi": "identity", "f": f, "mode": "exact", **gates}
    mixer = with_shared_weights(**PAPER | change)
    q, k, v, alpha, log_beta, gamma = memory_inputs(mixer)
    assert log_beta[0].any() == ("error_at" in gates)
    yhat, keys = delta_rule(q, k, alpha, gamma[0], log_beta[0], scale=1.0, output_final_state=True)
    r = INTERMEDIATE[f](yhat)
    # The value pass reads with the transpose, which the op does not: it only writes here.
    values, outputs = None, []
    for t in range(X.shape[1]):
        token = slice(t, t + 1)
        _, values = delta_rule(
            v[:, token], v[:, token], alpha[:, token], gamma[1][:, token], log_beta[1][:, token],
            initial_state=values, output_final_state=True,
        )  # fmt: skip
        outputs.append(torch.einsum("bhdm,bhm->bhd", values, r[:, t]))
    y, state = mixer(X)
    assert relative_rms(y, mixer.project_out(X, torch.stack(outputs, dim=1), v)) < 1e-9
    assert relative_rms(state.memory.keys, keys.mT) < 1e-9
    assert relative_rms(state.memory.values, values.mT) < 1e-9


def test_stale_mini_batches_of_one_are_exact_mode():
    stale = with_shared_weights(**ROWS["b = 1"])
    exact = with_shared_weights(**PAPER | {"mode": "exact"})
    (y, after), (expected, state) = stale(X), exact(X)
    assert torch.equal(y, expected)
    assert torch.equal(after.memory.keys, state.memory.keys)
    assert torch.equal(after.memory.values, state.memory.values)


@pytest.mark.parametrize("slots", [32, 128])
def test_slots_of_the_key_memory_do_not_depend_on_their_number(slots):
    """phi acts on each slot alone, so more slots add to those that are there."""
    few, many = sorted((64, slots))
    keys, more = (
        with_shared_weights(**PAPER | {"slots": m})(X)[1].memory.keys for m in (few, many)
    )
    assert keys.shape == (2, 1, few, 64)
    assert more.shape == (2, 1, many, 64)
    assert relative_rms(keys, more[:, :, :few]) < 1e-9
    assert more[:, :, few:].abs().amax(-1).min() > 0


def test_defaults_follow_the_width():
    def sizes(dim, model_heads, **fields):
        mixer = build_mixer("trellis", dim, model_heads, **fields)
        keys, values = mixer.heads * mixer.key_dim, mixer.heads * mixer.value_dim
        convolved = {"q": keys, "k": keys}
        if "form" not in fields:
            convolved |= {"v": values, "alpha": mixer.heads * mixer.slots}
        assert set(mixer.convolutions) == set(convolved)
        tails = 3 * sum(convolved.values())
        assert mixer.state_size() == mixer.slots * (keys + values) + tails
        return mixer.heads, mixer.key_dim, mixer.value_dim, mixer.slots

    assert sizes(96, 3, shape="model") == sizes(96, 3, form="paper") == (3, 32, 32, 32)
    assert sizes(96, 3) == (2, 48, 96, 48)
    assert sizes(64, 8) == (1, 64, 128, 64)
    assert sizes(130, 2) == (10, 13, 26, 13)
    assert sizes(96, 3, heads=4, slots=10) == (4, 24, 48, 10)
    assert sizes(96, 3, heads=4, head_dim=7, expand_v=3) == (4, 7, 21, 7)


@pytest.mark.parametrize(
    ("stale_step", "factors"),
    [
        ("minibatch", [1 / 4] * 6),
        ("position", [1, 1 / 2, 1 / 3, 1 / 4, 1, 1 / 2]),
        ("none", [1] * 6),
    ],
)
def test_stale_mode_scales_the_step(stale_step, factors):
    torch.manual_seed(0)
    exact = build_mixer("trellis", 16, 2)
    stale = build_mixer("trellis", 16, 2, mode="stale", minibatch=4, stale_step=stale_step)
    stale.load_state_dict(exact.state_dict())
    x = torch.randn(1, 6, 16)
    one = exact.project(x, exact.init_state(1))[0].gamma[0]
    other = stale.project(x, stale.init_state(1))[0].gamma[0]
    assert torch.allclose(one * torch.tensor(factors)[:, None], other)


def test_stale_steps_by_position_go_on_inside_a_minibatch():
    mixer = build_mixer("trellis", 16, 2, mode="stale", minibatch=4, stale_step="position")
    x = torch.randn(1, 7, 16)
    _, state = mixer(x[:, :2])
    whole = mixer.project(x, mixer.init_state(1))[0].gamma[0]
    rest = mixer.project(x[:, 2:], state)[0].gamma[0]
    assert torch.allclose(whole[:, 2:], rest)


def test_half_lives_are_spread_over_the_heads_of_each_pass():
    mixer = build_mixer("trellis", 48, 3, heads=3, half_life=(8, 2048), separate_gates=True)
    torch.nn.init.zeros_(mixer.beta_proj.weight)
    keys, values = mixer._decays(torch.randn(1, 4, 48))
    for log_beta in (keys, values):
        half_lives = -math.log(2) / log_beta[0, 0]
        assert torch.allclose(half_lives, torch.tensor([8.0, 128.0, 2048.0]), rtol=1e-4)
    alone = build_mixer("trellis", 16, 1, half_life=(8, 2048))
    torch.nn.init.zeros_(alone.beta_proj.weight)
    assert alone._decays(torch.randn(1, 1, 16))[0].item() == pytest.approx(-math.log(2) / 2048)


def test_the_skip_adds_the_value_to_the_answer():
    torch.manual_seed(0)
    plain = build_mixer("trellis", 16, 2, skip=False)
    skipping = build_mixer("trellis", 16, 2, skip=0.5)
    skipping.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(1, 5, 16)
    v = plain.project(x, plain.init_state(1))[0].v
    y, _ = trellis_memory(*plain.project(x, plain.init_state(1))[0], **plain.choices)
    expected = plain.project_out(x, y + 0.5 * v, v)
    assert relative_rms(skipping(x)[0], expected) < 1e-5
    assert relative_rms(skipping(x)[0], plain(x)[0]) > 0.01


def test_forms_set_what_is_not_given():
    for name, fields in FORMS.items():
        chosen = TrellisMixerConfig(form=name)
        assert {field: getattr(chosen, field) for field in fields} == fields
        changed = TrellisMixerConfig(form=name, phi="tanh", skip=False, half_life=(2, 4))
        assert (changed.phi, changed.skip, changed.half_life) == ("tanh", False, (2, 4))
        assert changed.f == fields["f"]
    assert TrellisMixerConfig() == TrellisMixerConfig(form="recommended")
    assert TrellisMixerConfig(decay="sigmoid").half_life is False
    with pytest.raises(ValueError, match="form must be one of recommended, paper; got 'ours'"):
        TrellisMixerConfig(form="ours")


def test_tied_queries_start_equal_to_keys_and_are_their_own():
    mixer = build_mixer("trellis", 16, 2, tie_queries=True, conv_bias=True)
    q, k = mixer.project(torch.randn(1, 9, 16), mixer.init_state(1))[0][:2]
    assert torch.equal(q, k)
    assert mixer.q_proj.weight is not mixer.k_proj.weight
    free = build_mixer("trellis", 16, 2)
    q, k = free.project(torch.randn(1, 9, 16), free.init_state(1))[0][:2]
    assert relative_rms(q, k) > 0.1


def test_step_maxima_of_each_pass():
    mixer = build_mixer("trellis", 16, 2, step_max=(2.0, 0.5), separate_gates=False)
    keys, values = mixer.project(torch.randn(1, 9, 16), mixer.init_state(1))[0].gamma
    assert torch.allclose(keys, 4 * values)


def test_gates_start_in_their_ranges():
    mixer = build_mixer(
        "trellis", 64, 64, half_life=False, decay_rate=(2, 3), decay_step=(0.01, 0.02)
    )
    rate, step = mixer.decay.A_log.exp(), F.softplus(mixer.decay.dt_bias)
    assert 2 <= rate.min() <= rate.max() <= 3
    assert 0.0099 <= step.min() <= step.max() <= 0.0201
    exempt = {"decay.A_log", "decay.dt_bias", "gamma_proj.weight", "beta_proj.weight"}
    assert names_without_weight_decay(mixer) == exempt


def test_step_ranges():
    x = torch.randn(1, 50, 16)
    k = v = torch.randn(1, 50, 2, 8)
    wide = build_mixer("trellis", 16, 2, heads=2, step_max=1.5, step_bias=2.0)
    gamma = wide._steps(x, k, v)[0]
    assert 0 < gamma.min() < gamma.max() < 1.5
    assert gamma.mean() > 1.5 * 0.6
    fixed = build_mixer("trellis", 16, 2, heads=2, step="constant", step_max=0.3)
    assert torch.equal(fixed._steps(x, k, v)[0], torch.full((1, 50, 2), 0.3))
    lms = build_mixer("trellis", 16, 2, form="paper", lms_step=True)
    keys, values = lms._steps(x, k, 2 * v)
    assert relative_rms(4 * values, keys) < 1e-5
    assert (keys * k.square().sum(-1)).max() <= 1


def test_one_gate_or_one_for_each_pass():
    x = torch.randn(1, 5, 16)
    shared = build_mixer("trellis", 16, 2, heads=2, separate_gates=False)
    apart = build_mixer("trellis", 16, 2, heads=2, separate_gates=True)
    keys, values = shared._decays(x)
    assert keys is values
    keys, values = apart._decays(x)
    assert keys.shape == values.shape == (1, 5, 2)
    assert not torch.equal(keys, values)


def test_codes_of_one_size():
    """The size of alpha's map does not matter: codes keep a root mean square of 1."""
    torch.manual_seed(0)
    plain = {"conv_on": ("q", "k")}  # SiLU would not keep the direction of codes
    mixer, x = build_mixer("trellis", 16, 2, **plain), torch.randn(1, 20, 16)
    y = mixer(x)[0]
    with torch.no_grad():
        mixer.alpha_proj.weight *= 50
    codes = mixer.project(x, mixer.init_state(1))[0].alpha
    assert torch.allclose(codes.square().mean(-1), torch.ones(1, 20, 1), rtol=1e-4)
    assert relative_rms(mixer(x)[0], y) < 1e-4
    free = build_mixer("trellis", 16, 2, normalize_alpha=False, **plain)
    free.load_state_dict(mixer.state_dict())
    assert relative_rms(free(x)[0], y) > 0.1


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
        ({"step_max": (1.0, 2.0, 3.0)}, "step_max must be a number, or a pair"),
        ({"half_life": (8, 2)}, "half_life must be a range"),
        ({"half_life": (8, 16), "forget_gate": False}, "half_life needs forget_gate=True"),
        ({"skip": "yes"}, "skip must be a finite number; got 'yes'"),
        ({"stale_step": "b"}, "stale_step must be one of minibatch, position, none"),
        ({"decay_temperature": 0}, "decay_temperature must be a number above 0"),
    ],
)
def test_configuration_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        TrellisMixerConfig(**fields)


def test_streams_keep_the_dtype_of_autocast_on_a_gpu(monkeypatch):
    """Here the CPU stands for the GPU, where the memory's kernel takes 16-bit inputs."""
    mixer = build_mixer("trellis", 32, 2)
    x = torch.randn(1, 9, 32)
    state = mixer.init_state(1)
    found = {}
    for device in ("cpu", "cuda"):
        monkeypatch.setattr("trellis.mixers.layers.HALF_ON", (device,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inputs, _ = mixer.project(x, state)
        found[device] = inputs
        assert inputs.gamma[0].dtype == inputs.log_beta[0].dtype == torch.float32
    assert {t.dtype for t in found["cpu"][:4]} == {torch.bfloat16}
    assert {t.dtype for t in found["cuda"][:3]} == {torch.float32}
    for half, full in zip(found["cpu"][:3], found["cuda"][:3]):
        assert relative_rms(half, full) < 4e-3
