"""The gated slot memory of GSA and ABC; see README.md."""

from .interface import SlotState, gated_slots
from .running_softmax import LOGIT_BOUND, running_softmax

__all__ = ["LOGIT_BOUND", "SlotState", "gated_slots", "running_softmax"]
