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
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .. import checks
from ..mixers.layers import RMSNorm
from .backbone import Block, Packing
from .cache import TrellisCache, hash_weights
from .config import TrellisConfig
from .decoder import decode
from .loss import IGNORED, next_token_loss
from .relay import Relay

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
        # Only functions of nn.init: transformers makes them do nothing for weights it has loaded.
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
        """A hash of the configuration and of every weight: files for this model alone carry it."""
        backbone = self.base_model
        names = (
            "hidden_size",
            "vocab_size",
            "intermediate_size",
            "num_attention_heads",
            "norm_eps",
        )
        fields = {name: getattr(self.config, name) for name in names}
        # All fields, with defaults filled in; the backend does not change what is computed.
        fields["mixers"] = [
            {**dataclasses.asdict(block.mixer.config), "backend": None} for block in backbone.layers
        ]
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

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TrellisCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        hidden_to_keep: int = 0,
        relay: Relay | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The hidden states of the tokens, and the cache after them.

        input_ids [B, T], or inputs_embeds [B, T, dim].
        attention_mask [B, T]: 0 at padding, left or right; with a cache, and only then, it may
            also cover the tokens that the cache has read.
        cu_seqlens [N+1]: makes the one row of a batch (B = 1) a pack of N sequences.
        hidden_to_keep: only this many of the last hidden states are returned; 0: all.
        relay: in place of a cache, hands states into and out of every layer (models/relay.py).
        Positions follow from the order of the tokens: `position_ids`, which generate() passes, are
        not used.
        """
        _refuse_misspelt(kwargs, type(self).forward)
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is not None:
            checks.dimensions("inputs_embeds", inputs_embeds, "[B,T,dim]")
        else:
            checks.token_ids("input_ids", given, self.config.vocab_size)
        tokens = given.shape[1]
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        cache = past_key_values
        self._check_inputs(given, attention_mask, cache, cu_seqlens)
        if relay is not None and (use_cache or cache is not None or attention_mask is not None):
            raise ValueError("relay cannot be given together with a cache or an attention_mask")
        if attention_mask is not None:
            attention_mask = attention_mask[:, attention_mask.shape[1] - tokens :]

        packed = cu_seqlens is not None or relay is not None
        whole = packed or torch.is_grad_enabled() or output_hidden_states
        size = tokens if whole else self.config.segment_size
        if cache is None and (use_cache or tokens > size):
            # The layers make their own first states, from weights that FSDP may have sharded and
            # makes whole only inside the layer.
            cache = TrellisCache(self, [None] * len(self.layers))
        kept: list[Tensor] = []
        all_hidden: list[Tensor] = []
        first_kept = tokens - hidden_to_keep if hidden_to_keep else 0
        for start in range(0, max(tokens, 1), max(size, 1)):
            part = slice(start, start + size)
            x = self.embed_tokens(input_ids[:, part]) if input_ids is not None else given[:, part]
            mask = attention_mask[:, part] if attention_mask is not None else None
            x, all_hidden = self._read(x, mask, cache, cu_seqlens, relay, output_hidden_states)
            if start + x.shape[1] > first_kept or tokens == 0:
                kept.append(self.norm(x[:, max(first_kept - start, 0) :]))
        hidden = kept[0] if len(kept) == 1 else torch.cat(kept, dim=1)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache if use_cache else None,
            hidden_states=(*all_hidden[:-1], hidden) if output_hidden_states else None,
        )

    @staticmethod
    def _check_inputs(
        given: Tensor, attention_mask: Tensor | None, cache: Any, cu_seqlens: Tensor | None
    ) -> None:
        """Raises at inputs that do not fit together, before any token is read."""
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
            most = tokens + (cache.get_seq_length() if cache is not None else 0)
            if not tokens <= columns <= most or attention_mask.shape[0] != batch:
                longer = f", or up to {most}, with those of the cache" if most > tokens else ""
                raise ValueError(
                    f"attention_mask must have shape [B, T] with B = {batch} and T = {tokens}, the "
                    f"number of input tokens{longer}; got {list(attention_mask.shape)}"
                )

    def _read(
        self,
        x: Tensor,
        mask: Tensor | None,
        cache: TrellisCache | None,
        cu_seqlens: Tensor | None,
        relay: Relay | None,
        output_hidden_states: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        """Passes one segment x [B, T, dim] through all blocks and updates the cache.

        Returns the output, and with output_hidden_states also the inputs of all blocks before it.
        """
        columns = x.shape[1]
        packing = None
        if mask is not None and not (mask != 0).all():
            packing = Packing(mask)
            x, cu_seqlens = packing.pack(x), packing.cu_seqlens
        trace, states = [x], []
        before = cache.states if cache is not None else []
        for i, block in enumerate(self.layers):
            if relay is not None:
                x, state = block(x, relay.before(i), cu_seqlens)
                x = relay.after(i, state, x)
            elif cache is not None:
                x, state = block(x, before[i], cu_seqlens)
                states.append(state)
            else:
                x, _ = block(x, None, cu_seqlens)
            if output_hidden_states:
                trace.append(x)
        if cache is not None:  # all at once: an interrupted call leaves the cache as it was
            cache.states = states
            cache.advance(columns)
        if packing is not None:
            x, trace = packing.unpack(x), [packing.unpack(t) for t in trace]
        return x, trace


class TrellisForCausalLM(TrellisPreTrainedModel, GenerationMixin):
    """The language model: the backbone and a linear head, by default tied to the embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: TrellisConfig):
        super().__init__(config)
        self.model = TrellisModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model makes its own cache

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TrellisCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        logits_to_keep: int | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, and the loss if `labels` or `targets` are given.

        labels [B, T]: the tokens themselves, -100 where a token is not to be predicted.
        targets [B, T]: in place of labels, already shifted: token t is to predict targets[:, t],
            and nothing where that is -100, as at the last token of a document.
        logits_to_keep: how many of the last tokens the logits are returned of (0: all), or their
            indices. By default a call with labels returns all logits if there are at most
            `config.loss_tokens` tokens, and else none: the loss never holds the logits of more.
        num_items_in_batch: divides the summed loss, in place of the number of predicted tokens.
        The other arguments are those of TrellisModel.forward.
        """
        _refuse_misspelt(kwargs, type(self).forward)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if labels is not None:
            if targets is not None:
                raise ValueError("only one of labels and targets can be given")
            given = input_ids if inputs_embeds is None else inputs_embeds
            if given is not None:
                checks.shape("labels", labels, given.shape[:2], "[B,T]")
            targets = _shifted(labels, attention_mask, cu_seqlens)
        plain = targets is None and not output_hidden_states and kwargs.get("relay") is None
        if plain and inputs_embeds is None and cu_seqlens is None:
            decoded = decode(self, input_ids, attention_mask, past_key_values, logits_to_keep)
            if decoded is not None:
                cache = past_key_values if kwargs.get("use_cache") is not False else None
                return CausalLMOutputWithPast(logits=decoded, past_key_values=cache)
        whole = targets is not None or output_hidden_states or not isinstance(logits_to_keep, int)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            cu_seqlens=cu_seqlens,
            hidden_to_keep=0 if whole else logits_to_keep,
            **{**kwargs, "return_dict": True},
        )
        hidden = outputs.last_hidden_state
        if logits_to_keep is None and (
            targets is None or targets.numel() <= self.config.loss_tokens
        ):
            logits_to_keep = 0
        loss = logits = None
        if logits_to_keep is not None:
            at = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, at])
        if targets is not None:
            head: nn.Module = self.lm_head
            if logits is not None and logits.shape[:2] == targets.shape:
                hidden, head = logits, nn.Identity()
            loss = next_token_loss(
                hidden, targets, head, chunk=self.config.loss_tokens, count=num_items_in_batch
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

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
            input_ids, next_sequence_length, inputs_embeds=inputs_embeds, **kwargs
        )

    @torch.no_grad()
    def read(self, input_ids: Tensor, cache: TrellisCache | None = None) -> TrellisCache:
        """Reads tokens [B, T], however many, into a cache, and computes no logits.

        `lm_head(cache.last)` gives the logits of the token after them.
        """
        if cache is None:
            cache = self.init_cache(len(input_ids))
        read = self.model(input_ids, past_key_values=cache, use_cache=True, hidden_to_keep=1)
        if input_ids.shape[1]:
            cache.last = read.last_hidden_state[:, -1]
        return cache


class TrellisForSequenceClassification(GenericForSequenceClassification, TrellisPreTrainedModel):
    """The backbone and a linear map from the last token that is not padding to labels."""


def _refuse_misspelt(unknown: dict[str, Any], function: Any) -> None:
    """Raises at an unknown keyword that is nearly a known one.

    Other keywords are accepted: generate() passes some that do not concern this model.
    """
    for name, value in unknown.items():
        hint = checks.did_you_mean(name, inspect.signature(function).parameters, cutoff=0.85)
        if value is not None and hint:
            raise TypeError(f"there is no argument {name!r}{hint}")


def _shifted(labels: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """What every token is to predict [B, T]: the next token's label.

    It is -100 at the last token of every sequence and around padding.
    """
    if cu_seqlens is not None:
        starts = cu_seqlens[:-1][cu_seqlens.diff() > 0].long()
        labels = labels.index_fill(1, starts, IGNORED)
    elif mask is not None:
        real = mask[:, mask.shape[1] - labels.shape[1] :] != 0
        before = F.pad(real[:, :-1], (1, 0), value=True)
        labels = labels.masked_fill(~(real & before), IGNORED)
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
