"""TrellisModel and TrellisForCausalLM for Hugging Face transformers."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .backbone import Block
from .cache import TrellisCache, tensor_bytes
from .config import TrellisConfig
from .loss import IGNORED, next_token_loss
from .padding import packing_of


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
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]

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
            "mixers": self.config.layer_mixers(),
        }
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
        for name, weight in sorted(backbone.state_dict().items()):
            digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
            digest.update(tensor_bytes(weight))
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
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
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
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """Hidden states of the tokens, and the cache after them.

        input_ids [B, T], or inputs_embeds [B, T, dim]. attention_mask [B, T], 0 at padding, left
        or right; with a cache it may also cover the tokens read before. cu_seqlens [N+1] makes
        one row (B = 1) a pack of N sequences. hidden_to_keep returns only that many of the last
        hidden states (0: all). Positions follow from the order of the tokens: `position_ids`,
        which generate() passes, are not used.
        """
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        batch, tokens = given.shape[:2]
        if cu_seqlens is not None and attention_mask is not None:
            raise ValueError("cu_seqlens and attention_mask cannot be given together")
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training)
        cache = past_key_values
        if cache is not None and not isinstance(cache, TrellisCache):
            raise TypeError(
                f"past_key_values must be a TrellisCache; got {type(cache).__name__}. "
                "Leave it out, or make one with model.init_cache(batch)"
            )
        if attention_mask is not None:
            packing_of(attention_mask, tokens)  # raises before anything is read
            attention_mask = attention_mask[:, attention_mask.shape[1] - tokens :]

        whole = torch.is_grad_enabled() or cu_seqlens is not None or output_hidden_states
        size = tokens if whole else self.config.segment_size
        if cache is None and (use_cache or tokens > size):
            sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
            cache = self.init_cache(sequences)
        kept, all_hidden = [], None
        first_kept = tokens - hidden_to_keep if hidden_to_keep else 0
        for start in range(0, max(tokens, 1), max(size, 1)):
            part = slice(start, start + size)
            x = self.embed_tokens(input_ids[:, part]) if input_ids is not None else given[:, part]
            mask = attention_mask[:, part] if attention_mask is not None else None
            x, all_hidden = self._read(x, mask, cache, cu_seqlens, bool(output_hidden_states))
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
        return output.to_tuple() if return_dict is False else output

    def _read(
        self,
        x: Tensor,
        mask: Tensor | None,
        cache: TrellisCache | None,
        cu_seqlens: Tensor | None,
        output_hidden_states: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """One segment through all blocks. Updates the cache."""
        columns = x.shape[1]
        packing = packing_of(mask, columns)
        if packing is not None:
            x, cu_seqlens = packing.pack(x), packing.cu_seqlens
        trace = [x]
        for i, block in enumerate(self.layers):
            state = cache.states[i] if cache is not None else None
            x, state = block(x, state, cu_seqlens)
            if cache is not None:
                cache.states[i] = state
            trace.append(x)
            if not output_hidden_states:
                trace.clear()
        if cache is not None:
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
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits of the next token, and the loss if `labels` [B, T] are given (-100: none).

        The loss never holds the logits of more than `config.loss_tokens` tokens. The logits
        returned are those of the last `logits_to_keep` tokens, or at its indices; 0 returns all.
        In training mode a call with labels returns no logits, so that long contexts fit.
        The other arguments are those of TrellisModel.forward.
        """
        only_last = labels is None and isinstance(logits_to_keep, int)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seqlens=cu_seqlens,
            hidden_to_keep=logits_to_keep if only_last else 0,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        loss = None
        if labels is not None:
            if labels.shape != hidden.shape[:2]:
                raise ValueError(
                    f"labels must have shape [B,T] = {list(hidden.shape[:2])}; "
                    f"got {list(labels.shape)}"
                )
            loss = next_token_loss(
                hidden,
                _predictable(labels, attention_mask, cu_seqlens),
                self.lm_head,
                chunk=self.config.loss_tokens,
                count=num_items_in_batch,
            )
        logits = None
        if labels is None or not self.training:
            kept = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            )
            logits = self.lm_head(hidden[:, kept])
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
        return output.to_tuple() if return_dict is False else output

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        if next_sequence_length is not None and next_sequence_length <= 0:
            raise ValueError(
                f"input_ids has {input_ids.shape[1]} tokens, but the cache in past_key_values has "
                f"read {input_ids.shape[1] - next_sequence_length} already. Pass the whole "
                "sequence, or only the new tokens with an attention_mask that covers both"
            )
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, **kwargs
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
