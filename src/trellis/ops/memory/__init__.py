from .interface import BACKENDS, compress, trellis_memory, trellis_memory_step
from .state import MemoryState, PassState

__all__ = [
    "BACKENDS",
    "MemoryState",
    "PassState",
    "compress",
    "trellis_memory",
    "trellis_memory_step",
]
