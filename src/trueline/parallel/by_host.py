"""Sums over members on several hosts: inside each host first, then once between the hosts.

    members of a host ──read, add──▶ shard i at member i ──link, i to i──▶ shard i of all ──read──▶ members

Between two hosts one gradient passes in each direction, where a ring over all members passes nearly two. Members of a
host read each other's buckets where they lie (`peer_memory.py`); all messages go over the group's own connections, so
that a cut ends every wait. Before a member's bucket may change, it takes back its mark: a peer that reads the mark
after the bucket knows that what it has read was whole.
"""

import concurrent.futures
import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import msgspec
import torch

from trueline.parallel.local_sums import MOST_MEMBERS, SMALL, LocalMember, LocalSums, MessagePipe
from trueline.parallel.peer_memory import REFUSED, HostMemories, PeerMemory, let_siblings_read

ONE_HOST = "127.0.0.1"
CHUNK = 2 << 20
"""Numbers of a bucket that are summed as one; several are under way at once, so that the link is busy."""
LINKS = 3
"""Parts that are between the hosts at once."""
_ROW = 255
_MARK = torch.zeros(16, dtype=torch.uint8)
"""Of the group that this process is in; zeros: nothing here may be read."""
_marking = threading.Lock()
_TAGS = 1 << 28


def own_host() -> str:
    return os.environ.get("TRUELINE_HOST", ONE_HOST)


Exchange = Callable[[bytes], dict[int, bytes]]
"""Sends bytes to all other members; returns theirs by rank."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a member is, as it tells the others."""

    host: str
    pid: int
    mark: bytes
    mark_at: int
    inbox: tuple[int, int]

    @property
    def memory(self) -> PeerMemory:
        return PeerMemory(self.pid, self.mark.hex(), self.mark_at, [])


class HostSum:
    """A pending sum, with the two methods of torch's Work that a `GlooGroup` uses."""

    def __init__(self, parts: list[Future[None]]) -> None:
        self._parts = parts

    def is_completed(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raises RuntimeError when the sum failed, or is not over in time."""
        until = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for part in self._parts:
            try:
                part.result(None if until is None else max(0.0, until - time.monotonic()))
            except TimeoutError as error:
                raise RuntimeError("gloo: the sum is not over") from error
            except concurrent.futures.CancelledError as error:
                raise RuntimeError("gloo: the group was left") from error


class HostSums:
    """Sums of one group. `hosts`: the ranks on each, in the same order in all members."""

    def __init__(self, rank: int, places: Sequence[Place], hosts: list[list[int]]) -> None:
        self._rank, self._places, self._hosts = rank, places, hosts
        self.group: Any = None
        """Of gloo, set before the first sum: it sends between the hosts, and messages inside them."""
        self._memories = HostMemories({other: places[other].memory for host in hosts if rank in host for other in host})
        self._own = next(host for host in hosts if rank in host)
        self._mine = self._own.index(rank)
        self._others = [other for other in self._own if other != rank]
        self._shards = min(map(len, hosts))
        self._numbers = itertools.count()
        adding, linking, filling = (
            concurrent.futures.ThreadPoolExecutor(threads, f"by-host-{stage}")
            for stage, threads in (("add", 1), ("link", LINKS), ("fill", 1))
        )
        self._adding, self._linking, self._filling = adding, linking, filling

    def sum(self, value: torch.Tensor) -> HostSum:
        """Begins the sum of `value` [any shape, contiguous, in host memory] in place.

        All members call it in one order. Raises RuntimeError when a sum before has failed.
        """
        flat = value.view(-1)
        parts = [(flat[at : at + CHUNK], next(self._numbers)) for at in range(0, max(1, len(flat)), CHUNK)]
        try:
            return HostSum([self._begin(part, 4 * number % _TAGS) for part, number in parts])
        except RuntimeError as error:
            raise RuntimeError(f"gloo: the group was left: {error}") from error

    def close(self) -> None:
        """Takes the mark back: nothing of this process is read for this group from now on."""
        _withdraw(self._places[self._rank].mark)
        for stage in (self._adding, self._linking, self._filling):
            stage.shutdown(wait=False, cancel_futures=True)

    def _begin(self, flat: torch.Tensor, tag: int) -> Future[None]:
        """One part of a sum in its three stages. Each stage takes the parts in one order in all members: two that begin
        with different parts would wait for each other."""
        shards = self._shards if len(flat) >= SMALL else 1
        bounds = [len(flat) * shard // shards for shard in range(shards + 1)]
        added = self._adding.submit(self._run, self._add_here, flat, bounds, tag)
        linked = self._linking.submit(self._run, self._sum_after, added, flat, bounds, tag + 1)
        return self._filling.submit(self._run, self._fill_after, added, linked, flat, bounds, tag + 2)

    def _run(self, stage: Callable[..., Any], *of: Any) -> Any:
        try:
            return stage(*of)
        except BaseException as error:
            self.close()  # before anyone may change the bucket
            if isinstance(error, concurrent.futures.CancelledError):
                raise RuntimeError("gloo: the group was left") from error
            raise

    def _add_here(self, flat: torch.Tensor, bounds: list[int], tag: int) -> dict[int, int]:
        """Adds what the members of this host have for the own shard. Returns where their parts lie."""
        at = self._tell(self._others, self._others, tag, flat.data_ptr())
        if self._mine < len(bounds) - 1:
            own = flat[bounds[self._mine] : bounds[self._mine + 1]]
            first = bounds[self._mine] * flat.element_size()
            self._memories.add(own, {other: at[other] + first for other in self._others})
        return at

    def _sum_after(self, added: Future[dict[int, int]], flat: torch.Tensor, bounds: list[int], tag: int) -> None:
        added.result()
        if self._mine < len(bounds) - 1:
            own = flat[bounds[self._mine] : bounds[self._mine + 1]]
            self._sum_between(own, [host[self._mine] for host in self._hosts], tag)

    def _fill_after(
        self, added: Future[dict[int, int]], linked: Future[None], flat: torch.Tensor, bounds: list[int], tag: int
    ) -> None:
        """Reads the other shards from their owners, and waits until all have read the own one."""
        at, _ = added.result(), linked.result()
        is_owner = self._mine < len(bounds) - 1
        shards = [(owner, shard) for shard, owner in enumerate(self._own[: len(bounds) - 1]) if owner != self._rank]
        owners = [owner for owner, _ in shards]
        self._tell(self._others if is_owner else [], owners, tag)
        for owner, shard in shards:
            from_owner = at[owner] + bounds[shard] * flat.element_size()
            self._memories.fill(flat[bounds[shard] : bounds[shard + 1]], owner, from_owner)
        self._tell(owners, self._others if is_owner else [], tag + 1)

    def _sum_between(self, own: torch.Tensor, members: list[int], tag: int) -> None:
        """Sums `own` over `members`, one on each host: each adds its piece in the order of the hosts."""
        here, others = members.index(self._rank), [member for member in members if member != self._rank]
        pieces = torch.tensor_split(own, len(members))
        parts = {member: torch.empty_like(pieces[here]) for member in others}
        self._exchange({member: pieces[members.index(member)] for member in others}, parts, tag)
        for member in others:
            pieces[here].add_(parts[member])
        sums = {member: pieces[members.index(member)] for member in others}
        # A tag of its own: the peer may be one exchange ahead.
        self._exchange(dict.fromkeys(others, pieces[here]), sums, tag + _TAGS)

    def _tell(self, to: Sequence[int], by: Sequence[int], tag: int, word: int = 0) -> dict[int, int]:
        """Sends a number to members of this host, and receives theirs."""
        words = {member: torch.zeros(1, dtype=torch.int64) for member in by}
        self._exchange(dict.fromkeys(to, torch.tensor([word])), words, tag)
        return {member: int(received) for member, received in words.items()}

    def _exchange(self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor], tag: int) -> None:
        works = [self.group.recv([tensor], member, tag) for member, tensor in received.items() if len(tensor)]
        works += [self.group.send([tensor], member, tag) for member, tensor in sent.items() if len(tensor)]
        for work in works:
            work.wait()


def _withdraw(mark: bytes) -> None:
    """Takes `mark` back, if it is still that of this process: nothing here is read for its group from now on."""
    with _marking:
        if bytes(_MARK.numpy()) == mark:
            _MARK.zero_()


def gather(group: Any, rank: int, size: int, row: bytes) -> dict[int, bytes]:
    """An `Exchange` over `group`, where the members have no connections of their own."""
    own = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    rows = [torch.empty_like(own) for _ in range(size)]
    group.allgather([rows], [own]).wait()
    return {other: bytes(found.numpy()) for other, found in enumerate(rows) if other != rank}


def open_sums(exchange: Exchange, rank: int, size: int) -> HostSums | LocalSums | None:
    """None where a sum over all at once is as good: with one member on each host, or where the kernel refuses to read
    a peer's memory. All members call it, and get the same kind. `exchange` may raise RuntimeError or OSError.
    """
    if size < 2:
        return None
    let_siblings_read()
    mark, inbox = secrets.token_bytes(16), MessagePipe()
    with _marking:
        _MARK.copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
    place = msgspec.msgpack.encode(Place(own_host(), os.getpid(), mark, _MARK.data_ptr(), inbox.place))
    own = (bytes([len(place)]) + place).ljust(_ROW + 1, b"\0")
    rows = exchange(own) | {rank: own}
    places = [msgspec.msgpack.decode(row[1 : 1 + row[0]], type=Place) for _, row in sorted(rows.items())]
    by_host: dict[str, list[int]] = {}
    for other, there in enumerate(places):
        by_host.setdefault(there.host, []).append(other)
    if max(map(len, by_host.values())) < 2 or (len(by_host) == 1 and size > MOST_MEMBERS):
        return None
    here = {other: places[other] for other in by_host[own_host()]}
    sums: HostSums | LocalSums | None = None
    if not REFUSED.is_set() and all(there.memory.is_marked() for there in here.values()):
        if len(by_host) > 1:
            sums = HostSums(rank, places, list(by_host.values()))
        else:
            peers = {other: LocalMember(there.memory, there.inbox) for other, there in here.items() if other != rank}
            with contextlib.suppress(OSError):  # the kernel refuses it, or a peer is gone
                sums = LocalSums(rank, inbox, peers, lambda: _withdraw(mark))
    able = [row[0] for row in exchange(bytes([sums is not None])).values()]
    if sums is not None and not all(able):
        sums.close()
        return None
    return sums
