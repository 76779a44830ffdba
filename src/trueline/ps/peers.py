"""One thread that moves the bytes between a worker and all servers.

A request waits until its server is there, and is sent again when the connection ends before the reply. A server may
answer that it cannot take a request yet; then it is sent later.
"""

import contextlib
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trueline.clock import Clock, monotonic_s
from trueline.ps.dial import ServerAddress, dial
from trueline.ps.shared_memory import CallerMemory
from trueline.ps.wire import Array, Call, Failure, FrameError, Inbox, Outbox, ReceivedFrame, encode

CONNECT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.25
LATER = frozenset({"unconfigured", "disk_full", "storage"})
"""Failures that end by themselves."""
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


@dataclass(eq=False, slots=True)
class PeerRequest:
    """`done` is called in the thread: with the reply, whose arrays are valid until it returns unless it detaches the
    buffer, or with what the server refuses."""

    ref: str
    kind: Call
    body: object
    arrays: Sequence[Array]
    done: Callable[[ReceivedFrame | None, Failure | None, Inbox], None]
    reply_bytes: int = 0
    """Of the arrays of the reply, as far as they are known."""


class _Peer:
    """The connection to one server, and the requests that it has not answered."""

    def __init__(self, ref: str) -> None:
        self.ref = ref
        self.connection: socket.socket | None = None
        self.inbox, self.outbox = Inbox(), Outbox()
        self.pending: dict[int, PeerRequest] = {}
        self.numbers = 0
        self.writing = False
        self.retry_at, self.pause_s = 0.0, FIRST_PAUSE_S
        self.trouble = ""
        self._shared: CallerMemory | None = None

    def add(self, request: PeerRequest) -> None:
        self.numbers = (self.numbers + 1) & 0xFFFFFFFF
        self.pending[self.numbers] = request
        if self.connection is not None:
            self._write(self.numbers, request)

    def _write(self, number: int, request: PeerRequest) -> None:
        pieces = encode(request.kind, number, request.body, request.arrays)
        place = self._shared.send(number, pieces, request.reply_bytes) if self._shared is not None else None
        self.outbox.add(pieces if place is None else [place])

    def begin(self, connection: socket.socket, shared: CallerMemory | None) -> None:
        """Takes a connection, by which all that was not answered is sent again."""
        self.connection, self._shared = connection, shared
        self.inbox, self.outbox = Inbox(shared), Outbox()
        self.trouble, self.pause_s, self.writing = "", FIRST_PAUSE_S, False
        for number, request in self.pending.items():
            self._write(number, request)

    def pop(self, number: int) -> PeerRequest | None:
        """The request that has this reply. Its memory is free."""
        if self._shared is not None:
            self._shared.free(number)
        return self.pending.pop(number, None)


class Peers:
    def __init__(
        self, addresses: Callable[[str], ServerAddress | None], secret: bytes, clock: Clock = monotonic_s
    ) -> None:
        self._addresses, self._secret, self._clock = addresses, secret, clock
        self._submitted: deque[PeerRequest] = deque()
        self._later: list[tuple[float, PeerRequest]] = []
        self._peers: dict[str, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="servers", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[PeerRequest]) -> None:
        """From any thread."""
        self._submitted.extend(requests)
        with contextlib.suppress(OSError):  # closed meanwhile
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Ends the thread; requests without a reply are forgotten."""
        self._closing = True
        self.submit(())
        self._thread.join()

    @property
    def trouble(self) -> str:
        """Which servers are away and why, for messages."""
        return "; ".join(f"{peer.ref}: {peer.trouble}" for peer in list(self._peers.values()) if peer.trouble)

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(self._time_left_s()):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                elif key.data.connection is not None:
                    self._advance(key.data, events)
            self._take_submitted()
            for peer in self._peers.values():
                if peer.connection is None and peer.pending and peer.retry_at <= self._clock():
                    self._connect(peer)
        for peer in self._peers.values():
            if peer.connection is not None:
                peer.connection.close()
        self._selector.close()
        os.close(self._wake)

    def _time_left_s(self) -> float | None:
        times = [peer.retry_at for peer in self._peers.values() if peer.connection is None and peer.pending]
        times += [at for at, _ in self._later]
        return max(0.0, min(times) - self._clock()) if times else None

    def _take_submitted(self) -> None:
        now = self._clock()
        due = [request for at, request in self._later if at <= now]
        if due:
            self._later = [(at, request) for at, request in self._later if at > now]
        touched = {}
        while self._submitted:
            due.append(self._submitted.popleft())
        for request in due:
            peer = self._peers.get(request.ref)
            if peer is None:
                peer = self._peers[request.ref] = _Peer(request.ref)
            peer.add(request)
            touched[peer.ref] = peer
        for peer in touched.values():
            if peer.connection is not None:
                self._send(peer)

    def _connect(self, peer: _Peer) -> None:
        try:
            address = self._addresses(peer.ref)
            if address is None:
                raise ConnectionError("it has not begun to listen")
            connection, shared = _connect(address.preferred, self._secret)
        except OSError as error:
            peer.trouble = str(error)
            peer.retry_at = self._clock() + peer.pause_s
            peer.pause_s = min(2 * peer.pause_s, LONGEST_PAUSE_S)
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        peer.begin(connection, shared)
        self._send(peer)

    def _advance(self, peer: _Peer, events: int) -> None:
        assert peer.connection is not None
        try:
            if events & selectors.EVENT_READ:
                while (frame := peer.inbox.receive(peer.connection)) is not None:
                    self._take_reply(peer, frame)
        except OSError as error:
            self._lose(peer, error)
            return
        if events & selectors.EVENT_WRITE:
            self._send(peer)

    def _take_reply(self, peer: _Peer, frame: ReceivedFrame) -> None:
        request = peer.pop(frame.number)
        if request is None:
            raise FrameError(f"{peer.ref} answers request {frame.number}, which it was not sent")
        if frame.kind is Call.OK:
            request.done(frame, None, peer.inbox)
            return
        failure = frame.read(Failure)
        if failure.code in LATER:
            peer.trouble = failure.message
            self._later.append((self._clock() + LONGEST_PAUSE_S / 5, request))
        else:
            request.done(None, failure, peer.inbox)

    def _send(self, peer: _Peer) -> None:
        assert peer.connection is not None
        try:
            waits = not peer.outbox.send(peer.connection)
        except OSError as error:
            self._lose(peer, error)
            return
        if waits != peer.writing:
            peer.writing = waits
            self._selector.modify(peer.connection, _BOTH if waits else selectors.EVENT_READ, peer)

    def _lose(self, peer: _Peer, error: OSError) -> None:
        """Forgets a connection that has ended; the requests stay."""
        assert peer.connection is not None
        self._selector.unregister(peer.connection)
        peer.connection.close()
        peer.connection, peer.trouble, peer.retry_at = None, str(error), 0.0


def _connect(address: str, secret: bytes) -> tuple[socket.socket, CallerMemory | None]:
    """A connection, and the memory that the server shares, on one host. Raises OSError."""
    try:
        memory = CallerMemory() if address.startswith("/") else None
    except OSError:
        memory = None
    if memory is None:
        return dial(address, secret, CONNECT_S)[0], None
    connection, shared = dial(address, secret, CONNECT_S, memory.handle)
    return connection, memory if shared else None
