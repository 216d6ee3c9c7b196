"""States that clients can name, and beginnings of prompts that are not read twice.

A state is the whole past of a session. In memory all states share one budget. With a folder, each
named state is also a pair of files there:

    state_3f...json          what is known about it: its parent, name, tokens, data
    8c....safetensors        its data, the cache; forks share one

The JSON file is written last, so a state is listed after a crash if and only if it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..files import locked, parse_json, sync, write_json, write_whole
from ..mixers.transformer import AttentionState
from ..mixers.trellis import TrellisState
from ..models.cache import OtherModel, TrellisCache
from ..models.modeling import TrellisForCausalLM
from .metrics import Metrics

log = logging.getLogger("trellis")

ID = re.compile(r"(?:state|resp)_[0-9a-f]{32}")
_DATA = re.compile(r"[0-9a-f]{32}\.safetensors")
#: Loading a state's file takes about as long as reading so many tokens.
TOKENS_OF_A_LOAD = 50
#: Characters of a turn's text that are kept with a state.
KEPT_TEXT = 20_000
#: A beginning that two prompts share is kept from so many tokens on.
SHARED_TOKENS = 32
#: Prompts whose tokens are remembered to find what they share.
RECENT_PROMPTS = 64
#: Tokens of such a prompt that are remembered.
RECENT_TOKENS = 2**16


class UnknownState(KeyError):
    """There is no state of this name."""


class DamagedState(Exception):
    """The file of a state is not what was written."""


class NoRoom(Exception):
    """A state cannot be kept: the disk is full, or the state is larger than the memory's budget."""


def new_id(kind: str = "state") -> str:
    return f"{kind}_{secrets.token_hex(16)}"


@dataclass
class State:
    """What is known about a named state.

    created: seconds since 1970. tokens: how many the session has read. bytes: the size of its
    cache. parent: the state that it goes on from, which may be gone. kind: "response",
    "completion", "read", "fork" or "upload".
    input, output: the text that was read and the text that was answered since the parent, shortened
    to their ends. ended: whether the model itself ended the answer.
    """

    id: str
    created: float
    tokens: int
    bytes: int
    kind: str
    parent: str | None = None
    name: str | None = None
    input: str = ""
    output: str = ""
    ended: bool = False
    fingerprint: str = ""
    data: str | None = None
    file_bytes: int = 0

    @classmethod
    def of(cls, cache: TrellisCache, kind: str, **about: Any) -> State:
        for side in ("input", "output"):
            about[side] = about.get(side, "")[-KEPT_TEXT:]
        about.setdefault("id", new_id())
        tokens = cache.get_seq_length()
        return cls(created=time.time(), tokens=tokens, bytes=cache.nbytes, kind=kind, **about)


@dataclass
class _Held:
    """A cache in memory. worth: grows with what re-reading it would cost per byte, and with use."""

    cache: TrellisCache
    cost: float
    worth: float = 0.0


class Pool:
    """Caches in memory under a budget of bytes.

    Where room is needed, the cache goes whose re-reading costs least per byte. What has not been
    used for long counts for less and less ("GreedyDual"): the worth of the last one to go is added
    to that of every cache that is used afterwards.
    """

    def __init__(self, budget: int, metrics: Metrics):
        self.budget, self.metrics = budget, metrics
        self.held: dict[str, _Held] = {}
        self.bytes = 0
        self.floor = 0.0

    def put(self, key: str, cache: TrellisCache, cost: float) -> list[str]:
        """Keeps a cache; returns the keys of those that went. Raises NoRoom if it never fits."""
        size = cache.nbytes
        if size > self.budget:
            raise NoRoom(
                f"a state of {size:,} bytes is larger than the budget of {self.budget:,} bytes"
            )
        self.drop(key)
        gone = []
        while self.bytes + size > self.budget:
            least = min(self.held, key=lambda k: self.held[k].worth)
            self.floor = self.held[least].worth
            self.drop(least)
            gone.append(least)
        self.metrics.evictions.inc(len(gone))
        self.held[key] = _Held(cache, cost, self.floor + cost / max(size, 1))
        self.bytes += size
        self.metrics.memory_bytes.set(self.bytes)
        return gone

    def get(self, key: str) -> TrellisCache | None:
        held = self.held.get(key)
        if held is None:
            return None
        held.worth = self.floor + held.cost / max(held.cache.nbytes, 1)
        return held.cache

    def drop(self, key: str) -> None:
        held = self.held.pop(key, None)
        if held is not None:
            self.bytes -= held.cache.nbytes
            self.metrics.memory_bytes.set(self.bytes)


@dataclass
class Store:
    """The states of one model. Its methods may be called by any thread.

    folder: where named states are kept; None keeps them in memory only, where the budget may drop
    them. fingerprint: that of the model, computed once.
    """

    model: TrellisForCausalLM
    metrics: Metrics
    budget: int = 2**30
    folder: Path | None = None
    fingerprint: str = ""
    states: dict[str, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fingerprint = self.fingerprint or self.model.fingerprint()
        self.pool = Pool(self.budget, self.metrics)
        self.prefixes: dict[str, tuple[int, str]] = {}  # hash of ids -> their number, key in pool
        self.recent: list[np.ndarray] = []
        self.lock = threading.RLock()
        self.files = threading.Lock()  # one change of the files at a time; taken before `lock`
        self._open_folder = contextlib.ExitStack()
        if self.folder is not None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open_folder.enter_context(locked(self.folder))
            self._list()

    def close(self) -> None:
        self._open_folder.close()

    # Named states.

    def list(self) -> list[State]:
        with self.lock:
            return list(self.states.values())

    def get(self, name: str) -> State:
        """Raises UnknownState."""
        with self.lock:
            if name not in self.states:
                raise UnknownState(name)
            return self.states[name]

    def check_room(self) -> None:
        """Raises NoRoom where a new state would not fit on the disk as it is."""
        if self.folder is None:
            return
        needed = 2 * sum(t.nbytes for _, t in self.model.init_cache(1)._tensors()) + 2**16
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise NoRoom(f"the disk of {self.folder} is full: {free:,} bytes are left")

    def add(self, cache: TrellisCache, state: State, ids: np.ndarray | None = None) -> State:
        """Keeps a cache of one sequence as a named state; returns when it is safely kept.

        ids: all tokens that the session has read, if they are known: other prompts that begin with
        them then go on from this state.

        Raises:
            NoRoom: the disk is full, or the state is larger than the budget. Nothing is kept.
        """
        state = replace(state, fingerprint=self.fingerprint)
        if self.folder is not None:
            data = cache.dump(self.fingerprint)
            state.data, state.file_bytes = f"{secrets.token_hex(16)}.safetensors", len(data)
            with self._writing(self.folder / state.data, self.folder / f"{state.id}.json"):
                write_whole(self.folder / state.data, data)
                self._write(state)
        try:
            with self.lock:
                if ids is not None:
                    self.pool.drop(_digest(ids))  # the same cache, kept as a beginning
                self._put(state.id, cache, on_disk=self.folder is not None)
                self.states[state.id] = state
                if ids is not None:
                    self.prefixes[_digest(ids)] = len(ids), state.id
                self._count()
        except NoRoom:
            if self.folder is None:
                raise
            with self.lock:  # it is on the disk, and will be loaded whenever it is used
                self.states[state.id] = state
                self._count()
        return state

    def open(self, name: str) -> tuple[State, TrellisCache]:
        """A state and its cache, which the caller may read into.

        Raises:
            UnknownState: there is none of this name.
            DamagedState: its file is not what was written.
        """
        with self.lock:
            state = self.get(name)
            cache = self.pool.get(name)
        if cache is None:
            assert self.folder is not None  # a state without a file goes when its memory goes
            try:
                cache = TrellisCache.load(
                    self.folder / str(state.data), self.model, self.fingerprint
                )
            except (ValueError, OSError) as error:
                self.get(name)  # it may have been deleted meanwhile
                raise DamagedState(f"the file of {name} is damaged: {error}") from error
            with self.lock, contextlib.suppress(NoRoom):
                if name in self.states:
                    self._put(name, cache, on_disk=True)
        return state, cache.detach()

    def content(self, name: str) -> bytes:
        """The file of a state."""
        state, cache = self.open(name)
        if self.folder is not None:
            try:
                return (self.folder / str(state.data)).read_bytes()
            except OSError as error:
                self.get(name)  # it may have been deleted meanwhile
                raise DamagedState(f"the file of {name} cannot be read: {error}") from error
        return cache.dump(self.fingerprint)

    def fork(self, name: str, title: str | None = None) -> State:
        """Another state with the same past, which shares the other's file and memory."""
        state, cache = self.open(name)
        made = replace(
            state, id=new_id(), created=time.time(), kind="fork", parent=state.id,
            input="", output="", name=title,
        )  # fmt: skip
        with self.files:
            self.get(name)  # it may have been deleted meanwhile
            if self.folder is not None:
                with self._writing(self.folder / f"{made.id}.json"):
                    self._write(made)
            with self.lock:
                with contextlib.suppress(NoRoom):
                    self._put(made.id, cache, on_disk=self.folder is not None)
                self.states[made.id] = made
                self._count()
        return made

    def rename(self, name: str, title: str | None) -> State:
        with self.files:
            state = replace(self.get(name), name=title)
            if self.folder is not None:
                with self._writing():
                    self._write(state)
            with self.lock:
                self.get(name)  # without a folder, the budget may have dropped it meanwhile
                self.states[name] = state
        return state

    def delete(self, name: str) -> None:
        """Deletes a state, and its data if no fork shares them."""
        with self.files, self.lock:
            state = self.get(name)
            if self.folder is not None:
                (self.folder / f"{name}.json").unlink(missing_ok=True)
                if not any(s.data == state.data for s in self.states.values() if s is not state):
                    (self.folder / str(state.data)).unlink(missing_ok=True)
            self._forget(name)
            self.pool.drop(name)
            self._count()

    def upload(self, path: Path, name: str | None) -> State:
        """Keeps the state of a file.

        Raises ValueError, of which OtherModel is one, if the file is not a state of this model.
        """
        try:
            cache = TrellisCache.load(path, self.model, self.fingerprint)
        except OtherModel:
            raise
        except ValueError as error:
            raise ValueError(str(error).replace(str(path), "the file")) from error
        check_content(cache)
        return self.add(cache, State.of(cache, "upload", name=name))

    # Beginnings of prompts.

    def longest_prefix(self, ids: np.ndarray) -> tuple[int, TrellisCache | None]:
        """The longest known beginning of some tokens: its length, and a cache that has read it."""
        with self.lock:
            lengths = sorted({n for n, _ in self.prefixes.values() if n <= len(ids)})
            found: tuple[int, TrellisCache | None] = 0, None
            digest, at = hashlib.sha256(), 0
            for length in lengths:
                digest.update(ids[at:length].astype("<u4").tobytes())
                at = length
                known = self.prefixes.get(digest.copy().hexdigest())
                if known is not None and (cache := self.pool.get(known[1])) is not None:
                    found = length, cache
            hit = found[1] is not None
            (self.metrics.prefix_hits if hit else self.metrics.prefix_misses).inc()
            self.metrics.prefix_tokens.inc(found[0])
            return found[0], None if found[1] is None else found[1].detach()

    def keep_prefix(self, ids: np.ndarray, cache: TrellisCache) -> None:
        """Remembers what has read the beginning of a prompt."""
        key = _digest(ids)
        with self.lock, contextlib.suppress(NoRoom):
            if key not in self.prefixes:
                self._put(key, cache, on_disk=False)
                self.prefixes[key] = len(ids), key

    def shared_with_recent(self, ids: np.ndarray) -> int:
        """How many tokens a prompt has in common with the most similar recent one, from
        SHARED_TOKENS on; else 0. Remembers the prompt."""
        with self.lock:
            best = max((_common(ids, other) for other in self.recent), default=0)
            kept = ids[:RECENT_TOKENS].astype(np.uint32)
            self.recent = [*self.recent[-RECENT_PROMPTS + 1 :], kept]
        return best if best >= SHARED_TOKENS else 0

    # Inside.

    def _put(self, key: str, cache: TrellisCache, *, on_disk: bool) -> None:
        tokens = cache.get_seq_length()
        cost = min(tokens, TOKENS_OF_A_LOAD) if on_disk else tokens
        for gone in self.pool.put(key, cache, cost):
            if gone not in self.states:
                self.prefixes.pop(gone, None)
            elif self.folder is None:
                self._forget(gone)

    def _forget(self, name: str) -> None:
        self.states.pop(name, None)
        self.prefixes = {k: v for k, v in self.prefixes.items() if v[1] != name}

    def _count(self) -> None:
        self.metrics.states.set(len(self.states))
        files = {s.data: s.file_bytes for s in self.states.values()}
        self.metrics.disk_bytes.set(sum(files.values()))

    @contextlib.contextmanager
    def _writing(self, *new: Path) -> Iterator[None]:
        """Turns a failure to write into NoRoom; the new files are removed."""
        try:
            yield
        except OSError as error:
            for path in new:
                path.unlink(missing_ok=True)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            why = "is full" if full else f"cannot be written to: {error}"
            raise NoRoom(f"the disk of {self.folder} {why}") from error

    def _write(self, state: State) -> None:
        assert self.folder is not None
        write_json(self.folder / f"{state.id}.json", asdict(state))
        sync(self.folder)

    def _list(self) -> None:
        """Finds the states of the folder; of what a crash has left, removes our own files."""
        assert self.folder is not None
        others, data = 0, set()
        for path in sorted(self.folder.glob("*.json")):
            if not ID.fullmatch(path.stem):
                continue
            try:
                state = State(**parse_json(path.read_bytes()))
                file = self.folder / str(state.data)
                if state.id != path.stem or file.stat().st_size != state.file_bytes:
                    raise ValueError("its data are not those that were written")
                state.created = float(state.created)
            except (ValueError, TypeError, OSError) as error:
                log.warning("the state %s is left out: %s", path, error)
                with contextlib.suppress(ValueError, AttributeError):
                    data.add(parse_json(path.read_bytes()).get("data"))
                continue
            data.add(state.data)
            if state.fingerprint == self.fingerprint:
                self.states[state.id] = state
            else:
                others += 1
        for path in self.folder.iterdir():
            unfinished = re.fullmatch(r"\.(.+)\..{8}", path.name)
            ours = unfinished and (
                _DATA.fullmatch(unfinished[1]) or ID.fullmatch(unfinished[1].removesuffix(".json"))
            )
            if ours or (_DATA.fullmatch(path.name) and path.name not in data):
                path.unlink()
        self.states = dict(sorted(self.states.items(), key=lambda item: item[1].created))
        if others:
            log.warning("%d states in %s are of other models: left alone", others, self.folder)
        self._count()


def check_content(cache: TrellisCache) -> None:
    """Raises ValueError at a cache that somebody has made: no model would compute these numbers."""
    if cache.batch_size != 1:
        raise ValueError(f"a state must hold one session; got {cache.batch_size}")
    for name, tensor in cache._tensors():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"a state must hold finite numbers; {name} does not")
    for state, block in zip(cache.states, cache._owner().base_model.layers):
        if isinstance(state, AttentionState):
            columns = min(int(state.length), block.mixer._kept)
            if state.keys.shape != state.values.shape or state.keys.shape[2] != columns:
                raise ValueError("a state must hold keys and values of the tokens that it has read")
        offset = state.memory.offset if isinstance(state, TrellisState) else None
        if offset is not None and not 0 <= int(offset) < block.mixer.config.minibatch:
            raise ValueError(
                "a state must have an offset in its mini-batch from 0 to "
                f"{block.mixer.config.minibatch - 1}; got {int(offset)}"
            )


def _digest(ids: np.ndarray) -> str:
    return hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many of the first tokens are the same."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def file_name(state: State) -> str:
    """A name for a downloaded state that any system takes."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", state.name or "").strip("-.")[:60]
    return f"{plain or state.id}.safetensors"
