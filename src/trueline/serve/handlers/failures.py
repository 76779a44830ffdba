"""How a handler's request or process fails. A server of bundles imports this, and not the processes."""

from trueline.errors import DeadlineExceeded, RequestError, TruelineError

DIED = "Worker died."  # TorchServe's message for a request whose process ended


class HandlerFailed(RequestError):
    """The handler rejected the request or failed; status and message are its own or TorchServe's."""

    code = "handler_failed"

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = status if 400 <= status <= 599 else 500


class Hung(DeadlineExceeded):
    """The handler exceeded its timeout, and its process was ended."""


class StartFailed(TruelineError):
    """A handler's process did not become ready. The message contains no path."""

    code = "start_failed"


class NoSequence(RequestError):
    """A sequence is closed, expired, lost or full, or there is no room for another."""

    code = "no_sequence"
    status = 503
