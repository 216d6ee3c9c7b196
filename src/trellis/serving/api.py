"""The HTTP interface: OpenAI's, and what states add to it."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import hmac
import json
import logging
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__, checks
from ..data.tokenizer import TextTokenizer
from ..evaluation.inspection import token_texts
from ..models.cache import OtherModel, TrellisCache
from ..models.modeling import TrellisForCausalLM
from ..models.sampling import Sampling
from . import schema
from .chat import NO_TEMPLATE, SYSTEM, ChatTemplate
from .engine import (
    Busy,
    Engine,
    Event,
    Failed,
    Finished,
    Job,
    Progress,
    Text,
    TimeIsUp,
    TokenChance,
)
from .metrics import Metrics
from .observer import check_place, trellis_layers
from .states import DamagedState, NoRoom, State, Store, UnknownState, file_name, new_id

log = logging.getLogger("trellis")

PAGE = Path(__file__).parent / "page"
FILES = {"/": "index.html", "/app.js": "app.js", "/style.css": "style.css"}
KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
#: Answers of chats and responses that ask for no length.
DEFAULT_TOKENS = 512
#: Seconds for which the rest of a refused body is read, so that its sender gets to see the answer.
LINGER = 2.0
#: The page loads nothing from elsewhere, and no other site can show it in a frame.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass
class Limits:
    """What one request may take. request_bytes: of a JSON body. upload_bytes: of an uploaded state.
    document_bytes: of a document to read; 0 for any. seconds: of a request, from queue to end."""

    request_bytes: int = 16 * 2**20
    upload_bytes: int = 2**30
    document_bytes: int = 0
    seconds: float = 3600.0


@dataclass
class Service:
    """A model, and all that serves it."""

    name: str
    model: TrellisForCausalLM
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    store: Store
    engine: Engine
    metrics: Metrics
    limits: Limits = field(default_factory=Limits)
    key: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def attention_bytes(self) -> int:
        """Bytes per token of the keys and values that attention of this width would keep."""
        config = self.model.config
        return 2 * 4 * config.num_hidden_layers * config.hidden_size


class ApiError(Exception):
    """An error that the client is told as OpenAI's interface tells errors."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {
            "message": str(self), "type": kind, "param": self.param, "code": self.code,
        }}  # fmt: skip


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about an error."""
    match error:
        case ApiError():
            return error
        case Busy():
            return ApiError(503, str(error), code="busy",
                            headers={"Retry-After": str(error.seconds)})  # fmt: skip
        case TimeIsUp():
            return ApiError(504, str(error), code="timeout")
        case UnknownState():
            return ApiError(404, f"there is no state {error.args[0]!r}", code="not_found")
        case DamagedState():
            return ApiError(409, str(error), code="damaged")
        case NoRoom():
            return ApiError(507, str(error), code="no_room")
        case OtherModel():
            return ApiError(409, "the state belongs to a model with another configuration or other "
                            "weights", code="other_model")  # fmt: skip
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
        case ValueError():
            return ApiError(400, str(error))
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed at this request; its log says why")


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII: a text may have characters that UTF-8 does not encode."""
    return Response(json.dumps(content), status, headers, "application/json")


def error_answer(error: Exception) -> Response:
    told = as_api_error(error)
    return answer(told.body, told.status, told.headers)


# One request's way through the engine.


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
        if self.left:
            self.service.metrics.cancelled.inc()
        for job in self.jobs:
            self.service.engine.cancel(job)

    @property
    def known(self) -> int:
        return sum(job.known for job in self.jobs)


class ClientGone(Exception):
    pass


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
    return StreamingResponse(body(), media_type="text/event-stream", headers=headers)


# The application.


def create_app(service: Service) -> FastAPI:
    store, metrics, limits = service.store, service.metrics, service.limits

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.engine.stop)
            store.close()

    app = FastAPI(
        title="trellis serve", version=__version__, lifespan=lifespan, docs_url=None,
        redoc_url=None, responses={
            status: {"description": text, "content": {"application/json": {}}}
            for status, text in {
                400: "the request is not understood", 401: "the API key is missing or wrong",
                403: "another site sent the request", 404: "there is no such state",
                409: "the state is damaged or of another model", 413: "too large",
                503: "busy: try again after Retry-After seconds", 504: "out of time",
                507: "no room for the state",
            }.items()
        },
    )  # fmt: skip
    app.add_middleware(Guard, service=service)

    def told(request: Request, error: Exception) -> Response:
        return error_answer(error)

    for kind in (ApiError, Busy, TimeIsUp, UnknownState, DamagedState, NoRoom, ValueError,
                 HTTPException, Exception):  # fmt: skip
        app.add_exception_handler(kind, told)

    @app.exception_handler(ClientGone)
    def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_answer(_validation_error(error))

    # What is there.

    for path, file in FILES.items():
        app.get(path, include_in_schema=False)(partial(_page, file))

    @app.get("/health")
    def health() -> Response:
        """Whether the server works: 503 while it shuts down."""
        engine = service.engine
        working = engine.thread.is_alive() and engine.stop_at == float("inf")
        content = {"status": "ok" if working else "shutting down", "model": service.name,
                   "running": engine.rows, "waiting": len(engine.waiting)}  # fmt: skip
        return answer(content, 200 if working else 503)

    @app.get("/metrics")
    def prometheus() -> Response:
        """Counts and times in the format of Prometheus."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    def models() -> Response:
        """The one model that is served."""
        return answer({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{model}")
    def one_model(model: str) -> Response:
        _check_model(service, model)
        return answer(_model(service))

    # Text.

    @app.post("/v1/completions")
    async def completions(request: Request, body: schema.CompletionRequest) -> Response:
        """Text that goes on from a prompt, a state, or both."""
        return await _Completion(service, body).respond(request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: schema.ChatRequest) -> Response:
        """The next message of a conversation, for models with a chat template."""
        return await _Chat(service, body).respond(request)

    @app.post("/v1/responses")
    async def responses(request: Request, body: schema.ResponseRequest) -> Response:
        """An answer whose id names the state after it: `previous_response_id` goes on from it."""
        return await _Response(service, body).respond(request)

    # States.

    @app.get("/v1/states")
    def list_states(
        limit: int = Query(10_000, ge=1, le=100_000), after: str = Query("", max_length=64)
    ) -> Response:
        """All states, oldest first; with `after`, those behind that one."""
        found = store.list()
        ids = [state.id for state in found]
        if after and after not in ids:
            raise UnknownState(after)
        start = ids.index(after) + 1 if after else 0
        data = [_public(service, state, short=True) for state in found[start : start + limit]]
        return answer({"object": "list", "data": data, "has_more": len(found) > start + len(data)})

    @app.post("/v1/states", status_code=201)
    async def upload(
        request: Request, name: str | None = Query(None, min_length=1, max_length=200)
    ) -> Response:
        """Takes a state's file, as it was downloaded, as the body."""
        with _spool() as file:
            await _receive(request, file, limits.upload_bytes)
            state = await asyncio.to_thread(store.upload, Path(file.name), name)
        return answer(_public(service, state), 201)

    @app.get("/v1/states/{state}")
    def get_state(state: str) -> Response:
        return answer(_public(service, store.get(state)))

    @app.patch("/v1/states/{state}")
    def rename(state: str, body: schema.Rename) -> Response:
        return answer(_public(service, store.rename(state, body.name)))

    @app.delete("/v1/states/{state}")
    def delete(state: str) -> Response:
        store.delete(state)
        return answer({"id": state, "object": "state.deleted", "deleted": True})

    @app.post("/v1/states/{state}/fork", status_code=201)
    def fork(state: str, body: schema.Rename | None = None) -> Response:
        """Another state with the same past."""
        made = store.fork(state, body.name if body else None)
        return answer(_public(service, made), 201)

    @app.get("/v1/states/{state}/content")
    def download(state: str) -> Response:
        """The state as a file of safetensors."""
        content, found = store.content(state), store.get(state)
        headers = {"Content-Disposition": f'attachment; filename="{file_name(found)}"'}
        return Response(content, headers=headers, media_type="application/octet-stream")

    @app.post("/v1/read", status_code=201)
    async def read(
        request: Request,
        state: str | None = Query(None, max_length=64),
        name: str | None = Query(None, min_length=1, max_length=200),
        stream: bool = True,
    ) -> Response:
        """Folds a document of any length, UTF-8 text as the body, into a state.

        With `stream`, events tell how far it is; the last one has the state.
        """
        return await _read(service, request, state, name, stream)

    return app


def _page(file: str) -> Response:
    kind = KINDS[file.rpartition(".")[2]]
    return Response((PAGE / file).read_bytes(), headers=PAGE_HEADERS, media_type=kind)


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong, by its name and with what it must be."""
    found = error.errors()[0]
    path = [str(part) for part in found["loc"] if part not in ("body", "query", "path")]
    param = ".".join(path) or None
    if found["type"] == "json_invalid":
        why = found.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not JSON: {why}", code="json")
    if found["type"] == "extra_forbidden":
        known = {name for kind in (schema.CompletionRequest, schema.ChatRequest,
                 schema.ResponseRequest) for name in kind.model_fields}  # fmt: skip
        hint = checks.did_you_mean(path[-1], known)
        return ApiError(400, f"there is no field {param!r}{hint}", param, "unknown_field")
    told = found["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param or 'the body'}: {told}", param)


def _check_model(service: Service, model: str | None) -> None:
    if model is not None and model != service.name:
        raise ApiError(404, f"there is no model {model!r}; this server has {service.name!r}",
                       "model", "model_not_found")  # fmt: skip


def _model(service: Service) -> dict[str, Any]:
    empty = service.model.init_cache(1)
    return {
        "id": service.name, "object": "model", "created": service.created, "owned_by": "trellis",
        "trellis": {
            "parameters": sum(p.numel() for p in service.model.parameters()),
            "fingerprint": service.store.fingerprint,
            "state_bytes": None if service.engine.grows else empty.nbytes,
            "attention_bytes_per_token": service.attention_bytes,
            "memory_layers": trellis_layers(service.model),
            "chat": service.template is not None,
            "kept_on_disk": service.store.folder is not None,
        },
    }  # fmt: skip


def _public(service: Service, state: State, short: bool = False) -> dict[str, Any]:
    """A state as clients see it. short: without its texts."""
    text = (state.input + state.output).strip()
    found = {
        "id": state.id, "object": "state", "created": state.created, "model": service.name,
        "kind": state.kind, "name": state.name, "parent": state.parent, "tokens": state.tokens,
        "bytes": state.bytes, "attention_bytes": state.tokens * service.attention_bytes,
        "fingerprint": state.fingerprint, "ended": state.ended, "preview": text[:80],
    }  # fmt: skip
    return found if short else {**found, "input": state.input, "output": state.output}


# Requests for text.


class _Answer:
    """What completions, chats and responses have in common: jobs, then one answer or a stream."""

    prefix = ""

    def __init__(self, service: Service, body: Any):
        self.service, self.body = service, body
        _check_model(service, body.model)
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
        ids = None if prompt is None else [*prompt.tolist(), *done.read]
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


class _Choices(_Answer):
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


class _Completion(_Choices):
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
            more["state"] = _public(self.service, state, short=True)
        return more


class _Chat(_Choices):
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
            self.service.store.keep_prefix(ids, done.cache)
        return await super().after(run, job, done, text)


class _Response(_Answer):
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
        self.input, places = "", []
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
            found["state"] = _public(self.service, state, short=True)
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


# Bodies that are files.


@contextlib.contextmanager
def _spool() -> Iterator[Any]:
    """A file for a body that does not fit into memory; it is gone afterwards."""
    with tempfile.NamedTemporaryFile(prefix="trellis-serve-") as file:
        yield file


async def _receive(request: Request, file: Any, limit: int) -> int:
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


class _Document:
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


async def _read(
    service: Service, request: Request, state: str | None, name: str | None, stream: bool
) -> Response:
    store = service.store
    await asyncio.to_thread(store.check_room)
    parent, cache = (None, None) if state is None else await asyncio.to_thread(store.open, state)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_spool())
        size = await _receive(request, file, service.limits.document_bytes)
        document = _Document(file, size, service.tokenizer)
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
        ids = None if prompt is None else prompt.tolist()
        kept = await asyncio.to_thread(store.add, done.cache, about, ids)
        more = {"cut": done.cut} if done.cut else {}
        return {**_public(service, kept), **more}

    async def whole() -> dict[str, Any]:
        async for _, event in run:
            if isinstance(event, Finished):
                done = event
        return await finished(done)

    async def events() -> AsyncIterator[bytes]:
        with opened:
            async for _, event in run:
                if isinstance(event, Progress):
                    told = {"type": "progress", "tokens": event.tokens,
                            "total_bytes": size, "bytes": document.bytes_of(event.tokens)}  # fmt: skip
                    yield sse(told)
                elif isinstance(event, Finished):
                    done = event
            yield sse({"type": "done", "state": await finished(done)})

    if stream:
        return await unless_gone(request, streamed(run, events()))
    with opened:
        try:
            return answer(await unless_gone(request, whole()), 201)
        finally:
            run.cancel()


# Who may ask, and how much.


class Guard:
    """Refuses requests without the key, from other sites, and with bodies that are too large.

    Without a key the server is for this machine alone. A page of another site could still send
    requests to it from a browser here: these name another host, or another origin.
    """

    #: Paths that need no key: they tell nothing about anybody.
    OPEN = (*FILES, "/health")
    #: Paths whose bodies have limits of their own.
    FILES = ("/v1/read", "/v1/states")

    def __init__(self, app: ASGIApp, service: Service):
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, ended = 500, False
        limit = self.service.limits.request_bytes
        size = 0

        async def counted() -> Message:
            nonlocal size, ended
            message = await receive()
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                ended = not message.get("more_body")
                if size > limit and scope["path"] not in self.FILES:
                    raise HTTPException(413, f"the body must have at most {limit:,} bytes")
            else:
                ended = True
            return message

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        refused = self._refused(scope)
        if refused is not None:
            await error_answer(refused)(scope, counted, noted)
        else:
            await self.app(scope, counted, noted)
        path = getattr(scope.get("route"), "path", "other")
        self.service.metrics.requests.labels(path, str(status)).inc()
        if status >= 400 and not ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._rest(receive), LINGER)

    @staticmethod
    async def _rest(receive: Receive) -> None:
        """Takes what a client still sends: one that is cut off would not see the answer."""
        while True:
            message = await receive()
            if message["type"] != "http.request" or not message.get("more_body"):
                return

    def _refused(self, scope: Scope) -> ApiError | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in
                   scope["headers"]}  # fmt: skip
        if self.service.key is not None:
            if scope["path"] in self.OPEN:
                return None
            given = headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
            if hmac.compare_digest(given, self.service.key.encode()):
                return None
            return ApiError(401, "the API key is missing or wrong", code="invalid_api_key",
                            headers={"WWW-Authenticate": "Bearer"})  # fmt: skip
        host = headers.get("host", "")
        origin = headers.get("origin")
        if not _is_local(host) or (origin is not None and urlsplit(origin).netloc != host):
            return ApiError(403, "requests from other sites need an API key", code="other_site")
        told = headers.get("content-length", "")
        limit = self.service.limits.request_bytes
        if scope["path"] not in self.FILES and told.isdigit() and int(told) > limit:
            return ApiError(413, f"the body must have at most {limit:,} bytes; got {int(told):,}")
        return None


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in ("localhost", "127.0.0.1", "::1")
