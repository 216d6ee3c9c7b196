"""Mamba2 beside transformers: the scan, the layer, a language model, and its cache."""

import pytest
import torch
from tests.support import projection
from torch import nn

from trellis.mixers import build_mixer
from trellis.ops import linear_attention

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("transformers_alone")]

DIM, HEADS, HEAD, STATE, TOKENS = 48, 6, 16, 20, 150


@pytest.fixture
def peer():
    from transformers.models.mamba2 import modeling_mamba2

    return modeling_mamba2


def config(groups=1, **fields):
    from transformers import Mamba2Config

    return Mamba2Config(
        hidden_size=DIM, num_heads=HEADS, head_dim=HEAD, state_size=STATE, n_groups=groups,
        num_hidden_layers=2, vocab_size=70, chunk_size=32, **fields,
    )  # fmt: skip


def of_same_weights(theirs, limit=None):
    """Our mixer with the weights of a Mamba2Mixer."""
    ours = build_mixer(
        "mamba2", DIM, 1, heads=HEADS, state_dim=STATE, groups=theirs.n_groups, step_limit=limit
    )
    ours.load_state_dict({name: theirs.get_parameter(path) for name, path in PLACES.items()} | {
        "convolution.weight": theirs.conv1d.weight[:, 0]
    })  # fmt: skip
    return ours


#: name of a parameter of ours -> of theirs; the convolution's weight has one dimension more there.
PLACES = {
    "in_proj.weight": "in_proj.weight",
    "convolution.bias": "conv1d.bias",
    "decay.A_log": "A_log",
    "decay.dt_bias": "dt_bias",
    "D": "D",
    "out_norm.weight": "norm.weight",
    "out_proj.weight": "out_proj.weight",
}


@pytest.mark.parametrize("groups", [1, 3])
def test_scan(agrees, peer, groups):
    torch.manual_seed(0)
    leaves = {
        "x": torch.randn(2, TOKENS, HEADS, HEAD),
        "dt": torch.rand(2, TOKENS, HEADS),
        "B": torch.randn(2, TOKENS, groups, STATE),
        "C": torch.randn(2, TOKENS, groups, STATE),
        "state": torch.randn(2, HEADS, HEAD, STATE),
    }
    rate = -torch.linspace(0.1, 2, HEADS)

    def ours(x, dt, B, C, state):
        y, final = linear_attention(
            C, B, dt[..., None] * x, rate * dt,
            initial_state=state.mT, output_final_state=True, backend="chunked",
        )  # fmt: skip
        return y, final.memory.mT

    def theirs(x, dt, B, C, state):
        return peer.mamba2_chunk_scan(
            x, dt, rate, B, C, chunk_size=32, initial_states=state, return_final_states=True
        )

    def results(call):
        given = {name: t.clone().requires_grad_() for name, t in leaves.items()}
        y, final = call(**given)
        loss = projection((y, final), torch.float32)
        found = {f"d {n}": g for n, g in zip(given, torch.autograd.grad(loss, given.values()))}
        return {"y": y, "final state": final} | found

    one, other = results(ours), results(theirs)
    what = f"linear attention with decay, {groups} groups"
    agrees(what, "transformers mamba2_chunk_scan", {n: (one[n], other[n]) for n in other})


@pytest.mark.parametrize(("groups", "limit"), [(1, None), (3, (0.005, 0.05))])
def test_layer(agrees, peer, groups, limit):
    torch.manual_seed(0)
    options = {} if limit is None else {"time_step_limit": limit}
    theirs = peer.Mamba2Mixer(config(groups, **options), layer_idx=0)
    nn.init.normal_(theirs.norm.weight)
    nn.init.normal_(theirs.D)
    ours = of_same_weights(theirs, limit)
    x = torch.randn(2, TOKENS, DIM, requires_grad=True)
    dy = torch.randn(2, TOKENS, DIM)
    one, other = ours(x)[0], theirs(x)
    pairs = {"y": (one, other)}
    places = PLACES | {"convolution.weight": "conv1d.weight"}
    gradients = torch.autograd.grad(one, [x, *map(ours.get_parameter, places)], dy)
    expected = torch.autograd.grad(other, [x, *map(theirs.get_parameter, places.values())], dy)
    for name, mine, their in zip(["x", *places], gradients, expected):
        pairs[f"d {name}"] = (mine, their.view_as(mine))
    agrees(f"Mamba2 layer, {groups} groups", "transformers Mamba2Mixer", pairs)


class InPlace(nn.Module):
    """Our mixer where transformers calls its own; it carries its state from call to call."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer, self.state = mixer, None

    def forward(self, hidden_states, **_):
        y, self.state = self.mixer(hidden_states, self.state)
        return y


@torch.no_grad()
def test_language_model_and_cache(agrees, peer):
    torch.manual_seed(0)
    model = peer.Mamba2ForCausalLM(config(groups=2)).eval()
    tokens = torch.randint(0, 70, (2, 60))
    whole = model(tokens, use_cache=False).logits
    pieces = [tokens[:, :40], *tokens[:, 40:].split(1, dim=1)]
    cache, stepwise = None, []
    for piece in pieces:
        out = model(piece, cache_params=cache, use_cache=True)
        cache = out.cache_params
        stepwise.append(out.logits)
    for block in model.backbone.layers:
        block.mixer = InPlace(of_same_weights(block.mixer))
    pairs = {"logits": (model(tokens, use_cache=False).logits, whole)}
    for block in model.backbone.layers:
        block.mixer.state = None
    ours = [model(piece, use_cache=False).logits for piece in pieces]
    pairs["logits token by token"] = (torch.cat(ours, dim=1), torch.cat(stepwise, dim=1))
    agrees("language model of Mamba2 layers", "transformers Mamba2ForCausalLM", pairs)
