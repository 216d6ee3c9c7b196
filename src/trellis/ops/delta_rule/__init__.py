"""The delta rule, with or without a decay. Equations in README.md."""

from .interface import delta_rule

__all__ = ["delta_rule"]
