"""The language model for Hugging Face transformers. Its parts are imported when first used."""

import importlib
from typing import Any

_HOME = {
    "TrellisConfig": "config",
    "TrellisModel": "modeling",
    "TrellisForCausalLM": "modeling",
    "TrellisPreTrainedModel": "modeling",
    "TrellisCache": "cache",
    "PRESETS": "presets",
    "preset": "presets",
    "match_parameters": "presets",
    "count_parameters": "presets",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(
            f"trellis.{name} needs transformers: pip install 'trellis-memory[models]'"
        ) from error
