from .interface import IGNORED, cross_entropy_

__all__ = ["IGNORED", "cross_entropy_"]
