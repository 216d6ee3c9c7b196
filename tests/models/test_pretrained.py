"""Pretrained models as ours: the same logits and greedy tokens as in transformers and llama2.c."""

import struct

import numpy as np
import pytest
import torch
from tests.support import relative_rms, small_model, tokens
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trellis.mixers import MIXERS
from trellis.models.presets import state_bytes
from trellis.models.pretrained import config_of, imported, read_llama2c, replaced, take_over

SIZES = {
    "vocab_size": 97, "intermediate_size": 88, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    "initializer_range": 0.1,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip


def heads(dim, queries, keys, **more):
    return {"hidden_size": dim, "num_attention_heads": queries, "num_key_value_heads": keys, **more}


def rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


#: name -> (configuration, model, fields)
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, heads(32, 4, 4)),
    "smollm2": (
        LlamaConfig,
        LlamaForCausalLM,
        heads(72, 9, 3, tie_word_embeddings=True, rope_parameters=rope(1e5)),
    ),
    "llama 3": (LlamaConfig, LlamaForCausalLM, heads(32, 4, 2, rope_parameters=LLAMA3)),
    "llama with biases": (LlamaConfig, LlamaForCausalLM, heads(32, 4, 2, attention_bias=True)),
    "mistral": (MistralConfig, MistralForCausalLM, heads(32, 4, 2, sliding_window=9)),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, heads(32, 4, 2, tie_word_embeddings=True)),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        heads(32, 4, 2, head_dim=16, tie_word_embeddings=True, rope_parameters=rope(1e6)),
    ),
}


def pretrained(name):
    """A small model of a family with random weights, biases and norms included."""
    config, model, fields = FAMILIES[name]
    torch.manual_seed(0)
    made = model(config(**SIZES, **fields)).eval()
    with torch.no_grad():
        for key, weight in made.named_parameters():
            if key.endswith(("bias", "norm.weight", "layernorm.weight")):
                weight.uniform_(0.5, 1.5)
    return made


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_and_greedy_tokens_equal_those_of_transformers(name):
    theirs = pretrained(name)
    ours = imported(theirs)
    ids = tokens(2, 100)
    assert relative_rms(ours(ids).logits, theirs(ids).logits) < 1e-5
    options = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


def test_the_cache_of_grouped_keys_is_as_small_as_theirs():
    theirs = pretrained("smollm2")
    ours = imported(theirs)
    ids = tokens(1, 50)
    with torch.no_grad():
        layers = theirs(ids, use_cache=True).past_key_values.layers
        cache = ours(ids, use_cache=True).past_key_values
    expected = sum(4 * (layer.keys.numel() + layer.values.numel()) for layer in layers)
    assert state_bytes(ours.config, 50) == expected + 4 * len(layers)  # and a count of tokens
    assert sum(t.numel() for n, t in cache._tensors() if "length" not in n) * 4 == expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "one of the kinds llama, mistral, qwen2, qwen3; got 'gpt2'"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act must be 'silu'"),
        (LlamaConfig(mlp_bias=True), "mlp_bias must be false"),
        (
            LlamaConfig(rope_parameters={**rope(1e4), "rope_type": "linear", "factor": 2.0}),
            "rope_type must be 'default' or 'llama3'; got 'linear'",
        ),
        (
            Qwen2Config(use_sliding_window=True, num_hidden_layers=4, max_window_layers=2),
            "layer_types must be the same for all layers",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(config, reason):
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        config_of(config)


def test_weights_of_another_model_are_refused():
    model = pretrained("llama")
    model.config.num_hidden_layers = 1
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.1\."):
        imported(model)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(ValueError, match="got 'gpt2'"):
        imported(gpt2)


# llama2.c


def write_llama2c(
    path, dim=16, hidden=24, layers=2, queries=4, keys=2, vocabulary=97, positions=64
):
    """A random model in the legacy format; returns its weights by name."""
    chance = np.random.default_rng(0)
    size = dim // queries
    shapes = {
        "embedding": (vocabulary, dim), "attention norm": (layers, dim), "q": (layers, dim, dim),
        "k": (layers, keys * size, dim), "v": (layers, keys * size, dim), "o": (layers, dim, dim),
        "mlp norm": (layers, dim), "gate": (layers, hidden, dim), "down": (layers, dim, hidden),
        "up": (layers, hidden, dim), "norm": (dim,),
    }  # fmt: skip
    weights = {k: chance.normal(0, 0.3, s).astype("<f4") for k, s in shapes.items()}
    angles = np.arange(positions)[:, None] * 1e4 ** (-np.arange(0, size, 2) / size)
    header = struct.pack("<7i", dim, hidden, layers, queries, keys, vocabulary, positions)
    tables = [np.cos(angles).astype("<f4"), np.sin(angles).astype("<f4")]
    path.write_bytes(header + b"".join(w.tobytes() for w in [*weights.values(), *tables]))
    return weights, angles


def llama2c_logits(weights, angles, ids, queries=4, keys=2):
    """What run.c computes, in fp64: neighbours among the channels are turned together."""
    w = {name: weight.astype(np.float64) for name, weight in weights.items()}
    x, count = w["embedding"][ids], len(ids)

    def norm(x, scale):
        return scale * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def turned(x):
        x = x.reshape(count, -1, angles.shape[1], 2)
        cosine, sine = (f(angles[:count])[:, None] for f in (np.cos, np.sin))
        a, b = x[..., 0], x[..., 1]
        return np.stack([a * cosine - b * sine, a * sine + b * cosine], -1).reshape(
            count, -1, 2 * angles.shape[1]
        )

    for layer in range(len(w["q"])):
        h = norm(x, w["attention norm"][layer])
        q, k = turned(h @ w["q"][layer].T), turned(h @ w["k"][layer].T)
        v = (h @ w["v"][layer].T).reshape(count, keys, -1)
        k, v = (np.repeat(part, queries // keys, 1) for part in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
        scores = np.exp(np.where(np.tri(count) > 0, scores, -np.inf))
        mixed = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(count, -1) @ w["o"][layer].T
        h = norm(x, w["mlp norm"][layer])
        gate = h @ w["gate"][layer].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"][layer].T)) @ w["down"][layer].T
    return norm(x, w["norm"]) @ w["embedding"].T


def test_a_model_of_llama2c(tmp_path):
    weights, angles = write_llama2c(tmp_path / "model.bin")
    model = read_llama2c(tmp_path / "model.bin")
    ids = tokens(1, 40)
    with torch.no_grad():
        logits = model(ids).logits[0]
    expected = torch.from_numpy(llama2c_logits(weights, angles, ids[0].numpy()))
    assert relative_rms(logits, expected) < 1e-5


def test_other_files_than_llama2c_are_refused(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"not a model of llama2\.c: it has 5 bytes"):
        read_llama2c(path)
    path.write_bytes(bytes(1000))
    with pytest.raises(ValueError, match="its header is"):
        read_llama2c(path)
    write_llama2c(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"not a whole model of llama2\.c: by its header"):
        read_llama2c(path)


# Other mixers in place of attention.


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "transformer"])
def test_any_mixer_takes_the_place_of_attention(mixer):
    teacher = imported(pretrained("qwen2"))
    student = replaced(teacher, [1], mixer, window=4)
    assert student.config.mixer == ["transformer", mixer]
    assert student.model.layers[0].mixer.config.window == 4
    before, after = teacher.state_dict(), student.state_dict()
    for name in before:
        if "layers.1.mixer." not in name:
            assert torch.equal(before[name], after[name]), name
    with torch.no_grad():
        assert student(tokens(1, 30)).logits.isfinite().all()


@pytest.mark.parametrize("mixer", ["trellis", "gated_delta_net"])
def test_the_maps_of_attention_are_taken_over(mixer):
    """Also with heads of another size than width / heads, and norms on queries and keys."""
    teacher = imported(pretrained("qwen3"))
    new = replaced(teacher, [0, 1], mixer).model.layers[0].mixer
    old = teacher.model.layers[0].mixer
    assert take_over(new, old) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    if mixer == "trellis":  # like attention, which adds no values and puts none through SiLU
        assert new.skip is None
        assert set(new.convolutions) == {"q", "k"}
    assert torch.equal(new.o_proj.weight, old.o_proj.weight)
    x = torch.randn(1, 7, 32)
    for stream, norm in (("q", old.q_norm), ("k", old.k_norm), ("v", None)):
        theirs = getattr(old, f"{stream}_proj")(x).unflatten(-1, (-1, 16))
        if norm is not None:
            theirs = torch.nn.functional.normalize(norm(theirs), dim=-1)
        if stream != "q":  # two query heads share a head of keys and values
            theirs = theirs.repeat_interleave(2, dim=2)
        ours = getattr(new, f"{stream}_proj")(x)
        if stream in new.convolutions:  # which passes every token on, then takes SiLU
            passed, _ = new.convolutions[stream](ours, None, None)
            assert relative_rms(passed, torch.nn.functional.silu(ours)) < 1e-6
        ours = ours.unflatten(-1, (-1, 16))
        if norm is not None:
            ours = torch.nn.functional.normalize(ours, dim=-1)
        assert relative_rms(ours, theirs) < 1e-5, stream


def test_what_cannot_be_replaced():
    teacher = imported(pretrained("llama"))
    with pytest.raises(ValueError, match="layers must be from 0 to 1; got 5"):
        replaced(teacher, [5], "trellis")
    with pytest.raises(ValueError, match="another one than 'transformer'"):
        replaced(teacher, [0], "transformer")
    with pytest.raises(ValueError, match="did you mean 'trellis'"):
        replaced(teacher, [0], "treliss")
    with pytest.raises(ValueError, match="no field 'slot'"):
        replaced(teacher, [0], "trellis", {"slot": 3})
    with pytest.raises(ValueError, match="the mixer 'transformer' in all layers; got trellis"):
        replaced(small_model(), [0], "gated_delta_net")
