"""Connections between the workers of a job: each side proves that it has the job's secret before anything else is sent.

    caller                                          listener
      greeting: purpose, generation, rank, nonce ──▶
                    ◀── nonce, HMAC("listener", greeting, nonce, address)
      HMAC("caller", greeting, nonce, address) ──▶   from here on the connection belongs to the purpose

HMAC-SHA256 (RFC 2104) over both nonces, so that no proof can be replayed; over the role, so that none can be reflected;
and over the address that the caller dialled, so that a process that listens where a dead worker did cannot pass on the
proof of a live one. The secret itself is never sent. Afterwards the connection is neither encrypted nor authenticated:
without privileges no other user can read or alter it on the loopback.
"""

import contextlib
import enum
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from trueline.engine.hosts.route import join_address, list_ports, split_address

PROOF_S = 10.0
"""How long a peer may take to prove itself; a starved machine needs seconds for what takes one millisecond."""
MOST_UNPROVEN = 256
"""Connections that may be without a proof at one time; the oldest is closed for one more."""
_MAGIC, _NONCE, _MAC = b"TLP1", 32, 32
_HELLO = struct.Struct("!Bqq")
_GREETING = len(_MAGIC) + _HELLO.size + _NONCE
_ALONE = secrets.token_urlsafe(32)
"""The secret of a process that trains without a job: no other process can have it."""


class Purpose(enum.IntEnum):
    """What a connection is for."""

    STATE = 1
    STORE = 2
    LINK = 3


class Hello(NamedTuple):
    """What the caller says about itself. Proven: it comes from a process that has the secret."""

    purpose: int
    generation: int
    rank: int = -1


Opened = Callable[[socket.socket], None]
"""Is given a connection of a group when it has been opened."""


class PeerListener:
    """Accepts connections in a thread of its own, and hands over those whose caller has proven itself.

    All callers without a proof share that thread and `MOST_UNPROVEN` places, each for `PROOF_S`: a stranger can neither
    hold it up nor fill the memory.
    """

    ports: ClassVar[set[int]] = set()
    """Of all listeners of this process."""

    def __init__(self, accept: Callable[[Hello, socket.socket], None], *, name: str) -> None:
        """`accept` gets each proven connection, which it owns, in blocking mode; it must not wait."""
        host = os.environ.get("TRUELINE_HOST", "127.0.0.1")
        self._accept, self._secret = accept, _job_secret()
        self._listener = _listen(host, os.environ.get("TRUELINE_PORTS", ""))
        self._listener.setblocking(False)
        self._port: int = self._listener.getsockname()[1]
        self.ports.add(self._port)
        self.address = join_address(host, self._port)
        self._closed = threading.Event()
        self._unproven: dict[socket.socket, _Caller] = {}
        """In the order of their deadlines."""
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self.ports.discard(self._port)
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it

    def _serve(self) -> None:
        with self._listener, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closed.is_set():
                for key, _ in selector.select(self._time_left_s()):
                    if self._closed.is_set():
                        break
                    if key.fileobj is self._listener:
                        self._admit(selector)
                    elif (caller := self._unproven.get(key.data)) is not None:  # not dropped by the ones before
                        self._advance(selector, caller)
                while self._time_left_s() == 0.0:
                    self._forget(selector, next(iter(self._unproven.values()))).close()
            for connection in self._unproven:
                connection.close()

    def _time_left_s(self) -> float | None:
        """Until the oldest unproven connection is closed; None without one."""
        oldest = next(iter(self._unproven.values()), None)
        return None if oldest is None else max(0.0, oldest.until - time.monotonic())

    def _admit(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._closed.wait(0.05)  # other parts of the process may free descriptors
            return  # the caller is gone
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._unproven) >= MOST_UNPROVEN:
            self._forget(selector, next(iter(self._unproven.values()))).close()
        self._unproven[connection] = _Caller(connection, time.monotonic() + PROOF_S)
        selector.register(connection, selectors.EVENT_READ, connection)

    def _forget(self, selector: selectors.BaseSelector, caller: "_Caller") -> socket.socket:
        selector.unregister(caller.connection)
        return self._unproven.pop(caller.connection).connection

    def _advance(self, selector: selectors.BaseSelector, caller: "_Caller") -> None:
        """Reads what `caller` sent; hands it over, drops it, or leaves it waiting for more."""
        try:
            hello = caller.read(self._secret, self.address)
        except BlockingIOError:
            return
        except (OSError, ValueError):  # gone, or a stranger
            self._forget(selector, caller).close()
            return
        if hello is not None:
            connection = self._forget(selector, caller)
            connection.setblocking(True)
            self._accept(hello, connection)


def _listen(host: str, ports: str) -> socket.socket:
    """A listener at `host`, on a free one of the `ports` FIRST-LAST if they are given. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    choices = list_ports(ports)
    secrets.SystemRandom().shuffle(choices)
    for port in choices:
        try:
            return socket.create_server((host, port), family=family, backlog=4096)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"no port of {ports} is free at {host}")


@dataclass(slots=True)
class _Caller:
    """A connection whose caller has not proven itself yet."""

    connection: socket.socket
    until: float
    received: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None
    """What its greeting says; None until that is complete."""
    expected: bytes = b""
    """Its proof."""

    def read(self, secret: bytes, address: str) -> Hello | None:
        """Returns the hello with the last byte of the proof. Raises ValueError for a stranger, OSError at the end."""
        whole = _GREETING if self.hello is None else _MAC
        data = self.connection.recv(whole - len(self.received))
        if not data:
            raise OSError("the caller closed the connection")
        self.received += data
        if self.hello is None:
            if not bytes(self.received).startswith(_MAGIC[: len(self.received)]):
                raise ValueError("another protocol")
            if len(self.received) == whole:
                self._challenge(secret, address)
            return None
        if len(self.received) < whole:
            return None
        if not hmac.compare_digest(bytes(self.received), self.expected):
            raise ValueError("a wrong proof")
        return self.hello

    def _challenge(self, secret: bytes, address: str) -> None:
        nonce = secrets.token_bytes(_NONCE)
        self.hello = Hello(*_HELLO.unpack_from(self.received, len(_MAGIC)))
        transcript = bytes(self.received) + nonce + address.encode()
        self.expected = _prove(secret, b"caller", transcript)
        self.received.clear()
        self.connection.sendall(nonce + _prove(secret, b"listener", transcript))


def connect(address: str, hello: Hello, timeout_s: float) -> socket.socket:
    """Connects to the `PeerListener` at `address`; operations of the connection time out after `timeout_s` too.

    Raises OSError when it is gone, does not answer in time, or does not have the job's secret.
    """
    until = time.monotonic() + timeout_s
    try:
        connection = socket.create_connection(split_address(address), timeout=timeout_s)
    except OSError as error:
        why = "it does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise ConnectionError(
            f"{os.environ.get('TRUELINE_HOST', 'this host')} cannot reach {address}: {why}"
        ) from error
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = _MAGIC + _HELLO.pack(*hello) + secrets.token_bytes(_NONCE)
        connection.sendall(greeting)
        answer = _receive(connection, _NONCE + _MAC, until)
        secret, transcript = _job_secret(), greeting + answer[:_NONCE] + address.encode()
        if not hmac.compare_digest(answer[_NONCE:], _prove(secret, b"listener", transcript)):
            raise PermissionError(f"the process at {address} does not have the secret of this job")
        connection.sendall(_prove(secret, b"caller", transcript))
        connection.settimeout(timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket, size: int, until: float) -> bytes:
    """Reads `size` bytes before `until`, however slowly they come. Raises OSError."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(1e-3, until - time.monotonic()))
        if time.monotonic() >= until:
            raise TimeoutError("the peer did not prove itself in time")
        more = connection.recv(size - len(data))
        if not more:
            raise OSError("the peer closed the connection")
        data += more
    return data


def _prove(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, b"trueline " + role + b"\0" + transcript, "sha256")


def _job_secret() -> bytes:
    return (os.environ.get("TRUELINE_SECRET") or _ALONE).encode()
