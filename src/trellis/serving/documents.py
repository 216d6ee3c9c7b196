"""Bodies that are files: states to keep, and documents to read."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response

from ..data.tokenizer import TextTokenizer
from .answers import Run, sse, streamed, unless_gone
from .engine import Finished, Progress
from .errors import ApiError, answer
from .service import Service
from .states import NoRoom, State


@contextlib.contextmanager
def spooled() -> Iterator[Any]:
    """A file for a body that does not fit into memory; it is gone afterwards."""
    with tempfile.NamedTemporaryFile(prefix="trellis-serve-") as file:
        yield file


async def received(request: Request, file: Any, limit: int) -> int:
    """Writes the body to a file; returns its size. Raises ApiError where it exceeds the limit."""
    size = 0
    told = request.headers.get("content-length", "")
    if limit and told.isdigit() and int(told) > limit:
        raise ApiError(413, f"the body must have at most {limit:,} bytes; got {int(told):,}")
    try:
        async for block in request.stream():
            size += len(block)
            if limit and size > limit:
                raise ApiError(413, f"the body must have at most {limit:,} bytes; got more")
            file.write(block)
        file.flush()
    except OSError as error:
        raise NoRoom(f"the body cannot be kept: {error}") from error
    return size


class Document:
    """A file of text as pieces of tokens, counted as they are taken."""

    def __init__(self, file: Any, size: int, tokenizer: TextTokenizer):
        self.file, self.size, self.tokenizer = file, size, tokenizer
        self.tokens = self.at = 0
        self.end = ""  # of the text, to be shown with the state

    def pieces(self) -> Iterator[np.ndarray]:
        for ids in self.tokenizer.encode_parts(self._parts()):
            self.tokens += len(ids)
            yield ids

    def _parts(self) -> Iterator[str]:
        self.file.seek(0)
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            while block := self.file.read(2**16):
                self.at += len(block)
                text = decoder.decode(block)
                self.end = (self.end + text)[-400:]
                yield text
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise ValueError(f"the document must be UTF-8 text: {error}") from error

    def bytes_of(self, tokens: int) -> int:
        """About so many bytes are the first tokens."""
        return int(self.at * tokens / self.tokens) if self.tokens else self.at


async def read_document(
    service: Service, request: Request, state: str | None, name: str | None, stream: bool
) -> Response:
    store = service.store
    await asyncio.to_thread(store.check_room)
    parent, cache = (None, None) if state is None else await asyncio.to_thread(store.open, state)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(spooled())
        size = await received(request, file, service.limits.document_bytes)
        document = Document(file, size, service.tokenizer)
        if not size:
            raise ApiError(400, "the body must be a document: UTF-8 text; it is empty")
        job = {"pieces": document.pieces(), "cache": cache, "max_tokens": 0, "keep_state": True}
        run = Run(service, [job])
        opened = stack.pop_all()  # the file is needed for as long as it is read

    async def finished(done: Finished) -> dict[str, Any]:
        assert done.cache is not None
        prompt = run.jobs[0].prompt
        about = State.of(done.cache, "read", parent=parent and parent.id, name=name,
                         input=("…" if size > 400 else "") + document.end)  # fmt: skip
        kept = await asyncio.to_thread(store.add, done.cache, about, prompt)
        more = {"cut": done.cut} if done.cut else {}
        return {**service.about_state(kept), **more}

    async def whole() -> dict[str, Any]:
        async for _, event in run:
            if isinstance(event, Finished):
                done = event
        return await finished(done)

    async def events() -> AsyncIterator[bytes]:
        with opened:
            async for _, event in run:
                if isinstance(event, Progress):
                    place = {"bytes": document.bytes_of(event.tokens), "total_bytes": size}
                    yield sse({"type": "progress", "tokens": event.tokens, **place})
                elif isinstance(event, Finished):
                    done = event
            yield sse({"type": "done", "state": await finished(done)})

    if stream:
        try:
            return await unless_gone(request, streamed(run, events()))
        except BaseException:
            opened.close()
            raise
    with opened:
        try:
            return answer(await unless_gone(request, whole()), 201)
        finally:
            run.cancel()
