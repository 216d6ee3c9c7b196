"""Trellis: sequence models whose memory is bounded and learns while it reads.

`import trellis` does not import transformers. The names of the language model, such as
`trellis.TrellisForCausalLM`, import it when they are first used.
"""

from typing import Any

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


def __getattr__(name: str) -> Any:
    if name not in _MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import models

    return getattr(models, name)
