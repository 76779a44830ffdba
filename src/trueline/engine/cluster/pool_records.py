"""What a pool of lent hosts has in its store: the only module that knows its files.

    STORE/.pool/hosts/ID.json            a host that lends its cores, and that it lives
    .../submissions/NAME.json            what was submitted
    .../turns/00000012.json              the twelfth decision: which host starts which submission, or that none does
    .../cancels/NAME, NAME.kill          it is to end: politely, or at once
    .../ends/NAME.json                   how it ended
    .../logs/NAME.log                    its output, where the store is no folder

A turn is made once. So of two hosts that start a submission, or of a host that starts it and a client that withdraws
it, one is first; and a host decides by all turns before its own.
"""

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from trueline.engine.cluster.contract import Submission, SubmissionReport, SubmissionState
from trueline.engine.cluster.line import Waiter, find_obstacle
from trueline.storage.location import Location, join_location
from trueline.storage.shared_folder import SharedFolder

FOLDER = ".pool"
LEASE_S = 5.0
"""A host that has written nothing for so long, as who looks has seen it, is given up with all that it runs."""
STALE_S = 60.0
"""A host whose file is older by the wall clock is watched for a lease before anyone believes in it."""
KEPT_S = 86_400.0
"""How long the records of an ended submission stay."""
PYTHON = "{python}"
"""In a command: the Python of the host that runs it."""
WITHDRAWN = "cancelled while it waited"

_Record = TypeVar("_Record", bound=msgspec.Struct)


class PoolHost(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """Random: a host that comes back is another one."""
    name: str
    cores: int
    memory_mb: int = 0
    """0: unknown."""
    leaving: bool = False
    beat: int = 0
    """Grows while it lives."""
    at: float = 0.0
    """Seconds since 1970, by its own clock."""


class PoolSubmission(msgspec.Struct, frozen=True, kw_only=True):
    submission: Submission
    submitted_at: float


class PoolTurn(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    host: str = ""
    """The id of who starts it; empty: it was withdrawn."""
    node: str = ""
    """That host's name."""


class PoolEnd(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    code: int | None = None
    at: float = 0.0


class PoolView:
    """The pool as it was when `look` was called last. Its methods raise StorageError."""

    def __init__(self, store: Location, now: Callable[[], float] = time.monotonic) -> None:
        self.store, self._now = store, now
        self.files = SharedFolder(join_location(store, FOLDER))
        self.hosts: dict[str, PoolHost] = {}
        self.submissions: dict[str, PoolSubmission] = {}
        self.turns: dict[str, PoolTurn] = {}
        """By their numbers."""
        self.ends: dict[str, PoolEnd] = {}
        self.cancels: set[str] = set()
        self._heard: dict[str, tuple[int, float]] = {}
        """The last beat of each host, and when it was seen first."""
        self._looked_at = now()
        self._beating = set[str]()
        """Hosts of which more than one beat was seen."""
        self._placed: dict[str, PoolTurn] = {}

    def look(self) -> None:
        """Reads what is new. Ends come first: what has one by then has a turn, too, and its turn a host."""
        self._read("ends", self.ends, PoolEnd)
        self._read("submissions", self.submissions, PoolSubmission)
        self._read("turns", self.turns, PoolTurn)
        self._placed = {turn.name: turn for turn in self.turns.values()}
        self.cancels = self.files.names("cancels")
        hosts = dict[str, PoolHost]()
        self._read("hosts", hosts, PoolHost)
        self.hosts = hosts
        self._hear(self._now())

    def _hear(self, now: float) -> None:
        late, self._looked_at = now - self._looked_at, now
        if late > LEASE_S / 2:  # this process was stopped, or the store was away: others may have been silent for it
            self._heard = {host: (beat, at + late) for host, (beat, at) in self._heard.items()}
        for host in self.hosts.values():
            before = self._heard.get(host.id)
            if before is None or before[0] != host.beat:
                self._heard[host.id] = (host.beat, now)
                self._beating |= {host.id} if before is not None else set()

    def _read(self, folder: str, into: dict[str, _Record], kind: type[_Record]) -> None:
        listed = {file.removesuffix(".json") for file in self.files.names(folder) if file.endswith(".json")}
        for gone in into.keys() - listed:
            del into[gone]
        for name in sorted(listed - into.keys()):
            record = self.files.read_record(f"{folder}/{name}.json", kind)
            if record is not None:
                into[name] = record

    def find_turn(self, name: str) -> PoolTurn | None:
        return self._placed.get(name)

    def is_silent(self, host: str) -> bool:
        """Whether the host has left, or has written nothing for a lease."""
        return host not in self.hosts or self._now() - self._heard[host][1] > LEASE_S

    def needs_watching(self, now: float) -> bool:
        """Whether something runs on a host that may be dead since long: only its next beat tells."""
        hosts = (self.hosts.get(self._placed[name].host) for name in self.list_running())
        unsure = (host for host in hosts if host is not None and host.id not in self._beating)
        return any(now - host.at > STALE_S and not self.is_silent(host.id) for host in unsure)

    def list_running(self) -> list[str]:
        """What a host has started, without an end yet."""
        return [turn.name for turn in self._placed.values() if turn.host and turn.name not in self.ends]

    def take_turn(self, turn: PoolTurn) -> bool:
        """False: another turn was first, which `look` shows."""
        number = max(map(int, self.turns), default=0) + 1
        return self.files.write_record(f"turns/{number:08d}.json", turn, replace=False)

    def end(self, name: str, end: PoolEnd) -> None:
        self.files.write_record(f"ends/{name}.json", end, replace=False)

    def give_up_silent(self, at: float) -> None:
        """Ends what runs on hosts that are silent: a host that comes back kills what has an end."""
        for name in self.list_running():
            turn = self._placed[name]
            if self.is_silent(turn.host):
                why = "has left" if turn.host not in self.hosts else f"has been silent for {LEASE_S:.0f} s"
                end = PoolEnd(reason=f"its host {turn.node} {why}", at=at)
                self.end(name, end)  # the host may have written one as it left
                self.ends[name] = self.files.read_record(f"ends/{name}.json", PoolEnd) or end

    def report(self, name: str) -> SubmissionReport:
        turn, end = self.find_turn(name), self.ends.get(name)
        if end is None and turn is not None and not turn.host:
            end = PoolEnd(reason=WITHDRAWN)
        if end is not None:
            return SubmissionReport(
                name=name, state=SubmissionState.ENDED, reason=end.reason, code=end.code, node=turn.node if turn else ""
            )
        if turn is not None:
            return SubmissionReport(name=name, state=SubmissionState.RUNNING, node=turn.node)
        return SubmissionReport(name=name, state=SubmissionState.QUEUED, reason=self.find_obstacle(name) or "starts")

    def find_obstacle(self, name: str) -> str:
        """Why a submission waits; empty: a host with room for it may start it."""
        own, *others = self._line(name)
        lent = [host for host in self.hosts.values() if not host.leaving and not self.is_silent(host.id)]
        if not lent:
            return f"no host lends its cores to {self.store}: `trueline join {self.store}` there"
        room = sum(host.cores // own.slots * own.slots for host in lent)
        if own.need > room:
            return (
                f"needs {own.need} slots to begin, and the hosts of {self.store} have {room}: `trueline join` on more"
            )
        running = [self.submissions[one] for one in self.list_running() if one in self.submissions]
        ids = {host.id for host in lent}
        elsewhere = sum(one.submission.slots for one in running if self._placed[one.submission.name].host not in ids)
        if why := find_obstacle(own, others, room + elsewhere):
            return why
        if not any(self.has_room(host, name) for host in lent):
            memory = self.submissions[name].submission.memory_mb
            return f"waits for a host with {own.slots} free slots" + (f" and {memory} MB" if memory else "")
        return ""

    def _line(self, name: str) -> list[Waiter]:
        """All that lives, `name` first."""
        waiters = []
        for each, queued in self.submissions.items():
            turn = self.find_turn(each)
            if each not in self.ends and (turn is None or turn.host):
                own = queued.submission
                waiters.append(Waiter(
                    name=each, slots=own.slots, gang=own.gang, priority=own.priority,
                    submitted_at=queued.submitted_at, running=turn is not None,
                ))  # fmt: skip
        return sorted(waiters, key=lambda one: one.name != name)

    def has_room(self, host: PoolHost, name: str) -> bool:
        wanted = self.submissions[name].submission
        there = [
            self.submissions[one].submission
            for one in self.list_running()
            if self._placed[one].host == host.id and one in self.submissions
        ]
        memory = host.memory_mb - sum(one.memory_mb for one in there)
        return host.cores - sum(one.slots for one in there) >= wanted.slots and (
            not host.memory_mb or memory >= wanted.memory_mb
        )

    def list_waiting(self) -> list[str]:
        """What may begin, in order: heads by their rank, then hosts."""
        waiting = [one for one in self.submissions if one not in self.ends and self.find_turn(one) is None]
        return sorted(waiting, key=lambda one: (
            not self.submissions[one].submission.gang, -self.submissions[one].submission.priority,
            self.submissions[one].submitted_at, one,
        ))  # fmt: skip

    def sweep(self, now: float) -> None:
        """Removes the records of what ended long ago, and of hosts that died with nothing left to end."""
        for name, end in list(self.ends.items()):
            if 0 < end.at < now - KEPT_S:
                for file in (
                    f"submissions/{name}.json",
                    f"cancels/{name}",
                    f"cancels/{name}.kill",
                    f"ends/{name}.json",
                ):
                    with contextlib.suppress(FileNotFoundError):
                        self.files.remove(file)
                self.submissions.pop(name, None)
        newest = max(self.turns, default="")
        for number, turn in self.turns.items():
            if turn.name not in self.submissions and number != newest:
                self.files.remove(f"turns/{number}.json")
        busy = {self._placed[name].host for name in self.list_running()}
        for host in self.hosts:
            if host not in busy and self.is_silent(host):
                self.files.remove(f"hosts/{host}.json")
