"""The access log: one line of JSON for each request, written by a thread so that no request waits for it.

    {"at": 1767225600.123, "face": "data", "method": "POST", "path": "/v2/models/digits/infer", "status": 200,
     "ms": 1.42, "bytes_in": 1090, "bytes_out": 211, "id": "..."}
    {"at": 1767225600.125, "face": "grpc", "method": "ModelInfer", "path": "/inference.GRPCInferenceService/ModelInfer",
     "status": 200, "ms": 1.1, "bytes_in": 1052, "bytes_out": 63, "id": null, "model": "digits", "code": "OK"}

`at` is the Unix time at which the request was received, `ms` the time to the head of its response, `status` 499
(nginx's) where the client had left before. `bytes_out` is null for streamed responses. Of a URL only the path is
written, since a query may hold secrets. A gRPC call has its code and HTTP's status for it; its bytes are those of the
messages, its `ms` end with the last of them, and each request of a bidirectional stream has a line.

When the disk is full or too slow, lines are dropped and counted in a line of their own. A file renamed by logrotate is
reopened under its name.
"""

import json
import os
import sys
import threading
import time
from collections import deque
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from trueline import events
from trueline.errors import UsageError
from trueline.web.messages import Answer, App, Request, Response

CLIENT_CLOSED = 499
MAX_WAITING = 65536
"""Lines that may wait to be written."""
FLUSH_S = 0.2
_ID = b"x-request-id"
_ID_CHARS = 200


class AccessEntry(msgspec.Struct):
    at: float
    face: str
    method: str
    path: str
    status: int
    ms: float
    bytes_in: int
    bytes_out: int | None
    id: str | None
    model: str | UnsetType | None = UNSET
    """This and `code` are of a gRPC call."""
    code: str | UnsetType = UNSET


class AccessLog:
    """Writes entries to the file `path`, `-` for standard error, until it is closed. Raises UsageError."""

    def __init__(self, path: str, *, max_waiting: int = MAX_WAITING) -> None:
        self.path, self._max_waiting = path, max_waiting
        self._entries: deque[AccessEntry] = deque()
        self._dropped = self._unwritten = self._reported = 0
        """Entries without room, lines that failed to be written, and how many of both a line has reported."""
        self._failing = False
        self._ending = threading.Event()
        try:
            self._handle = self._open()
        except OSError as error:
            why = error.strerror or error
            raise UsageError(
                f"the access log {path} cannot be written: {why}", hint="name another file, or -"
            ) from error
        self._thread = threading.Thread(target=self._run, name="access", daemon=True)
        self._thread.start()

    def _open(self) -> int:
        if self.path == "-":
            return os.dup(sys.stderr.fileno())
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)

    def enter(self, entry: AccessEntry) -> None:
        """Queues `entry`, or counts it as dropped; called by one thread."""
        if len(self._entries) < self._max_waiting:
            self._entries.append(entry)
        else:
            self._dropped += 1

    def _run(self) -> None:
        while not self._ending.wait(FLUSH_S):
            self.flush()
        self.flush()

    def flush(self) -> None:
        """Writes what is queued, whole lines at once, so that several processes may share a file."""
        count, lost = len(self._entries), self._dropped + self._unwritten
        if not count and lost == self._reported:
            return
        lines = [msgspec.json.encode(self._entries.popleft()) for _ in range(count)]
        if lost > self._reported:
            lines.append(msgspec.json.encode({"at": time.time(), "dropped": lost - self._reported}))
        try:
            self._reopen_if_renamed()
            data = b"\n".join(map(_to_ascii, lines)) + b"\n"
            while data:
                data = data[os.write(self._handle, data) :]
        except OSError as error:
            self._unwritten += count
            if not self._failing:
                events.emit("access.not_written", path=self.path, why=error.strerror or str(error))
            self._failing = True
        else:
            self._reported, self._failing = lost, False

    def _reopen_if_renamed(self) -> None:
        if self.path == "-":
            return
        try:
            same = os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except FileNotFoundError:
            same = False
        if not same:
            handle = self._open()
            os.close(self._handle)
            self._handle = handle

    def close(self) -> None:
        """Writes the rest and ends."""
        self._ending.set()
        self._thread.join()
        os.close(self._handle)


class AccessLogMiddleware:
    """`app`, with an entry in `log` for each request."""

    def __init__(self, app: App, face: str, log: AccessLog) -> None:
        self._app, self._face, self._log = app, face, log

    def answer(self, request: Request) -> Answer:
        """The response of the app, logged when it is there or the client has left."""
        began = time.perf_counter()
        answer = self._app.answer(request)
        if isinstance(answer, Response):
            self._enter(request, answer, began)
        else:
            answer.add_done_callback(
                lambda done: self._enter(request, None if done.cancelled() else done.result(), began)
            )
        return answer

    def _enter(self, request: Request, response: Response | None, began: float) -> None:
        at, ms = _times(began)
        status = CLIENT_CLOSED if response is None else response.status
        size = None if response is None or response.pieces is not None else len(response.body)
        named, method, path = _decode_id(request.headers.get(_ID)), request.method, request.path
        self._log.enter(AccessEntry(at, self._face, method, path, status, ms, len(request.body), size, named))

    def refuse(self, path: str, status: int, message: str) -> Response:
        refusal = self._app.refuse(path, status, message)
        size = len(refusal.body)
        self._log.enter(AccessEntry(round(time.time(), 6), self._face, "-", path, refusal.status, 0.0, 0, size, None))
        return refusal


class GrpcCallLog:
    """The entry of one gRPC call, begun when its bytes are there; without a `log` it does nothing."""

    __slots__ = ("_began", "_bytes_in", "_face", "_id", "_log", "_model", "path")

    def __init__(self, log: AccessLog | None, face: str, path: str, bytes_in: int, request_id: bytes | None) -> None:
        self._log, self._face, self.path, self._bytes_in = log, face, path, bytes_in
        self._id = _decode_id(request_id)
        self._model: str | None = None
        self._began = time.perf_counter()

    def note_model(self, request: Any) -> Any:
        """Takes model and id from the message `request`, and returns it."""
        if self._log is not None:
            model = getattr(request, "model_name", "") or getattr(request, "name", "")
            self._model = model[:_ID_CHARS] or None
            self._id = self._id or getattr(request, "id", "")[:_ID_CHARS] or None
        return request

    def end(self, bytes_out: int, *, status: int = 200, code: str = "OK") -> None:
        """Enters the call; `status` is HTTP's for `code`."""
        if self._log is None:
            return
        at, ms = _times(self._began)
        method = self.path.rpartition("/")[2]
        size, given = self._bytes_in, (self._id, self._model, code)
        self._log.enter(AccessEntry(at, self._face, method, self.path, status, ms, size, bytes_out, *given))


def _to_ascii(line: bytes) -> bytes:
    """The same JSON in ASCII: some terminals obey the control characters from U+0080 on, and marks reverse text.

    >>> _to_ascii('"\u009b31m"'.encode())
    b'"\\\\u009b31m"'
    """
    return line if line.isascii() else json.dumps(msgspec.json.decode(line), separators=(",", ":")).encode()


def _times(began: float) -> tuple[float, float]:
    """`at` and `ms` of an entry for what began at `began` (perf_counter) and ends now."""
    seconds = time.perf_counter() - began
    return round(time.time() - seconds, 6), round(seconds * 1e3, 3)


def _decode_id(given: bytes | None) -> str | None:
    return None if given is None else given[:_ID_CHARS].decode("latin-1")
