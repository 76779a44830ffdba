"""Pages of other origins: which of them a browser lets read the answers. An App around another; TorchServe's settings.

A browser asks before (a preflight, which carries no token and is answered here), and looks for the word that the origin
is let in behind every answer. Without `origin` nobody is. It keeps no client out that is no browser: tokens do.
Sources: the Fetch standard, "CORS protocol"; TorchServe's cors_* keys.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from trueline.errors import UsageError
from trueline.web.messages import Answer, App, InlineFuture, Request, Response

METHODS = "GET, POST, PUT, DELETE, OPTIONS"
_AGE_S = 600
_ALWAYS = "content-type, authorization, inference-header-content-length"
_SHOWN = "inference-header-content-length, ts_request_sequence_id, x-request-id, retry-after"
"""Headers of answers that a page may read beside the usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsRule:
    """Who is let in, and with what."""

    origin: str
    """One origin, as `https://example.org`, or `*`."""
    methods: str = METHODS
    headers: str = ""
    """Of requests, beside those that this server knows."""

    @classmethod
    def of(cls, origin: str, methods: str, headers: str) -> CorsRule | None:
        """None when no origin is let in. Raises UsageError for what cannot stand in a header."""
        for name, text in (("origin", origin), ("methods", methods), ("headers", headers)):
            if not text.isascii() or not text.isprintable():
                raise UsageError(f"cors_{name} is {text[:80]!r}: printable ASCII goes")
        if not origin:
            if methods or headers:
                raise UsageError("cors_methods and cors_headers say what an origin may, and cors_origin names none")
            return None
        if origin != "*" and ("://" not in origin or origin.count("/") != 2 or "," in origin):
            raise UsageError(f"cors_origin is '{origin[:80]}'", hint="name one origin, https://example.org, or *")
        return cls(origin=origin, methods=methods or METHODS, headers=headers)


class CorsMiddleware:
    """`app`, whose answers the pages of one origin may read."""

    def __init__(self, app: App, rule: CorsRule) -> None:
        self._app = app
        self._origin = rule.origin.encode()
        lines = f"access-control-allow-origin: {rule.origin}\r\naccess-control-expose-headers: {_SHOWN}\r\n"
        self._mark = lines.encode() + (b"" if rule.origin == "*" else b"vary: origin\r\n")
        allowed = f"{_ALWAYS}, {rule.headers}" if rule.headers else _ALWAYS
        self._preflight = Response(
            200,
            b"",
            b"",
            self._mark
            + f"access-control-allow-methods: {rule.methods}\r\naccess-control-allow-headers: {allowed}\r\n"
            f"access-control-max-age: {_AGE_S}\r\n".encode(),
        )

    def answer(self, request: Request) -> Answer:
        """The answer of the app, readable for the origin; a preflight's own."""
        origin = request.headers.get(b"origin")
        if origin is None or self._origin not in (b"*", origin):
            return self._app.answer(request)
        if request.method == "OPTIONS" and b"access-control-request-method" in request.headers:
            return self._preflight
        found = self._app.answer(request)
        return self._marked(found) if isinstance(found, Response) else self._later(found)

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The answer for a request that could not be received: of whom it was, nobody knows."""
        return self._app.refuse(path, status, message)

    def _marked(self, response: Response) -> Response:
        """A copy: the app may answer others with the same one."""
        return msgspec.structs.replace(response, headers=response.headers + self._mark, lead=b"")

    def _later(self, found: asyncio.Future[Response] | InlineFuture) -> InlineFuture:
        told = InlineFuture()

        def done(one: asyncio.Future[Response] | InlineFuture) -> None:
            if one.cancelled():
                told.cancel()
            else:
                told.set_result(self._marked(one.result()))

        found.add_done_callback(done)
        told.add_done_callback(lambda _: found.cancel())
        return told
