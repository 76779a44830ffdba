"""How protocols reject requests: allowed methods, readable bodies, and the format of errors."""

from __future__ import annotations

from typing import Protocol

import msgspec

from trueline.errors import MethodNotAllowed, Overloaded, RequestError, UnsupportedMedia
from trueline.web.messages import JSON, Request, Response

NO_METHOD = "Requested method is not allowed, please refer to API document."
NO_RESOURCE = "Requested resource is not found, please refer to API document."
"""TorchServe's words, which its clients compare; all paths outside /v1 and /v2 use them."""


def json(status: int, value: object, headers: bytes = b"") -> Response:
    return Response(status, msgspec.json.encode(value), JSON, headers)


class ErrorFormat(Protocol):
    """The form in which a protocol writes errors."""

    def encode_error(self, error: RequestError, path: str) -> Response:
        """The response to a rejected request."""
        ...

    def encode_failure(self) -> Response:
        """The response to a request on which the model or the server failed; the log says why."""
        ...

    def encode_malformed(self, path: str, status: int, message: str) -> Response:
        """The response to a request that could not be received."""
        ...


class OipErrors:
    """`{"error": ...}`, the form of the Open Inference Protocol."""

    def encode_error(self, error: RequestError, path: str) -> Response:
        hint = f"; {error.hint}" if error.hint else ""
        return json(error.status, {"error": error.message + hint}, extra(error))

    def encode_failure(self) -> Response:
        return json(500, {"error": "the model failed on this request; the server's log says why"})

    def encode_malformed(self, path: str, status: int, message: str) -> Response:
        return json(status, {"error": message})


class Method(MethodNotAllowed):
    """The path exists, but not for this method."""

    def __init__(self, message: str, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = ", ".join(allowed)


def is_oip(path: str) -> bool:
    """Whether `path` belongs to the Open Inference Protocol or to KServe's V1."""
    return path in ("/v1", "/v2") or path.startswith(("/v1/", "/v2/"))


def allow(request: Request, methods: tuple[str, ...], message: str) -> None:
    """Raises Method."""
    if request.method not in methods:
        raise Method(message, methods)


def check_media(request: Request) -> None:
    """Raises UnsupportedMedia for a media type that is not JSON. No type, or the form of `curl -d`, is accepted."""
    media = request.headers.get(b"content-type")
    if media is not None and media.lower().startswith((b"multipart/", b"image/", b"audio/", b"video/")):
        raise UnsupportedMedia(f"content-type '{media.decode('latin-1')[:64]}' is not supported here; send JSON")


def extra(error: RequestError) -> bytes:
    """Header lines of an error's response."""
    if isinstance(error, Overloaded):
        return b"retry-after: %d\r\n" % max(1, round(error.retry_after_s))
    if isinstance(error, Method):
        return b"allow: %b\r\n" % error.allowed.encode()
    return b""
