"""Requests for text, from jobs for the engine to one answer or a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.background import BackgroundTask

from ..evaluation.inspection import token_texts
from ..models.cache import TrellisCache
from ..models.sampling import Sampling
from . import schema
from .chat import NO_TEMPLATE, SYSTEM
from .engine import Event, Failed, Finished, Job, Progress, Text, TokenChance
from .errors import ApiError, answer, as_api_error
from .observer import check_place
from .service import Service
from .states import State, new_id

#: Answers of chats and responses that ask for no length.
DEFAULT_TOKENS = 512
#: An answer is given up if its client has left so many pieces of it unread. A small model makes
#: thousands in a second, and a client that pauses for some seconds must not lose its answer.
MOST_UNREAD = 20_000


class Run:
    """The jobs of one request, and their events as they come."""

    def __init__(self, service: Service, jobs: list[dict[str, Any]]):
        self.service = service
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.jobs = [
            Job(listen=partial(self._hear, n), seconds=service.limits.seconds, **job)
            for n, job in enumerate(jobs)
        ]
        self.left = sum(len(job.seeds) for job in self.jobs)
        self.first: list[tuple[int, Event]] = []
        service.engine.submit(*self.jobs)

    def _hear(self, n: int, event: Event) -> None:
        if self.queue.qsize() > MOST_UNREAD and not self.jobs[n].cancelled:
            self.service.engine.cancel(self.jobs[n])
            event = Failed(ApiError(408, f"{MOST_UNREAD:,} pieces of the answer were not read"))
        with contextlib.suppress(RuntimeError):  # the server's loop has ended
            self.loop.call_soon_threadsafe(self.queue.put_nowait, (n, event))

    async def begin(self) -> None:
        """Waits for the first event, so that an early error has a status of its own."""
        self.first.append(await self._next())

    async def _next(self) -> tuple[int, Event]:
        n, event = await self.queue.get()
        if isinstance(event, Failed):
            raise event.error
        return n, event

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while self.left:
            n, event = self.first.pop() if self.first else await self._next()
            if isinstance(event, Finished):
                self.left -= 1
            yield n, event

    def cancel(self) -> None:
        """Gives up what is not finished; nothing happens if all is."""
        if self.left:
            self.service.metrics.cancelled.inc()
        self.left = 0
        for job in self.jobs:
            self.service.engine.cancel(job)

    @property
    def known(self) -> int:
        return sum(job.known for job in self.jobs)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(request: Request, work: Any) -> Any:
    """The result of some work, which is given up where the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, leaving):
            one.cancel()


def sse(content: Any, event: str | None = None) -> bytes:
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(content)}\n\n".encode()


async def streamed(run: Run, events: AsyncIterator[bytes]) -> Response:
    """A stream of events. Where the client goes away, the run is cancelled."""
    try:
        await run.begin()
    except BaseException:
        run.cancel()
        raise

    async def body() -> AsyncIterator[bytes]:
        try:
            async for part in events:
                yield part
        except Exception as error:
            yield sse(as_api_error(error).body)
        finally:
            run.cancel()

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        body(), media_type="text/event-stream", headers=headers,
        background=BackgroundTask(run.cancel),  # also where the body was never begun
    )  # fmt: skip


class Answer:
    """What completions, chats and responses have in common: jobs, then one answer or a stream."""

    prefix = ""

    def __init__(self, service: Service, body: Any):
        self.service, self.body = service, body
        service.check_model(body.model)
        self.id = f"{self.prefix}{secrets.token_hex(12)}"
        self.created = int(time.time())
        if body.memory is not None:
            check_place(service.model, body.memory.layer, body.memory.head)
        # What a client gets that says nothing, as from OpenAI.
        temperature = 1.0 if body.temperature is None else body.temperature
        self.way = Sampling(temperature, 1.0 if body.top_p is None else body.top_p, body.top_k)

    def job(self, ids: Any, cache: TrellisCache | None, n: int = 1, **more: Any) -> dict[str, Any]:
        ids = np.asarray(ids, np.int64)
        size = self.service.model.config.vocab_size
        if len(ids) and ids.max() >= size:
            raise ApiError(400, f"prompt must have tokens below {size}; got {ids.max()}", "prompt")
        if not len(ids) and cache is None:
            begin = self.service.tokenizer.end_of_document
            if begin is None:
                raise ApiError(400, "prompt must have a token to go on from", "prompt")
            ids = np.array([begin])
        seed = self.body.seed
        seed = secrets.randbits(62) if seed is None else seed
        place = self.body.memory
        return {
            "pieces": iter([ids]), "cache": cache, "way": self.way, "stops": self.body.stops,
            "seeds": [(seed + k) % 2**63 for k in range(n)],
            "observe": None if place is None else (place.layer, place.head), **more,
        }  # fmt: skip

    async def opened(self, name: str | None) -> tuple[State | None, TrellisCache | None]:
        if name is None:
            return None, None
        return await asyncio.to_thread(self.service.store.open, name)

    async def keep(self, run: Run, n: int, done: Finished, state: dict[str, Any]) -> State:
        assert done.cache is not None
        prompt = run.jobs[n].prompt
        ids = None if prompt is None else np.concatenate([prompt, np.array(done.read, np.int64)])
        about = State.of(done.cache, ended=done.ended, **state)
        return await asyncio.to_thread(self.service.store.add, done.cache, about, ids)

    async def jobs(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    async def whole(self, run: Run) -> dict[str, Any]:
        raise NotImplementedError

    def stream(self, run: Run) -> AsyncIterator[bytes]:
        raise NotImplementedError

    async def respond(self, request: Request) -> Response:
        jobs = await self.jobs()
        run = Run(self.service, jobs)
        if self.body.stream:
            return await unless_gone(request, streamed(run, self.stream(run)))
        try:
            return answer(await unless_gone(request, self.whole(run)))
        finally:
            run.cancel()

    def usage(self, run: Run, drawn: int) -> dict[str, Any]:
        read = sum(job.read for job in run.jobs)
        return {
            "prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn,
            "prompt_tokens_details": {"cached_tokens": run.known},
        }  # fmt: skip

    def token(self, i: int) -> dict[str, Any]:
        (text,) = token_texts(self.service.tokenizer, [i])
        table = self.service.tokenizer.token_bytes
        return {"token": text, "bytes": list(text.encode() if table is None else table[i])}


class Choices(Answer):
    """Completions and chats: several answers, in chunks."""

    object = ""

    async def whole(self, run: Run) -> dict[str, Any]:
        n = len(run.jobs[0].seeds)
        count = n * len(run.jobs)
        texts, chances = [""] * count, [[] for _ in range(count)]  # type: ignore[var-annotated]
        choices: list[dict[str, Any]] = [{}] * count
        drawn = 0
        async for job, event in run:
            if isinstance(event, Text):
                place = job * n + event.choice
                texts[place] += event.text
                chances[place] += event.chances
            elif isinstance(event, Finished):
                place = job * n + event.choice
                drawn += len(event.ids) - event.ended
                more = await self.after(run, job, event, texts[place])
                choices[place] = {
                    "index": place, **self.message(texts[place]),
                    "logprobs": self.logprobs(run, chances[place], 0),
                    "finish_reason": event.reason, **more,
                }  # fmt: skip
        return {**self.head(self.object), "choices": choices, "usage": self.usage(run, drawn)}

    async def stream(self, run: Run) -> AsyncIterator[bytes]:
        n = len(run.jobs[0].seeds)
        texts = [""] * (n * len(run.jobs))
        drawn = 0
        told = bool(self.body.stream_options and self.body.stream_options.include_usage)

        def chunk(place: int, content: dict[str, Any], reason: str | None, **more: Any) -> bytes:
            choice = {"index": place, **content, "finish_reason": reason, **more}
            head = self.head(self.chunk_object)
            return sse({**head, "choices": [choice], **({"usage": None} if told else {})})

        for place in range(len(texts)):
            if first := self.opening():
                yield chunk(place, first, None, logprobs=None)
        async for job, event in run:
            if isinstance(event, Progress):
                if event.memory:
                    yield chunk(job * n, self.delta(""), None, memory=event.memory)
            elif isinstance(event, Text):
                place = job * n + event.choice
                more: dict[str, Any] = {"memory": event.memory} if event.memory else {}
                logprobs = self.logprobs(run, event.chances, len(texts[place]))
                texts[place] += event.text
                yield chunk(place, self.delta(event.text), None, logprobs=logprobs, **more)
            elif isinstance(event, Finished):
                place = job * n + event.choice
                drawn += len(event.ids) - event.ended
                more = await self.after(run, job, event, texts[place])
                yield chunk(place, self.delta(None), event.reason, logprobs=None, **more)
        if told:
            head = self.head(self.chunk_object)
            yield sse({**head, "choices": [], "usage": self.usage(run, drawn)})
        yield b"data: [DONE]\n\n"

    @property
    def chunk_object(self) -> str:
        return self.object

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.name,
                "system_fingerprint": self.service.store.fingerprint[:16]}  # fmt: skip

    def opening(self) -> dict[str, Any]:
        return {}

    def message(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, text: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self, run: Run, chances: list[TokenChance], offset: int) -> Any:
        raise NotImplementedError

    async def after(self, run: Run, job: int, done: Finished, text: str) -> dict[str, Any]:
        return {"cut": done.cut} if done.cut else {}


class Completion(Choices):
    prefix, object = "cmpl-", "text_completion"

    async def jobs(self) -> list[dict[str, Any]]:
        body, tokenizer = self.body, self.service.tokenizer
        prompt: Any = body.prompt
        many = isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int))
        prompts = (prompt or [""]) if many else ["" if prompt is None else prompt]
        n = body.n or 1
        if len(prompts) * n > schema.MOST_ANSWERS:
            raise ApiError(400, f"n times the number of prompts must be at most "
                           f"{schema.MOST_ANSWERS}; got {len(prompts) * n}", "n")  # fmt: skip
        if body.return_state:
            await asyncio.to_thread(self.service.store.check_room)
        self.parent, cache = await self.opened(body.state)
        encoded = [
            await asyncio.to_thread(tokenizer.encode, p) if isinstance(p, str) else p
            for p in prompts
        ]
        self.inputs = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
        return [
            self.job(
                ids, None if cache is None else cache.detach(), n,
                max_tokens=16 if body.max_tokens is None else body.max_tokens,
                chances=body.logprobs, keep_state=bool(body.return_state),
            )
            for ids in encoded
        ]  # fmt: skip

    def message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def logprobs(self, run: Run, chances: list[TokenChance], offset: int) -> Any:
        if self.body.logprobs is None:
            return None
        tokens = [self.token(one.token)["token"] for one in chances]
        places = np.cumsum([offset, *(len(token) for token in tokens)])[:-1].tolist()
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in chances],
            "top_logprobs": [
                {self.token(i)["token"]: value for i, value in one.top} for one in chances
            ],
            "text_offset": places,
        }

    async def after(self, run: Run, job: int, done: Finished, text: str) -> dict[str, Any]:
        more = await super().after(run, job, done, text)
        if done.cache is not None:
            state = await self.keep(run, job, done, {
                "kind": "completion", "parent": self.parent and self.parent.id,
                "name": self.body.name, "input": self.inputs[job], "output": text,
            })  # fmt: skip
            more["state"] = self.service.about_state(state, short=True)
        return more


class Chat(Choices):
    prefix, object = "chatcmpl-", "chat.completion"

    async def jobs(self) -> list[dict[str, Any]]:
        body, template = self.body, self.service.template
        if template is None:
            raise ApiError(400, NO_TEMPLATE, "messages", "no_chat_template")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        messages = [message.plain() for message in body.messages]
        ids, places = await asyncio.to_thread(template.encode, messages)
        limit = body.max_completion_tokens or body.max_tokens or DEFAULT_TOKENS
        return [self.job(
            ids, None, body.n or 1, max_tokens=limit, places=places, keep_state=True,
            chances=(body.top_logprobs or 0) if body.logprobs else None,
        )]  # fmt: skip

    @property
    def chunk_object(self) -> str:
        return "chat.completion.chunk"

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def logprobs(self, run: Run, chances: list[TokenChance], offset: int) -> Any:
        if not self.body.logprobs:
            return None
        content = [
            {**self.token(one.token), "logprob": one.logprob, "top_logprobs": [
                {**self.token(i), "logprob": value} for i, value in one.top
            ]}
            for one in chances
        ]  # fmt: skip
        return {"content": content, "refusal": None}

    async def after(self, run: Run, job: int, done: Finished, text: str) -> dict[str, Any]:
        """The end of a turn is kept: the conversation's next request begins with it."""
        prompt = run.jobs[job].prompt
        if done.cache is not None and prompt is not None:
            ids = np.concatenate([prompt, np.array(done.read, np.int64)])
            await asyncio.to_thread(self.service.store.keep_prefix, ids, done.cache)
        return await super().after(run, job, done, text)


class Responding(Answer):
    def __init__(self, service: Service, body: Any):
        super().__init__(service, body)
        self.id = new_id("resp")
        self.item = f"msg_{secrets.token_hex(12)}"
        self.number = -1

    async def jobs(self) -> list[dict[str, Any]]:
        body, template = self.body, self.service.template
        kept = body.store is not False
        if kept:
            await asyncio.to_thread(self.service.store.check_room)
        self.parent, cache = await self.opened(body.previous_response_id)
        self.input = ""
        places: list[int] = []
        if template is None or (body.input is None and body.instructions is None):
            if isinstance(body.input, list) or body.instructions is not None:
                param = "instructions" if body.instructions is not None else "input"
                raise ApiError(400, NO_TEMPLATE, param, "no_chat_template")
            self.input = body.input or ""
            ids = await asyncio.to_thread(self.service.tokenizer.encode, self.input)
        else:
            given = body.input or ""
            messages = (
                [{"role": "user", "content": given}] if isinstance(given, str)
                else [message.plain() for message in given]
            )  # fmt: skip
            self.input = "\n".join(m["content"] for m in messages if m["role"] not in SYSTEM)
            if body.instructions is not None:
                messages = [{"role": "system", "content": body.instructions}, *messages]
            if self.parent is None:
                ids, places = await asyncio.to_thread(template.encode, messages)
            else:
                ids = await asyncio.to_thread(template.encode_next, messages, self.parent.ended)
        return [self.job(ids, cache, max_tokens=body.max_output_tokens or DEFAULT_TOKENS,
                         places=places, keep_state=kept)]  # fmt: skip

    def response(self, status: str, run: Run, text: str, done: Finished | None) -> dict[str, Any]:
        body = self.body
        long = done is not None and done.reason == "length"
        found: dict[str, Any] = {
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "error": None, "model": self.service.name, "instructions": body.instructions,
            "incomplete_details": {"reason": "max_output_tokens"} if long else None,
            "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {},
            "output": [], "parallel_tool_calls": False, "tool_choice": "none", "tools": [],
            "previous_response_id": body.previous_response_id, "store": body.store is not False,
            "temperature": self.way.temperature, "top_p": self.way.top_p, "truncation": "disabled",
            "text": {"format": {"type": "text"}}, "usage": None,
        }  # fmt: skip
        if done is not None:
            used = self.usage(run, len(done.ids) - done.ended)
            found["usage"] = {
                "input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"],
                "total_tokens": used["total_tokens"],
                "input_tokens_details": {"cached_tokens": run.known, "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            }  # fmt: skip
            found["output"] = [self.message(text, "incomplete" if long else "completed")]
        return found

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def message(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [self.part(text)]
        return {"id": self.item, "type": "message", "role": "assistant", "status": status,
                "content": content}  # fmt: skip

    async def finished(self, run: Run, done: Finished, text: str) -> dict[str, Any]:
        found = self.response(
            "incomplete" if done.reason == "length" else "completed", run, text, done
        )
        if done.cut:
            found["cut"] = done.cut
        if done.cache is not None:
            state = await self.keep(run, 0, done, {
                "kind": "response", "id": self.id, "parent": self.parent and self.parent.id,
                "name": self.body.name, "input": self.input, "output": text,
            })  # fmt: skip
            found["state"] = self.service.about_state(state, short=True)
        return found

    async def whole(self, run: Run) -> dict[str, Any]:
        text = ""
        async for _, event in run:
            if isinstance(event, Text):
                text += event.text
            elif isinstance(event, Finished):
                done = event
        return await self.finished(run, done, text)

    def event(self, kind: str, **more: Any) -> bytes:
        self.number += 1
        return sse({"type": kind, "sequence_number": self.number, **more}, kind)

    async def stream(self, run: Run) -> AsyncIterator[bytes]:
        started = self.response("in_progress", run, "", None)
        yield self.event("response.created", response=started)
        yield self.event("response.in_progress", response=started)
        place = {"output_index": 0}
        yield self.event("response.output_item.added", **place,
                         item=self.message(None, "in_progress"))  # fmt: skip
        place |= {"item_id": self.item, "content_index": 0}  # type: ignore[dict-item]
        yield self.event("response.content_part.added", **place, part=self.part(""))
        text = ""
        try:
            async for _, event in run:
                memory = getattr(event, "memory", None)
                if isinstance(event, Text) or memory:
                    new = event.text if isinstance(event, Text) else ""
                    text += new
                    more = {"memory": memory} if memory else {}
                    yield self.event("response.output_text.delta", **place, delta=new, logprobs=[],
                                     **more)  # fmt: skip
                elif isinstance(event, Finished):
                    done = event
            ended = await self.finished(run, done, text)
        except Exception as error:
            told = as_api_error(error).body["error"]
            failed = self.response("failed", run, "", None)
            failed["error"] = {"code": "server_error", "message": told["message"]}
            yield self.event("response.failed", response=failed)
            return
        yield self.event("response.output_text.done", **place, text=text, logprobs=[])
        yield self.event("response.content_part.done", **place, part=self.part(text))
        yield self.event("response.output_item.done", output_index=0, item=ended["output"][0])
        yield self.event(f"response.{ended['status']}", response=ended)
