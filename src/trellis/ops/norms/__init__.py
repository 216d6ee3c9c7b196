from .interface import gated_norm, rms_norm, unit_length

__all__ = ["gated_norm", "rms_norm", "unit_length"]
