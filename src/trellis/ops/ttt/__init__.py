from .interface import TTTState, ttt_linear

__all__ = ["TTTState", "ttt_linear"]
