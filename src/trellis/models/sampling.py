"""Text from a model, token by token, into and out of a bounded state."""

from __future__ import annotations

from collections.abc import Iterator
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
    seed: int = 0,
) -> Iterator[str]:
    """Iterates over new text as it is made, until a document ends or for `max_tokens` tokens.

    tokenizer: a `trellis.data.TextTokenizer`. The cache may have read any text before the prompt;
    afterwards it has also read the prompt and every new token, so that it can be saved and used
    again. Temperature 0 always takes the likeliest token; top_p 0.95 draws only from the fewest
    likeliest tokens that have 95% of the probability together.

    Raises:
        ValueError: an option is out of range; or the prompt has no token, and the tokenizer none
            that begins a document.
    """
    checks.at_least("temperature", temperature, 0, whole=False)
    checks.share("top_p", top_p)
    if not -(2**63) <= seed < 2**64:  # what torch takes
        raise ValueError(f"seed must be from -2^63 to 2^64 - 1; got {seed}")
    ids = tokenizer.encode(prompt).tolist()
    if not ids:
        if cache.seen or tokenizer.end_of_document is None:
            raise ValueError("prompt must have a token that what follows can be predicted from")
        ids = [tokenizer.end_of_document]
    source = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def stream() -> Iterator[str]:
        decoder = tokenizer.stream_decoder()
        new = torch.tensor([ids], device=model.device)
        for _ in range(max_tokens):
            logits = model(new, past_key_values=cache, logits_to_keep=1).logits[0, -1]
            token = _choose(logits.float().cpu(), temperature, top_p, source)
            new = torch.tensor([[token]], device=model.device)
            if token == tokenizer.end_of_document:
                break
            if text := decoder.feed(token):
                yield text
        model.read(new, cache)  # the last token, or the whole prompt if max_tokens is 0
        if text := decoder.finish():
            yield text

    return stream()  # the arguments were checked above, before the first text is asked for


def _choose(logits: Tensor, temperature: float, top_p: float, source: torch.Generator) -> int:
    """Draws a token from the fewest likeliest tokens that have `top_p` of the probability."""
    if temperature == 0:
        return int(logits.argmax())
    # In fp64 and with the largest logit at 0, any temperature above 0 works: 1e-300, too.
    scaled = (logits - logits.max()).double() / temperature
    chances, order = scaled.softmax(-1).float().sort(descending=True)
    before = chances.cumsum(-1) - chances
    before[0] = -1  # the likeliest token always stays
    chances = chances.masked_fill(before >= top_p, 0)
    return int(order[torch.multinomial(chances, 1, generator=source)])
