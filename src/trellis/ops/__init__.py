"""Functions on tensors; they know nothing of layers and models."""

from .convolution import causal_convolution
from .memory import MemoryState, PassState, compress, trellis_memory, trellis_memory_step

__all__ = [
    "MemoryState",
    "PassState",
    "causal_convolution",
    "compress",
    "trellis_memory",
    "trellis_memory_step",
]
