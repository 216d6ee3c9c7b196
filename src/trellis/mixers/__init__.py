"""Layers that mix tokens along the sequence, all with one interface (see base.Mixer)."""

from .base import Mixer, names_without_weight_decay
from .delta_net import (
    DeltaNetMixer,
    DeltaNetMixerConfig,
    DeltaNetState,
    GatedDeltaNetMixerConfig,
)
from .registry import MIXERS, build_mixer, mixer_config
from .transformer import AttentionState, TransformerMixer, TransformerMixerConfig
from .trellis import TrellisMixer, TrellisMixerConfig, TrellisState

__all__ = [
    "MIXERS",
    "AttentionState",
    "DeltaNetMixer",
    "DeltaNetMixerConfig",
    "DeltaNetState",
    "GatedDeltaNetMixerConfig",
    "Mixer",
    "TransformerMixer",
    "TransformerMixerConfig",
    "TrellisMixer",
    "TrellisMixerConfig",
    "TrellisState",
    "build_mixer",
    "mixer_config",
    "names_without_weight_decay",
]
