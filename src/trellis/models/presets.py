"""The paper's model sizes, and how mixers are compared at one parameter count."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..mixers import Mixer
from .config import TrellisConfig, default_mlp_width
from .flops import forward_flops
from .modeling import TrellisForCausalLM

#: blocks, width, heads. The paper does not give the 1B shape; this one is ours.
PRESETS: dict[str, dict[str, int]] = {
    "125m": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
    "170m": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 16},
    "350m": {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
    "780m": {"num_hidden_layers": 24, "hidden_size": 1536, "num_attention_heads": 16},
    "1b": {"num_hidden_layers": 18, "hidden_size": 2048, "num_attention_heads": 16},
}
#: Slots per head in the paper, at every size.
PAPER_SLOTS = 64
#: How close two parameter counts must be to be called equal.
TOLERANCE = 0.01


def preset(name: str, mixer: str | list[str] = "trellis", **overrides: Any) -> TrellisConfig:
    """A model of one of the paper's sizes, with the parameter count of Transformer++ there.

    `overrides` are further TrellisConfig fields; an intermediate_size among them is kept as it is.
    """
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}")
    config = TrellisConfig(**{**PRESETS[name], "mixer": mixer, **overrides})
    if any(layer == "trellis" for layer, _ in config.layer_mixers()):
        config.mixer_config.setdefault("trellis", {}).setdefault("slots", PAPER_SLOTS)
    if "intermediate_size" in overrides:
        return config
    plain = {k: v for k, v in overrides.items() if k != "mixer_config"}
    reference = TrellisConfig(**{**PRESETS[name], **plain, "mixer": "transformer"})
    return match_parameters(config, reference)


def count_parameters(config: TrellisConfig) -> int:
    """Parameters of the language model, tied weights counted once. Allocates nothing."""
    return sum(parameter.numel() for parameter in weightless(config).parameters())


class Description(NamedTuple):
    blocks: int
    width: int
    heads: int
    mlp: int
    parameters: int
    embeddings: int
    state_bytes: int | None  # fp32, of one sequence; None: grows with what is read
    growth_bytes: int  # of the state with a token, after some tokens
    flops: list[float]  # per token, forward, on average over each context


def describe(
    name: str, mixer_name: str, contexts: Sequence[int] = (), **overrides: Any
) -> Description:
    """What a preset comes to with a mixer."""
    config = preset(name, mixer_name, **overrides)
    model = weightless(config)
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    numbers = sum(mixer.state_size() for mixer in mixers)
    return Description(
        blocks=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        mlp=config.intermediate_size or 0,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embeddings=model.model.embed_tokens.weight.numel(),
        state_bytes=None if math.isinf(numbers) else int(4 * numbers),
        growth_bytes=int(4 * sum(m.state_size(2000) - m.state_size(1999) for m in mixers)),
        flops=[forward_flops(model, context) for context in contexts],
    )


def weightless(config: TrellisConfig) -> TrellisForCausalLM:
    """The model on the meta device: its shapes, and no memory."""
    with torch.device("meta"):
        return TrellisForCausalLM(config)


def match_parameters(config: TrellisConfig, reference: TrellisConfig) -> TrellisConfig:
    """A copy of `config` whose MLP width gives it the parameter count of `reference`, within 1%.

    The width is a multiple of 32 where that is close enough, else of 8, else any.

    Raises:
        ValueError: no width does it; the mixers differ by more than the MLPs hold.
    """
    matched = copy.deepcopy(config)
    matched.intermediate_size = default_mlp_width(config.hidden_size)
    wanted = count_parameters(reference)
    per_column = 3 * config.hidden_size * config.num_hidden_layers
    missing = wanted - count_parameters(matched)
    exact = matched.intermediate_size + missing / per_column
    for multiple in (32, 8, 1):
        width = round(exact / multiple) * multiple
        error = abs(width - exact) * per_column / wanted
        if width >= 1 and error <= TOLERANCE / (2 if multiple > 1 else 1):
            matched.intermediate_size = width
            return matched
    raise ValueError(
        f"no MLP width gives this model the {wanted} parameters of the reference: it would have "
        f"to be {exact:.1f}"
    )
