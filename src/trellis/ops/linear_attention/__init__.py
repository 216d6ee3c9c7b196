from .interface import LinearAttentionState, linear_attention

__all__ = ["LinearAttentionState", "linear_attention"]
