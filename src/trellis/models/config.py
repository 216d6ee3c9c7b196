"""The configuration of the language model, in Hugging Face's terms."""

from __future__ import annotations

import copy
import dataclasses
from itertools import cycle, islice
from typing import Any

from transformers import PreTrainedConfig

from .. import checks
from ..mixers import computed_fields, mixer_config
from ..mixers.registry import check_name

#: SwiGLU widths are rounded up to a multiple of this.
MLP_MULTIPLE = 32


class TrellisConfig(PreTrainedConfig):
    """A pre-norm language model whose mixer is chosen by name, for all layers or for each.

    vocab_size, hidden_size, num_hidden_layers, num_attention_heads: as in every model of
        transformers; num_attention_heads is the default number of heads of every mixer.
    intermediate_size: width of the SwiGLU; None means 8/3 of hidden_size, rounded up to a
        multiple of 32. `match_parameters` sets it to compare mixers at one parameter count.
    mixer: a mixer's name, or a list of names that is repeated over the layers, e.g.
        ["trellis", "trellis", "transformer"].
    mixer_config: the mixers' own fields, {"trellis": {"slots": 32}}; with a single mixer also
        without its name, {"slots": 32}. The fields are those of each mixer's configuration
        class, e.g. trellis.mixers.TrellisMixerConfig, which can be given as well.
    norm_eps: epsilon of the RMS norms.
    initializer_range: standard deviation from which the weights of a linear map with 768 inputs
        are drawn. A map with n inputs is drawn with initializer_range * sqrt(768 / n), so that
        what it returns has the same scale at every width. The last maps of mixers and MLPs, whose
        results are added to the residual stream, are drawn with that / sqrt(2 *
        num_hidden_layers), so that their sum over all layers has the same scale at every depth.
        Embeddings are drawn as a map with hidden_size inputs, which they are where they are tied.
    segment_size: without gradients, an input of more tokens is read in segments of this many.
    loss_tokens: the loss holds the logits of at most this many tokens in memory at once.
    """

    model_type = "trellis"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    mixer: str | list[str] | tuple[str, ...] = "trellis"
    mixer_config: Any = None
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    segment_size: int = 4096
    loss_tokens: int = 2048
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        known = [field.name for field in dataclasses.fields(self)]
        for name in kwargs:  # transformers would keep a misspelt field
            hint = checks.did_you_mean(name, known, cutoff=0.9)
            if hint and not name.endswith("_token_id"):
                raise ValueError(f"TrellisConfig has no field {name!r}{hint}")
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                     "segment_size", "loss_tokens"):  # fmt: skip
            checks.at_least(name, getattr(self, name), 1)
        if self.intermediate_size is None:
            self.intermediate_size = default_mlp_width(self.hidden_size)
        if not isinstance(self.mixer, str):
            self.mixer = list(self.mixer)
            if not self.mixer:
                raise ValueError("mixer must be a name or a list of at least one; got []")
        for name in self._mixer_names:
            check_name(name)
        self.mixer_config = self._by_mixer(_as_fields(self.mixer_config))
        for name in self._mixer_names:
            mixer_config(name, self.mixer_config.get(name, {}))
        super().__post_init__(**kwargs)

    def save_pretrained(self, *arguments: Any, **options: Any) -> None:
        """Saves the configuration with every field of its mixers, also those left to defaults: a
        saved model stays what it is when a later version has other defaults."""
        whole = copy.deepcopy(self)
        whole.mixer_config = {
            name: computed_fields(name, self.mixer_config.get(name, {}))
            for name in self._mixer_names
        }
        super(TrellisConfig, whole).save_pretrained(*arguments, **options)

    @property
    def _mixer_names(self) -> list[str]:
        return [self.mixer] if isinstance(self.mixer, str) else list(dict.fromkeys(self.mixer))

    def _by_mixer(self, fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
        names = self._mixer_names
        if all(isinstance(value, dict) for value in fields.values()):
            for name in fields:
                if name not in names:
                    raise ValueError(
                        f"mixer_config has a section for {name!r}, which is not among the "
                        f"mixers of this model: {', '.join(names)}"
                    )
            return {name: dict(section) for name, section in fields.items()}
        if len(names) > 1:
            raise ValueError(
                "with several mixers, mixer_config must have one section for each, such as "
                f"{{{names[0]!r}: {{...}}}}; got the fields {', '.join(fields)}"
            )
        return {names[0]: fields}

    def layer_mixers(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, fields) of the mixer of every layer; a list in `mixer` repeats over the layers."""
        names = [self.mixer] if isinstance(self.mixer, str) else list(self.mixer)
        sections = self.mixer_config or {}
        repeated = islice(cycle(names), self.num_hidden_layers)
        return [(name, sections.get(name, {})) for name in repeated]


def _as_fields(section: Any) -> dict[str, Any]:
    """`mixer_config` as a plain dictionary; typed configurations of mixers become dictionaries."""
    if section is None:
        return {}
    if dataclasses.is_dataclass(section) and not isinstance(section, type):
        return dataclasses.asdict(section)
    return {
        name: _as_fields(value) if dataclasses.is_dataclass(value) else value
        for name, value in section.items()
    }


def default_mlp_width(hidden_size: int) -> int:
    """8/3 of hidden_size, rounded up to a multiple of 32."""
    return -(-hidden_size * 8 // (3 * MLP_MULTIPLE)) * MLP_MULTIPLE
