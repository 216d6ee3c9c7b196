"""`trellis serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from . import options


def serve(
    model: Annotated[str, Argument(help="A run's folder, or one that `trellis export` wrote.")],
    host: Annotated[
        str,
        Option(
            help="The address to listen at. Any but 127.0.0.1, ::1 or localhost lets other "
            "machines in and needs an API key."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="The port; 0 takes a free one.", min=0, max=65535)] = 8000,
    state_dir: Annotated[
        Path | None, Option(help="A folder that keeps states over restarts.")
    ] = None,
    api_key: Annotated[
        str | None,
        Option(help="Where the key is, file:PATH or env:NAME; default: TRELLIS_API_KEY, if set."),
    ] = None,
    memory_mb: Annotated[int, Option(help="MiB of states held in memory.", min=1)] = 1024,
    sessions: Annotated[int, Option(help="Answers at the same time.", min=1, max=4096)] = 64,
    queue: Annotated[int, Option(help="Requests that may wait for a place.", min=1)] = 256,
    segment: Annotated[
        int,
        Option(
            help="Tokens of a prompt or document that are read before running answers get their "
            "next token.",
            min=1,
        ),
    ] = 512,
    max_seconds: Annotated[float, Option(help="The most time of a request.", min=0.1)] = 3600.0,
    max_request_mb: Annotated[int, Option(help="MiB of a request's JSON.", min=1)] = 16,
    max_document_mb: Annotated[int, Option(help="MiB of a document; 0: any.", min=0)] = 0,
    grace: Annotated[
        float, Option(help="Seconds for running answers after SIGTERM.", min=0)
    ] = 30.0,
    threads: options.Threads = 0,
) -> None:
    """Serve a model over HTTP, with sessions that never outgrow their memory, and a page."""
    try:
        from ..serving.server import Limits, Settings
        from ..serving.server import serve as run
    except ModuleNotFoundError as error:
        if error.name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "starlette"):
            raise ModuleNotFoundError(
                f"trellis serve needs {error.name}: pip install 'trellis-memory[cli,serve]'"
            ) from error
        raise
    limits = Limits(max_request_mb * 2**20, document_bytes=max_document_mb * 2**20,
                    seconds=max_seconds)  # fmt: skip
    settings = Settings(host, port, state_dir, api_key, memory_mb * 2**20, sessions, queue, segment,
                        grace, limits)  # fmt: skip
    run(model, settings, typer.echo)
