"""What a handler answers, and the ways in which it does not. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trueline.errors import DeadlineExceeded, RequestError, TruelineError
from trueline.web.streaming import StreamedBody

DIED = "Worker died."
"""TorchServe's words for a request whose process ended under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request's answer, or one piece of it. Header names are lower-case; a content type is one of them.

    An answer that comes in pieces has them in `pieces`, and its head is that of the first.
    """

    body: bytes | bytearray
    status: int = 200
    phrase: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: StreamedBody | None = None


class HandlerFailed(RequestError):
    """The handler refused or failed: `status` and message are its own, or TorchServe's for what happened."""

    code = "handler_failed"

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = status if 400 <= status <= 599 else 500


class Hung(DeadlineExceeded):
    """The handler gave no answer in its time, and its process was ended."""


class StartFailed(TruelineError):
    """A handler's process did not become ready. The message says why, and names no path."""

    code = "start_failed"


class NoSequence(RequestError):
    """The request's sequence is closed, expired, lost or full, or there is no room for another; the message says which,
    behind TorchServe's words for all of them.
    """

    code = "no_sequence"
    status = 503
