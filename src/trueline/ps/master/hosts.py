"""A parameter-server job on several hosts: workers run wherever there is room, servers and checkpoints stay here."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from trueline.engine.contract import Engine, parse_ref
from trueline.engine.hosts.roles import PinnedEngine
from trueline.ps.master.master import PsMaster
from trueline.ps.master.shell import WORKER
from trueline.train.master.hosts import JobHosts


class TravellingWorkers:
    """`hosts`: those of the job; `local`: the engine of this one."""

    def __init__(self, hosts: JobHosts, local: Engine) -> None:
        self._hosts = hosts
        self.engine = PinnedEngine(hosts.fleet, local, WORKER)

    async def attach(self, master: PsMaster, server: Any) -> None:
        """Opens the port for other hosts on `server`, and lets the master know what room they bring and take."""
        self._master, fleet = master, self._hosts.fleet
        self._hosts.emit = master.emit
        master.localize, master.hosts = self._hosts.localize, fleet.describe
        fleet.process_bytes = self._measure
        fleet.on_room, fleet.on_leave = master.set_room, self._release
        self._hosts.serve(server)
        master.set_room(await fleet.capacity())

    def _measure(self) -> int:
        return max((size for ref, size in self._master.memory.items() if parse_ref(ref)[0] == WORKER), default=0)

    def _release(self, refs: Sequence[str]) -> None:
        """The host of these workers takes its cores back: they commit what they have pushed, and end."""
        master = self._master
        for ref in refs:
            master.emit("worker.leaving", worker=ref)
            master.spawn(master.order(partial(self.engine.kill, ref, grace_s=max(master.job.lease_s, 3.0))))
