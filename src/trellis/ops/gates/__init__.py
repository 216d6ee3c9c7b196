from .interface import silu_product

__all__ = ["silu_product"]
