"""The access log: one line of JSON for each request, written by a thread and never waited for.

    {"at": 1767225600.123, "face": "data", "method": "POST", "path": "/v2/models/digits/infer", "status": 200,
     "ms": 1.42, "bytes_in": 1090, "bytes_out": 211, "id": "..."}
    {"at": 1767225600.125, "face": "grpc", "method": "ModelInfer", "path": "/inference.GRPCInferenceService/ModelInfer",
     "status": 200, "ms": 1.1, "bytes_in": 1052, "bytes_out": 63, "id": null, "model": "digits", "code": "OK"}

`at` is the Unix time at which the request was there, `ms` the time to the head of its answer, `status` 499 (nginx's)
where the client had gone before. `bytes_out` is null for answers in pieces. Of a URL only the path is written: a query
may hold secrets. A call over gRPC has its code beside what HTTP would have said; its bytes are those of the messages,
its `ms` go to the last of them, and each request of a stream that goes both ways is a line.

When the disk is slower than the requests come, or full, lines are dropped and counted in a line of their own; requests
go on. A file that was moved away, as logrotate does, is opened anew under its name.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import msgspec

from trueline import events
from trueline.errors import UsageError
from trueline.web.messages import Answer, App, Request, Response

CLIENT_CLOSED = 499
MOST = 65536
"""Lines that may wait to be written."""
FLUSH_S = 0.2
_ID = b"x-request-id"
_ID_CHARS = 200


class AccessEntry(NamedTuple):
    at: float
    face: str
    method: str
    path: str
    status: int
    ms: float
    bytes_in: int
    bytes_out: int | None
    id: str | None


class GrpcEntry(NamedTuple):
    """An entry of a call over gRPC."""

    at: float
    face: str
    method: str
    path: str
    status: int
    ms: float
    bytes_in: int
    bytes_out: int | None
    id: str | None
    model: str | None
    code: str


class AccessLog:
    """Writes entries to the file `path`, `-` for standard error, until it is closed. Raises UsageError."""

    def __init__(self, path: str, *, most: int = MOST) -> None:
        self.path, self._most = path, most
        self._entries: deque[AccessEntry | GrpcEntry] = deque()
        self._dropped = self._unwritten = self._told = 0
        """Entries that found no room, lines that were not written, and how many of both the file says."""
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

    def enter(self, entry: AccessEntry | GrpcEntry) -> None:
        """Takes `entry`, or counts it as dropped; called by the one thread that answers."""
        if len(self._entries) < self._most:
            self._entries.append(entry)
        else:
            self._dropped += 1

    def _run(self) -> None:
        while not self._ending.wait(FLUSH_S):
            self.flush()
        self.flush()

    def flush(self) -> None:
        """Writes what is there; whole lines at once, so that several processes may share a file."""
        count, lost = len(self._entries), self._dropped + self._unwritten
        if not count and lost == self._told:
            return
        lines = [msgspec.json.encode(self._entries.popleft()._asdict()) for _ in range(count)]
        if lost > self._told:
            lines.append(msgspec.json.encode({"at": time.time(), "dropped": lost - self._told}))
        try:
            self._follow()
            data = b"\n".join(lines) + b"\n"
            while data:
                data = data[os.write(self._handle, data) :]
        except OSError as error:
            self._unwritten += count
            if not self._failing:
                events.emit("access.not_written", path=self.path, why=error.strerror or str(error))
            self._failing = True
        else:
            self._told, self._failing = lost, False

    def _follow(self) -> None:
        """Opens the file anew when another one, or none, has its name."""
        if self.path == "-":
            return
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            there = None
        ours = os.fstat(self._handle)
        if there is None or (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            handle = self._open()
            os.close(self._handle)
            self._handle = handle

    def close(self) -> None:
        """Writes the rest and ends."""
        self._ending.set()
        self._thread.join()
        os.close(self._handle)


class AccessLogMiddleware:
    """`app`, each of whose requests is an entry of `log`."""

    def __init__(self, app: App, face: str, log: AccessLog) -> None:
        self._app, self._face, self._log = app, face, log

    def answer(self, request: Request) -> Answer:
        """The answer of the app; it is entered when it is there, or when the client has gone."""
        began = time.perf_counter()
        found = self._app.answer(request)
        if isinstance(found, Response):
            self._enter(request, found, began)
        else:
            found.add_done_callback(
                lambda done: self._enter(request, None if done.cancelled() else done.result(), began)
            )
        return found

    def _enter(self, request: Request, response: Response | None, began: float) -> None:
        ms = (time.perf_counter() - began) * 1e3
        named = request.headers.get(_ID)
        self._log.enter(
            AccessEntry(
                round(time.time() - ms / 1e3, 6),
                self._face,
                request.method,
                request.path,
                CLIENT_CLOSED if response is None else response.status,
                round(ms, 3),
                len(request.body),
                None if response is None or response.pieces is not None else len(response.body),
                None if named is None else named[:_ID_CHARS].decode("latin-1"),
            )
        )

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The answer for a request that could not be received."""
        found = self._app.refuse(path, status, message)
        body = len(found.body)
        self._log.enter(AccessEntry(round(time.time(), 6), self._face, "-", path, found.status, 0.0, 0, body, None))
        return found


class GrpcCallLog:
    """The line of one call over gRPC, begun when its bytes are there; without a `log` nobody reads it."""

    __slots__ = ("_began", "_bytes_in", "_face", "_id", "_log", "_model", "path")

    def __init__(self, log: AccessLog | None, face: str, path: str, bytes_in: int, named: bytes | None) -> None:
        self._log, self._face, self.path, self._bytes_in = log, face, path, bytes_in
        self._id = None if named is None else named[:_ID_CHARS].decode("latin-1")
        self._model: str | None = None
        self._began = time.perf_counter()

    def note_model(self, request: Any) -> Any:
        """Takes from the message `request` which model it asks, and under which id; returns it."""
        if self._log is not None:
            model = getattr(request, "model_name", "") or getattr(request, "name", "")
            self._model = model[:_ID_CHARS] or None
            self._id = self._id or getattr(request, "id", "")[:_ID_CHARS] or None
        return request

    def end(self, bytes_out: int, *, status: int = 200, code: str = "OK") -> None:
        """Enters the line; `status` is what HTTP would have said."""
        if self._log is None:
            return
        ms, method = (time.perf_counter() - self._began) * 1e3, self.path.rpartition("/")[2]
        at = round(time.time() - ms / 1e3, 6)
        sizes = self._bytes_in, bytes_out
        self._log.enter(
            GrpcEntry(at, self._face, method, self.path, status, round(ms, 3), *sizes, self._id, self._model, code)
        )
