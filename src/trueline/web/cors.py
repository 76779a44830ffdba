"""Cross-origin requests: pages of one origin may read this server's responses. TorchServe's cors_* settings.

A browser sends a preflight without a token, which is answered here, and reads a response only if it allows the origin.
This keeps no other client out: tokens do. Source: the Fetch standard, "CORS protocol".
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
"""Response headers that a page may read beside the usual ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsRule:
    """Which pages may read answers."""

    origin: str
    """One origin, as `https://example.org`, or `*`."""
    methods: str = METHODS
    headers: str = ""
    """Of requests, beside those that this server knows."""

    @classmethod
    def of(cls, origin: str, methods: str, headers: str) -> CorsRule | None:
        """None when no origin is allowed. Raises UsageError for text that cannot stand in a header."""
        for name, text in (("origin", origin), ("methods", methods), ("headers", headers)):
            if not text.isascii() or not text.isprintable():
                raise UsageError(f"cors_{name} is {text[:80]!r}: expected printable ASCII")
        if not origin:
            if methods or headers:
                raise UsageError("cors_methods and cors_headers need a cors_origin")
            return None
        if origin != "*" and ("://" not in origin or origin.count("/") != 2 or "," in origin):
            raise UsageError(f"cors_origin is '{origin[:80]}'", hint="name one origin, https://example.org, or *")
        return cls(origin=origin, methods=methods or METHODS, headers=headers)


class CorsMiddleware:
    """`app`, whose responses the pages of one origin may read."""

    def __init__(self, app: App, rule: CorsRule) -> None:
        self._app = app
        self._origin = rule.origin.encode()
        lines = f"access-control-allow-origin: {rule.origin}\r\naccess-control-expose-headers: {_SHOWN}\r\n"
        self._lines = lines.encode() + (b"" if rule.origin == "*" else b"vary: origin\r\n")
        allowed = f"{_ALWAYS}, {rule.headers}" if rule.headers else _ALWAYS
        self._preflight = Response(
            200,
            b"",
            b"",
            self._lines
            + f"access-control-allow-methods: {rule.methods}\r\naccess-control-allow-headers: {allowed}\r\n"
            f"access-control-max-age: {_AGE_S}\r\n".encode(),
        )

    def answer(self, request: Request) -> Answer:
        """The response of the app, readable for the origin; a preflight is answered here."""
        origin = request.headers.get(b"origin")
        if origin is None or self._origin not in (b"*", origin):
            return self._app.answer(request)
        if request.method == "OPTIONS" and b"access-control-request-method" in request.headers:
            return self._preflight
        answer = self._app.answer(request)
        if isinstance(answer, Response):
            return self._allow(answer)
        allowed = InlineFuture()

        def finish(done: asyncio.Future[Response] | InlineFuture) -> None:
            if done.cancelled():
                allowed.cancel()
            else:
                allowed.set_result(self._allow(done.result()))

        answer.add_done_callback(finish)
        allowed.add_done_callback(lambda _: answer.cancel())
        return allowed

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The response to a request that could not be received, whose origin is unknown."""
        return self._app.refuse(path, status, message)

    def _allow(self, response: Response) -> Response:
        """A copy: the app may send the same response to other clients."""
        return msgspec.structs.replace(response, headers=response.headers + self._lines, lead=b"")
