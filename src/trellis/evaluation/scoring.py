"""What tasks ask of a model: likelihoods of continuations, losses of tokens, greedy text.

Work is sorted by length and done in batches of about `batch_tokens` tokens. Results come in the
order of the requests and do not depend on the batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .models import EvaluatedModel

BATCH_TOKENS = 8192
#: About this many logits are in memory at a time: with a large vocabulary a batch has fewer tokens.
LOGITS = 2**26
#: `token_losses` holds the logits of this many tokens at a time.
LOGIT_TOKENS = 4096
#: Names that models of transformers give to what they keep of a text.
_CACHES = ("past_key_values", "cache_params")
#: The token ids of a context and of a continuation.
Request = tuple[Sequence[int], Sequence[int]]
#: Called with the number of items that were finished since the last call.
Progress = Callable[[int], None]


class Score(NamedTuple):
    """The log-likelihood of a continuation in nats, and whether greedy decoding would write it."""

    likelihood: float
    greedy: bool


def score(
    model: EvaluatedModel,
    requests: Sequence[Request],
    *,
    batch_tokens: int = BATCH_TOKENS,
    share: bool = True,
    progress: Progress = lambda done: None,
) -> list[Score]:
    """Scores of (context, continuation) pairs of token ids; neither may be empty.

    share: read a context that several continuations follow only once and copy its state. Models of
        transformers, whose caches are of many kinds, read every request from its beginning.
    """
    for context, continuation in requests:
        if not context or not continuation:
            raise ValueError("context and continuation must have at least one token each")
        model.check_context(len(context) + len(continuation) - 1, "a request")
    found: dict[int, Score] = {}
    run = _shared if share and model.ours else _apart
    for batch in run(model, requests, batch_tokens):
        found |= batch
        progress(len(batch))
    return [found[number] for number in range(len(requests))]


def _apart(
    model: EvaluatedModel, requests: Sequence[Request], batch_tokens: int
) -> Iterator[dict[int, Score]]:
    """Reads context and continuation of every request together."""
    lengths = [len(context) + len(continuation) for context, continuation in requests]
    for batch in batches(lengths, _fitting(model, batch_tokens)):
        rows = [[*requests[n][0], *requests[n][1]][:-1] for n in batch]
        yield {
            n: _score(logits[len(requests[n][0]) - 1 :], requests[n][1])
            for n, logits in zip(batch, model.logits(rows))
        }


def _shared(
    model: EvaluatedModel, requests: Sequence[Request], batch_tokens: int
) -> Iterator[dict[int, Score]]:
    """Reads every context once and copies its state for each continuation."""
    followers: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, (context, _) in enumerate(requests):
        followers[tuple(context)].append(number)
    contexts = list(followers)
    for batch in batches([len(context) for context in contexts], batch_tokens):
        chosen = [contexts[n] for n in batch]
        last, cache = model.read(chosen)
        numbers = [n for context in chosen for n in followers[context]]
        owners = [place for place, c in enumerate(chosen) for _ in followers[c]]
        lengths = [len(requests[n][1]) for n in numbers]
        for part in batches(lengths, _fitting(model, batch_tokens)):
            rows = [requests[numbers[i]][1] for i in part]
            own = torch.tensor([owners[i] for i in part], device=last.device)
            # The context predicts the first token of each continuation, copied states the rest.
            first, rest = last[own, None], [last[:0]] * len(rows)
            if len(rows[0]) > 1:  # the longest
                rest = model.logits([row[:-1] for row in rows], cache.reorder(own))
            yield {
                numbers[i]: _score(torch.cat(logits), row)
                for i, row, logits in zip(part, rows, zip(first, rest))
            }


def _fitting(model: EvaluatedModel, batch_tokens: int) -> int:
    return min(batch_tokens, max(1, LOGITS // model.tokenizer.vocab_size))


def _score(logits: Tensor, continuation: Sequence[int]) -> Score:
    """logits [T, V]: row t predicts token t of the continuation."""
    greedy = logits.argmax(-1).tolist() == list(continuation)
    return Score(-float(_losses(logits, continuation).double().sum()), greedy)


@torch.no_grad()
def token_losses(model: EvaluatedModel, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """-log p, in nats, of every token of every row except its first.

    Our models read rows in segments, so that a row of any length takes the memory of one segment.
    """
    if not model.ours:
        logits = model.logits([row[:-1] for row in rows])
        return [_losses(one, row[1:]) for one, row in zip(logits, rows)]
    # Longest first, so that the rows which are not finished are always the first ones.
    order = sorted(range(len(rows)), key=lambda n: -len(rows[n]))
    size = max(1, LOGIT_TOKENS // len(rows))
    cache = model.network.init_cache(len(rows))
    found: list[list[Tensor]] = [[torch.empty(0, device=model.device)] for _ in rows]
    for begin in range(0, len(rows[order[0]]) - 1, size):
        going = [n for n in order if len(rows[n]) > begin + 1]
        if len(going) < cache.batch_size:
            cache = cache.select(slice(0, len(going)))
        parts = [list(rows[n][begin : begin + size + 1]) for n in going]
        logits = model.logits([part[:-1] for part in parts], cache)
        for n, part, one in zip(going, parts, logits):
            found[n].append(_losses(one, part[1:]))
    return [torch.cat(losses) for losses in found]


def _losses(logits: Tensor, targets: Sequence[int]) -> Tensor:
    return F.cross_entropy(
        logits.float(), torch.tensor(targets, device=logits.device), reduction="none"
    )


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of items, longest first, in groups whose padded size is at most `batch_tokens`."""
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    group: list[int] = []
    for n in order:
        width = lengths[group[0]] if group else lengths[n]
        if group and width * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(n)
    if group:
        yield group


@torch.no_grad()
def complete(
    model: EvaluatedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop: str | Sequence[str] | None = None,
    enough: Callable[[int, str], bool] = lambda number, text: False,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = lambda done: None,
) -> list[str]:
    """Greedy text after each prompt, up to `max_tokens`, the end of a document, or `stop`.

    stop: one text or several; a result ends before the first of them.
    enough: called with the number of a prompt and its text so far; True ends this text.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for prompt in prompts:
        if not prompt:
            raise ValueError("a prompt must have at least one token")
        model.check_context(len(prompt) + max_tokens, "a prompt with its answer")
    found = [""] * len(prompts)
    for batch in batches([len(prompt) + max_tokens for prompt in prompts], batch_tokens):
        for group in [batch] if model.ours else [[n] for n in batch]:
            writers = [_Writer(model, stops, partial(enough, n)) for n in group]
            _write(model, [prompts[n] for n in group], max_tokens, writers)
            for n, writer in zip(group, writers):
                found[n] = writer.text
        progress(len(batch))
    return found


def _write(
    model: EvaluatedModel,
    rows: Sequence[Sequence[int]],
    max_tokens: int,
    writers: Sequence[_Writer],
) -> None:
    """Appends the likeliest token to every text, in turns; a finished text leaves the batch."""
    texts = [list(row) for row in rows]
    cache: Any = None
    for _ in range(max_tokens):
        logits, cache = _next(model, texts, cache)
        tokens = logits.argmax(-1).tolist()
        going = [i for i, token in enumerate(tokens) if writers[i].take(token)]
        if not going:
            break
        if len(going) < len(texts):
            cache = cache.reorder(torch.tensor(going))
        writers = [writers[i] for i in going]
        texts = [[*texts[i], tokens[i]] for i in going]


def _next(model: EvaluatedModel, texts: list[list[int]], cache: Any) -> tuple[Tensor, Any]:
    """Logits [N, V] after texts, and what the model keeps of them.

    cache: what it kept of the texts without their last token; None if it has read nothing. Models
    of transformers read one text, and keep a dictionary of whatever caches they bring.
    """
    if model.ours and cache is None:
        return model.read(texts)
    # Without a cache that can be handed back, the whole text is read again.
    new = torch.tensor([row[-1:] for row in texts] if cache else texts, device=model.device)
    if model.ours:
        return model.network(new, past_key_values=cache).logits[:, -1], cache
    out = model.network(new, use_cache=True, logits_to_keep=1, **(cache or {}))
    given = {name: getattr(out, name, None) for name in _CACHES}
    return out.logits[:, -1], {name: one for name, one in given.items() if one is not None}


class _Writer:
    """Collects the tokens of one text, up to a stop."""

    def __init__(self, model: EvaluatedModel, stops: Sequence[str], enough: Callable[[str], bool]):
        self.decoder = model.tokenizer.stream_decoder()
        self.end = model.tokenizer.end_of_document
        self.known = model.tokenizer.vocab_size
        self.stops, self.enough = stops, enough
        self.text = ""

    def take(self, token: int) -> bool:
        """Adds a token. Returns whether the text goes on."""
        if token == self.end:
            return False
        if token < self.known:  # a model may have more tokens than its tokenizer
            self.text += self.decoder.feed(token)
        ends = [self.text.index(stop) for stop in self.stops if stop in self.text]
        if ends:
            self.text = self.text[: min(ends)]
        return not ends and not self.enough(self.text)
