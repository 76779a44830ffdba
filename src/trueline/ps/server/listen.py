"""The connections of one server: one thread, one selector, frames in and replies out.

A caller has `PROOF_S` to prove the job's secret; until then it gets no memory, and there are `MOST_UNPROVEN` at most.
What is no frame closes its connection and no other.
"""

import contextlib
import errno
import hmac
import os
import selectors
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trueline import events
from trueline.clock import Clock, monotonic_s
from trueline.engine.hosts.route import join_address
from trueline.errors import StorageError
from trueline.ps.dial import ACCEPTED, GREETING, MAC, SHARED, challenge, set_options, short_path
from trueline.ps.shared_memory import ListenerMemory, ReplyRoom
from trueline.ps.wire import Array, Call, FrameError, Inbox, Outbox, ReceivedFrame, encode

PROOF_S = 10.0
MOST_UNPROVEN = 256
SOCKET = "socket"
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


class CallerLine:
    """A connection to this server."""

    def __init__(self, connection: socket.socket, address: str, until: float) -> None:
        self.connection, self.address, self.until = connection, address, until
        self.inbox, self.outbox = Inbox(), Outbox()
        self.proven = self.closed = self.writing = False
        self._received = b""
        self._expected = b""
        self._handles: list[int] = []

    def prove(self, secret: bytes) -> bool:
        """Reads what there is of the caller's proof; whether it is complete. Raises ConnectionError for a stranger."""
        whole = MAC if self._expected else GREETING
        try:
            data = self._receive(whole - len(self._received))
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionResetError("the caller closed the connection")
        self._received += data
        if len(self._received) < whole:
            return False
        if not self._expected:
            answer, self._expected = challenge(secret, self.address, self._received)
            self._received = b""
            self.connection.sendall(answer)
            return False
        if not hmac.compare_digest(self._received, self._expected):
            raise FrameError("a caller does not have the secret of this job")
        self.connection.sendall(SHARED if self._share() else ACCEPTED)
        self.proven = True
        return True

    def _receive(self, size: int) -> bytes:
        if not self._expected or self.connection.family != socket.AF_UNIX:
            return self.connection.recv(size)
        data, handles, _, _ = socket.recv_fds(self.connection, size, 1, socket.MSG_CMSG_CLOEXEC)
        self._handles += handles
        return data

    def _share(self) -> bool:
        """Maps the memory that came with the proof."""
        with contextlib.suppress(OSError, ValueError):
            for handle in self._handles:
                self.inbox.shared = ListenerMemory(handle)
        self.close_handles()
        return self.inbox.shared is not None

    def close_handles(self) -> None:
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()


class CallerLines:
    """All connections. `answer` gets each frame, whose arrays are valid until it returns, unless it detaches the buffer
    of `line.inbox`; `forget` gets each connection that has ended."""

    def __init__(
        self,
        secret: bytes,
        answer: Callable[[CallerLine, ReceivedFrame], None],
        forget: Callable[[CallerLine], None],
        clock: Clock = monotonic_s,
    ) -> None:
        self._secret, self._answer, self._forget, self._clock = secret, answer, forget, clock
        self._selector = selectors.DefaultSelector()
        self._unproven: dict[CallerLine, None] = {}
        self._lines: set[CallerLine] = set()
        self._listeners: list[socket.socket] = []

    def open(self, folder: Path, host: str, ports: Sequence[int] = (0,)) -> tuple[str, str]:
        """Listens at a Unix socket in `folder`, and at a free one of `ports`. Returns both addresses; the first is
        empty where the file system has no sockets. Raises StorageError when no port is free."""
        path = str(folder / SOCKET)
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        name, handle = short_path(path)
        try:
            unix.bind(name)
            os.chmod(path, 0o600)
            self._add_listener(unix, path)
        except OSError:
            unix.close()
            path = ""
        finally:
            os.close(handle)
        tcp = _listen(host, ports)
        address = join_address(host, tcp.getsockname()[1])
        self._add_listener(tcp, address)
        return path, address

    def _add_listener(self, listener: socket.socket, address: str) -> None:
        listener.setblocking(False)
        listener.listen(512)
        self._listeners.append(listener)
        self.watch(listener, lambda: self._admit(listener, address))

    def watch(self, handle: Any, act: Callable[[], None]) -> None:
        """Has `act` called whenever `handle` is readable."""
        self._selector.register(handle, selectors.EVENT_READ, act)

    def ignore(self, handle: Any) -> None:
        self._selector.unregister(handle)

    def poll(self, timeout_s: float | None) -> None:
        """Waits for at most `timeout_s` (None: for what comes), and handles one frame of each connection."""
        now = self._clock()
        oldest = next(iter(self._unproven), None)
        if oldest is not None:
            timeout_s = min(oldest.until - now, PROOF_S if timeout_s is None else timeout_s)
        for key, mask in self._selector.select(None if timeout_s is None else max(0.0, timeout_s)):
            if isinstance(key.data, CallerLine):
                self._advance(key.data, mask)
            else:
                key.data()
        for line in [line for line in self._unproven if line.until <= now]:
            self.drop(line)

    def _admit(self, listener: socket.socket, address: str) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                events.emit("server.crowded", why=str(error))
                if self._unproven:
                    self.drop(next(iter(self._unproven)))
            return
        connection.setblocking(False)
        set_options(connection)
        if len(self._unproven) >= MOST_UNPROVEN:
            self.drop(next(iter(self._unproven)))
        line = CallerLine(connection, address, self._clock() + PROOF_S)
        self._unproven[line] = None
        self._lines.add(line)
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _advance(self, line: CallerLine, mask: int) -> None:
        if line.closed:  # by one before it in the same round
            return
        try:
            if mask & selectors.EVENT_WRITE:
                self._send(line)
            if not mask & selectors.EVENT_READ:
                return
            if not line.proven:
                if line.prove(self._secret):
                    self._unproven.pop(line, None)
                return
            frame = line.inbox.receive(line.connection)
            if frame is not None:
                self._answer(line, frame)
        except OSError as error:
            if isinstance(error, FrameError):
                events.emit("server.refused_caller", why=str(error))
            self.drop(line)

    def reply(
        self, line: CallerLine, number: int, body: object = None, arrays: Sequence[Array] = (), *,
        kind: Call = Call.OK, given: bool = False, room: ReplyRoom | None = None,
    ) -> None:  # fmt: skip
        """Sends a reply, as far as the connection takes it now; the arrays may change afterwards, unless they are
        `given` away. `room`: where it is written if there is enough."""
        if line.closed:
            return
        pieces = encode(kind, number, body, arrays)
        place = room.write(pieces) if room is not None else None
        line.outbox.add(pieces if place is None else [place])
        try:
            self._send(line)
        except OSError:
            self.drop(line)
        if arrays and line.outbox and not given:
            line.outbox.copy_rest()

    def _send(self, line: CallerLine) -> None:
        waits = not line.outbox.send(line.connection)
        if waits != line.writing:
            line.writing = waits
            self._selector.modify(line.connection, _BOTH if waits else selectors.EVENT_READ, line)

    def drop(self, line: CallerLine) -> None:
        """Closes a connection. May be repeated."""
        if line.closed:
            return
        line.closed = True
        self._unproven.pop(line, None)
        self._lines.discard(line)
        self._selector.unregister(line.connection)
        line.connection.close()
        line.close_handles()
        self._forget(line)

    def flush(self, timeout_s: float) -> None:
        """Sends the replies that wait, for at most `timeout_s` of blocking a connection."""
        for line in [line for line in self._lines if line.outbox]:
            line.connection.settimeout(timeout_s)
            with contextlib.suppress(OSError):
                line.outbox.send(line.connection)

    def close(self) -> None:
        for line in list(self._lines):
            self.drop(line)
        for listener in self._listeners:
            listener.close()
        self._selector.close()


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=512)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                why = f"a parameter server cannot listen at {host}: {error.strerror}"
                raise StorageError(why, hint="--interface names the address or interface of this host") from error
    raise StorageError(
        f"no port of {ports[0]}-{ports[-1]} is free at {host} for a parameter server",
        hint="give --ports one more for each server",
    )
