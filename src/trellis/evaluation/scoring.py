"""What tasks ask of a model: the likelihood of continuations, and greedy text.

Work is ordered by length and done in batches of about `batch_tokens` tokens. Results come in the
order of the requests and do not depend on the batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .subject import Subject

BATCH_TOKENS = 8192
#: Logits that exist at a time, about: with a large vocabulary a batch has fewer tokens.
LOGITS = 2**26
#: Names that models of transformers give to what they keep of a text.
_CACHES = ("past_key_values", "cache_params")
Progress = Callable[[int], None]


class Score(NamedTuple):
    """Of a continuation: its log-likelihood in nats, and whether greedy decoding gives it."""

    likelihood: float
    greedy: bool


def score(
    subject: Subject,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_tokens: int = BATCH_TOKENS,
    share: bool = True,
    progress: Progress = lambda done: None,
) -> list[Score]:
    """Scores of (context, continuation) pairs of token ids; neither may be empty.

    share: where a model's state can be copied (all of ours), a context that several continuations
    follow is read once.
    """
    for context, continuation in requests:
        if not context or not continuation:
            raise ValueError("context and continuation must have at least one token each")
        subject.check_context(len(context) + len(continuation) - 1, "a request")
    found: list[Score | None] = [None] * len(requests)
    run = _shared if share and subject.ours else _apart
    for batch in run(subject, requests, batch_tokens):
        for number, result in batch:
            found[number] = result
        progress(len(batch))
    return [result for result in found if result is not None]


def _apart(
    subject: Subject, requests: Sequence[tuple[Sequence[int], Sequence[int]]], batch_tokens: int
) -> Iterator[list[tuple[int, Score]]]:
    """Every request read for itself."""
    lengths = [len(context) + len(continuation) for context, continuation in requests]
    for batch in batches(lengths, _fitting(subject, batch_tokens)):
        rows = [[*requests[n][0], *requests[n][1]][:-1] for n in batch]
        logits = subject.logits(rows)
        yield [
            (n, _score(one[len(requests[n][0]) - 1 :], requests[n][1]))
            for n, one in zip(batch, logits)
        ]


def _shared(
    subject: Subject, requests: Sequence[tuple[Sequence[int], Sequence[int]]], batch_tokens: int
) -> Iterator[list[tuple[int, Score]]]:
    """Every context read once; its state is copied for each continuation."""
    followers: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, (context, _) in enumerate(requests):
        followers[tuple(context)].append(number)
    contexts = list(followers)
    for batch in batches([len(context) for context in contexts], batch_tokens):
        chosen = [contexts[n] for n in batch]
        last, cache = subject.read(chosen)
        numbers = [n for context in chosen for n in followers[context]]
        owners = [place for place, c in enumerate(chosen) for _ in followers[c]]
        # The context predicts the first token of all that follow it; their states predict the rest.
        found = _first(torch.stack(last), owners, [requests[n][1][0] for n in numbers])
        longer = [place for place, n in enumerate(numbers) if len(requests[n][1]) > 1]
        lengths = [len(requests[numbers[place]][1]) - 1 for place in longer]
        for part in batches(lengths, _fitting(subject, batch_tokens)):
            places = [longer[i] for i in part]
            rows = [requests[numbers[place]][1] for place in places]
            forked = cache.reorder(torch.tensor([owners[place] for place in places]))
            all_logits = subject.go_on([row[:-1] for row in rows], forked)
            for place, row, logits in zip(places, rows, all_logits):
                first, rest = found[place], _score(logits, row[1:])
                found[place] = Score(
                    first.likelihood + rest.likelihood, first.greedy and rest.greedy
                )
        yield list(zip(numbers, found))


def _fitting(subject: Subject, batch_tokens: int) -> int:
    return min(batch_tokens, max(1, LOGITS // subject.tokenizer.vocab_size))


def _first(last: Tensor, owners: Sequence[int], tokens: Sequence[int]) -> list[Score]:
    """Scores of single tokens, each from the logits of its owner, [N, V]."""
    own, ids = torch.tensor([owners, tokens], device=last.device)
    last = last.float()
    likelihood = last[own, ids] - last.logsumexp(-1)[own]
    greedy = last.argmax(-1)[own] == ids
    return [Score(*one) for one in zip(likelihood.tolist(), greedy.tolist())]


def _score(logits: Tensor, continuation: Sequence[int]) -> Score:
    """From the logits that predict each token of the continuation, [T, V]."""
    ids = torch.tensor(continuation, device=logits.device)
    logits = logits.float()
    likelihood = logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(-1)
    return Score(float(likelihood.double().sum()), bool((logits.argmax(-1) == ids).all()))


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
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop: str | Sequence[str] | None = None,
    enough: Callable[[int, str], bool] = lambda number, text: False,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = lambda done: None,
) -> list[str]:
    """The likeliest token after another, until `max_tokens`, the end of a document, or `stop`.

    stop: a text, or several; the result ends before the first of them.
    enough: whether the text that follows the prompt of that number needs no more.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for prompt in prompts:
        if not prompt:
            raise ValueError("a prompt must have at least one token")
        subject.check_context(len(prompt) + max_tokens, "a prompt with its answer")
    found = [""] * len(prompts)
    for batch in batches([len(prompt) + max_tokens for prompt in prompts], batch_tokens):
        rows = [prompts[n] for n in batch]
        writers = [_Writer(subject, stops, partial(enough, n)) for n in batch]
        if subject.ours:
            _complete_ours(subject, rows, max_tokens, writers)
        else:
            for row, writer in zip(rows, writers):
                _complete_alone(subject, row, max_tokens, writer)
        for n, writer in zip(batch, writers):
            found[n] = writer.text
        progress(len(batch))
    return found


def _complete_ours(
    subject: Subject, rows: Sequence[Sequence[int]], max_tokens: int, writers: Sequence[_Writer]
) -> None:
    """A batch from its states; a sequence that has stopped leaves the batch."""
    last, cache = subject.read(rows)
    logits = torch.stack(last)
    active = list(range(len(rows)))
    for place in range(max_tokens):
        tokens = logits.argmax(-1).tolist()
        going = [i for i, token in enumerate(tokens) if writers[active[i]].take(token)]
        if not going or place == max_tokens - 1:
            break
        if len(going) < len(active):
            cache = cache.reorder(torch.tensor(going))
            active = [active[i] for i in going]
        new = torch.tensor([[tokens[i]] for i in going], device=subject.device)
        logits = subject.model(new, past_key_values=cache).logits[:, -1]


def _complete_alone(subject: Subject, row: Sequence[int], max_tokens: int, writer: _Writer) -> None:
    """One prompt with the cache that the model brings, whatever it is."""
    cache: dict[str, Any] = {}
    ids = list(row)
    for _ in range(max_tokens):
        # Without a cache that can be handed back, all is read again.
        new = ids[-1:] if cache else ids
        out = subject.model(
            torch.tensor([new], device=subject.device), use_cache=True, logits_to_keep=1, **cache
        )
        ids.append(int(out.logits[0, -1].argmax()))
        if not writer.take(ids[-1]):
            break
        given = {name: getattr(out, name, None) for name in _CACHES}
        cache = {name: value for name, value in given.items() if value is not None}


class _Writer:
    """Collects tokens to a text, up to a stop."""

    def __init__(self, subject: Subject, stops: Sequence[str], enough: Callable[[str], bool]):
        self.decoder = subject.tokenizer.stream_decoder()
        self.end = subject.tokenizer.end_of_document
        self.known = subject.tokenizer.vocab_size
        self.stops, self.enough = stops, enough
        self.text = ""

    def take(self, token: int) -> bool:
        """Whether the text goes on."""
        if token == self.end:
            return False
        if token < self.known:  # a model may have more tokens than its tokenizer
            self.text += self.decoder.feed(token)
        ends = [self.text.index(stop) for stop in self.stops if stop in self.text]
        if ends:
            self.text = self.text[: min(ends)]
        return not ends and not self.enough(self.text)
