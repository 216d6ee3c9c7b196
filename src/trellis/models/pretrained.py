"""Pretrained Transformers as our model: exactly, and with other mixers in place of attention.

`imported` turns a causal model of transformers of the Llama family into a TrellisForCausalLM with
the mixer "transformer" that computes the same logits. `read_llama2c` does so for the files of the
project llama2.c. `replaced` puts another mixer into some of its layers, with the attention's maps.
"""

from __future__ import annotations

import copy
import dataclasses
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..mixers import MIXERS, Mixer, TransformerMixer
from ..mixers.layers import StreamConvolutions
from ..mixers.registry import check_name
from ..mixers.transformer import SCALING
from .config import TrellisConfig
from .modeling import TrellisForCausalLM

#: Kinds of models (model_type) that are imported.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: Parts of the names of our weights, and what they are called in models of transformers.
NAMES = {
    ".mixer_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".mixer.": ".self_attn.",
}
#: The maps of attention that another mixer may take over.
MAPS = ("q_proj", "k_proj", "v_proj", "o_proj")


def imported(model: Any) -> TrellisForCausalLM:
    """A causal model of transformers as ours, with the same logits.

    Raises ValueError, naming what it is, at a model that cannot be computed exactly.
    """
    config = config_of(model.config)
    ours = _without_start(config)
    theirs = model.state_dict()
    weights = {}
    for name in ours.state_dict():
        there = name
        for part, other in NAMES.items():
            there = there.replace(part, other)
        if there not in theirs:
            raise ValueError(f"the model has no weight {there}")
        weights[name] = theirs.pop(there).float()
    left = [name for name in theirs if not name.endswith("inv_freq")]
    if left:
        raise ValueError(f"the model has weights that ours has no place for: {', '.join(left[:3])}")
    ours.load_state_dict(weights)
    return ours.eval()


def config_of(config: Any) -> TrellisConfig:
    """Our configuration of a model whose configuration of transformers is given.

    Raises ValueError, naming what it is, at anything that our attention does not compute.
    """
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise ValueError(
            f"a model to convert must be one of the kinds {', '.join(FAMILIES)}; got {kind!r}"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act must be 'silu', as in SwiGLU; got {config.hidden_act!r}")
    if getattr(config, "mlp_bias", False):
        raise ValueError("mlp_bias must be false: our MLPs have no biases; got True")
    rope = dict(config.rope_parameters)
    scaled = rope.get("rope_type", "default")
    if scaled not in ("default", "llama3"):
        raise ValueError(f"rope_type must be 'default' or 'llama3'; got {scaled!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1; got {rope['partial_rotary_factor']!r}")
    bias = kind == "qwen2" or bool(getattr(config, "attention_bias", False))
    heads = config.num_attention_heads
    fields = {
        "heads": heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "window": _window_of(config),
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": {name: rope[name] for name in SCALING} if scaled == "llama3" else None,
        "qkv_bias": bias,
        "out_bias": bias and kind != "qwen2",
        "qk_norm": kind == "qwen3",
        "norm_eps": config.rms_norm_eps,
    }
    return TrellisConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        intermediate_size=config.intermediate_size,
        mixer="transformer",
        mixer_config={"transformer": fields},
        norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


def _window_of(config: Any) -> int | None:
    """The window of all layers. Raises ValueError if only some layers have one."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds <= {"full_attention"} and config.model_type != "mistral":
        return None
    if len(kinds) > 1:
        raise ValueError(
            f"layer_types must be the same for all layers; got {', '.join(sorted(kinds))}"
        )
    return getattr(config, "sliding_window", None)


def _without_start(config: TrellisConfig) -> TrellisForCausalLM:
    """A model whose weights are about to be loaded."""
    with torch.device("meta"):
        model = TrellisForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    return model


# The files of llama2.c.

_HEADER = struct.Struct("<7i")


def read_llama2c(path: Path) -> TrellisForCausalLM:
    """A model from a file of llama2.c in its "legacy" format.

    The header is seven int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size (negative
    if the head is not tied to the embedding) and seq_len. The fp32 weights follow, those of one
    kind for all layers together.

    Raises ValueError if the file is not one.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise ValueError(f"{path} is not a model of llama2.c: it has {size} bytes")
    dim, hidden, layers, heads, kv_heads, vocabulary, positions = _HEADER.unpack(header)
    tied, vocabulary = vocabulary > 0, abs(vocabulary)
    numbers = (dim, hidden, layers, heads, kv_heads, vocabulary, positions)
    if min(numbers) < 1 or max(numbers) > 2**24 or dim % heads or heads % kv_heads:
        raise ValueError(f"{path} is not a model of llama2.c: its header is {numbers}")
    keys, half = dim // heads * kv_heads, dim // heads // 2
    parts: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, dim),
        "mixer_norm.weight": (layers, dim),
        "mixer.q_proj.weight": (layers, dim, dim),
        "mixer.k_proj.weight": (layers, keys, dim),
        "mixer.v_proj.weight": (layers, keys, dim),
        "mixer.o_proj.weight": (layers, dim, dim),
        "mlp_norm.weight": (layers, dim),
        "mlp.gate_proj.weight": (layers, hidden, dim),
        "mlp.down_proj.weight": (layers, dim, hidden),
        "mlp.up_proj.weight": (layers, hidden, dim),
        "model.norm.weight": (dim,),
        "cosines": (positions, half),
        "sines": (positions, half),
        **({} if tied else {"lm_head.weight": (vocabulary, dim)}),
    }
    expected = _HEADER.size + 4 * sum(int(np.prod(shape)) for shape in parts.values())
    if size != expected:
        raise ValueError(
            f"{path} is not a whole model of llama2.c: by its header it has {expected} bytes, but "
            f"the file {size}"
        )
    numbers_at = np.fromfile(path, dtype="<f4", offset=_HEADER.size)
    weights: dict[str, Tensor] = {}
    start = 0
    for name, shape in parts.items():
        end = start + int(np.prod(shape))
        weight = torch.from_numpy(numbers_at[start:end].reshape(shape).copy())
        start = end
        if name in ("cosines", "sines"):  # they follow from the base 10000
            continue
        if name.startswith(("model.", "lm_head.")):
            weights[name] = weight
            continue
        for layer in range(layers):
            one = weight[layer]
            if name in ("mixer.q_proj.weight", "mixer.k_proj.weight"):
                one = _halves(one, dim // heads)
            weights[f"model.layers.{layer}.{name}"] = one.clone()
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = _without_start(
        TrellisConfig(
            vocab_size=vocabulary,
            hidden_size=dim,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=hidden,
            mixer="transformer",
            mixer_config={"transformer": {"kv_heads": kv_heads}},
            norm_eps=1e-5,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=1,
        )
    )
    model.load_state_dict(weights)
    return model.eval()


def _halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of a map in our order: llama2.c turns channels 2i and 2i + 1 together, we i and i + D/2.

    weight: [H * D, dim].
    """
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


# Other mixers in place of attention.


def replaced(
    model: TrellisForCausalLM,
    layers: Collection[int],
    mixer: str,
    fields: Mapping[str, Any] | None = None,
    window: int | None = None,
    seed: int = 0,
) -> TrellisForCausalLM:
    """A copy of a model of attention with another mixer in some layers.

    fields: of the new mixer's configuration. Unless they are given, `heads` and `head_dim` are
        those of the attention, and what the mixer's `like_attention` names is as it says there.
    window: of the attention that stays, where its own is not smaller; None leaves it as it is.

    The new mixer takes over each of the maps q, k, v and o that has the same shape in it, with
    grouped keys and values repeated for each query head. Norms of q and k go into the rows of their
    maps. Its short convolutions start as the identity, before the SiLU of mixers that have one,
    with the biases of q and k where they have one. All else (the code, the gates, the output's
    norm) starts as in a new model, drawn with `seed`.

    Raises ValueError if the model has no attention in these layers, or the mixer does not fit.
    """
    config = attention_config(model)
    check_name(mixer)
    if mixer == "transformer":
        raise ValueError("the mixer must be another one than 'transformer', which is there already")
    names = ["transformer"] * config.num_hidden_layers
    for layer in layers:
        if not 0 <= layer < len(names):
            raise ValueError(f"layers must be from 0 to {len(names) - 1}; got {layer}")
        names[layer] = mixer
    attention = dict(config.mixer_config.get("transformer", {}))
    if window is not None:
        attention["window"] = min(window, attention.get("window") or window)
    sections = {"transformer": attention, mixer: _fields_for(model, mixer, fields or {})}
    changed = TrellisConfig.from_dict({
        **config.to_dict(), "mixer": names,
        "mixer_config": {name: sections[name] for name in dict.fromkeys(names)},
    })  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = TrellisForCausalLM(changed)
    weights = {
        name: weight
        for name, weight in model.state_dict().items()
        if not any(name.startswith(f"model.layers.{layer}.mixer.") for layer in layers)
    }
    student.load_state_dict(weights, strict=False)
    for layer in layers:
        old, new = (m.model.layers[layer].mixer for m in (model, student))
        take_over(new, old)  # type: ignore[arg-type]
    return student.eval()


def attention_config(model: TrellisForCausalLM) -> TrellisConfig:
    """A copy of the configuration of a model of attention. Raises ValueError at another model."""
    mixers = {name for name, _ in model.config.layer_mixers()}
    if mixers != {"transformer"}:
        raise ValueError(
            "a model to convert must have the mixer 'transformer' in all layers; got "
            f"{', '.join(sorted(mixers))}"
        )
    return copy.deepcopy(model.config)


def _fields_for(model: TrellisForCausalLM, mixer: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a new mixer with heads like those of the model's attention."""
    attention = model.model.layers[0].mixer
    assert isinstance(attention, TransformerMixer)
    config, mixer_class = MIXERS[mixer]
    known = {field.name for field in dataclasses.fields(config)}
    heads = {"heads": attention.heads, "head_dim": attention.head_dim}
    same = {name: value for name, value in heads.items() if name in known}
    return {**same, **mixer_class.like_attention, **fields}


@torch.no_grad()
def take_over(mixer: Mixer, attention: TransformerMixer) -> list[str]:
    """Copies the maps of attention into a mixer, as `replaced` says. Returns which were copied."""
    group = attention.heads // attention.kv_heads
    size = attention.head_dim

    def rows(name: str) -> tuple[Tensor, Tensor | None]:
        """A map's weight and bias, with a row for each channel of each query head."""
        linear: nn.Linear = getattr(attention, name)
        weight, bias = linear.weight, linear.bias
        norm = {"q_proj": attention.q_norm, "k_proj": attention.k_norm}.get(name)
        repeats = group if name in ("k_proj", "v_proj") else 1
        found = []
        for part in (weight, bias):
            if part is None or name == "o_proj":
                found.append(part)
                continue
            heads = part.unflatten(0, (-1, size))
            if norm is not None:  # a norm's scale, before its result is made a unit vector
                heads = heads * norm.weight.view(1, size, *[1] * (heads.dim() - 2))
            found.append(heads.repeat_interleave(repeats, dim=0).flatten(0, 1))
        return found[0], found[1]

    copied = []
    convolutions = getattr(mixer, "convolutions", None)
    for name in MAPS:
        weight, bias = rows(name)
        linear = getattr(mixer, name, None)
        if isinstance(linear, nn.Linear) and linear.weight.shape == weight.shape:
            linear.weight.copy_(weight)
            copied.append(name)
            stream = name[0]
            if isinstance(convolutions, StreamConvolutions) and stream in convolutions:
                convolution: Any = convolutions[stream]
                convolution.weight.zero_()
                convolution.weight[:, -1] = 1
                if convolution.bias is not None:
                    convolution.bias.zero_()
                    if bias is not None and stream in "qk":
                        convolution.bias.copy_(bias)
    return copied
