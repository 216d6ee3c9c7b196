"""One thread that owns the model: it reads prompts in segments and decodes many sessions together.

Every step of the thread reads at most about one segment of waiting text, then draws one token for
each running session. Sessions join and leave the batch between steps.

A text is always read in the same pieces: whole segments from its start, and a piece up to each
place where its state is kept. So what a session computes does not depend on the sessions beside it;
but a prompt that shares a beginning with a recent one is read in other pieces than it would be
alone, and its numbers may differ in their last bits.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.tokenizer import TextTokenizer
from ..models.cache import TrellisCache
from ..models.decoder import MOST_ROWS
from ..models.modeling import TrellisForCausalLM
from ..models.sampling import Sampling, choose, seeded
from .metrics import Metrics
from .observer import Observer
from .states import Store

log = logging.getLogger("trellis")

#: Tokens of a prompt whose gates are shown where the memory is looked at.
OBSERVED = 32
#: Longest wait of the thread for work, in seconds: deadlines are looked at so often.
TICK = 0.2
#: More tokens than the bytes of a character, some of which may not have become text yet.
HELD = 10


class Busy(Exception):
    """There is no place for a request. seconds: when it may be worth another try."""

    def __init__(self, message: str, seconds: int):
        super().__init__(message)
        self.seconds = seconds


class TimeIsUp(Exception):
    """A request took longer than it may, before there was anything to answer."""


@dataclass
class TokenChance:
    """A drawn token, the logarithm of its probability, and those of the likeliest tokens."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Progress:
    """So many tokens of the text have been read; `memory` has what the observer saw of the last."""

    tokens: int
    memory: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Text:
    """New text of one of the answers."""

    choice: int
    text: str
    chances: list[TokenChance] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Finished:
    """An answer is complete. reason: "stop" or "length". cut: "time" or "shutdown" where these
    ended it. ids: the drawn tokens. cache: what has read the answer, if it was asked for; `read`
    are then the tokens that it has read after the prompt."""

    choice: int
    reason: str
    ids: list[int]
    cache: TrellisCache | None
    read: list[int] = field(default_factory=list)
    ended: bool = False
    cut: str | None = None


@dataclass
class Failed:
    error: Exception


Event = Progress | Text | Finished | Failed


@dataclass(eq=False)
class Job:
    """A text to read into a cache, and how to go on from there.

    pieces: the ids of the text, in as many arrays as its source gives.
    listen: called by the engine's thread with every event. Each answer ends with one Finished; a
        Failed ends the whole job.
    cache: what the text goes on from; None begins anew, perhaps from a known beginning.
    seeds: one for each answer. max_tokens: the most tokens of an answer; 0 reads only.
    stops: texts before which an answer ends. chances: how many of the likeliest tokens are told
        with each token; None tells nothing.
    keep_state: whether Finished brings the cache.
    places: places in the text, in tokens, whose states other prompts will want.
    observe: layer and head of a memory to look at.
    seconds: the most time for all of it.
    """

    pieces: Iterator[np.ndarray]
    listen: Callable[[Event], None]
    cache: TrellisCache | None = None
    seeds: Sequence[int] = (0,)
    way: Sampling = field(default_factory=Sampling)
    max_tokens: int = 16
    stops: Sequence[str] = ()
    chances: int | None = None
    keep_state: bool = False
    places: Sequence[int] = ()
    observe: tuple[int, int] | None = None
    seconds: float = math.inf

    cancelled: bool = False
    read: int = 0
    known: int = 0
    deadline: float = math.inf
    held: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    exhausted: bool = False
    prompt: np.ndarray | None = None  # all of it, where it begins anew and is known whole
    observer: Observer | None = None
    unfinished: int = 0


@dataclass(eq=False)
class Row:
    """One answer under way. cache: before it is in a group. base: what the answer began from."""

    job: Job
    choice: int
    source: torch.Generator
    decoder: Any
    cache: TrellisCache
    base: TrellisCache | None
    observer: Observer | None
    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # characters of text after each token
    text: str = ""
    sent: int = 0
    chances: list[TokenChance] = field(default_factory=list)


@dataclass(eq=False)
class Group:
    """Rows that are decoded in one call."""

    rows: list[Row]
    cache: TrellisCache


class Engine:
    """Start it with `start()`, hand it jobs with `submit`, end it with `stop()`."""

    def __init__(
        self,
        model: TrellisForCausalLM,
        tokenizer: TextTokenizer,
        store: Store,
        metrics: Metrics,
        *,
        segment: int = 512,
        most_rows: int = 64,
        most_waiting: int = 256,
    ):
        self.model, self.tokenizer, self.store, self.metrics = model, tokenizer, store, metrics
        self.segment, self.most_rows, self.most_waiting = segment, most_rows, most_waiting
        self.group_rows = MOST_ROWS if model.device.type == "cpu" else most_rows
        blocks: Any = model.model.layers
        self.grows = any(math.isinf(block.mixer.state_size()) for block in blocks)
        self.waiting: deque[Job] = deque()
        self.reading: deque[Job] = deque()
        self.groups: list[Group] = []
        self.changed = threading.Condition()
        self.stop_at = math.inf
        self.stopped = False
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def submit(self, *jobs: Job) -> None:
        """Raises Busy where there is no place for all of them."""
        with self.changed:
            if self.stop_at < math.inf or self.stopped:
                raise Busy("the server is shutting down", 30)
            if self.waiting and len(self.waiting) + len(jobs) > self.most_waiting:
                raise Busy(f"{len(self.waiting)} requests are waiting already", 1)
            now = time.monotonic()
            for job in jobs:
                job.unfinished = len(job.seeds)
                job.deadline = now + job.seconds
            self.waiting.extend(jobs)
            self.changed.notify()

    def cancel(self, job: Job) -> None:
        """Frees the places of a job whose answer nobody waits for."""
        job.cancelled = True
        with self.changed:
            self.changed.notify()

    def drain(self, seconds: float) -> None:
        """Takes no more jobs. After so many seconds, answers end where they are."""
        with self.changed:
            self.stop_at = min(self.stop_at, time.monotonic() + seconds)
            self.changed.notify()

    def stop(self) -> None:
        self.drain(0)
        with self.changed:
            self.stopped = True
            self.changed.notify()
        self.thread.join()

    @property
    def rows(self) -> int:
        return sum(len(group.rows) for group in self.groups)

    # The thread.

    def _run(self) -> None:
        with torch.no_grad():
            while True:
                with self.changed:
                    idle = not (self.reading or self.groups)
                    if idle and self.stopped and not self.waiting:
                        return
                    if idle and not self.waiting:
                        self.changed.wait(TICK)
                    self._admit()
                try:
                    self._step()
                except Exception as error:  # such as a lack of memory for a larger batch
                    log.exception("a step failed")
                    jobs = [*self.reading, *(row.job for g in self.groups for row in g.rows)]
                    self.reading.clear()
                    self.groups = []
                    for job in jobs:
                        self._fail(job, error)

    def _admit(self) -> None:
        """Jobs begin in their order while there are places for their answers."""
        self.waiting = deque(job for job in self.waiting if not job.cancelled)
        places = self.most_rows - self.rows - sum(len(job.seeds) for job in self.reading)
        while self.waiting and (
            len(self.waiting[0].seeds) <= places or not (self.reading or self.groups)
        ):
            job = self.waiting.popleft()
            places -= len(job.seeds)
            self.reading.append(job)
        self.metrics.waiting.set(len(self.waiting))

    def _step(self) -> None:
        self._end_late()
        self.metrics.reading.set(len(self.reading))
        new = self._read_some()
        if new:
            self._join(new)
        self.metrics.batch.set(self.rows)
        if self.groups:
            start = time.monotonic()
            for group in list(self.groups):
                self._guarded(group)
            self.metrics.step.observe(time.monotonic() - start)
            self._part()

    def _guarded(self, group: Group) -> None:
        """What fails in the batch fails for the jobs in it, and for no others."""
        try:
            self._decode(group)
        except Exception as error:
            log.exception("decoding failed")
            for job in {row.job for row in group.rows}:
                self._fail(job, error)

    def _end_late(self) -> None:
        """Ends what was cancelled, takes too long, or has to end with the server."""
        now = time.monotonic()
        stopping = now >= self.stop_at
        with self.changed:
            for job in self.waiting:
                if stopping:
                    self._fail(job, Busy("the server is shutting down", 30))
                elif now >= job.deadline:
                    self._fail(job, TimeIsUp(f"no place was free in {job.seconds:g} seconds"))
            self.waiting = deque(job for job in self.waiting if job.unfinished)
        for job in list(self.reading):
            if job.cancelled:
                self.reading.remove(job)
            elif stopping or now >= job.deadline:
                self.reading.remove(job)
                if job.max_tokens == 0 and job.read:
                    if job.prompt is not None:  # the state is that of what has been read
                        job.prompt = job.prompt[: job.read]
                    self._finish_reading(job, "shutdown" if stopping else "time")
                elif stopping:
                    self._fail(job, Busy("the server is shutting down", 30))
                else:
                    self._fail(job, TimeIsUp(f"the text was not read in {job.seconds:g} seconds"))
        for group in self.groups:
            for place, row in enumerate(group.rows):
                if row.job.cancelled or row.job.unfinished == 0:
                    continue
                if stopping or now >= row.job.deadline:
                    cut = "shutdown" if stopping else "time"
                    self._finish(row, "length", group, place, cut=cut)
        self._part()

    # Reading.

    def _read_some(self) -> list[Row]:
        """Reads pieces of waiting texts, in turn, of about one segment together."""
        new: list[Row] = []
        used = 0
        for _ in range(len(self.reading)):
            job = self.reading[0]
            try:
                size = self._prepare(job)
                if used and used + size > self.segment:
                    break
                self.reading.popleft()
                used += size
                if size:
                    self._read(job, size)
                if not job.exhausted or len(job.held):
                    self.reading.append(job)
                else:
                    new += self._begin(job)
            except Exception as error:
                if job in self.reading:
                    self.reading.remove(job)
                if not isinstance(error, (ValueError, OSError)):
                    log.exception("reading failed")
                self._fail(job, error)
        return new

    def _prepare(self, job: Job) -> int:
        """Sees to it that the job holds its next piece; returns the tokens of the piece."""
        first = job.read == 0 and job.known == 0
        self._fill(job, self.segment)
        if first and job.cache is None:
            self._from_known(job)
        if job.cache is None:
            job.cache = self.model.init_cache(1)
        size = min(self.segment, len(job.held))
        for place in sorted(job.places):
            if job.read < place < job.read + size:
                return place - job.read
        return size

    def _fill(self, job: Job, tokens: int) -> None:
        while len(job.held) < tokens and not job.exhausted:
            piece = next(job.pieces, None)
            if piece is None:
                job.exhausted = True
            elif len(piece):
                job.held = np.concatenate([job.held, np.asarray(piece, np.int64)])

    def _from_known(self, job: Job) -> None:
        """Begins a prompt from the longest beginning that was read before."""
        if not job.exhausted:
            self._fill(job, len(job.held) + 1)
        if not job.exhausted:  # a document, which comes in pieces
            return
        ids = job.held
        known, cache = self.store.longest_prefix(ids)
        shared = self.store.shared_with_recent(ids)
        places = {*job.places, *([shared] if known < shared < len(ids) else []), len(ids)}
        job.places = sorted(place for place in places if known < place <= len(ids))
        if cache is not None:
            job.cache, job.known, job.read, job.held = cache, known, known, ids[known:]
        job.prompt = ids

    def _read(self, job: Job, size: int) -> None:
        assert job.cache is not None
        ids, job.held = job.held[:size], job.held[size:]
        last = job.exhausted and not len(job.held)
        memory: list[dict[str, Any]] = []
        if job.observe is not None and last:
            seen = max(0, size - OBSERVED)
            if seen:
                self.model.read(self._tensor(ids[:seen]), job.cache)
            job.observer = Observer(self.model, self.tokenizer, job.cache, *job.observe)
            memory = job.observer.read(ids[seen:].tolist())
            ids = ids[seen:]
        self.model.read(self._tensor(ids), job.cache)
        job.read += size
        self.metrics.read_tokens.inc(size)
        if job.prompt is not None and job.read in job.places:
            self.store.keep_prefix(job.prompt[: job.read], job.cache.detach())
        job.listen(Progress(job.read, memory))

    def _tensor(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids))[None].to(self.model.device)

    def _begin(self, job: Job) -> list[Row]:
        """The answers of a job whose text is read; each has its first token."""
        assert job.cache is not None
        if job.max_tokens == 0:
            self._finish_reading(job, None)
            return []
        cache = job.cache
        if cache.last is None:
            raise ValueError("prompt must have a token that what follows can be predicted from")
        if job.observe is not None and job.observer is None:  # the text was empty
            job.observer = Observer(self.model, self.tokenizer, cache, *job.observe)
        logits = self.model.lm_head(cache.last).float().cpu()
        rows = []
        for choice, seed in enumerate(job.seeds):
            base = cache.detach() if job.stops and job.keep_state else None
            decoder = self.tokenizer.stream_decoder()
            observer = job.observer if choice == 0 else None
            rows.append(Row(job, choice, seeded(seed), decoder, cache.detach(), base, observer))
        job.cache = None
        return self._draw(rows, logits.expand(len(rows), -1))

    def _finish_reading(self, job: Job, cut: str | None) -> None:
        for choice in range(len(job.seeds)):
            kept = job.cache if job.keep_state else None
            job.listen(Finished(choice, "length", [], kept, cut=cut))
        job.unfinished = 0

    # Decoding.

    def _decode(self, group: Group) -> None:
        ids = torch.tensor([[row.ids[-1]] for row in group.rows], device=self.model.device)
        out = self.model(ids, past_key_values=group.cache, logits_to_keep=1).logits[:, -1]
        self._draw(group.rows, out.float().cpu(), group)

    def _draw(self, rows: list[Row], logits: Tensor, group: Group | None = None) -> list[Row]:
        """Draws the next token of every row. Returns the rows that go on."""
        logits = logits[:, : self.tokenizer.vocab_size]  # a model may have rows to spare
        finite = logits.isfinite().all(-1).tolist()
        chosen = choose(logits, [row.job.way for row in rows], [row.source for row in rows])
        self.metrics.new_tokens.inc(len(rows))  # before anybody is told that an answer is complete
        going = []
        for place, (row, token) in enumerate(zip(rows, chosen)):
            if row.job.cancelled or not row.job.unfinished:
                continue
            if not finite[place]:
                self._fail(row.job, ValueError("the state leads to numbers that are not finite"))
            elif self._accept(row, token, logits[place], group, place):
                going.append(row)
        return going

    def _accept(
        self, row: Row, token: int, logits: Tensor, group: Group | None, place: int
    ) -> bool:
        """Adds a token to an answer; False if the answer ends with it."""
        job = row.job
        row.ids.append(token)
        if token == self.tokenizer.end_of_document:
            row.text += row.decoder.finish()
            row.ends.append(len(row.text))
            self._send(row, final=True)
            self._finish(row, "stop", group, place, ended=True)
            return False
        row.text += row.decoder.feed(token)
        row.ends.append(len(row.text))
        if job.chances is not None:
            row.chances.append(_chance(token, logits, job.chances))
        memory = row.observer.read([token]) if row.observer is not None else []
        stop = _first_stop(row.text, job.stops, row.sent)
        if stop is not None:
            row.text = row.text[:stop]
            self._send(row, memory, final=True)
            self._finish(row, "stop", group, place)
            return False
        if len(row.ids) >= job.max_tokens:
            row.text += row.decoder.finish()
            self._send(row, memory, final=True)
            self._finish(row, "length", group, place)
            return False
        self._send(row, memory)
        return True

    def _send(
        self, row: Row, memory: list[dict[str, Any]] | None = None, final: bool = False
    ) -> None:
        """Sends new text, but for an end that may become one of the texts that stop the answer."""
        end = len(row.text) if final else len(row.text) - _held_back(row.text, row.job.stops)
        new, row.sent = row.text[row.sent : end], max(end, row.sent)
        if new or row.chances or memory:
            row.job.listen(Text(row.choice, new, row.chances, memory or []))
        row.chances = []

    def _finish(
        self, row: Row, reason: str, group: Group | None, place: int,
        *, ended: bool = False, cut: str | None = None,
    ) -> None:  # fmt: skip
        job = row.job
        if cut is not None:
            row.text += row.decoder.finish()
            self._send(row, final=True)
        cache, read = self._state_after(row, group, place) if job.keep_state else (None, [])
        job.unfinished -= 1
        row.ids, ids = [], row.ids
        job.listen(Finished(row.choice, reason, ids, cache, read, ended, cut))

    def _state_after(
        self, row: Row, group: Group | None, place: int
    ) -> tuple[TrellisCache, list[int]]:
        """What has read the prompt and the answer as far as it was sent, and the answer's ids."""
        if row.base is not None and row.ends and len(row.text) < row.ends[-1]:
            # A text that stops the answer was drawn, but is no part of it: read without it.
            # Its last tokens may begin a character of which they have added no text yet.
            most = sum(end <= len(row.text) for end in row.ends)
            for whole in range(most, max(most - HELD, 0), -1):
                before = self.tokenizer.decode(row.ids[:whole])
                if row.text.startswith(before):
                    break
            else:
                whole, before = 0, ""
            rest = row.text[len(before) :]
            ids = read = [*row.ids[:whole], *self.tokenizer.encode(rest).tolist()]
            cache = row.base
        else:
            cache = row.cache if group is None else group.cache.select(place)
            cache = TrellisCache.join([cache])
            ids, read = row.ids[-1:], row.ids
        if ids:
            self.model.read(self._tensor(np.array(ids, np.int64)), cache)
        return cache, read

    def _fail(self, job: Job, error: Exception) -> None:
        if job.unfinished:
            job.unfinished = 0
            job.listen(Failed(error))

    # Who is decoded with whom.

    def _part(self) -> None:
        """Takes finished rows out of their groups, and merges groups that have become small."""
        left = []
        for group in self.groups:
            staying = [
                place for place, row in enumerate(group.rows)
                if row.ids and row.job.unfinished and not row.job.cancelled
            ]  # fmt: skip
            if not staying:
                continue
            if len(staying) < len(group.rows):
                group.cache = group.cache.select(staying)
                if self.grows:
                    group.cache = TrellisCache.join([group.cache])
                group.rows = [group.rows[place] for place in staying]
            left.append(group)
        left.sort(key=lambda group: -len(group.rows))
        while len(left) > 1 and len(left[-1].rows) + len(left[-2].rows) <= self.group_rows:
            small, other = left.pop(), left[-1]
            other.cache = TrellisCache.join([other.cache, small.cache])
            other.rows = other.rows + small.rows
            left.sort(key=lambda group: -len(group.rows))
        self.groups = left

    def _join(self, new: list[Row]) -> None:
        """Puts new rows into groups that have places, and the rest into groups of their own."""
        for group in [*self.groups]:
            places = self.group_rows - len(group.rows)
            if places and new:
                some, new = new[:places], new[places:]
                group.cache = TrellisCache.join([group.cache, *(row.cache for row in some)])
                group.rows = [*group.rows, *some]
        while new:
            some, new = new[: self.group_rows], new[self.group_rows :]
            self.groups.append(Group(some, TrellisCache.join([row.cache for row in some])))


def _chance(token: int, logits: Tensor, count: int) -> TokenChance:
    logs = logits.double().log_softmax(-1)
    values, ids = logs.topk(min(count, len(logs)))
    top = [(int(i), float(value)) for i, value in zip(ids, values)]
    return TokenChance(token, float(logs[token]), top)


def _first_stop(text: str, stops: Sequence[str], sent: int) -> int | None:
    """Where the first of the texts that stop an answer begins; what was sent does not count."""
    found = [place for stop in stops if (place := text.find(stop, sent)) >= 0]
    return min(found, default=None)


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may be the beginning of one that stops it."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
