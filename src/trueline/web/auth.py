"""An App behind a door: requests without the right token are refused before anything reads them."""

from __future__ import annotations

from trueline.errors import RequestError
from trueline.serve.protocols.errors import face_of
from trueline.torchserve import responses
from trueline.web.messages import Answer, App, Request, Response
from trueline.web.tokens import Keys, Kind, Unauthorized

_CHALLENGE = b'www-authenticate: Bearer realm="trueline"\r\n'


def is_open(path: str) -> bool:
    """Whether a path is answered without a token: what says that the server lives and is ready, and the pages,
    which hold nothing.
    """
    return path in ("/ping", "/health", "/dashboard", "/try") or path.startswith("/v2/health/")


class Guarded:
    """`app` for who has the token of `kind`. What renews tokens, and what acts under /v2/repository, has its own."""

    def __init__(self, app: App, keys: Keys, kind: Kind, *, strict: bool = False) -> None:
        """`strict`: TorchServe's paths are refused with its status, which is another."""
        self._app = app
        self._strict = strict
        self._keys = keys
        self._kind = kind

    def answer(self, request: Request) -> Answer:
        """The answer of the app, or a refusal."""
        if is_open(request.path):
            return self._app.answer(request)
        try:
            self._keys.check(self._wanted(request.path), request.headers.get(b"authorization"))
        except RequestError as error:
            return self._refusal(request.path, error)
        return self._app.answer(request)

    def _refusal(self, path: str, error: RequestError) -> Response:
        theirs = self._kind == "management" or face_of(path) == "torchserve"
        hint = f"; {error.hint}" if error.hint else ""
        refusal = self._app.refuse(path, 400 if theirs and self._strict else error.status, error.message + hint)
        if theirs:
            refusal = responses.error(error, strict=self._strict)
        if isinstance(error, Unauthorized):
            refusal.headers += _CHALLENGE
        return refusal

    def _wanted(self, path: str) -> Kind:
        if path == "/token":
            return "API"
        return "management" if path.startswith("/v2/repository/models/") else self._kind

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The answer for a request that could not be received."""
        return self._app.refuse(path, status, message)
