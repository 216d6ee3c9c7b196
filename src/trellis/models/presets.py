"""Model sizes: the paper's presets, equal parameter counts, and operations per token.

All models are counted by one formula (docs/flops.md explains it mixer by mixer):

    forward(token)  = 2 x entries of all linear maps, the head included + the mixers' own operations
    training(token) = 3 x forward(token): the backward makes two products for each of the forward's
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import checks
from ..mixers import Mixer
from .config import TrellisConfig, default_mlp_width
from .modeling import TrellisForCausalLM

#: Blocks, width and heads of each size. The paper does not give the shape of its 1B; it is ours.
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
    """A configuration of one of the paper's sizes, with as many parameters as Transformer++ has.

    `overrides` are further fields of TrellisConfig. With an intermediate_size among them, nothing
    is matched: the model gets that width.
    """
    checks.choice("preset", name, tuple(PRESETS))
    config = TrellisConfig(**{**PRESETS[name], "mixer": mixer, **overrides})
    if any(layer == "trellis" for layer, _ in config.layer_mixers()):
        config.mixer_config.setdefault("trellis", {}).setdefault("slots", PAPER_SLOTS)
    if "intermediate_size" in overrides:
        return config
    plain = {k: v for k, v in overrides.items() if k != "mixer_config"}
    reference = TrellisConfig(**{**PRESETS[name], **plain, "mixer": "transformer"})
    return match_parameters(config, reference)


def count_parameters(config: TrellisConfig) -> int:
    """The number of parameters of a language model, tied weights counted once.

    One layer of each kind is made, however many there are.
    """
    pattern = 1 if isinstance(config.mixer, str) else len(config.mixer)
    short = copy.deepcopy(config)
    short.num_hidden_layers = min(config.num_hidden_layers, pattern)
    model = weightless(short)
    total = _numbers(model)
    blocks = [_numbers(block) for block in model.model.layers]
    repeats, rest = divmod(config.num_hidden_layers, len(blocks))
    return total + (repeats - 1) * sum(blocks) + sum(blocks[:rest])


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Description(NamedTuple):
    """The shape and the costs of a model."""

    blocks: int
    width: int
    heads: int
    mlp: int
    parameters: int
    embeddings: int
    state_bytes: int | None  # of one sequence in fp32; None: it grows with every token read
    growth_bytes: int  # by which the state of one sequence grows with a token, in fp32
    flops: list[float]  # operations per token, forward, on average over each of the contexts


def describe(
    name: str, mixer_name: str, contexts: Sequence[int] = (), **overrides: Any
) -> Description:
    """The shape and the costs of a preset with a mixer."""
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


def state_bytes(config: TrellisConfig, tokens: int) -> int:
    """The bytes, in fp32, of what a model keeps of one sequence after so many tokens."""
    mixers = [module for module in weightless(config).modules() if isinstance(module, Mixer)]
    return int(4 * sum(mixer.state_size(tokens) for mixer in mixers))


def weightless(config: TrellisConfig) -> TrellisForCausalLM:
    """A model on the meta device: it has shapes, but takes no memory.

    Raises ValueError if there can be no such model.
    """
    try:
        with torch.device("meta"):
            return TrellisForCausalLM(config)
    except (RuntimeError, TypeError, OverflowError) as error:  # of torch, at sizes above 2^63
        names = ("vocab_size", "hidden_size", "intermediate_size", "mixer_config")
        given = ", ".join(f"{name} = {getattr(config, name)}" for name in names)
        reason = str(error).splitlines()[0]
        raise ValueError(f"no model can be made with {given}: {reason}") from error


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


def forward_flops(model: nn.Module, context: int) -> float:
    """Operations per token of reading `context` tokens, on average; a multiply-add counts as two.

    Embedding look-ups, norms and activations are left out: they do not grow with the width squared.
    """
    mixing = sum(m.flops(context) for m in model.modules() if isinstance(m, Mixer))
    return 2 * linear_entries(model) + mixing


def training_flops(model: nn.Module, context: int) -> float:
    """Operations per token of a training step, without what activation checkpointing repeats."""
    return 3 * forward_flops(model, context)


def linear_entries(module: nn.Module) -> int:
    """The number of entries of the weights of all linear maps in a module."""
    return sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, nn.Linear))
