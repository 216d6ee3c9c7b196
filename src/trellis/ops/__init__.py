"""Functions on tensors; they know nothing of layers and models."""

from .convolution import causal_convolution
from .cross_entropy import cross_entropy_
from .delta_rule import delta_rule
from .gates import silu_product
from .memory import MemoryState, PassState, compress, trellis_memory, trellis_memory_step
from .norms import gated_norm, rms_norm, unit_length

__all__ = [
    "MemoryState",
    "PassState",
    "causal_convolution",
    "compress",
    "cross_entropy_",
    "delta_rule",
    "gated_norm",
    "rms_norm",
    "silu_product",
    "trellis_memory",
    "trellis_memory_step",
    "unit_length",
]
