"""Functions on tensors; they know nothing of layers and models."""

from .memory import MemoryState, PassState, compress, trellis_memory, trellis_memory_step

__all__ = ["MemoryState", "PassState", "compress", "trellis_memory", "trellis_memory_step"]
