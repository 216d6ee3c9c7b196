from .backends import BACKENDS
from .interface import compress, trellis_memory, trellis_memory_step
from .state import MemoryState, PassState

__all__ = [
    "BACKENDS",
    "MemoryState",
    "PassState",
    "compress",
    "trellis_memory",
    "trellis_memory_step",
]
