"""The HTTP interface: OpenAI's, and what states add to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .. import __version__
from . import schema
from .answers import Chat, ClientGone, Completion, Responding
from .documents import read_document, received, spooled
from .engine import Busy, TimeIsUp
from .errors import ApiError, answer, error_answer, validation_error
from .guard import Guard
from .service import Service
from .states import DamagedState, NoRoom, UnknownState, file_name

PAGE = Path(__file__).parent / "page"
FILES = {"/": "index.html", "/app.js": "app.js", "/style.css": "style.css"}
KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
#: The page loads nothing from elsewhere, and no other site can show it in a frame.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


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
    @app.exception_handler(ClientDisconnect)  # in the middle of a body
    def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_answer(validation_error(error))

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
        return answer({"object": "list", "data": [service.about_model()]})

    @app.get("/v1/models/{model}")
    def one_model(model: str) -> Response:
        service.check_model(model)
        return answer(service.about_model())

    # Text.

    @app.post("/v1/completions")
    async def completions(request: Request, body: schema.CompletionRequest) -> Response:
        """Text that goes on from a prompt, a state, or both."""
        return await Completion(service, body).respond(request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: schema.ChatRequest) -> Response:
        """The next message of a conversation, for models with a chat template."""
        return await Chat(service, body).respond(request)

    @app.post("/v1/responses")
    async def responses(request: Request, body: schema.ResponseRequest) -> Response:
        """An answer whose id names the state after it: `previous_response_id` goes on from it."""
        return await Responding(service, body).respond(request)

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
        data = [service.about_state(state, short=True) for state in found[start : start + limit]]
        return answer({"object": "list", "data": data, "has_more": len(found) > start + len(data)})

    @app.post("/v1/states", status_code=201)
    async def upload(
        request: Request, name: str | None = Query(None, min_length=1, max_length=200)
    ) -> Response:
        """Takes a state's file, as it was downloaded, as the body."""
        with spooled() as file:
            await received(request, file, limits.upload_bytes)
            state = await asyncio.to_thread(store.upload, Path(file.name), name)
        return answer(service.about_state(state), 201)

    @app.get("/v1/states/{state}")
    def get_state(state: str) -> Response:
        return answer(service.about_state(store.get(state)))

    @app.patch("/v1/states/{state}")
    def rename(state: str, body: schema.Rename) -> Response:
        return answer(service.about_state(store.rename(state, body.name)))

    @app.delete("/v1/states/{state}")
    def delete(state: str) -> Response:
        store.delete(state)
        return answer({"id": state, "object": "state.deleted", "deleted": True})

    @app.post("/v1/states/{state}/fork", status_code=201)
    def fork(state: str, body: schema.Rename | None = None) -> Response:
        """Another state with the same past."""
        made = store.fork(state, body.name if body else None)
        return answer(service.about_state(made), 201)

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
        return await read_document(service, request, state, name, stream)

    return app


def _page(file: str) -> Response:
    kind = KINDS[file.rpartition(".")[2]]
    return Response((PAGE / file).read_bytes(), headers=PAGE_HEADERS, media_type=kind)
