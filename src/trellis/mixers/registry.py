"""Mixers by name. To add a mixer, write a file beside this one and add a line to MIXERS."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .. import checks
from .abc import ABCMixer, ABCMixerConfig
from .base import Mixer
from .delta_net import DeltaNetMixer, DeltaNetMixerConfig, GatedDeltaNetMixerConfig
from .gsa import GSAMixer, GSAMixerConfig
from .linear_attention import LinearAttentionMixer, LinearAttentionMixerConfig
from .mamba2 import Mamba2Mixer, Mamba2MixerConfig
from .transformer import TransformerMixer, TransformerMixerConfig
from .trellis import TrellisMixer, TrellisMixerConfig
from .ttt import TTTMixer, TTTMixerConfig

#: name -> (configuration, mixer). A mixer is built as mixer(dim, heads, configuration).
MIXERS: dict[str, tuple[type, type[Mixer]]] = {
    "trellis": (TrellisMixerConfig, TrellisMixer),
    "transformer": (TransformerMixerConfig, TransformerMixer),
    "delta_net": (DeltaNetMixerConfig, DeltaNetMixer),
    "gated_delta_net": (GatedDeltaNetMixerConfig, DeltaNetMixer),
    "linear_attention": (LinearAttentionMixerConfig, LinearAttentionMixer),
    "abc": (ABCMixerConfig, ABCMixer),
    "gsa": (GSAMixerConfig, GSAMixer),
    "mamba2": (Mamba2MixerConfig, Mamba2Mixer),
    "ttt": (TTTMixerConfig, TTTMixer),
}


def check_name(name: object) -> None:
    if name not in MIXERS:
        hint = checks.did_you_mean(name, MIXERS)
        raise ValueError(f"mixer must be one of {', '.join(MIXERS)}; got {name!r}{hint}")


def computed_fields(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a mixer that decides what it computes, also those that are left to defaults.

    A record or a fingerprint that has them stays true when a default changes.
    """
    found = dataclasses.asdict(mixer_config(name, fields))
    found.pop("backend", None)
    return found


def mixer_config(name: str, fields: Mapping[str, Any]) -> Any:
    """The configuration of mixer `name`, such as TrellisMixerConfig, from its fields.

    Raises ValueError at an unknown name or field.
    """
    check_name(name)
    config_class = MIXERS[name][0]
    known = [field.name for field in dataclasses.fields(config_class)]
    for field in fields:
        if field not in known:
            hint = checks.did_you_mean(field, known)
            raise ValueError(f"mixer {name!r} has no field {field!r}{hint}")
    return config_class(**fields)


def build_mixer(name: str, dim: int, heads: int, /, **fields: Any) -> Mixer:
    """A mixer of width `dim`, e.g. build_mixer("trellis", 256, 4, slots=32).

    heads: number of heads, unless the field `heads` gives another. The baselines mamba2, gsa, abc,
        delta_net and gated_delta_net choose their heads by the width, as their authors do.
    fields: those of the mixer's configuration. The defaults are what comparisons use: the
        authors' sizes at this width, and around every recurrence a norm and an output gate.
    """
    config = mixer_config(name, fields)
    return MIXERS[name][1](dim, heads, config)
