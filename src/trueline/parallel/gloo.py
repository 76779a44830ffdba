"""The process group of one generation on gloo, and how to get out of it alive.

gloo cannot abort a collective: a member that waits for a dead or departed peer waits for the whole timeout. So the
sockets of the group are shut down from outside (`cut`), whereupon every pending operation fails at once with a
RuntimeError in the thread that waits. The pitfalls, each of which once cost a stall (docs/concepts/generation.md):

* listening sockets must be left alone: gloo's accept loop ends the process when its socket fails;
* sockets appear while the group forms, so a cut is repeated until the group is closed;
* a member that dies while the group forms is tried again and again, where no socket is open that could be shut: for
  the timeout by a store's client, for up to 10 s by gloo. So a thread of its own forms the group, and whoever waits
  for it leaves it to itself after a cut;
* shutting the sockets does not reach everything: gloo tells nobody about a message that was partly written or read
  when its socket closed (Pair::signalException forgets unbound buffers), so an operation of more than a socket's buffer
  waits for its timeout. Therefore nothing here waits for gloo for longer than a slice, and then looks for a cut;
* a group with such an operation must not be destroyed either: its destructor joins the thread that waits. It is kept
  aside until its operations are over, and then dropped by a thread of its own (the join takes 10 ms at best);
* descriptors are reused: a socket is known by its inode, not by its number;
* torch names groups by a process-wide count that a failed init does not take back: it is reset, or members that
  failed differently often look for each other under different names for ever.

Host memory is exchanged; what lies on a device is copied there and back by its owner, unless the job has a plane for
it (`backend.py`), which forms, is cut and left with the group. Linux only (/proc/self/fd).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed import distributed_c10d

from trueline.errors import TrainError, TruelineError
from trueline.parallel.backend import Connect, Plane, Sum

_SLICE = timedelta(milliseconds=20)
"""How long a wait goes on before it looks for a cut that gloo has not noticed; a look costs 0.2 ms of CPU. A callback
that a cut could break at once would cost each step 0.1 ms: it takes turns with the training for the interpreter."""
FORM_TIMEOUT_S = 2.0
"""For forming a group, at first: each try that fails doubles it, up to START_TIMEOUT_S, until a group has formed."""
RUN_TIMEOUT_S = 600.0
START_TIMEOUT_S = 30.0
"""A store's first connection to itself: a network that is away for a moment is no reason to end."""
_LOOK_S = 20e-6
"""Between two looks at a plane's sum."""
PLANE_TRIES = 5
"""Planes that do not form one after the other, while gloo does, before the job ends."""
_BACKEND = "trueline_gloo"
_formed: dict[str, ProcessGroupGloo] = {}
"""The gloo group that torch is about to be given, under the name of its backend: it lets nobody hand one over."""


def _hand_over(store: object, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    return _formed.pop(_BACKEND)


dist.Backend.register_backend(_BACKEND, _hand_over, devices=["cpu"])


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
        timeout=timedelta(seconds=START_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}"


class GlooGroup:
    """The group that this process is in, if any. `cut` may be called from any thread, the rest from one."""

    def __init__(self, connect: Connect | None = None) -> None:
        """`connect`: how the members make a plane for what lies on their devices; None: they have none."""
        self._connect = connect
        self._plane: Plane | None = None
        self._left: Plane | None = None
        """The plane of a group that was left between two steps: a slower peer may still be reading from it."""
        self._plane_misses = 0
        self._sums: list[Sum] = []
        """Of the plane, that may be under way."""
        self.generation = -1
        self.open = False
        self._broken = False
        self._misses = 0
        self._cut_below = 0
        """Generations below this were cut, also those that were not formed by then."""
        self._before: set[str] = set()
        self._lock = threading.Lock()
        self._outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        """Of the group that is being formed: the group, or why there will be none."""
        self._works: list[Any] = []
        """Operations that may be under way."""
        self._gloo: ProcessGroupGloo | None = None
        """What is inside torch's default group: asked directly, it begins an operation in half the time."""

    def takes(self, value: torch.Tensor) -> bool:
        """Whether `value` can be summed where it lies."""
        return value.is_cpu or self._plane is not None

    def bucket_summed(self, value: torch.Tensor) -> Any:
        """As `summed`, over the plane if there is one; `value` lies where `takes` says that it may."""
        if self._plane is None:
            return self.summed(value)
        self._sums.append(self._plane.sum(value))
        return self._sums[-1]

    def wait_bucket(self, begun: Any) -> None:
        """As `wait`, for what `bucket_summed` returned. The memory of a sum that failed may be anything from now on."""
        if self._plane is None:
            self.wait(begun)
            return
        try:
            while not begun.over():
                if self._broken:
                    break
                time.sleep(_LOOK_S)
        except RuntimeError as error:
            raise dist.DistBackendError(f"the plane failed: {error}") from error
        if self._broken:  # after the sum was over: one that was ended by an abort says the same
            raise dist.DistBackendError("the plane was aborted: the group was cut")
        self._sums.remove(begun)

    def summed(self, value: torch.Tensor) -> Any:
        """Begins the sum of `value`, which lies in host memory, over the members; what it returns is for `wait`."""
        assert self._gloo is not None
        return self._begun(self._gloo.allreduce([value]))  # type: ignore[attr-defined]  # its stub lacks it

    def _begun(self, work: Any) -> Any:
        self._works = [*(other for other in self._works if not other.is_completed()), work]
        return work

    def wait(self, work: Any) -> None:
        """Returns when `work`, an asynchronous operation of this group, is done.

        Raises RuntimeError when it failed, or when the group was cut.
        """
        if work not in self._works:
            self._begun(work)
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:  # the slice is over, or the operation, whose end is looked into below
                if work.is_completed():
                    break
                if self._broken:
                    raise RuntimeError("gloo: the group was cut") from None
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"gloo: {'the group was cut: ' if self._broken else ''}{error}") from error

    def form(self, generation: int, *, rank: int, size: int, store: str) -> None:
        """Joins the group of `generation` as `rank` of `size`. Raises RuntimeError when it cannot be formed."""
        self.close()
        if os.environ.get("TRUELINE_HOST", "127.0.0.1") == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with self._lock:
            self._before = set(_sockets())
            self.generation = generation
            self.open, self._broken = True, False
            outcomes = self._outcomes = queue.SimpleQueue[_Outcome]()
        if generation < self._cut_below:  # its cut came before there was anything to cut
            raise RuntimeError(f"gloo: generation {generation} was cut before it was formed")
        patience = timedelta(seconds=self.patience_s)
        self._misses += 1

        def work() -> None:
            try:
                found = _connected(store, generation, rank, size, patience, self._connect)
            except Exception as error:  # noqa: BLE001  whatever keeps the group from forming, its waiter is told
                outcomes.put(error)
                return
            with self._lock:
                late = not self.open or self._broken or self.generation != generation
                if not late:
                    self._plane = found[2]
                    outcomes.put(found)
            if late and found[2] is not None:
                found[2].abort()

        threading.Thread(target=work, name="form", daemon=True).start()
        found = outcomes.get()
        if isinstance(found, _PlaneError):
            self._plane_missed(found)
        if isinstance(found, TruelineError):
            raise found
        if isinstance(found, Exception):
            raise RuntimeError(f"gloo: generation {generation} was not formed: {found}") from found
        _formed[_BACKEND], named, _ = found
        run_timeout = timedelta(seconds=RUN_TIMEOUT_S)
        dist.init_process_group(_BACKEND, store=named, rank=rank, world_size=size, timeout=run_timeout)
        self._gloo, self._misses, self._plane_misses = found[0], 0, 0
        self._let_go()

    def _plane_missed(self, error: _PlaneError) -> None:
        """Raises TrainError when it is not for want of a peer."""
        self._plane_misses += 1
        if self._plane_misses >= PLANE_TRIES:
            raise TrainError(
                f"workers could not connect over their backend {PLANE_TRIES} times, one after the other: {error}",
                hint="leave --backend out: gradients go over gloo then; for NCCL, NCCL_DEBUG=INFO says more",
            ) from error

    def _let_go(self) -> None:
        """Everybody is in a newer group, or this member in none: nobody reads from the one that was left any more."""
        left, self._left = self._left, None
        if left is not None:
            left.abort()

    @property
    def patience_s(self) -> float:
        """How long the next try to form a group may take: a machine that is slow today gets more time each time."""
        return min(FORM_TIMEOUT_S * 2.0 ** min(self._misses, 8), START_TIMEOUT_S)

    def cut(self) -> int:
        """Shuts down the sockets of the group and fails what waits; returns how many. Safe when there is no group."""
        with self._lock:
            if not self.open:
                return 0
            self._broken = True
            shut = sum(_shut(number, inode) for inode, number in _sockets().items() if inode not in self._before)
            self._outcomes.put(RuntimeError("it was cut"))
            plane = self._plane
        if plane is not None:
            plane.abort()  # after the note that the group is broken
        return shut

    def cut_until_left(self, below: int) -> None:
        """Cuts again and again while this process is in a group of a generation older than `below`.

        A group of such a generation that is not there yet will not be formed.
        """
        self._cut_below = max(self._cut_below, below)
        while self.open and self.generation < below:
            self.cut()
            time.sleep(0.003)  # sockets may still be appearing; the owner leaves as soon as one call fails

    def close(self) -> None:
        """Leaves the group; pending operations of peers with this process fail."""
        with self._lock:
            if self.open and not self._broken:
                self._left, self._plane = self._plane or self._left, None
        self.cut()
        with self._lock:
            self.open, self._plane = False, None
        if dist.is_initialized():
            left, self._gloo = [dist.group.WORLD, self._gloo], None
            with contextlib.suppress(RuntimeError, ValueError):  # a half-formed group refuses, and is dropped as well
                dist.destroy_process_group()
            works, self._works = self._works, []
            threading.Thread(target=_bury, args=(left, works), name="bury", daemon=True).start()
        if self._sums:
            sums, self._sums = self._sums, []
            threading.Thread(target=_outlast, args=(sums,), name="outlast", daemon=True).start()
        # torch names groups by a count that a failed init leaves raised; members must agree on the name.
        distributed_c10d._world.group_count = 0


_Formed = tuple[ProcessGroupGloo, PrefixStore, Plane | None]
_Outcome = _Formed | Exception


class _PlaneError(RuntimeError):
    """The members are connected over gloo, and not over the plane."""


def _connected(
    store: str, generation: int, rank: int, size: int, patience: timedelta, connect: Connect | None
) -> _Formed:
    """A gloo group whose members are all connected, its part of the store, and their plane. Raises RuntimeError."""
    host, _, port = store.rpartition(":")
    _check_open(host, int(port))
    client = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=patience)
    named = PrefixStore(f"generation-{generation}", client)
    group = ProcessGroupGloo(named, rank, size, timeout=patience)
    group._set_default_timeout(timedelta(seconds=RUN_TIMEOUT_S))
    if connect is None:
        return group, named, None
    try:  # a peer that dies meanwhile brings a cut, and nobody waits for this any more
        return group, named, connect(PrefixStore("plane", named), rank, size, timedelta(seconds=START_TIMEOUT_S))
    except TruelineError:
        raise
    except Exception as error:
        raise _PlaneError(f"{type(error).__name__}: {error}") from error


def _check_open(host: str, port: int) -> None:
    """Raises RuntimeError when nobody listens: a TCPStore client would try again until its timeout.

    Members listen before they are in a view, so a refused connection means that rank 0 is dead.
    """
    try:
        with socket.create_connection((host, port), timeout=FORM_TIMEOUT_S):
            return
    except OSError as error:
        raise RuntimeError(f"gloo: the rendezvous store at {host}:{port} is gone: {error}") from error


def _bury(groups: list[Any], works: list[Any]) -> None:
    """Drops a group once none of its operations is under way; its destructor waits for them, and for its threads."""
    for work in works:
        with contextlib.suppress(RuntimeError):  # failed, as was to be expected of a group that was left
            work.wait()
    groups.clear()


def _outlast(sums: list[Sum]) -> None:
    """Keeps what was being summed until an aborted plane writes into it no more: its memory must not be given away."""
    for one in sums:
        with contextlib.suppress(RuntimeError):  # failed: that is an end as well
            while not one.over():
                time.sleep(0.01)


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
