"""The sockets of one gloo group, which a cut shuts down: those that were opened for it, and no others.

While a group forms, the same process opens other sockets: its rendezvous store accepts members of the next generation,
gRPC connects to a master that came back, a data set reads. So the group's sockets are entered one by one. Only gloo and
NCCL connect out of sight; there each socket counts that appears meanwhile, unless a listener of this job accepted it.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from trueline.parallel.handshake import PeerListener

_INTERNET = (socket.AF_INET, socket.AF_INET6)


class GroupSockets:
    """Entered from the thread that forms the group, cut from any. Descriptors are reused: an inode names a socket."""

    def __init__(self) -> None:
        self._inodes: set[int] = set()
        self._before: set[int] | None = None
        """The sockets that were open when other code began to connect."""
        self._cut = False

    def add(self, connection: socket.socket) -> None:
        """Enters `connection`; shuts it down if the group was cut before."""
        self._inodes.add(os.fstat(connection.fileno()).st_ino)
        if self._cut:
            self.cut()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Enters the sockets that other code opens in the block."""
        self._before = set(_list_sockets())
        try:
            yield
        finally:
            self._inodes, self._before = self._inodes | self._find_new(), None

    def _find_new(self) -> set[int]:
        before = self._before
        there = _list_sockets().items() if before is not None else ()
        return {inode for inode, number in there if inode not in (before or ()) and not _is_accepted(number)}

    def cut(self) -> int:
        """Shuts the group's sockets down; returns how many were open."""
        self._cut = True
        own, there = self._inodes | self._find_new(), _list_sockets()
        return sum(_shut_down(there[inode], inode) for inode in there.keys() & own)


def _list_sockets() -> dict[int, int]:
    """Open sockets of this process: inode -> descriptor."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets[status.st_ino] = int(name)
    return sockets


def _is_accepted(number: int) -> bool:
    """Whether a listener of this job has accepted the socket; also true of one that is closed by now."""
    try:
        with socket.socket(fileno=os.dup(number)) as copy:
            return copy.family in _INTERNET and copy.getsockname()[1] in PeerListener.ports
    except OSError:
        return True


def _shut_down(number: int, inode: int) -> bool:
    try:
        copy = os.dup(number)
    except OSError:  # closed since it was listed
        return False
    if os.fstat(copy).st_ino != inode:  # the number was reused
        os.close(copy)
        return False
    with socket.socket(fileno=copy) as connection:
        if connection.family not in _INTERNET or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        with contextlib.suppress(OSError):  # not connected, or shut already
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
