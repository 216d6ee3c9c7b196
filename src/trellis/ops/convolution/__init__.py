from .interface import causal_convolution

__all__ = ["causal_convolution"]
