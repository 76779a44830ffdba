"""Sums over members of one host, which read each other's buckets where they lie.

    members ──begun, address──▶ all      member i reads shard i of all others and adds it to its own
    member i ──summed──▶ all             members read shard i from member i
    members ──read──▶ owners of shards   buckets may change

Bytes are copied once between two processes, where gloo's loopback takes three copies and threads on both sides. A
message is 24 bytes in the receiver's pipe, which the others open by its number in /proc. Source: proc(5), pipe(7),
pidfd_open(2). The thread that waits for a sum does its work; a thread beside the backward does that of earlier buckets.
"""

import contextlib
import fcntl
import os
import queue
import select
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch

from trueline.parallel.peer_memory import GONE, HostMemories, PeerMemory

SMALL = 8 << 10
"""Fewer numbers are not worth a shard for each member."""
MOST_MEMBERS = 32
"""More are not served: each sends to each other one."""
PROMPT = 512 << 10
"""Sums of at most this many numbers get on in the thread that begins them; larger ones would stop its backward."""
_MESSAGE = struct.Struct("=iiqq")
"""Kind, rank of the sender, number of the sum, address."""
_BEGUN, _SUMMED, _READ, _LEFT = range(4)
_READ_BYTES = _MESSAGE.size << 11
_PIPE_BYTES, _SET_PIPE_BYTES = 1 << 20, 1031
"""Of an inbox, where the kernel allows it; F_SETPIPE_SZ, fcntl(2)."""
_FULL_S = 0.02


class MessagePipe:
    """The pipe into which the other members of the host write."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(OSError):  # its usual size serves, too
            _set_pipe_size(self.writes)
        self.place = self.reads, os.fstat(self.reads).st_ino
        """Its number in this process, and its inode."""
        weakref.finalize(self, _close_all, [self.reads, self.writes])


class LocalMember(NamedTuple):
    """Another member of the host, as it tells of itself."""

    memory: PeerMemory
    inbox: tuple[int, int]
    """`MessagePipe.place` in that process."""

    def open_inbox(self) -> int:
        """The descriptor for messages to it. Raises OSError: the kernel refuses it, or that member has closed its pipe
        since, whose number another file may have by now."""
        number, inode = self.inbox
        outbox = os.open(
            f"/proc/{self.memory.pid}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        )
        status = os.fstat(outbox)
        if stat.S_ISFIFO(status.st_mode) and status.st_ino == inode:
            return outbox
        os.close(outbox)
        raise ConnectionError("a member on this host has closed its pipe")


class LocalSum:
    """A pending sum, with the two methods of torch's Work that a `GlooGroup` uses."""

    def __init__(self, sums: "LocalSums", number: int, flat: torch.Tensor, owners: Sequence[int]) -> None:
        self._sums, self.number, self.flat = sums, number, flat
        self.address = flat.data_ptr()
        """Where the others find what this member adds."""
        self.bounds = [len(flat) * shard // len(owners) for shard in range(len(owners) + 1)]
        self.owners = owners
        """Of each shard, the member that adds it."""
        self.begun: dict[int, int] = {}
        """Of the others that have begun, where the sum lies in their memory."""
        self.unread = {owner for owner in owners if owner != sums.rank}
        """Owners whose shard this member has not read yet."""
        self.readers = set(sums.others) if sums.rank in owners else set[int]()
        """Members that have not said that they have read the own shard."""
        self.added = self.done = False

    def is_completed(self) -> bool:
        return self.done or bool(self._sums.failure)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raises RuntimeError when the sum failed, or is not over in time."""
        self._sums.advance(self, None if timeout is None else time.monotonic() + timeout.total_seconds())

    def shard(self, owner: int) -> tuple[torch.Tensor, int]:
        """The shard of `owner`, and where it begins in bytes."""
        first, end = self.bounds[(at := self.owners.index(owner))], self.bounds[at + 1]
        return self.flat[first:end], first * self.flat.element_size()

    def add(self, memories: HostMemories, rank: int) -> None:
        """Adds the shards of all members to that of this one, its owner. Raises RuntimeError when one has left."""
        own, first = self.shard(rank)
        memories.add(own, {other: at + first for other, at in sorted(self.begun.items())})

    def needs(self, member: int) -> bool:
        """Whether something of `member` is missing."""
        return not self.done and (member not in self.begun or member in self.unread or member in self.readers)


class LocalRowSum(LocalSum):
    """A pending sum of rows, one after another: its bits are those of that order, on whichever members the rows lie.

    `rows`: [members, counts[rank], width] those of this member, shard by shard. `order`: the ranks in that of their
    rows.
    """

    def __init__(
        self, sums: "LocalSums", number: int, flat: torch.Tensor, rows: torch.Tensor,
        counts: Sequence[int], order: Sequence[int],
    ) -> None:  # fmt: skip
        super().__init__(sums, number, flat, range(len(counts)))
        self.address, self._rows, self._counts, self._order = rows.data_ptr(), rows, counts, order

    def add(self, memories: HostMemories, rank: int) -> None:
        own, _ = self.shard(rank)
        places = [(member, row) for member in self._order for row in range(self._counts[member])]
        if not places:
            own.zero_()
        for number, (member, row) in enumerate(places):
            first = (rank * self._counts[member] + row) * len(own)
            if member == rank:
                mine = self._rows.view(-1)[first : first + len(own)]
                own.add_(mine) if number else own.copy_(mine)
                continue
            at = self.begun[member] + first * own.element_size()
            memories.add(own, {member: at}) if number else memories.fill(own, member, at)


_Begun = TypeVar("_Begun", bound=LocalSum)


class LocalSums:
    """Sums of one group. All members begin them in one order. Raises OSError when a peer's pipe cannot be opened.

    `withdraw` takes the mark of this process back: nothing of its memory counts for this group from then on.
    """

    def __init__(
        self, rank: int, inbox: MessagePipe, peers: dict[int, LocalMember], withdraw: Callable[[], None]
    ) -> None:
        self.rank, self._inbox, self._withdraw = rank, inbox, withdraw
        self.others = sorted(peers)
        self.failure = ""
        """Why sums fail."""
        self._memories = HostMemories({other: peer.memory for other, peer in peers.items()})
        self._outboxes, self._ends, opened = dict[int, int](), dict[int, int](), list[int]()
        weakref.finalize(self, _close_all, opened)
        self._poll = select.poll()
        self._poll.register(inbox.reads, select.POLLIN)
        for other, peer in peers.items():
            self._outboxes[other] = peer.open_inbox()
            opened.append(self._outboxes[other])
            end = os.pidfd_open(peer.memory.pid)
            opened.append(end)
            self._ends[end] = other
            self._poll.register(end, select.POLLIN)
        self._gone = set[int]()
        self._number = 0
        self._change = threading.Condition()
        """Guards what follows, and the sums' own sets."""
        self._pending: dict[int, LocalSum] = {}
        self._early: dict[int, dict[int, int]] = {}
        """What others have begun and this member has not: number -> member -> address."""
        self._polling = False
        """Whether a thread reads the messages."""
        self._earlier: queue.SimpleQueue[LocalSum | None] | None = None
        """Sums for the thread beside the backward, which starts with the second sum that is pending."""
        self._last: LocalSum | None = None

    def sum(self, value: torch.Tensor) -> LocalSum:
        """Begins the sum of `value` [any shape, contiguous, in host memory] in place. Raises RuntimeError when a sum
        before has failed."""
        self._expect_open()
        flat = value.view(-1)
        members = sorted([self.rank, *self.others])
        owners = members if len(flat) >= SMALL else members[:1]
        return self._begin(LocalSum(self, self._number, flat, owners))

    def sum_rows(
        self, rows: torch.Tensor, counts: Sequence[int], order: Sequence[int], into: torch.Tensor
    ) -> LocalRowSum:
        """Begins the ordered sum of all members' rows (`LocalRowSum`), `into` [members * width]. `rows` may change once
        it is over. Raises RuntimeError when a sum before has failed."""
        self._expect_open()
        return self._begin(LocalRowSum(self, self._number, into, rows, counts, order))

    def _begin(self, one: _Begun) -> _Begun:
        before, self._last = self._last, one
        with self._change:
            self._number += 1
            one.begun = self._early.pop(one.number, {})
            self._pending[one.number] = one
        self._send(self.others, _BEGUN, one.number, one.address)
        if before is not None and not before.done:
            self._hand_over(before)
        if len(one.flat) <= PROMPT:
            self.advance(one, None, patient=False)
        return one

    def close(self) -> None:
        """Ends the sums: what is pending fails, here and at the peers that need this member."""
        self._fail("gloo: the group was left")

    def _fail(self, why: str) -> None:
        self._withdraw()  # before the caller may change a bucket
        with self._change:
            first, self.failure = not self.failure, self.failure or why
            self._last = None
            self._pending.clear()
            self._change.notify_all()
        if not first:
            return
        _write(self._inbox.writes, _MESSAGE.pack(_LEFT, self.rank, 0, 0))  # wakes the thread that polls
        for outbox in self._outboxes.values():
            _write(outbox, _MESSAGE.pack(_LEFT, self.rank, 0, 0))
        if self._earlier is not None:
            self._earlier.put(None)

    def _expect_open(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)

    def advance(self, one: LocalSum, until: float | None, *, patient: bool = True) -> None:
        """Does what is to do for the pending sums until `one` is done or, if not `patient`, as far as messages are
        there. Raises RuntimeError when it fails, or is not done at `until` (time.monotonic)."""
        if not self._take_turn(one, until, patient=patient):
            return
        try:
            self._add_ready(one)
            while not one.done:
                self._expect_open()
                left = 0.0 if not patient else None if until is None else max(0.0, until - time.monotonic())
                if not self._read_messages(left):
                    if not patient:
                        return
                    if left is not None and time.monotonic() >= (until or 0.0):
                        raise TimeoutError
        except TimeoutError:
            raise RuntimeError("gloo: the sum is not over") from None
        except RuntimeError as error:
            self._fail(str(error))
            raise
        finally:
            with self._change:
                self._polling = False
                self._change.notify_all()

    def _take_turn(self, one: LocalSum, until: float | None, *, patient: bool) -> bool:
        """Whether this thread is the one to read messages; False when `one` is done without, or another reads them."""
        with self._change:
            while not one.done:
                self._expect_open()
                if not self._polling:
                    self._polling = True
                    return True
                if not patient:
                    return False
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise RuntimeError("gloo: the sum is not over")
                self._change.wait(left)
        return False

    def _read_messages(self, timeout_s: float | None) -> bool:
        """Acts on the messages that are there; False if there are none within `timeout_s`."""
        found = self._poll.poll(None if timeout_s is None else 1e3 * timeout_s)
        with contextlib.suppress(BlockingIOError):  # what a member has written before its end counts
            for message in _MESSAGE.iter_unpack(os.read(self._inbox.reads, _READ_BYTES)):
                self._take(*message)
        for number, _ in found:
            if number in self._ends:
                self._poll.unregister(number)
                self._lose(self._ends[number])
        return bool(found)

    def _lose(self, member: int) -> None:
        """Fails what needs a member that has left, or whose process has ended."""
        with self._change:
            self._gone.add(member)
            lost = [one for one in self._pending.values() if one.needs(member)]
        if lost:
            raise RuntimeError(GONE)

    def _take(self, kind: int, member: int, number: int, address: int) -> None:
        if member == self.rank:  # `close` wakes this thread
            self._expect_open()
            return
        if kind == _LEFT:
            self._lose(member)
            return
        with self._change:
            one = self._pending.get(number)
            if one is None:
                self._early.setdefault(number, {})[member] = address
                return
            if kind == _BEGUN:
                one.begun[member] = address
            elif kind == _READ:
                one.readers.discard(member)
        if kind == _SUMMED:
            self._fill(one, member, address)
        self._add_ready(one)
        self._end_ready(one)

    def _add_ready(self, one: LocalSum) -> None:
        """Adds the own shard once all have begun."""
        with self._change:
            if one.added or len(one.begun) < len(self.others):
                gone = [member for member in self._gone if one.needs(member)]
                if gone and not one.added:
                    raise RuntimeError(GONE)
                return
            one.added = True
        if self.rank in one.owners:
            one.add(self._memories, self.rank)
            self._send(self.others, _SUMMED, one.number, one.flat.data_ptr())
            self._end_ready(one)

    def _fill(self, one: LocalSum, owner: int, address: int) -> None:
        shard, first = one.shard(owner)
        self._memories.fill(shard, owner, address + first)
        self._send([owner], _READ, one.number, 0)
        with self._change:
            one.unread.discard(owner)

    def _end_ready(self, one: LocalSum) -> None:
        with self._change:
            if not one.done and one.added and not one.unread and not one.readers:
                one.done = True
                self._pending.pop(one.number, None)
                self._last = None if self._last is one else self._last
                self._change.notify_all()

    def _send(self, to: Sequence[int], kind: int, number: int, address: int) -> None:
        message = _MESSAGE.pack(kind, self.rank, number, address)
        for member in to:
            while not _write(self._outboxes[member], message):
                self._expect_open()
                select.select([], [self._outboxes[member]], [], _FULL_S)

    def _hand_over(self, one: LocalSum) -> None:
        """Has the thread beside the backward wait for `one`: a later bucket has begun."""
        if self._earlier is None:
            self._earlier = queue.SimpleQueue()
            threading.Thread(target=_wait_for_all, args=(self._earlier,), name="local-sums", daemon=True).start()
        self._earlier.put(one)


def _wait_for_all(sums: "queue.SimpleQueue[LocalSum | None]") -> None:
    while (one := sums.get()) is not None:
        try:
            one.wait()
        except RuntimeError:
            return  # the thread of the step meets the same error
        del one


def _write(pipe: int, message: bytes) -> bool:
    """Whether there was room; a reader that is gone takes everything."""
    try:
        os.write(pipe, message)
    except BlockingIOError:
        return False
    except BrokenPipeError:
        return True
    return True


def _set_pipe_size(pipe: int) -> None:
    fcntl.fcntl(pipe, _SET_PIPE_BYTES, _PIPE_BYTES)


def _close_all(numbers: list[int]) -> None:
    for number in numbers:
        os.close(number)
