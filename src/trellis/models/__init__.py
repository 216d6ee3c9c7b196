"""The language model for Hugging Face transformers.

Importing this package registers the model with transformers' Auto classes, so that
`AutoModelForCausalLM.from_pretrained("my-model")` loads one.
"""

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "the language model needs transformers: pip install 'trellis-memory[models]'"
    ) from error

from .cache import TrellisCache
from .config import TrellisConfig
from .modeling import (
    TrellisForCausalLM,
    TrellisForSequenceClassification,
    TrellisModel,
    TrellisPreTrainedModel,
)
from .presets import PRESETS, count_parameters, match_parameters, preset

__all__ = [
    "PRESETS",
    "TrellisCache",
    "TrellisConfig",
    "TrellisForCausalLM",
    "TrellisForSequenceClassification",
    "TrellisModel",
    "TrellisPreTrainedModel",
    "count_parameters",
    "match_parameters",
    "preset",
]

AutoConfig.register(TrellisConfig.model_type, TrellisConfig, exist_ok=True)
AutoModel.register(TrellisConfig, TrellisModel, exist_ok=True)
AutoModelForCausalLM.register(TrellisConfig, TrellisForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(
    TrellisConfig, TrellisForSequenceClassification, exist_ok=True
)
