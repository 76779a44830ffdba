"""What a handler answered, as an HTTP response with TorchServe's headers."""

from __future__ import annotations

import os

from trueline.serve.models.servable import Answer
from trueline.web.messages import JSON, Response

_NO_CACHE = (
    b"pragma: no-cache\r\n"
    b"cache-control: no-cache; no-store, must-revalidate, private\r\n"
    b"expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)


def reply(status: int, body: bytes, extra: bytes = b"") -> Response:
    """An answer with TorchServe's headers; it keeps the connection when all went well, as TorchServe does."""
    token = os.urandom(16).hex()
    request_id = f"x-request-id: {token[:8]}-{token[8:12]}-{token[12:16]}-{token[16:20]}-{token[20:]}\r\n"
    return Response(status, body, JSON, request_id.encode() + _NO_CACHE + extra, close=status >= 400)


def encode_answer(answer: Answer) -> Response:
    """What a handler answered. It has a content type only if the handler named one, as in TorchServe."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items() if name != "content-type")
    if answer.pieces is not None:
        lines += "ts_stream_next: true\r\n"
    made = reply(answer.status, bytes(answer.body), lines.encode("latin-1", "replace"))
    made.content_type = answer.headers.get("content-type", "").encode("latin-1", "replace")
    made.pieces = answer.pieces
    return made
