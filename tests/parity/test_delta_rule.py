"""The delta rule beside the functions of transformers (Qwen3-Next) and flash-linear-attention."""

import pytest
import torch
from tests.support import projection

from trellis.mixers import build_mixer
from trellis.ops import delta_rule

BATCH, TOKENS, HEADS, KEY, VALUE = 2, 150, 3, 16, 24
NAMES = ("q", "k", "v", "beta", "log_decay", "initial state")


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    lead = (BATCH, TOKENS, HEADS)
    q, k = torch.nn.functional.normalize(
        torch.randn(2, *lead, KEY, generator=generator), dim=-1
    ).unbind()
    v = torch.randn(*lead, VALUE, generator=generator)
    beta = torch.rand(*lead, generator=generator)
    log_decay = -0.3 * torch.rand(*lead, generator=generator)
    state = torch.randn(BATCH, HEADS, KEY, VALUE, generator=generator)
    return dict(zip(NAMES, (q, k, v, beta, log_decay, state)))


def results(call, tensors):
    """y, the final state and the gradients of a random function of both."""
    given = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    y, final = call(**{name.replace(" ", "_"): t for name, t in given.items()})
    loss = projection((y, final), torch.float32)
    gradients = torch.autograd.grad(loss, list(given.values()))
    return {"y": y, "final state": final} | {f"d {n}": g for n, g in zip(given, gradients)}


def compare(agrees, what, peer, theirs, tensors):
    def ours(**given):
        return delta_rule(**given, output_final_state=True, backend="chunked")

    one, other = results(ours, tensors), results(theirs, tensors)
    agrees(what, peer, {name: (one[name], other[name]) for name in other})


@pytest.mark.transformers
@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize("name", ["torch_chunk", "torch_recurrent"])
def test_qwen3_next(agrees, transformers_alone, name, decays):
    from transformers.models.qwen3_next import modeling_qwen3_next

    function = getattr(modeling_qwen3_next, f"{name}_gated_delta_rule")

    def theirs(q, k, v, beta, initial_state, log_decay=None):
        decay = torch.zeros_like(beta) if log_decay is None else log_decay
        return function(
            q, k, v, g=decay, beta=beta, initial_state=initial_state, output_final_state=True
        )

    tensors = problem()
    if not decays:
        del tensors["log_decay"]
    what = "gated delta rule" if decays else "delta rule"
    compare(agrees, what, f"transformers {name}_gated_delta_rule", theirs, tensors)


@pytest.mark.fla
@pytest.mark.parametrize("name", ["naive_recurrent", "naive_chunk"])
def test_fla_gated(agrees, fla, name):
    function = getattr(fla("ops.gated_delta_rule.naive"), f"{name}_gated_delta_rule")

    def theirs(q, k, v, beta, log_decay, initial_state):
        return function(
            q, k, v, beta=beta, g=log_decay, initial_state=initial_state, output_final_state=True
        )

    compare(agrees, "gated delta rule", f"fla {name}_gated_delta_rule", theirs, problem())


@pytest.mark.fla
def test_fla_without_decay(agrees, fla):
    function = fla("ops.delta_rule.naive").delta_rule_recurrence

    def theirs(q, k, v, beta, initial_state):
        q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta))  # heads first
        y, final = function(q, k, v, beta, initial_state=initial_state)
        return y.transpose(1, 2), final

    tensors = problem()
    del tensors["log_decay"]
    compare(agrees, "delta rule", "fla delta_rule_recurrence", theirs, tensors)


@pytest.mark.transformers
def test_the_layer_of_qwen3_next(agrees, transformers_alone):
    """Output and all gradients of a whole layer, its interleaved weights taken apart."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    torch.manual_seed(0)
    dim = HEADS * KEY
    config = Qwen3NextConfig(
        hidden_size=dim, linear_num_key_heads=HEADS, linear_num_value_heads=HEADS,
        linear_key_head_dim=KEY, linear_value_head_dim=VALUE, num_hidden_layers=1,
        layer_types=["linear_attention"], rms_norm_eps=1e-5,
    )  # fmt: skip
    peer = Qwen3NextGatedDeltaNet(config, 0)
    mixer = build_mixer("gated_delta_net", dim, HEADS, shape="model", expand_v=VALUE / KEY)
    with torch.no_grad():
        # At the peer's own start, decays of e^-20, its gradient of the decay loses three digits.
        peer.A_log.copy_(mixer.decay.A_log)
        peer.dt_bias.copy_(mixer.decay.dt_bias)
    mixer.load_state_dict(taken_apart(peer.state_dict()))

    x = torch.randn(BATCH, TOKENS, dim)
    sides = []
    for run, module in ((lambda x: mixer(x)[0], mixer), (peer, peer)):
        own = x.clone().requires_grad_()
        y = run(own)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        gradients = {name: weight.grad for name, weight in module.named_parameters()}
        if module is peer:
            gradients = taken_apart(gradients)
        sides.append({"y": y, "d x": own.grad} | {f"d {n}": g for n, g in gradients.items()})
    one, other = sides
    assert one.keys() == other.keys()
    what = {name: (one[name], other[name]) for name in other}
    agrees("gated_delta_net", "transformers Qwen3NextGatedDeltaNet", what)


def taken_apart(weights):
    """The weights of a Qwen3NextGatedDeltaNet, by our names."""
    maps = weights["in_proj_qkvz.weight"].unflatten(0, (HEADS, -1))
    streams = maps.split([KEY, KEY, VALUE, VALUE], dim=1)
    gates = weights["in_proj_ba.weight"].unflatten(0, (HEADS, 2)).unbind(1)
    taps = weights["conv1d.weight"].squeeze(1).split([HEADS * KEY, HEADS * KEY, HEADS * VALUE])
    return {
        **{f"{name}_proj.weight": stream.flatten(0, 1) for name, stream in zip("qkvg", streams)},
        **{f"{name}_proj.weight": gate for name, gate in zip("ba", gates)},
        **{f"convolutions.{name}.weight": tap for name, tap in zip("qkv", taps)},
        "decay.A_log": weights["A_log"],
        "decay.dt_bias": weights["dt_bias"],
        "out_norm.weight": weights["norm.weight"],
        "o_proj.weight": weights["out_proj.weight"],
    }
