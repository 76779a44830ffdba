"""Connects each member of a generation with each other one, over connections of `handshake.py`.

A member connects to those of lower rank, whose addresses are in the rendezvous store, and accepts those of higher
rank. Its listener exists only meanwhile.
"""

import socket
import threading
import time

from trueline.parallel import handshake
from trueline.parallel.handshake import Hello, Opened, PeerListener, Purpose
from trueline.parallel.store import PeerStore, read_all

REASON_S = 1.0
"""How long a member that lacks another one keeps that from the master."""


def meet(
    store: PeerStore, generation: int, rank: int, size: int, patience_s: float, opened: Opened
) -> dict[int, socket.socket]:
    """Returns the connections of member `rank` of `size` by the rank of the peer; each is given to `opened` at once.

    Raises OSError or DistStoreError when a peer is gone or does not connect within `patience_s`.
    """
    until = time.monotonic() + patience_s
    links: dict[int, socket.socket] = {}
    arrivals = _Arrivals(generation, opened) if rank < size - 1 else None
    try:
        if arrivals is not None:
            store.set(f"member-{rank}", arrivals.address)
        for other in range(rank):
            address = store.get(f"member-{other}").decode()
            hello = Hello(Purpose.LINK, generation, rank)
            try:
                links[other] = handshake.connect(address, hello, max(1e-3, until - time.monotonic()))
            except OSError as error:
                raise ConnectionError(f"rank {other} is out of reach: {error}") from error
            opened(links[other])
        if arrivals is not None:
            for other in range(rank + 1, size):
                links[other] = arrivals.take(other, until)
    except BaseException:
        for link in links.values():
            link.close()
        raise
    finally:
        if arrivals is not None:
            arrivals.close()
    return links


def exchange(links: dict[int, socket.socket], patience_s: float, row: bytes) -> dict[int, bytes]:
    """Sends `row` over each link; returns what the peers sent, by rank. All rows have one length.

    Raises OSError when a peer is gone or sends nothing within `patience_s`, a while later: one that has left, since a
    third is out of its reach, tells the master why, and the first reason counts.
    """
    found = {}
    for rank, link in links.items():
        try:
            link.settimeout(patience_s)
            link.sendall(row)
        except OSError as error:
            raise _wait_for_reason(rank) from error
    for rank, link in links.items():
        try:
            found[rank] = read_all(link, len(row))
        except OSError as error:
            raise _wait_for_reason(rank) from error
        link.settimeout(None)
    return found


def _wait_for_reason(rank: int) -> ConnectionError:
    time.sleep(REASON_S)  # in the thread that forms a group, which a cut abandons
    return ConnectionError(f"rank {rank} has left while the group forms")


class _Arrivals:
    """The connections that members of higher rank have made to this one."""

    def __init__(self, generation: int, opened: Opened) -> None:
        self._generation, self._closed, self._opened = generation, False, opened
        self._links: dict[int, socket.socket] = {}
        """By rank, until they are taken."""
        self._known: set[int] = set()
        self._change = threading.Condition()
        self._listener = PeerListener(self._accept, name="links")
        self.address = self._listener.address

    def _accept(self, hello: Hello, connection: socket.socket) -> None:
        with self._change:
            fits = (hello.purpose, hello.generation) == (Purpose.LINK, self._generation)
            if self._closed or not fits or hello.rank in self._known:
                connection.close()
                return
            self._opened(connection)
            self._known.add(hello.rank)
            self._links[hello.rank] = connection
            self._change.notify_all()

    def take(self, rank: int, until: float) -> socket.socket:
        """Returns the connection from `rank`. Raises TimeoutError."""
        with self._change:
            if not self._change.wait_for(lambda: rank in self._links, max(0.0, until - time.monotonic())):
                raise TimeoutError(f"rank {rank} did not connect to {self.address} in time")
            return self._links.pop(rank)

    def close(self) -> None:
        self._listener.close()
        with self._change:
            self._closed = True
            for link in self._links.values():
                link.close()
