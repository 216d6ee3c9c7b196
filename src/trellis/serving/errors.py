"""What clients are told where something is wrong, in the form of OpenAI's interface."""

from __future__ import annotations

import json
import logging
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from .. import checks
from ..models.cache import OtherModel
from . import schema
from .engine import Busy, TimeIsUp
from .states import DamagedState, NoRoom, UnknownState

log = logging.getLogger("trellis")


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


def validation_error(error: RequestValidationError) -> ApiError:
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
    if path and path[0] in ("prompt", "stop", "input"):  # which may be of several kinds
        param = path[0]
    told = found["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param or 'the body'}: {told}", param)
