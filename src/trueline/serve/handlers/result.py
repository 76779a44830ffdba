"""Errors of handlers and their processes."""

from __future__ import annotations

from trueline.errors import DeadlineExceeded, RequestError, TruelineError

DIED = "Worker died."
"""TorchServe's words for a request whose process ended under it."""


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
