"""Functions on tensors; they know nothing of layers and models."""

from .convolution import causal_convolution
from .cross_entropy import cross_entropy_
from .delta_rule import delta_rule
from .gated_slots import SlotState, gated_slots, running_softmax
from .gates import silu_product
from .linear_attention import LinearAttentionState, linear_attention
from .memory import MemoryState, PassState, compress, trellis_memory, trellis_memory_step
from .norms import gated_norm, rms_norm, unit_length
from .ttt import TTTState, ttt_linear

__all__ = [
    "LinearAttentionState",
    "MemoryState",
    "PassState",
    "SlotState",
    "TTTState",
    "causal_convolution",
    "compress",
    "cross_entropy_",
    "delta_rule",
    "gated_norm",
    "gated_slots",
    "linear_attention",
    "rms_norm",
    "running_softmax",
    "silu_product",
    "trellis_memory",
    "trellis_memory_step",
    "ttt_linear",
    "unit_length",
]
