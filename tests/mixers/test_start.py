"""What mixers put out before any training, in models of several widths."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from trellis import TrellisConfig, TrellisForCausalLM
from trellis.mixers import MIXERS

#: Trellis without what makes its memory a running average at the start.
NOISE = {"form": "paper", "conv_bias": False}
TOKENS = 64
SEEDS = range(4)
#: How much the scales of outputs may differ from that of attention.
RATIO = 3
#: Mamba2's authors put the norm behind the gate, so that what enters the last map has scale 1;
#: gates behind the norm make it a third of that elsewhere.
RATIOS = {"mamba2": 8}
#: Half-lives of running averages, in tokens; 0 is the newest value alone.
HALF_LIVES = (0, 1, 4, 16, 64, math.inf)
#: The least similarity of answers and running averages. Noise has 0, Trellis without bias and
#: skip 0.10, and of the others Gated DeltaNet the least, 0.17 to 0.19.
SIMILARITY = 0.13


def first_mixer(name, width, seed, layers=2, **fields):
    torch.manual_seed(seed)
    config = TrellisConfig(
        vocab_size=16, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=width // 64, mixer=name, mixer_config=fields or None,
    )  # fmt: skip
    return TrellisForCausalLM(config).model.layers[0].mixer


def normed_inputs(width, tokens=TOKENS):
    """What a mixer gets from its norm: tokens of scale 1."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, tokens, width, generator=generator)


@functools.cache
@torch.no_grad()
def scale(name, width):
    """The root mean square of what a mixer puts out, over some initialisations."""
    x = normed_inputs(width)
    squares = [first_mixer(name, width, seed)(x)[0].square().mean() for seed in SEEDS]
    return torch.stack(squares).mean().sqrt().item()


@pytest.mark.parametrize("width", [64, 128, 512])
def test_all_put_out_about_as_much_as_attention(width):
    expected = scale("transformer", width)
    found = {name: scale(name, width) / expected for name in MIXERS}
    print(width, {name: round(ratio, 2) for name, ratio in found.items()})
    for name, ratio in found.items():
        limit = RATIOS.get(name, RATIO)
        assert 1 / limit < ratio < limit, name


def test_the_scale_is_the_same_at_every_width():
    for name in MIXERS:
        scales = [scale(name, width) for width in (64, 128, 512)]
        assert max(scales) < 2 * min(scales), name


@torch.no_grad()
def values_and_answers(mixer, x):
    """The values that a mixer writes, and what its memory answers, [B, T, H, D] each."""
    seen = {}
    parts = dict(mixer.named_modules())
    names = ("convolutions.v", "convolution", "v_proj")
    source = next(parts[name] for name in names if name in parts)
    source.register_forward_hook(lambda _, inputs, outputs: seen.update(values=outputs))
    behind = getattr(mixer, "out_norm", mixer.output_projection)
    behind.register_forward_pre_hook(lambda _, inputs: seen.update(answers=inputs[0]))
    mixer(x)
    values = seen["values"][0] if isinstance(seen["values"], tuple) else seen["values"]
    answers = seen["answers"]
    if hasattr(mixer, "in_proj"):  # Mamba2, whose values come with B and C, and whose gate is first
        values = values[..., : mixer.inner_dim]
        answers = answers / F.silu(mixer.in_proj(x)[..., : mixer.inner_dim])
    return (part.flatten(2).unflatten(-1, (mixer.heads, -1)) for part in (values, answers))


def running_average(values, half_life):
    place = torch.arange(values.shape[1])
    age = (place[:, None] - place).to(values.dtype)
    weights = torch.where(age == 0, 1.0, 0.5 ** (age / half_life) if half_life else 0.0).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("ts,bshd->bthd", weights, values)


def similarity(name, **fields):
    """The cosine of answers and running averages of values, on average over tokens, heads and
    initialisations; at the half-life at which it is largest."""
    found = torch.zeros(len(HALF_LIVES))
    for seed in SEEDS:
        mixer = first_mixer(name, 128, seed, **fields)
        values, answers = values_and_answers(mixer, normed_inputs(128, 256))
        if name == "gsa":  # SiLU acts on values and on answers
            values = F.silu(values)
        for i, half_life in enumerate(HALF_LIVES):
            average = running_average(values, half_life)
            average = F.silu(average) if name == "gsa" else average
            found[i] += F.cosine_similarity(average, answers, dim=-1)[:, 8:].mean() / len(SEEDS)
    return found.max().item()


@pytest.mark.parametrize("name", MIXERS)
def test_memories_start_as_running_averages(name):
    """What a memory answers resembles an average of the values of recent tokens."""
    found = similarity(name)
    print(name, round(found, 3))
    assert found > SIMILARITY


def test_trellis_without_bias_and_skip_starts_with_noise():
    """The check tells a running average from noise."""
    assert similarity("trellis", **NOISE) < SIMILARITY


def test_maps_are_drawn_by_their_inputs():
    torch.manual_seed(0)
    for width, layers, fields in ((64, 3, {}), (192, 2, {"initializer_range": 0.05})):
        config = TrellisConfig(
            vocab_size=500, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2,
            intermediate_size=300, mixer=["mamba2", "delta_net"], tie_word_embeddings=False,
            **fields,
        )  # fmt: skip
        model = TrellisForCausalLM(config)
        last = {
            last
            for block in model.model.layers
            for last in (block.mixer.output_projection, block.mlp.down_proj)
        }
        assert len(last) == 2 * layers
        for name, module in model.named_modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                inputs = width if module is model.model.embed_tokens else module.in_features
                expected = config.initializer_range * math.sqrt(768 / inputs)
                expected /= math.sqrt(2 * layers) if module in last else 1
                assert module.weight.std().item() == pytest.approx(expected, rel=0.15), name


@pytest.mark.parametrize("name", MIXERS)
def test_the_output_projection_is_the_last_map(name):
    mixer = first_mixer(name, 64, 0)
    ends = []
    for module in mixer.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, _, y: ends.append((module, y)))
    y, _ = mixer(normed_inputs(64))
    module, last = ends[-1]
    assert module is mixer.output_projection
    assert last is y


def test_mixers_fill_in_their_own_starts():
    """Also those that have no parameters themselves, only maps."""
    mixer = first_mixer("trellis", 64, 0, step_bias=2.0, tie_queries=True)
    assert (mixer.gamma_proj.bias == 2).all()
    assert torch.equal(mixer.q_proj.weight, mixer.k_proj.weight)
