"""One engine over this machine and all hosts that have joined: a process starts where there is room.

A host has room for a process on each of its cores, as far as its memory goes: what a process takes is measured.

A joined host reports its processes as the local agent does. One that is silent for longer than the lease is given up:
its processes are reported as lost, and killed should it come back. Which host has what is in a file, so that the next
master waits for the hosts of the one before. Runs in the master's asyncio thread; no gRPC, no torch.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trueline import files
from trueline.engine.contract import Engine, Kind, ProcessSpec, Seen
from trueline.engine.hosts.host import Host, Orders
from trueline.engine.hosts.messages import (
    AddOrder,
    CoresOffer,
    Dismissal,
    EventLines,
    Greeting,
    HostList,
    JournalCopy,
    KillOrder,
    KnownHost,
)
from trueline.errors import StorageError

TICK_S = 0.25
KEEPERS = 4
"""Hosts that get the job's events beside its journal."""
GROWTH = 1.1
"""A process has to have this much more memory than the largest before, for the room to be counted again."""
AWAY_S = 1.5
"""A host whose connection ended is given up when it has not come back for so long."""
AVOID_S, MOST_AVOIDANCES = 30.0, 4
"""For how long a host is avoided for the first time; doubled each time, that many times at most."""


class FleetEngine:
    """`cores`: processes that this machine takes, `memory`: bytes that it has for them (0: unknown). `emit` publishes
    an event; `on_room` gets each new capacity."""

    def __init__(
        self,
        local: Engine,
        *,
        cores: int,
        file: Path,
        lease_s: float,
        now: Callable[[], float],
        emit: Callable[..., None],
        memory: int = 0,
    ) -> None:
        self._local, self._file, self._lease_s, self._now, self._emit = local, file, lease_s, now, emit
        self.here = Host(id="", name="this host", cores=cores, memory=memory, heard_at=now())
        self.hosts: dict[str, Host] = {}
        self.process_bytes: Callable[[], int] = lambda: 0
        """What the largest process has in memory; 0: not known yet."""
        self._process_bytes = 0
        self.on_room: Callable[[int], None] = lambda _: None
        self.on_leave: Callable[[Sequence[str]], None] = lambda _: None
        """Gets the processes of a host that takes its cores back."""
        self.journal: Callable[[], Iterator[JournalCopy]] = lambda: iter(())
        """The whole journal in messages, for a host that could lead the job."""
        self.history: Callable[[], Iterator[EventLines]] = lambda: iter(())
        """The job's events so far."""
        self._lost: dict[str, Seen] = {}
        self._waiting: dict[str, ProcessSpec] = {}
        """What no host has room for."""
        self._watchers: set[asyncio.Queue[Seen]] = set()
        self._parted = asyncio.Event()
        self._ticked_at = now()
        self._restore()
        for host in self._all():
            host.fit(0)

    def _restore(self) -> None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            for known in msgspec.json.decode(self._file.read_bytes(), type=list[KnownHost]):
                running = {ref: Seen(ref=ref, kind=Kind.STARTED, host=known.name) for ref in known.alive}
                self.hosts[known.id] = Host(
                    id=known.id, name=known.name, address=known.address, cores=known.cores, heard_at=self._now(),
                    processes=running, leaving=known.leaving, standby=known.standby, memory=known.memory,
                )  # fmt: skip

    def _keep(self) -> None:
        known = tuple(
            KnownHost(id=host.id, name=host.name, address=host.address, cores=host.cores, leaving=host.leaving,
                      alive=host.alive, standby=host.standby, memory=host.memory)
            for host in self.hosts.values() if host.cores
        )  # fmt: skip
        self.copy(HostList(known))
        with contextlib.suppress(StorageError):  # a full disk: the next master finds these hosts when they reconnect
            files.write_atomic(self._file, msgspec.json.encode(known), durable=False)  # no master outlives the machine

    def copy(self, message: JournalCopy | HostList) -> None:
        """Sends to all hosts that could lead the job what their master would have to know."""
        for host in self.hosts.values():
            if host.standby:
                host.send(message)

    def copy_events(self, message: EventLines) -> None:
        """Sends events to the hosts that keep them."""
        for host in self.hosts.values():
            if host.keeps_events:
                host.send(message)

    def share_history(self) -> None:
        """Sends the job's events to the hosts that are the first to lead it, a few of all."""
        line = [host for host in self.hosts.values() if host.standby and host.cores]
        for host in line[:KEEPERS]:
            if not host.keeps_events and host.orders is not None:
                host.keeps_events = True
                for piece in self.history():
                    host.send(piece)

    def _all(self) -> Iterator[Host]:
        yield self.here
        yield from self.hosts.values()

    def _find(self, ref: str) -> Host | None:
        return next((host for host in self._all() if ref in host.processes), None)

    async def add(self, specs: Sequence[ProcessSpec]) -> None:
        for spec in specs:
            if self._find(spec.ref) is None and spec.ref not in self._lost:
                self._waiting[spec.ref] = spec
        await self._place()

    async def _place(self) -> None:
        """Starts what waits on the hosts that have the most room."""
        ours = []
        for ref in tuple(self._waiting):
            host = max(self._all(), key=lambda host: host.room)
            if host.room <= 0:
                break
            spec = self._waiting.pop(ref)
            host.processes[ref], host.specs[ref] = (
                Seen(ref=ref, kind=Kind.STARTED, host=host.name if host.id else ""),
                spec,
            )
            if host is self.here:
                ours.append(spec)
            else:
                host.send(AddOrder(spec))
        if self._waiting or len(self.hosts):
            self._keep()
        if ours:
            await self._local.add(ours)

    async def kill(self, ref: str, *, grace_s: float = 0.0) -> None:
        self._waiting.pop(ref, None)
        host = self._find(ref)
        if host is None or host is self.here:
            await self._local.kill(ref, grace_s=grace_s)
        elif host.processes[ref].alive:
            host.doomed[ref] = grace_s
            host.send(KillOrder(ref, grace_s))

    async def list(self) -> list[Seen]:
        for seen in await self._local.list():
            self._enter(self.here, seen)
        return [*self._lost.values(), *(seen for host in self._all() for seen in host.processes.values())]

    async def capacity(self) -> int:
        return sum(host.capacity for host in self._all())

    async def watch(self) -> AsyncIterator[Seen]:
        changes: asyncio.Queue[Seen] = asyncio.Queue()
        self._watchers.add(changes)
        try:
            for seen in await self.list():
                if seen.pid or not seen.alive:  # a host that has an order reports when it has begun
                    yield seen
            while True:
                yield await changes.get()
        finally:
            self._watchers.discard(changes)

    def _enter(self, host: Host, seen: Seen) -> None:
        """Enters what `host` reports; each change is published once, and nothing after an end."""
        before = host.processes.get(seen.ref)
        if seen.ref in self._lost or before == seen or (before is not None and not before.alive):
            return
        host.processes[seen.ref] = seen
        if not seen.alive:
            host.doomed.pop(seen.ref, None)
            host.specs.pop(seen.ref, None)
        for watcher in self._watchers:
            watcher.put_nowait(seen)

    async def run(self) -> None:
        """Follows the local agent across its restarts, and time."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_local())
            tasks.create_task(self._follow_time())

    async def _follow_local(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # the launcher restarts a dead agent
                async for seen in self._local.watch():
                    self._enter(self.here, seen)
                    await self._place()
            await asyncio.sleep(TICK_S)

    async def _follow_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.give_up_silent()
            self.retry_avoided()
            self.share_history()
            self.measure()
            with contextlib.suppress(OSError):
                await self._place()

    def measure(self) -> None:
        """Counts every host's places again once the processes have grown; what runs continues."""
        size = self.process_bytes()
        if size <= self._process_bytes * GROWTH:
            return
        self._process_bytes, before = size, [host.places for host in self._all()]
        for host in self._all():
            self._fit(host)
        if before != [host.places for host in self._all()]:
            self._note_room()

    def _fit(self, host: Host, *, joins: bool = False) -> None:
        """Counts the places of `host`, and says so where its memory is too small for its cores."""
        before = host.cores if joins else host.places
        host.fit(self._process_bytes)
        if host.places < before:
            has, takes = (f"{size / 1e9:.1f} GB" for size in (host.memory, self._process_bytes))
            self._emit("host.short", host=host.name, has=has, takes=takes, places=host.places, cores=host.cores)

    def give_up_silent(self) -> None:
        """Gives up hosts that were silent for too long; not for time in which this process was stopped itself."""
        now = self._now()
        late = now - self._ticked_at - TICK_S
        self._ticked_at = now
        for host in tuple(self.hosts.values()):
            host.heard_at = min(now, host.heard_at + late) if late > TICK_S else host.heard_at
            if not host.cores and host.orders is not None:
                continue  # it imports what its workers need, and has nothing to lose yet
            limit = self._lease_s if host.orders is not None or not host.specs else min(AWAY_S, self._lease_s)
            if now - host.heard_at > limit:
                self.lose(host, f"nothing came from it for {now - host.heard_at:.1f} s")

    def lose(self, host: Host, why: str) -> None:
        """Removes a host; what still runs there is reported as lost."""
        del self.hosts[host.id]
        if host.orders is not None:
            host.orders.put_nowait(None)
        running = host.alive
        if not host.leaving or running:
            self._emit("host.lost", host=host.name, workers=len(running), why=why)
        for ref in running:
            lost = Seen(ref=ref, kind=Kind.LOST, host=host.name, reason=f"its host {host.name} is lost: {why}")
            self._lost[ref] = lost
            for watcher in self._watchers:
                watcher.put_nowait(lost)
        self._lost.update({ref: seen for ref, seen in host.processes.items() if not seen.alive})
        self._note_room()

    def _note_room(self) -> None:
        self._keep()
        self.on_room(sum(host.capacity for host in self._all()))

    def connect(self, greeting: Greeting) -> Host:
        """A host has connected, for the first time or again; its name becomes unique."""
        host = self.hosts.get(greeting.id)
        if host is None:
            names = {other.name for other in self.hosts.values()}
            free = (f"{greeting.name}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, len(names) + 3))))
            name = next(name for name in free if name not in names)
            host = self.hosts[greeting.id] = Host(id=greeting.id, name=name, heard_at=self._now())
        if host.orders is not None:  # its earlier connection is half open
            host.orders.put_nowait(None)
        host.address, host.orders, host.heard_at = greeting.address, asyncio.Queue(), self._now()
        return host

    def disconnect(self, host: Host, orders: Orders) -> None:
        """The connection with these orders has ended. A host that had nothing to lose is forgotten."""
        if host.orders is not orders:
            return
        host.orders = None
        self._parted.set()
        if not host.cores or (host.leaving and not host.alive):
            self.hosts.pop(host.id, None)
            if host.cores:
                self._emit("host.left", host=host.name)
            self._note_room()
        elif host.id in self.hosts:
            self._emit("host.away", host=host.name, workers=len(host.alive))

    def accept_offer(self, host: Host, offer: CoresOffer) -> None:
        """The host lends its cores: what it runs and should not is killed, and lost orders are repeated."""
        joined, host.cores, host.standby = not host.cores, offer.cores, offer.standby
        host.memory, host.keeps_events = host.memory or offer.memory, False
        for copy in self.journal() if host.standby else ():
            host.send(copy)
        running = {seen.ref: seen for seen in offer.running}
        for ref, seen in running.items():
            if seen.alive and (ref not in host.processes or not host.processes[ref].alive):
                host.send(KillOrder(ref))  # it was given up
            elif ref in host.processes:
                self._enter(host, msgspec.structs.replace(seen, host=host.name))
        for ref in host.alive:
            if ref not in running and ref in host.specs:
                host.send(AddOrder(host.specs[ref]))
            elif ref not in running:
                gone = Seen(ref=ref, kind=Kind.LOST, host=host.name, reason="its host does not know it")
                self._enter(host, gone)
        for ref, grace_s in host.doomed.items():
            host.send(KillOrder(ref, grace_s))
        self._emit("host.joined" if joined else "host.returned", host=host.name, address=host.address, cores=host.cores)
        self._fit(host, joins=True)
        self._note_room()

    def refuse(self, greeting: Greeting, why: str) -> None:
        """Notes that a host was sent away before it could lend anything."""
        self._emit("host.refused", host=greeting.name, address=greeting.address, why=why)

    def hear(self, host: Host, load: float | None = None) -> None:
        host.heard_at = self._now()
        host.load = host.load if load is None else load

    def note_clock(self, host: Host, off_s: float) -> None:
        if off := host.clock.note(off_s):
            self._emit("host.clock", host=host.name, off=off, seconds=host.clock.off_s)

    def avoid(self, ref: str, why: str) -> None:
        """Starts nothing on the host of this process for a while: its network is at fault."""
        host = self._find(ref)
        if host is not None:
            host.unwanted.add(ref)
        if host is not None and not host.avoided:
            retry_s = AVOID_S * 2.0 ** min(host.avoidances, MOST_AVOIDANCES)
            host.avoided, host.avoided_until, host.avoidances = True, self._now() + retry_s, host.avoidances + 1
            self._emit("host.avoided", host=host.name, retry_s=retry_s, why=f"{ref}: {why}")
        self._note_room()

    def retry_avoided(self) -> None:
        """Takes hosts into account again whose time is over."""
        for host in self._all():
            if host.avoided and self._now() >= host.avoided_until:
                host.avoided, host.unwanted = False, set()
                self._note_room()

    def report(self, host: Host, seen: Seen) -> None:
        if seen.ref in host.processes:
            self._enter(host, msgspec.structs.replace(seen, host=host.name))
            self._keep()
            if host.leaving and not host.alive:
                host.send(Dismissal("its workers have left"))

    def withdraw(self, host: Host) -> None:
        """The host takes its cores back: nothing new starts there, and what runs is to leave between two steps."""
        if host.leaving:
            return
        host.leaving = True
        self._emit("host.leaving", host=host.name, workers=len(host.alive))
        self._note_room()
        if not host.alive:
            host.send(Dismissal("it had no workers"))
        self.on_leave(host.alive)

    async def dismiss(self, why: str, within_s: float) -> None:
        """Sends all hosts away: the job is over. Returns when their connections have ended, or after `within_s`."""
        for host in self.hosts.values():
            host.send(Dismissal(why))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while any(host.orders is not None for host in self.hosts.values()):
                    self._parted.clear()
                    await self._parted.wait()

    def describe(self) -> Sequence[dict[str, Any]]:
        """The hosts, for status and page."""
        now = self._now()
        return [
            {
                "host": host.name, "address": host.address, "cores": host.cores, "load": round(host.load, 2),
                "places": host.places, "memory": host.memory, "clock": host.clock.words,
                "state": host.state,
                "silent_s": round(now - host.heard_at, 1) if host.id else 0.0, "workers": host.alive,
            }
            for host in self._all()
        ]  # fmt: skip
