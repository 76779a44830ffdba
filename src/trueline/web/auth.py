"""Authentication by bearer tokens in a key file: one for requests, one for management, one to renew the others.

The file has TorchServe's form (`key_file.json`), is readable by its owner alone, and is created when it is missing.
Tokens have at least 128 bits, are compared in constant time, and may have an expiration time.
Source: TorchServe's token_authorization_api page; RFC 6750 for 401 and 403.
"""

import hmac
import secrets
import stat
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from trueline import files
from trueline.errors import RequestError, UsageError
from trueline.web.messages import Answer, App, Request, Response
from trueline.web.pages import asks_for_home

_CHALLENGE = b'www-authenticate: Bearer realm="trueline"\r\n'
TokenKind = Literal["inference", "management", "API"]
MIN_CHARS = 16
"""A shorter token can be guessed; TorchServe's had 8."""


class Unauthorized(RequestError):
    """No token came with the request."""

    code = "unauthorized"
    status = 401


class Forbidden(RequestError):
    """The token is a wrong one, or it has expired."""

    code = "forbidden"
    status = 403
    torchserve_type = "InvalidKeyException"


class _Entry(msgspec.Struct, rename={"expires": "expiration time"}, omit_defaults=True):
    key: str
    expires: str | None = None


class Keys:
    """The tokens of one key file."""

    def __init__(self, path: Path, entries: dict[str, _Entry], now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._entries = entries
        self._now = now
        self._read = _stamp(path)

    def refresh(self) -> None:
        """Reads tokens that another process renewed. Raises UsageError for a broken file; the old tokens stay valid."""
        if _stamp(self._path) != self._read:
            self._read = _stamp(self._path)
            self._entries = load_keys(self._path, now=self._now)._entries

    def check(self, kind: TokenKind, authorization: bytes | None) -> None:
        """Raises Unauthorized without a bearer token, Forbidden for a wrong or expired one."""
        scheme, _, token = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            raise Unauthorized("this server needs a token", hint="send the header Authorization: Bearer TOKEN")
        entry = self._entries[kind]
        right = hmac.compare_digest(token.strip(), entry.key.encode())
        if not right or (
            entry.expires is not None and datetime.fromisoformat(entry.expires).timestamp() <= self._now()
        ):
            raise Forbidden("the token is not valid for this, or it has expired")

    def renew(self, kind: TokenKind) -> None:
        """Replaces a token. Raises StorageError; the old one then stays valid."""
        entries = self._entries | {kind: _Entry(key=secrets.token_urlsafe(32))}
        _write(self._path, entries)
        self._entries = entries


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_ino)


def load_keys(path: Path, *, now: Callable[[], float] = time.time) -> Keys:
    """The keys in the file `path`, which is created when it is missing. Raises UsageError, StorageError."""
    if not path.exists():
        entries = {kind: _Entry(key=secrets.token_urlsafe(32)) for kind in ("management", "inference", "API")}
        _write(path, entries)
        return Keys(path, entries, now)
    try:
        mode = path.stat().st_mode
        entries = msgspec.json.decode(path.read_bytes(), type=dict[str, _Entry])
        for entry in entries.values():
            if entry.expires is not None and datetime.fromisoformat(entry.expires).tzinfo is None:
                entry.expires = datetime.fromisoformat(entry.expires).replace(tzinfo=UTC).isoformat()
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise UsageError(f"{path} is no key file: {error}", hint="delete it, and a new one is created") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"others may read the key file {path}", hint=f"chmod 600 {path}")
    weak = [
        kind for kind in ("inference", "management", "API") if len(entries.get(kind, _Entry(key="")).key) < MIN_CHARS
    ]
    if weak:
        raise UsageError(
            f"{path} has no '{weak[0]}' key of at least {MIN_CHARS} characters",
            hint="delete the file, and one with keys of 256 bits is created",
        )
    return Keys(path, entries, now)


def _write(path: Path, entries: dict[str, _Entry]) -> None:
    files.write_atomic(path, msgspec.json.format(msgspec.json.encode(entries), indent=2) + b"\n", mode=0o600)


def is_open(path: str) -> bool:
    """Whether a path needs no token: liveness, readiness, and the pages, which hold no data."""
    return path in ("/ping", "/health", "/dashboard", "/try") or path.startswith("/v2/health/")


class AuthMiddleware:
    """`app` for clients with the token of `kind`. /token and /v2/repository/models need tokens of their own."""

    def __init__(self, app: App, keys: Keys, kind: TokenKind, render: Callable[[str, RequestError], Response]) -> None:
        """`render` makes the response for a path and the error of its token."""
        self._app, self._keys, self._kind, self._render = app, keys, kind, render

    def answer(self, request: Request) -> Answer:
        if is_open(request.path) or asks_for_home(request):
            return self._app.answer(request)
        path, kind = request.path, self._kind
        if path.rstrip("/") == "/token":
            kind = "API"
        elif path.startswith("/v2/repository/models/"):
            kind = "management"
        try:
            self._keys.check(kind, request.headers.get(b"authorization"))
        except RequestError as error:
            refusal = self._render(request.path, error)
            if isinstance(error, Unauthorized):
                refusal.headers += _CHALLENGE
            return refusal
        return self._app.answer(request)

    def refuse(self, path: str, status: int, message: str) -> Response:
        return self._app.refuse(path, status, message)
