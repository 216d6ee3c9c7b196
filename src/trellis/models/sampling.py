"""Text from a model, token by token, into and out of a bounded state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import checks
from .cache import TrellisCache
from .modeling import TrellisForCausalLM


def generate(
    model: TrellisForCausalLM,
    tokenizer: Any,
    prompt: str,
    cache: TrellisCache,
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int | None = None,
    seed: int = 0,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Iterator[str]:
    """Iterates over new text as it is made, until a document ends or for `max_tokens` tokens.

    tokenizer: a `trellis.data.TextTokenizer`. The cache may have read any text before the prompt;
    afterwards it has also read the prompt and every new token, so that it can be saved and used
    again. Without a prompt the text goes on from what `model.read` has read into the cache, or
    begins a document. Temperature 0 always takes the likeliest token; top_k 50 draws only from the
    50 likeliest tokens, top_p 0.95 only from the fewest of those that have 95% of their probability
    together. progress: called with the number of tokens whenever a part of the prompt is read.

    Raises:
        ValueError: an option is out of range; or the prompt has no token, and neither the cache nor
            the tokenizer gives one to begin with.
    """
    checks.at_least("temperature", temperature, 0, whole=False)
    checks.share("top_p", top_p)
    checks.at_least("top_k", top_k, 1, optional=True)
    if not -(2**63) <= seed < 2**64:  # what torch takes
        raise ValueError(f"seed must be from -2^63 to 2^64 - 1; got {seed}")
    ids = tokenizer.encode(prompt).tolist()
    if not ids and cache.last is None:
        if cache.seen or tokenizer.end_of_document is None:
            raise ValueError("prompt must have a token that what follows can be predicted from")
        ids = [tokenizer.end_of_document]
    source = torch.Generator().manual_seed(seed)

    def read(new: list[int]) -> None:
        model.read(torch.tensor([new], device=model.device), cache)

    @torch.no_grad()
    def stream() -> Iterator[str]:
        decoder = tokenizer.stream_decoder()
        for start in range(0, len(ids), model.config.segment_size):
            read(part := ids[start : start + model.config.segment_size])
            progress(len(part))
        token = None
        for _ in range(max_tokens):
            if token is None:
                logits = model.lm_head(cache.last)[0]
            else:
                new = torch.tensor([[token]], device=model.device)
                logits = model(new, past_key_values=cache, logits_to_keep=1).logits[0, -1]
            token = _choose(logits.float().cpu(), temperature, top_p, top_k, source)
            if token == tokenizer.end_of_document:
                break
            if text := decoder.feed(token):
                yield text
        if token is not None:
            read([token])
        if text := decoder.finish():
            yield text

    return stream()  # the arguments were checked above, before the first text is asked for


def _choose(
    logits: Tensor, temperature: float, top_p: float, top_k: int | None, source: torch.Generator
) -> int:
    """Draws a token, of the fewest likeliest of `top_k` that have `top_p` of the probability."""
    if temperature == 0:
        return int(logits.argmax())
    # In fp64 and with the largest logit at 0, any temperature above 0 works: 1e-300, too.
    scaled, order = ((logits - logits.max()).double() / temperature).sort(descending=True)
    chances = scaled[:top_k].softmax(-1).float()
    before = chances.cumsum(-1) - chances
    before[0] = -1  # the likeliest token always stays
    chances = chances.masked_fill(before >= top_p, 0)
    return int(order[torch.multinomial(chances, 1, generator=source)])
