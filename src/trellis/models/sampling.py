"""Text from a model, token by token, into and out of a bounded state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    begins a document. temperature, top_p, top_k: as in `Sampling`. progress: called with the number
    of tokens whenever a part of the prompt is read.

    Raises:
        ValueError: an option is out of range; or the prompt has no token, and neither the cache nor
            the tokenizer gives one to begin with.
    """
    way, source = Sampling(temperature, top_p, top_k), seeded(seed)
    ids = tokenizer.encode(prompt).tolist()
    if not ids and cache.last is None:
        if cache.get_seq_length() or tokenizer.end_of_document is None:
            raise ValueError("prompt must have a token that what follows can be predicted from")
        ids = [tokenizer.end_of_document]

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
            known = logits[: tokenizer.vocab_size]  # a model may have rows to spare
            (token,) = choose(known.float().cpu()[None], [way], [source])
            if token == tokenizer.end_of_document:
                break
            if text := decoder.feed(token):
                yield text
        if token is not None:
            read([token])
        if text := decoder.finish():
            yield text

    return stream()  # the arguments were checked above, before the first text is asked for


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Temperature 0 always takes the likeliest token. top_k 50 draws only from the 50 likeliest
    tokens, top_p 0.95 only from the fewest of those that have 95% of their probability together.

    Raises ValueError at a value that is out of range.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int | None = None

    def __post_init__(self) -> None:
        checks.at_least("temperature", self.temperature, 0, whole=False)
        checks.share("top_p", self.top_p)
        checks.at_least("top_k", self.top_k, 1, optional=True)


def seeded(seed: int) -> torch.Generator:
    """The source of one text's random numbers. Raises ValueError at a seed that torch refuses."""
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be from -2^63 to 2^64 - 1; got {seed}")
    return torch.Generator().manual_seed(seed)


#: A token is looked for among so many of the likeliest first. Most ways need no more.
FIRST = 256


def choose(
    logits: Tensor, ways: Sequence[Sampling], sources: Sequence[torch.Generator]
) -> list[int]:
    """Draws one token for every row of logits [B, V], each in its own way from its own source.

    What a row draws depends on its logits, way and source alone, not on the rows beside it.
    """
    chosen = logits.argmax(-1).tolist()
    drawn = [n for n, way in enumerate(ways) if way.temperature]
    whole = [n for n in drawn if ways[n].top_p == 1 and ways[n].top_k is None]
    cut = [n for n in drawn if n not in whole]
    for rows, draw in ((whole, _from_all), (cut, _from_likeliest)):
        if not rows:
            continue
        some = [ways[n] for n in rows]
        # In fp64 and with the largest logit at 0, any temperature above 0 works: 1e-300, too.
        scaled = (logits[rows] - logits[rows].amax(-1, keepdim=True)).double()
        scaled /= _column([way.temperature for way in some])
        numbers = [torch.rand((), generator=sources[n], dtype=torch.float64) for n in rows]
        for n, token in zip(rows, draw(scaled, some, torch.stack(numbers)[:, None])):
            chosen[n] = token
    return chosen


def _column(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def _from_all(scaled: Tensor, ways: list[Sampling], uniform: Tensor) -> list[int]:
    return _places(scaled.softmax(-1), uniform)


def _from_likeliest(scaled: Tensor, ways: list[Sampling], uniform: Tensor) -> list[int]:
    """With top_k and top_p. scaled [R, V], uniform [R, 1]."""
    values, order = scaled.topk(min(FIRST, scaled.shape[1]))
    most = _column([way.top_k or scaled.shape[1] for way in ways])
    allowed = values.masked_fill(torch.arange(values.shape[1]) >= most, -torch.inf)
    # The sum that makes the chances of the allowed tokens 1: of all tokens where there is no top_k.
    limited = torch.tensor([way.top_k is not None for way in ways])[:, None]
    total = torch.where(
        limited, allowed.logsumexp(-1, keepdim=True), scaled.logsumexp(-1, keepdim=True)
    )
    chances = (allowed - total).exp()
    top_p = _column([way.top_p for way in ways])
    found = _places(_nucleus(chances, top_p), uniform)
    tokens = order.gather(1, torch.tensor(found)[:, None])[:, 0].tolist()
    reached = (chances.sum(-1, keepdim=True) >= top_p) & (top_p < 1)
    enough = torch.where(limited, most <= values.shape[1], reached)
    for n in (~enough).flatten().nonzero().flatten().tolist():  # more than the first few are needed
        values, order = scaled[n].sort(descending=True)
        chances = values[: ways[n].top_k].softmax(-1)[None]
        (place,) = _places(_nucleus(chances, top_p[n : n + 1]), uniform[n : n + 1])
        tokens[n] = int(order[place])
    return tokens


def _nucleus(chances: Tensor, top_p: Tensor) -> Tensor:
    """Sorted chances [R, K], with 0 for those behind the fewest that have top_p [R, 1] together."""
    before = chances.cumsum(-1) - chances
    before[:, 0] = -1  # the likeliest token always stays
    return chances.masked_fill(before >= top_p, 0)


def _places(chances: Tensor, uniform: Tensor) -> list[int]:
    """The places whose part of each row's sum the numbers [R, 1] from 0 to 1 fall into."""
    sums = chances.cumsum(-1)
    found = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    # Rounding may lead past the last place that has a chance.
    last = chances.shape[1] - 1 - (chances > 0).flip(-1).int().argmax(-1, keepdim=True)
    return torch.minimum(found, last)[:, 0].tolist()
