"""Opens a model and serves it until a signal ends it."""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from ..evaluation.models import check_exists, name_of
from ..training.run import load_run
from .api import create_app
from .chat import ChatTemplate
from .engine import Engine
from .metrics import Metrics
from .service import Limits, Service
from .states import Store

#: The environment variable that may hold the API key.
KEY = "TRELLIS_API_KEY"
#: Seconds that answers have, after those of `grace`, to be saved and sent.
LAST_SECONDS = 20


@dataclass
class Settings:
    """How a model is served.

    state_dir: the folder where states are kept; None keeps them in memory only.
    api_key: where the key is, "file:PATH" or "env:NAME"; None looks into TRELLIS_API_KEY.
    memory: bytes of states in memory. sessions: answers at the same time. queue: requests that may
    wait. segment: tokens that are read at a time. grace: seconds for running answers after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    state_dir: Path | None = None
    api_key: str | None = None
    memory: int = 2**30
    sessions: int = 64
    queue: int = 256
    segment: int = 512
    grace: float = 30.0
    limits: Limits = field(default_factory=Limits)


def read_key(source: str | None) -> str | None:
    """The API key from where `source` says it is.

    Raises:
        ValueError: the source is neither a file nor a variable, or there is no key in it.
    """
    if source is None:
        if not os.environ.get(KEY):
            return None
        source = f"env:{KEY}"
    kind, _, name = source.partition(":")
    if kind == "env":
        found = os.environ.get(name, "")
    elif kind == "file":
        try:
            found = Path(name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key {source} cannot be read: {error}") from error
    else:
        raise ValueError(
            "--api-key must be file:PATH or env:NAME, so that the key itself is not in the list "
            "of processes"
        )
    if not found or not found.isascii() or not found.isprintable() or " " in found:
        raise ValueError(f"--api-key {source} must hold a key of printable ASCII without spaces")
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server at this address. Raises ValueError at no host."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ValueError(
            f"--host must be an address of this machine; got {host!r}: {error}"
        ) from None
    return all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in found)


def open_service(model: str, settings: Settings) -> Service:
    """Loads a model, and finds its states.

    Raises:
        FileNotFoundError, ValueError: there is no such model, or it is not one of ours.
    """
    check_exists(model)
    key = read_key(settings.api_key)
    if key is None and not is_loopback(settings.host):
        raise ValueError(
            f"--host {settings.host} lets other machines in: give an API key with --api-key "
            f"file:PATH, --api-key env:NAME or in {KEY}"
        )
    network, tokenizer = load_run(Path(model))
    template = ChatTemplate.of(Path(model), tokenizer)
    metrics = Metrics()
    store = Store(network, metrics, settings.memory, settings.state_dir)
    engine = Engine(
        network, tokenizer, store, metrics, segment=settings.segment,
        most_rows=settings.sessions, most_waiting=settings.queue,
    )  # fmt: skip
    limits = settings.limits
    if not engine.grows:  # a state of this model is never larger
        limits.upload_bytes = min(limits.upload_bytes, 2 * network.init_cache(1).nbytes + 2**20)
    return Service(
        name_of(model), network, tokenizer, template, store, engine, metrics, limits, key,
        host=settings.host,
    )  # fmt: skip


class Server(uvicorn.Server):
    """Lets answers finish after a signal."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float):
        super().__init__(config)
        self.engine, self.grace = engine, grace

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.engine.drain(self.grace)
        super().handle_exit(sig, frame)


def serve(model: str, settings: Settings, say: Callable[[str], object] = print) -> None:
    """Serves a model until SIGTERM or SIGINT; running answers then finish, or are cut and saved.

    say: called with a line when the server takes requests, which names its address.
    """
    service = open_service(model, settings)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(max(128, settings.queue))  # clients wait while the application starts
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--host {settings.host} --port {settings.port} cannot be used: {error}"
        ) from error
    config = uvicorn.Config(
        create_app(service), log_level=logging.WARNING, access_log=False, server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.grace) + LAST_SECONDS,
        backlog=max(128, settings.queue), timeout_keep_alive=30,
    )  # fmt: skip
    host = f"[{settings.host}]" if family == socket.AF_INET6 else settings.host
    kept = f"states in {settings.state_dir}: {len(service.store.states)}"
    if settings.state_dir is None:
        kept = "states in memory only (--state-dir keeps them)"
    server = Server(config, service.engine, settings.grace)
    # uvicorn sets the same handlers while it runs. A signal before that ends it when it has begun;
    # one that it hands on after it has shut down finds nothing left to do.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    say(f"{service.name} at http://{host}:{listener.getsockname()[1]}/ ({kept})")
    server.run(sockets=[listener])
