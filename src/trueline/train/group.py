"""The process group of one generation on gloo, and how to get out of it alive.

gloo cannot abort a collective: a member that waits for a dead or departed peer waits for the whole timeout. So the
sockets of the group are shut down from outside (`cut`), whereupon every pending operation fails at once with a
RuntimeError in the thread that waits. The pitfalls, each of which once cost a stall (docs/concepts/generation.md):

* listening sockets must be left alone: gloo's accept loop ends the process when its socket fails;
* sockets appear while the group forms, so a cut is repeated until the group is closed;
* a member that dies while the group forms cannot be cut off, so forming has a short timeout of its own;
* descriptors are reused: a socket is known by its inode, not by its number;
* torch names groups by a process-wide count that a failed init does not take back: it is reset, or members that
  failed differently often look for each other under different names for ever.

Linux only (/proc/self/fd). NCCL and MPI groups will stand beside this one with the same four methods.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

FORM_TIMEOUT_S = 2.0
RUN_TIMEOUT_S = 600.0


def start_store() -> tuple[TCPStore, str]:
    """A rendezvous store of this process, for the generations in which it is rank 0; returns it and host:port.

    It listens on a socket of ours: left to itself it would listen on every interface, and over IPv6, where each
    broken connection makes it look up a name such as ::ffff:127.0.0.1, which stalls it for 5 s without a DNS server.
    """
    host = os.environ.get("TRUELINE_HOST", "127.0.0.1")
    listener = socket.create_server((host, 0), family=socket.AF_INET, backlog=128)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=FORM_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}"


class GlooGroup:
    """The group that this process is in, if any. `cut` may be called from any thread, the rest from one."""

    def __init__(self) -> None:
        self.generation = -1
        self.open = False
        self._before: set[str] = set()
        self._lock = threading.Lock()

    def form(self, generation: int, *, rank: int, size: int, store: str) -> None:
        """Joins the group of `generation` as `rank` of `size`. Raises RuntimeError when it cannot be formed."""
        self.close()
        if os.environ.get("TRUELINE_HOST", "127.0.0.1") == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with self._lock:
            self._before = set(_sockets())
            self.generation = generation
            self.open = True
        host, _, port = store.rpartition(":")
        short = timedelta(seconds=FORM_TIMEOUT_S)
        client = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=short)
        named = PrefixStore(f"generation-{generation}", client)
        dist.init_process_group("gloo", store=named, rank=rank, world_size=size, timeout=short)
        distributed_c10d._set_pg_timeout(timedelta(seconds=RUN_TIMEOUT_S))

    def cut(self) -> int:
        """Shuts down the sockets of the group; returns how many. Safe when there is no group."""
        with self._lock:
            if not self.open:
                return 0
            return sum(_shut(number, inode) for inode, number in _sockets().items() if inode not in self._before)

    def cut_until_left(self, below: int) -> None:
        """Cuts again and again while this process is in a group of a generation older than `below`."""
        while self.open and self.generation < below:
            self.cut()
            time.sleep(0.003)  # sockets may still be appearing; the owner leaves as soon as one call fails

    def close(self) -> None:
        """Leaves the group; pending operations of peers with this process fail."""
        self.cut()
        with self._lock:
            self.open = False
        if dist.is_initialized():
            with contextlib.suppress(
                RuntimeError, ValueError
            ):  # a half-formed group refuses, and is dropped all the same
                dist.destroy_process_group()
        # torch names groups by a count that a failed init leaves raised; members must agree on the name.
        distributed_c10d._world.group_count = 0


def _sockets() -> dict[str, int]:
    """Open sockets of this process: inode -> descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


def _shut(number: int, inode: str) -> bool:
    try:
        copy = os.dup(number)
    except OSError:  # closed since it was listed
        return False
    if os.readlink(f"/proc/self/fd/{copy}") != inode:  # the number belongs to another file by now
        os.close(copy)
        return False
    with socket.socket(fileno=copy) as connection:
        if not _is_peer(connection):
            return False
        with contextlib.suppress(OSError):  # not connected, or shut already
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _is_peer(connection: socket.socket) -> bool:
    listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return connection.family in (socket.AF_INET, socket.AF_INET6) and not listening
