"""Who may ask, and how much."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, error_answer
from .service import Service

#: For so many seconds, and bytes, the rest of a refused body is read: its sender gets to see the
#: answer.
LINGER = 2.0
LINGER_BYTES = 2**26
#: Headers of requests that have a body.
BODY = {b"content-length", b"transfer-encoding"}


class Guard:
    """Refuses requests without the key, from other sites, and with bodies that are too large.

    Without a key the server is for this machine alone. A page of another site could still send
    requests to it from a browser here: these name another host, or another origin.
    """

    #: Paths that need no key: they tell nothing about anybody.
    OPEN = ("/", "/app.js", "/style.css", "/health")
    #: Paths whose bodies have limits of their own.
    FILES = ("/v1/read", "/v1/states")

    def __init__(self, app: ASGIApp, service: Service):
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500
        # Whether there is no more of the body to come.
        ended = not {name for name, _ in scope["headers"]} & BODY
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
                if status >= 400 and not ended:  # or the server would take all of the body
                    headers = [*message.get("headers", ()), (b"connection", b"close")]
                    message = {**message, "headers": headers}
            elif status >= 400 and not ended and not message.get("more_body"):
                await send({**message, "more_body": True})
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._rest(receive), LINGER)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        refused = self._refused(scope)
        if refused is not None:
            await error_answer(refused)(scope, counted, noted)
        else:
            await self.app(scope, counted, noted)
        path = getattr(scope.get("route"), "path", "other")
        self.service.metrics.requests.labels(path, str(status)).inc()

    @staticmethod
    async def _rest(receive: Receive) -> None:
        """Takes what a client still sends: one that is cut off would not see the answer."""
        taken = 0
        while taken < LINGER_BYTES:
            message = await receive()
            taken += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body"):
                return

    def _refused(self, scope: Scope) -> ApiError | None:
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        key, limit = self.service.key, self.service.limits.request_bytes
        if key is None:
            host, origin = headers.get("host", ""), headers.get("origin")
            if not _is_local(host, self.service.host):
                return ApiError(403, "this server has no API key, so it answers only requests to "
                                f"localhost; the Host header is {host!r}",
                                code="other_site")  # fmt: skip
            if origin is not None and origin.partition("://")[2] != host:
                return ApiError(403, "this server has no API key, so it answers no pages of other "
                                f"sites; the Origin header is {origin!r}",
                                code="other_site")  # fmt: skip
        elif scope["path"] not in self.OPEN:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
            if scheme.lower() != "bearer" or not right:
                return ApiError(401, "the API key is missing or wrong", code="invalid_api_key",
                                headers={"WWW-Authenticate": "Bearer"})  # fmt: skip
        told = headers.get("content-length", "")
        if scope["path"] not in self.FILES and told.isdigit() and int(told) > limit:
            return ApiError(413, f"the body must have at most {limit:,} bytes; got {int(told):,}")
        return None


def _is_local(host: str, own: str) -> bool:
    """Whether a Host header names this machine. own: the address that the server listens at."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name in ("localhost", "localhost.", own.lower()):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
