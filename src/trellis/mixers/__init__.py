"""Layers that mix tokens along the sequence. All share one interface, base.Mixer."""

from .abc import ABCMixer, ABCMixerConfig, ABCState
from .base import Mixer, names_without_weight_decay
from .delta_net import (
    DeltaNetMixer,
    DeltaNetMixerConfig,
    DeltaNetState,
    GatedDeltaNetMixerConfig,
)
from .gsa import GSAMixer, GSAMixerConfig
from .linear_attention import (
    LinearAttentionMixer,
    LinearAttentionMixerConfig,
    LinearAttentionMixerState,
)
from .mamba2 import Mamba2Mixer, Mamba2MixerConfig, Mamba2State
from .registry import MIXERS, build_mixer, computed_fields, mixer_config
from .transformer import AttentionState, TransformerMixer, TransformerMixerConfig
from .trellis import TrellisMixer, TrellisMixerConfig, TrellisState
from .ttt import TTTMixer, TTTMixerConfig, TTTMixerState

__all__ = [
    "MIXERS",
    "ABCMixer",
    "ABCMixerConfig",
    "ABCState",
    "AttentionState",
    "DeltaNetMixer",
    "DeltaNetMixerConfig",
    "DeltaNetState",
    "GSAMixer",
    "GSAMixerConfig",
    "GatedDeltaNetMixerConfig",
    "LinearAttentionMixer",
    "LinearAttentionMixerConfig",
    "LinearAttentionMixerState",
    "Mamba2Mixer",
    "Mamba2MixerConfig",
    "Mamba2State",
    "Mixer",
    "TTTMixer",
    "TTTMixerConfig",
    "TTTMixerState",
    "TransformerMixer",
    "TransformerMixerConfig",
    "TrellisMixer",
    "TrellisMixerConfig",
    "TrellisState",
    "build_mixer",
    "computed_fields",
    "mixer_config",
    "names_without_weight_decay",
]
