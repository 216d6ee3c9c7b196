"""The gated slot memory of GSA and ABC; see README.md."""

from .interface import SlotState, gated_slots

__all__ = ["SlotState", "gated_slots"]
