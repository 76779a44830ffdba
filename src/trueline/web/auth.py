"""Token authentication around an App: a request without the right token is refused before the App reads it."""

from __future__ import annotations

from collections.abc import Callable

from trueline.errors import RequestError
from trueline.web.messages import Answer, App, Request, Response
from trueline.web.tokens import Keys, TokenKind, Unauthorized

_CHALLENGE = b'www-authenticate: Bearer realm="trueline"\r\n'


def is_open(path: str) -> bool:
    """Whether a path needs no token: liveness, readiness, and the pages, which hold no data."""
    return path in ("/ping", "/health", "/dashboard", "/try") or path.startswith("/v2/health/")


class AuthMiddleware:
    """`app` for clients with the token of `kind`. /token and /v2/repository/models need tokens of their own."""

    def __init__(self, app: App, keys: Keys, kind: TokenKind, render: Callable[[str, RequestError], Response]) -> None:
        """`render` makes the response for a path and the error of its token."""
        self._app, self._keys, self._kind, self._render = app, keys, kind, render

    def answer(self, request: Request) -> Answer:
        """The response of the app, or a refusal."""
        if is_open(request.path):
            return self._app.answer(request)
        try:
            self._keys.check(self._kind_of(request.path), request.headers.get(b"authorization"))
        except RequestError as error:
            refusal = self._render(request.path, error)
            if isinstance(error, Unauthorized):
                refusal.headers += _CHALLENGE
            return refusal
        return self._app.answer(request)

    def _kind_of(self, path: str) -> TokenKind:
        if path == "/token":
            return "API"
        return "management" if path.startswith("/v2/repository/models/") else self._kind

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The response to a request that could not be received."""
        return self._app.refuse(path, status, message)
