"""Refusals that all faces share: which methods a path takes, which bodies are read, which headers an error carries."""

from __future__ import annotations

from typing import Literal

from trueline.errors import MethodNotAllowed, Overloaded, RequestError, UnsupportedMedia
from trueline.web.messages import Request

Face = Literal["oip", "torchserve"]


class Method(MethodNotAllowed):
    """The path exists, and takes other methods."""

    def __init__(self, message: str, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = ", ".join(allowed)


def face_of(path: str) -> Face:
    """Whose errors a path is answered with: `{"error": ...}`, or TorchServe's."""
    return "oip" if path in ("/v1", "/v2") or path.startswith(("/v1/", "/v2/")) else "torchserve"


def allow(request: Request, methods: tuple[str, ...], message: str) -> None:
    """Raises Method."""
    if request.method not in methods:
        raise Method(message, methods)


def check_media(request: Request) -> None:
    """Refuses bodies that are not JSON by their own word. A body that says nothing, or `curl -d`'s form, is tried."""
    media = request.headers.get(b"content-type")
    if media is not None and media.lower().startswith((b"multipart/", b"image/", b"audio/", b"video/")):
        raise UnsupportedMedia(f"content-type '{media.decode('latin-1')[:64]}' is not read here; send JSON")


def extra(error: RequestError) -> bytes:
    """Header lines that go with an error."""
    if isinstance(error, Overloaded):
        return b"retry-after: %d\r\n" % max(1, round(error.retry_after_s))
    if isinstance(error, Method):
        return b"allow: %b\r\n" % error.allowed.encode()
    return b""
