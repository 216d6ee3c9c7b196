"""Text from a model, token by token, into and out of a bounded state."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..data.tokenizer import TextTokenizer
from ..models.cache import TrellisCache
from ..models.modeling import TrellisForCausalLM


@torch.no_grad()
def generate(
    model: TrellisForCausalLM,
    tokenizer: TextTokenizer,
    prompt: str,
    cache: TrellisCache,
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> Iterator[str]:
    """Yields text as it comes, until the end of a document or `max_tokens`.

    `cache` goes on from whatever it has read; afterwards it has read the prompt and every token
    that was generated, so that it can be saved and gone on from. Temperature 0 takes the likeliest.

    Raises:
        ValueError: there is nothing to go on from: no prompt, and no token that begins a document.
    """
    ids = tokenizer.encode(prompt).tolist()
    if not ids:
        if cache.seen or tokenizer.end_of_document is None:
            raise ValueError("prompt must have a token that what follows can be predicted from")
        ids = [tokenizer.end_of_document]
    source = torch.Generator().manual_seed(seed)
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
    model.read(new, cache)  # the last token, or a prompt that nothing was to follow
    if text := decoder.finish():
        yield text


def _choose(logits: Tensor, temperature: float, top_p: float, source: torch.Generator) -> int:
    """One token: of the fewest likeliest that make up `top_p`, in proportion."""
    if temperature == 0:
        return int(logits.argmax())
    chances, order = (logits / temperature).softmax(-1).sort(descending=True)
    before = chances.cumsum(-1) - chances
    before[0] = -1  # one is always left
    chances = chances.masked_fill(before >= top_p, 0)
    return int(order[torch.multinomial(chances, 1, generator=source)])
