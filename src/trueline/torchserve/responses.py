"""The shape of TorchServe's answers: bodies, headers and exception names. Pure.

Source: TorchServe 0.12's HttpRequestHandler and NettyUtils, as the contract page has them. Where Trueline differs, it
says so in docs/guides/serve.md: overload is 429 with Retry-After, and a client's fault is never a 5xx.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trueline import events
from trueline.errors import Overloaded, RequestError
from trueline.serve.handlers.result import DIED, Answer, HandlerFailed, Hung
from trueline.serve.models.catalog import UnknownModel, UnknownVersion
from trueline.web.messages import JSON, Response
from trueline.web.tokens import Forbidden, Unauthorized

_NO_CACHE = (
    b"pragma: no-cache\r\n"
    b"cache-control: no-cache; no-store, must-revalidate, private\r\n"
    b"expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)
_TYPES = {
    401: "InvalidKeyException",
    403: "InvalidModelVersionException",
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    408: "RequestTimeoutException",
    409: "ConflictStatusException",
    429: "ServiceUnavailableException",
    500: "InternalServerException",
    503: "ServiceUnavailableException",
    507: "InternalServerException",
    504: "RequestTimeoutException",
}
_SCORING = {
    404: "RESOURCE_DOES_NOT_EXIST",
    429: "REQUEST_LIMIT_EXCEEDED",
    503: "TEMPORARILY_UNAVAILABLE",
    504: "TEMPORARILY_UNAVAILABLE",
}
PAGE = 100
NO_METHOD = "Requested method is not allowed, please refer to API document."
NO_KEY = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
NO_RESOURCE = "Requested resource is not found, please refer to API document."


def reply(status: int, body: bytes, extra: bytes = b"") -> Response:
    """An answer with TorchServe's headers; it keeps the connection when all went well, as TorchServe does."""
    token = os.urandom(16).hex()
    request_id = f"x-request-id: {token[:8]}-{token[8:12]}-{token[12:16]}-{token[16:20]}-{token[20:]}\r\n"
    return Response(status, body, JSON, request_id.encode() + _NO_CACHE + extra, close=status >= 400)


def pretty(value: dict[str, Any] | list[Any]) -> bytes:
    """JSON with two spaces and a line feed at the end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def whole(text: str | None, default: int) -> int:
    """A whole number of a query; TorchServe takes its default for what is none."""
    try:
        return default if text is None else int(text)
    except ValueError:
        return default


def page(names: Sequence[str], query: Mapping[str, str]) -> tuple[dict[str, Any], Sequence[str]]:
    """Of a list the names that `limit` and `next_page_token` ask for, and the answer's head: where the next begin.

    >>> page(["a", "b", "c"], {"limit": "2"})
    ({'nextPageToken': '2'}, ['a', 'b'])
    """
    limit = whole(query.get("limit"), PAGE)
    limit = limit if 0 < limit <= PAGE else PAGE
    start = max(0, whole(query.get("next_page_token"), 0))
    head: dict[str, Any] = {"nextPageToken": str(start + limit)} if start + limit < len(names) else {}
    return head, names[start : start + limit]


def status(word: str, code: int = 200) -> Response:
    return reply(code, pretty({"status": word}))


def refusal(code: int, message: str, *, kind: str | None = None, extra: bytes = b"", scoring: bool = False) -> Response:
    """TorchServe's error body; `scoring`: with MLflow's word for it, whose clients ask on the same path."""
    told = {"code": code, "type": kind or _TYPES.get(code, "BadRequestException"), "message": message}
    if scoring:
        told["error_code"] = _SCORING.get(code, "INTERNAL_ERROR" if code >= 500 else "BAD_REQUEST")
    return reply(code, pretty(told), extra)


def handled(answer: Answer) -> Response:
    """What a handler answered. It has a content type only if the handler named one, as in TorchServe."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items() if name != "content-type")
    if answer.pieces is not None:
        lines += "ts_stream_next: true\r\n"
    made = reply(answer.status, bytes(answer.body), lines.encode("latin-1", "replace"))
    made.content_type = answer.headers.get("content-type", "").encode("latin-1", "replace")
    made.pieces = answer.pieces
    return made


def error(found: RequestError, extra: bytes = b"", *, strict: bool = False, scoring: bool = False) -> Response:
    """The answer for a refused request; `strict`: with TorchServe's status where ours is another."""
    code, message, kind = _told(found, strict=strict)
    return refusal(code, message, kind=kind, extra=extra, scoring=scoring)


def _told(found: RequestError, *, strict: bool) -> tuple[int, str, str | None]:
    """Status, message and exception of a refused request."""
    if isinstance(found, HandlerFailed):
        code = 500 if strict and found.message == DIED else found.status
        return code, found.message, "InternalServerException"
    if strict and isinstance(found, Hung):
        return 500, DIED, "InternalServerException"
    if strict and isinstance(found, Overloaded):
        return 503, found.message, None
    if strict and isinstance(found, Unauthorized | Forbidden):
        return 400, NO_KEY, "InvalidKeyException"
    if isinstance(found, UnknownModel):
        return 404, f"Model not found: {found.model}", "ModelNotFoundException"
    if isinstance(found, UnknownVersion):
        message = f"Model version: {found.version} does not exist for model: {found.model}"
        return 404, message, "ModelVersionNotFoundException"
    hint = f"; {found.hint}" if found.hint else ""
    return found.status, found.message + hint, getattr(found, "torchserve_type", None)


def unexpected(path: str, error: Exception) -> Response:
    """The answer for a request on which the server itself failed; the log says why."""
    events.emit("request.failed", path=path[:200], why=traceback.format_exception(error)[-1].strip())
    return refusal(500, "the server failed on this request; its log says why", kind="InternalServerException")


def failed() -> Response:
    """The answer for a request on which the model failed."""
    return refusal(503, "Prediction failed", kind="InternalServerException")
