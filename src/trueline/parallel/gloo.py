"""The gloo process group of one generation, and how to abort it.

gloo cannot abort a collective: a member that waits for a dead peer waits for the whole timeout. `cut` therefore shuts
down the group's sockets, and every pending operation fails at once with a RuntimeError in the thread that waits.
docs/concepts/generation.md, "Why gloo is cut through its sockets", lists the pitfalls; each of them once cost a stall.
Only host memory is exchanged: tensors on a device are copied by the caller, or summed by the plane (`backend.py`),
which is formed, cut and left with the group. Linux only (/proc/self/fd).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.distributed import distributed_c10d

from trueline import events
from trueline.errors import TrainError, TruelineError
from trueline.parallel import by_host, gloo_sockets, mesh
from trueline.parallel.backend import Connect, Plane, Sum
from trueline.parallel.exchange import Overtaken
from trueline.parallel.group_sockets import GroupSockets
from trueline.parallel.local_sums import LocalSums
from trueline.parallel.store import PeerStore

_SLICE = timedelta(milliseconds=20)
"""How long a wait lasts before it checks for a cut that gloo has not noticed; a check costs 0.2 ms of CPU. A callback
would notice at once, and cost each step 0.1 ms of waiting for the interpreter lock."""
FORM_TIMEOUT_S = 2.0
"""For forming a group: doubled by each failed attempt, up to START_TIMEOUT_S, until a group has formed."""
RUN_TIMEOUT_S = 600.0
START_TIMEOUT_S = 30.0
_LOOK_S = 20e-6  # between two checks of a plane's sum
_EXIT_S = 5.0
"""How long the end of the process waits for groups to be dropped."""
PLANE_TRIES = 5  # after this many planes in a row that did not form while gloo did, the job ends
_BACKEND = "trueline_gloo"
_formed: dict[str, ProcessGroupGloo] = {}
"""The group that `init_process_group` is about to take, by backend name: torch accepts no ready-made group."""


_DEVICES = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]
"""DDP agrees on its buckets after the first step, in a small broadcast on the device of the parameters."""
dist.Backend.register_backend(_BACKEND, lambda *_: _formed.pop(_BACKEND), devices=_DEVICES)


class GlooGroup:
    """The group that this process is in, if any. `cut` may be called from any thread, all else from one."""

    def __init__(self, connect: Connect | None = None) -> None:
        """`connect`: makes the plane that sums tensors on the members' devices; None: they have none."""
        self._connect = connect
        self._plane: Plane | None = None
        self._left_plane: Plane | None = None
        """The plane of the group that was left between two steps: a slower peer may still be reading from it."""
        self._misses = self._plane_misses = 0
        self._sums: list[Sum] = []  # the plane's sums that may be pending
        self.generation = -1
        self.open = self._broken = False
        self._cut_below = 0  # generations below this were cut, also those that had not formed yet
        self._sockets = GroupSockets()
        self._lock = threading.Lock()
        self._outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        """The group that is being formed, or why it was not."""
        self._works: list[Any] = []  # operations that may be pending
        self._gloo: ProcessGroupGloo | None = None
        """The backend of torch's default group: called directly, it begins an operation in half the time."""
        self._host_sums: by_host.HostSums | LocalSums | None = None
        """Sums over members that read each other's memory."""

    def can_sum(self, value: torch.Tensor) -> bool:
        """Whether `value` can be summed without a copy to host memory."""
        return value.is_cpu or self._plane is not None

    def sum_bucket(self, value: torch.Tensor) -> Any:
        """Begins the sum of `value`, for which `can_sum` is true, over the members; returns it for `wait_bucket`. gloo
        sums sparse ones, which have no one place in memory."""
        if self._plane is None and self._host_sums is not None and not value.is_sparse:
            return self._track(self._host_sums.sum(value))
        if self._plane is None:
            return self.sum_on_host(value)
        self._sums.append(self._plane.sum(value))
        return self._sums[-1]

    def sum_rows(
        self, rows: torch.Tensor, counts: Sequence[int], order: Sequence[int], into: torch.Tensor
    ) -> Any | None:
        """Begins `LocalSums.sum_rows`; returns it for `wait`. None where members do not read each other's memory."""
        if isinstance(self._host_sums, LocalSums):
            return self._track(self._host_sums.sum_rows(rows, counts, order, into))
        return None

    def wait_bucket(self, pending: Any) -> None:
        """As `wait`, for a sum of `sum_bucket`. A failed sum leaves its tensor undefined."""
        if self._plane is None:
            self.wait(pending)
            return
        try:
            while not pending.over() and not self._broken:
                time.sleep(_LOOK_S)
        except RuntimeError as error:
            raise dist.DistBackendError(f"the plane failed: {error}") from error
        if self._broken:  # checked after the sum was over: an aborted sum looks the same
            raise dist.DistBackendError("the plane was aborted: the group was cut")
        self._sums.remove(pending)

    def sum_on_host(self, value: torch.Tensor) -> Any:
        """Begins the sum of `value`, which lies in host memory, over the members; returns the operation for `wait`."""
        assert self._gloo is not None
        return self._track(self._gloo.allreduce([value]))  # type: ignore[attr-defined]  # its stub lacks it

    def _track(self, work: Any) -> Any:
        self._works = [other for other in self._works if not other.is_completed()]
        self._works.append(work)
        return work

    def check(self) -> None:
        """Raises Overtaken when the group was cut."""
        if self._broken:
            raise Overtaken("gloo: the group was cut")

    def wait(self, work: Any) -> None:
        """Waits for `work`, an asynchronous operation of this group. Raises RuntimeError when it fails or is cut."""
        if work not in self._works:
            self._track(work)
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:  # the slice has ended, or the operation has failed
                if work.is_completed():
                    break
                if self._broken:
                    raise RuntimeError("gloo: the group was cut") from None
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"gloo: {'the group was cut: ' if self._broken else ''}{error}") from error

    def call(self, collective: Callable[[], object]) -> None:
        """Runs `collective`, which waits inside torch, in a thread. Raises RuntimeError when it fails or is cut."""
        ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                collective()
            except Exception as error:  # noqa: BLE001  the caller raises it
                ends.put(error)
            else:
                ends.put(None)

        threading.Thread(target=run, name="collective", daemon=True).start()
        while True:
            try:
                error = ends.get(timeout=_SLICE.total_seconds())
            except queue.Empty:
                if self._broken:
                    raise RuntimeError("gloo: the group was cut") from None
                continue
            if error is not None:
                raise RuntimeError(f"gloo: {error}") from error
            return

    def form(self, generation: int, *, rank: int, size: int, store: str) -> None:
        """Joins the group of `generation` as `rank` of `size`. Raises RuntimeError when it cannot be formed."""
        self.close()
        if os.environ.get("TRUELINE_HOST", "127.0.0.1") == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("GLOO_LOG_LEVEL", "WARN")  # else some builds greet each peer on the user's terminal
        with self._lock:
            sockets = self._sockets = GroupSockets()
            self.generation = generation
            self.open, self._broken = True, False
            outcomes = self._outcomes = queue.SimpleQueue[_Outcome]()
        if generation < self._cut_below:  # the cut came first
            raise RuntimeError(f"gloo: generation {generation} was cut before it was formed")
        patience = timedelta(seconds=self.patience_s)
        self._misses += 1

        def connect() -> None:
            try:
                formed = _connect_members(store, generation, rank, size, patience, self._connect, sockets)
                _, _, plane, host_sums = formed
                with self._lock:
                    late = not self.open or self._broken or self.generation != generation
                    if not late:
                        self._plane, self._host_sums = plane, host_sums
                        outcomes.put(formed)
                if late:
                    for ended in (plane.abort if plane else None, host_sums.close if host_sums else None):
                        if ended is not None:
                            ended()
            except Exception as error:  # noqa: BLE001  `form` raises it; without an outcome it would wait forever
                outcomes.put(error)

        threading.Thread(target=connect, name="form", daemon=True).start()
        outcome = outcomes.get()
        if isinstance(outcome, _PlaneError):
            self._count_plane_miss(outcome)
        if isinstance(outcome, TruelineError):
            raise outcome
        if isinstance(outcome, Exception):
            raise RuntimeError(f"gloo: generation {generation} was not formed: {outcome}") from outcome
        _formed[_BACKEND], named, *_ = outcome
        run_timeout = timedelta(seconds=RUN_TIMEOUT_S)
        dist.init_process_group(_BACKEND, store=named, rank=rank, world_size=size, timeout=run_timeout)
        self._gloo, self._misses, self._plane_misses = outcome[0], 0, 0
        left, self._left_plane = self._left_plane, None
        if left is not None:
            left.abort()  # all members are in this group now

    def _count_plane_miss(self, error: _PlaneError) -> None:
        """Raises TrainError after more misses than dead peers can cause."""
        self._plane_misses += 1
        if self._plane_misses >= PLANE_TRIES:
            raise TrainError(
                f"workers could not connect over their backend {PLANE_TRIES} times in a row: {error}",
                hint="leave --backend out: gradients go over gloo then; for NCCL, NCCL_DEBUG=INFO says more",
            ) from error

    @property
    def patience_s(self) -> float:
        """How long the next attempt to form a group may take: a slow machine gets more time with each."""
        return min(FORM_TIMEOUT_S * 2.0 ** min(self._misses, 8), START_TIMEOUT_S)

    def cut(self) -> int:
        """Shuts down the group's sockets, which fails its pending operations; returns how many were shut."""
        with self._lock:
            if not self.open:
                return 0
            if self._host_sums is not None:
                self._host_sums.close()  # first: a thread that finds the group broken may change a bucket
            self._broken = True
            shut = self._sockets.cut()
            self._outcomes.put(RuntimeError("it was cut"))
            plane = self._plane
        if plane is not None:
            plane.abort()  # after `_broken` is set
        return shut

    def cut_until_left(self, below: int) -> None:
        """Cuts until this process has left groups older than generation `below`; none of them will form later."""
        self._cut_below = max(self._cut_below, below)
        while self.open and self.generation < below:
            self.cut()
            time.sleep(0.003)  # sockets may still appear; the owner leaves when a call fails

    def close(self) -> None:
        """Leaves the group; operations that peers have pending with this process fail."""
        with self._lock:
            if self.open and not self._broken:
                self._left_plane, self._plane = self._plane or self._left_plane, None
        self.cut()
        with self._lock:
            self.open, self._plane, self._host_sums = False, None, None
        if dist.is_initialized():
            left, self._gloo = [dist.group.WORLD, self._gloo], None
            with contextlib.suppress(RuntimeError, ValueError):  # a half-formed group; it is dropped as well
                dist.destroy_process_group()
            works, self._works = self._works, []
            dropping = threading.Thread(target=_drop_group, args=(left, works), name="drop-group", daemon=True)
            _dropping.add(dropping)
            dropping.start()
        if self._sums:
            sums, self._sums = self._sums, []
            threading.Thread(target=_wait_for_sums, args=(sums,), name="outlast", daemon=True).start()
        # torch names groups by a process-wide count that a failed init leaves raised; members must agree on the name.
        distributed_c10d._world.group_count = 0


_Formed = tuple[ProcessGroupGloo, PrefixStore, Plane | None, by_host.HostSums | LocalSums | None]
_Outcome = _Formed | Exception


class _PlaneError(RuntimeError):
    """The members are connected over gloo, but not over the plane."""


def _connect_members(
    store: str,
    generation: int,
    rank: int,
    size: int,
    patience: timedelta,
    connect: Connect | None,
    sockets: GroupSockets,
) -> _Formed:
    """Connects the members; returns the gloo group, its part of the store, and the plane. Raises RuntimeError."""
    peers = PeerStore(store, generation, rank, patience, sockets.add)
    try:
        peers.open()
        named = PrefixStore("gloo", peers)
        if lack := gloo_sockets.find_lack():
            events.emit("gloo.unproven", why=lack)
            with sockets.watch():
                group = ProcessGroupGloo(named, rank, size, timeout=patience)
            sums = (
                None if connect else by_host.open_sums(functools.partial(by_host.gather, group, rank, size), rank, size)
            )
        else:
            links = mesh.meet(peers, generation, rank, size, patience.total_seconds(), sockets.add)
            over = functools.partial(mesh.exchange, links, patience.total_seconds())
            sums = None if connect else by_host.open_sums(over, rank, size)
            group = gloo_sockets.form(links, rank, size, patience)
        if isinstance(sums, by_host.HostSums):
            sums.group = group
        group._set_default_timeout(timedelta(seconds=RUN_TIMEOUT_S))
        if connect is None:
            return group, named, None, sums
        try:  # if a peer dies meanwhile, a cut ends the wait for this
            with sockets.watch():
                plane = connect(PrefixStore("plane", peers), rank, size, timedelta(seconds=START_TIMEOUT_S))
            return group, named, plane, None
        except TruelineError:
            raise
        except Exception as error:
            raise _PlaneError(f"{type(error).__name__}: {error}") from error
    finally:
        peers.release()


_dropping = weakref.WeakSet[threading.Thread]()


def _drop_group(groups: list[Any], works: list[Any]) -> None:
    """Drops a group after its operations have ended; its destructor waits for them, and for its threads."""
    for work in works:
        with contextlib.suppress(RuntimeError):  # expected: the group was left
            work.wait()
    groups.clear()


@atexit.register
def _wait_dropped() -> None:
    """Lets groups be dropped before the interpreter ends. Python ends a thread that returns from C++ after that, which
    in a destructor of gloo's ends the process with SIGABRT."""
    until = time.monotonic() + _EXIT_S
    for dropping in list(_dropping):
        dropping.join(max(0.0, until - time.monotonic()))


def _wait_for_sums(sums: list[Sum]) -> None:
    """Keeps the summed tensors alive while an aborted plane may still write into their memory."""
    for pending in sums:
        with contextlib.suppress(RuntimeError):  # failed, and so over
            while not pending.over():
                time.sleep(0.01)
