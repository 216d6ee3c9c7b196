"""TrellisModel and TrellisForCausalLM for Hugging Face transformers."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .. import checks
from ..mixers.layers import RMSNorm
from .backbone import Block
from .cache import TrellisCache, hash_weights
from .carry import Relay
from .config import TrellisConfig
from .loss import IGNORED, next_token_loss
from .padding import packing_of

#: Inputs of a linear map whose weights are drawn with `initializer_range` itself.
SPREAD_INPUTS = 768


class TrellisPreTrainedModel(PreTrainedModel):
    config_class = TrellisConfig
    config: TrellisConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("Block",)
    _is_stateful = True
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Through nn.init alone, which transformers guards while it loads a checkpoint.
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self._spread(module))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # False: otherwise transformers passes over modules without parameters of their own, such as
        # mixers whose reset_parameters fills parts of their maps.
        super()._initialize_weights(module, False)

    def _spread(self, module: nn.Linear | nn.Embedding) -> float:
        """The standard deviation of a map's weights at the start; see `initializer_range`."""
        inputs = module.weight.shape[1]  # an embedding's width is its inputs where it is tied
        std = self.config.initializer_range * math.sqrt(SPREAD_INPUTS / inputs)
        outputs = [
            output
            for block in self.base_model.layers
            for output in (block.mixer.output_projection, block.mlp.down_proj)
        ]
        if any(module is output for output in outputs):
            std /= math.sqrt(2 * self.config.num_hidden_layers)
        return std

    def init_cache(self, batch: int) -> TrellisCache:
        """The cache of `batch` sequences before their first token."""
        blocks = self.base_model.layers
        return TrellisCache(self, [block.mixer.init_state(batch) for block in blocks])

    def fingerprint(self) -> str:
        """A hash of the configuration and of every weight, for what only fits this model."""
        backbone = self.base_model
        fields = {
            "hidden_size": self.config.hidden_size,
            "vocab_size": self.config.vocab_size,
            "intermediate_size": self.config.intermediate_size,
            "num_attention_heads": self.config.num_attention_heads,
            "norm_eps": self.config.norm_eps,
            # As they came out, defaults included; the backend does not change what is computed.
            "mixers": [
                {**dataclasses.asdict(block.mixer.config), "backend": None}
                for block in backbone.layers
            ],
        }
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
        hash_weights(digest, backbone)
        return digest.hexdigest()


class TrellisModel(TrellisPreTrainedModel):
    """The backbone without the language-model head."""

    def __init__(self, config: TrellisConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        assert config.intermediate_size is not None  # the configuration has filled it in
        self.layers = nn.ModuleList(
            Block(
                config.hidden_size, config.num_attention_heads, config.intermediate_size,
                config.norm_eps, name, fields,
            )
            for name, fields in config.layer_mixers()
        )  # fmt: skip
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TrellisCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        hidden_to_keep: int = 0,
        relay: Relay | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """Hidden states of the tokens, and the cache after them.

        input_ids [B, T], or inputs_embeds [B, T, dim]. attention_mask [B, T], 0 at padding, left
        or right; with a cache it may also cover the tokens read before. cu_seqlens [N+1] makes
        one row (B = 1) a pack of N sequences. hidden_to_keep returns only that many of the last
        hidden states (0: all). `relay`, instead of a cache, hands states into and out of every
        layer; the training loop carries them across steps and processes with it. Positions
        follow from the order of the tokens: `position_ids`, which generate() passes, are not
        used.
        """
        _refuse_misspelt(kwargs, type(self).forward)
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        tokens = given.shape[1]
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        cache = past_key_values
        self._check_inputs(given, attention_mask, cache, cu_seqlens)
        if relay is not None and (use_cache or attention_mask is not None):
            raise ValueError("relay cannot be given together with a cache or an attention_mask")
        if attention_mask is not None:
            attention_mask = attention_mask[:, attention_mask.shape[1] - tokens :]

        whole = (
            torch.is_grad_enabled()
            or cu_seqlens is not None
            or relay is not None
            or output_hidden_states
        )
        size = tokens if whole else self.config.segment_size
        if cache is None and (use_cache or tokens > size):
            # The layers make their first states themselves: only inside them are weights whole
            # that FSDP has sharded.
            cache = TrellisCache(self, [None] * len(self.layers))
        kept, all_hidden = [], None
        first_kept = tokens - hidden_to_keep if hidden_to_keep else 0
        for start in range(0, max(tokens, 1), max(size, 1)):
            part = slice(start, start + size)
            x = self.embed_tokens(input_ids[:, part]) if input_ids is not None else given[:, part]
            mask = attention_mask[:, part] if attention_mask is not None else None
            traced = bool(output_hidden_states)
            x, all_hidden = self._read(x, mask, cache, cu_seqlens, relay, traced)
            if start + x.shape[1] > first_kept or tokens == 0:
                kept.append(self.norm(x[:, max(first_kept - start, 0) :]))
        hidden = kept[0] if len(kept) == 1 else torch.cat(kept, dim=1)
        if all_hidden is not None:
            all_hidden = (*all_hidden[:-1], hidden)
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache if use_cache else None,
            hidden_states=all_hidden,
        )
        return output if _as_dict(return_dict, self.config) else output.to_tuple()

    @staticmethod
    def _check_inputs(
        given: Tensor,
        attention_mask: Tensor | None,
        cache: TrellisCache | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        """Raises before anything is read."""
        batch, tokens = given.shape[:2]
        if cu_seqlens is not None:
            if attention_mask is not None:
                raise ValueError("cu_seqlens and attention_mask cannot be given together")
            if not torch.compiler.is_compiling():
                checks.bounds(cu_seqlens, tokens)
        sequences = checks.sequences(batch, cu_seqlens, given.device)
        if cache is not None and not isinstance(cache, TrellisCache):
            raise TypeError(
                f"past_key_values must be a TrellisCache; got {type(cache).__name__}. "
                "Leave it out, or make one with model.init_cache(batch)"
            )
        if cache is not None and cache.batch_size != sequences:
            raise ValueError(
                f"past_key_values must hold {sequences} sequences, as many as the input; "
                f"got {cache.batch_size}"
            )
        if attention_mask is not None:
            columns = attention_mask.shape[1] if attention_mask.dim() == 2 else -1
            if columns < tokens or attention_mask.shape[0] != batch:
                raise ValueError(
                    f"attention_mask must have shape [B, T] with B = {batch} and T at least "
                    f"{tokens}, the number of input tokens; got {list(attention_mask.shape)}"
                )

    def _read(
        self,
        x: Tensor,
        mask: Tensor | None,
        cache: TrellisCache | None,
        cu_seqlens: Tensor | None,
        relay: Relay | None,
        output_hidden_states: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """One segment through all blocks. Updates the cache."""
        columns = x.shape[1]
        packing = packing_of(mask)
        if packing is not None:
            x, cu_seqlens = packing.pack(x), packing.cu_seqlens
        trace, states = [x], []
        for i, block in enumerate(self.layers):
            before = None
            if cache is not None:
                before = cache.states[i]
            elif relay is not None:
                before = relay.before(i)
            x, state = block(x, before, cu_seqlens)
            if cache is not None:
                states.append(state)
            elif relay is not None:
                x = relay.after(i, state, x)
            if output_hidden_states:
                trace.append(x)
        if cache is not None:  # all at once: an interrupted call leaves the cache as it was
            cache.states = states
            cache.seen += columns
        if packing is not None:
            x = packing.unpack(x)
            trace = [packing.unpack(t) for t in trace]
        return x, tuple(trace) if output_hidden_states else None


class TrellisForCausalLM(TrellisPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: TrellisConfig):
        super().__init__(config)
        self.model = TrellisModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TrellisCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        relay: Relay | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits of the next token, and the loss if `labels` [B, T] are given (-100: none).

        `targets` [B, T], in place of labels, are shifted already: targets[:, t] is what token t
        is to predict, also where that lies beyond the input. They are taken as they are: what
        must not be predicted, such as the first token of another document, is -100 there.
        The loss never holds the logits of more than `config.loss_tokens` tokens. The logits
        returned are those of the last `logits_to_keep` tokens, or at its indices; 0 returns all.
        By default a call with labels returns all logits if they are those of one such chunk, and
        none if there are more, so that the loss of a long context fits.
        The other arguments are those of TrellisModel.forward.
        """
        _refuse_misspelt(kwargs, type(self).forward)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        name = "targets" if labels is None else "labels"
        targets = self._targets(labels, targets, attention_mask, cu_seqlens)
        whole = targets is not None or output_hidden_states or not isinstance(logits_to_keep, int)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seqlens=cu_seqlens,
            hidden_to_keep=0 if whole else logits_to_keep,
            relay=relay,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        if logits_to_keep is None and (
            targets is None or targets.numel() <= self.config.loss_tokens
        ):
            logits_to_keep = 0
        logits = None
        if isinstance(logits_to_keep, int):
            logits = self.lm_head(hidden[:, -logits_to_keep:])
        elif logits_to_keep is not None:
            logits = self.lm_head(hidden[:, logits_to_keep])
        loss = None
        if targets is not None:
            if targets.shape != hidden.shape[:2]:
                raise ValueError(
                    f"{name} must have shape [B,T] = {list(hidden.shape[:2])}; "
                    f"got {list(targets.shape)}"
                )
            have_all = logits is not None and logits.shape[:2] == targets.shape
            loss = next_token_loss(
                logits if have_all and logits is not None else hidden,
                targets,
                nn.Identity() if have_all else self.lm_head,
                chunk=self.config.loss_tokens,
                count=num_items_in_batch,
            )
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
        return output if _as_dict(return_dict, self.config) else output.to_tuple()

    @staticmethod
    def _targets(
        labels: Tensor | None,
        targets: Tensor | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor | None:
        """What every token is to predict, -100 where nothing."""
        if labels is None:
            return targets
        if targets is not None:
            raise ValueError("only one of labels and targets can be given")
        return F.pad(_predictable(labels, attention_mask, cu_seqlens)[:, 1:], (0, 1), value=IGNORED)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,  # named, so that generate() accepts it
        **kwargs: Any,
    ) -> dict[str, Any]:
        if next_sequence_length is not None and next_sequence_length <= 0:
            raise ValueError(
                f"input_ids has {input_ids.shape[1]} tokens, but the cache in past_key_values has "
                f"read {input_ids.shape[1] - next_sequence_length} already. Pass the whole "
                "sequence, or only the new tokens with an attention_mask that covers both"
            )
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model makes its own cache

    @torch.no_grad()
    def read(self, input_ids: Tensor, cache: TrellisCache | None = None) -> TrellisCache:
        """Read tokens [B, T] of any number into a cache, segment by segment; no logits."""
        if cache is None:
            cache = self.init_cache(input_ids.shape[0])
        self.model(input_ids, past_key_values=cache, use_cache=True, hidden_to_keep=1)
        return cache


def _as_dict(return_dict: bool | None, config: TrellisConfig) -> bool:
    return bool(config.return_dict if return_dict is None else return_dict)


def _refuse_misspelt(unknown: dict[str, Any], function: Any) -> None:
    """generate() and others pass keywords that do not concern this model; a slip is an error."""
    for name, value in unknown.items():
        hint = checks.did_you_mean(name, inspect.signature(function).parameters, cutoff=0.85)
        if value is not None and hint:
            raise TypeError(f"there is no argument {name!r}{hint}")


def _predictable(labels: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Labels without those that would be predicted across a boundary, or from padding."""
    if cu_seqlens is not None:
        starts = cu_seqlens[:-1][cu_seqlens.diff() > 0].long()
        return labels.index_fill(1, starts, IGNORED)
    if mask is None:
        return labels
    real = mask[:, mask.shape[1] - labels.shape[1] :] != 0
    before = F.pad(real[:, :-1], (1, 0), value=True)
    return labels.masked_fill(~(real & before), IGNORED)
