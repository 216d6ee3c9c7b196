"""Trellis: sequence models whose memory is bounded and learns while it reads."""

from typing import Any

from .models.registration import register_on_import

__version__ = "0.1.0"
_MODELS = (
    "TrellisCache",
    "TrellisConfig",
    "TrellisForCausalLM",
    "TrellisModel",
    "match_parameters",
    "preset",
)

__all__ = ["__version__", *_MODELS]

register_on_import()


def __getattr__(name: str) -> Any:
    if name not in _MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import models

    return getattr(models, name)
