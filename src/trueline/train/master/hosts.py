"""Other hosts, as the master has them: what the launcher prepared, and the fleet that its engine becomes."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec

from trueline import clock, files
from trueline.engine.contract import Engine, ProcessSpec
from trueline.engine.hosts.fleet import FleetEngine
from trueline.engine.hosts.messages import SERVICE, EventLines, JournalCopy, ScriptValues, TravelledFile, Welcome
from trueline.engine.hosts.roles import RoleEngine
from trueline.engine.hosts.service import HostsService
from trueline.engine.hosts.token import find_fault
from trueline.errors import UsageError
from trueline.train.job_dir import JobDir
from trueline.train.master.claims import Leader, Leadership, ViewClaims
from trueline.train.master.journal import Row
from trueline.train.master.master import TICK_S, Master
from trueline.train.membership import events as h
from trueline.train.settings import JobSettings, settle

WORKER = "worker"
PART_S = 1.0
TELL_S = 5.0
"""Between two events of the hosts, while none changes."""
_FLEETING = ("load", "silent_s")
STORE_S = 2.0
"""Between two looks at who has marked the store."""
_MARK = ".trueline-"
ROWS = 500
"""Of the journal, in one message."""
REFUSED = "the job's secret is missing or wrong"


class HostsLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher prepared: JOB/hosts/launch.json."""

    listen: str
    address: str
    """Where workers of this host listen."""
    ports: str
    cores: int
    memory: int = 0
    """Bytes that were free before the job's first process; 0: unknown."""
    preload: tuple[str, ...]
    files: tuple[TravelledFile, ...]
    packages: dict[str, str]
    versions: dict[str, str]
    store: str
    probe: str
    id: str
    """Names the launch in the store; a successor of the master has the same."""
    leader: Leader


class SuccessorKit(msgspec.Struct, frozen=True, kw_only=True):
    """What a joined host keeps to lead the job, should the master's host die. It holds the job's secret."""

    launch: HostsLaunch
    certificate: bytes
    key: bytes


class HostsFolder:
    """JOB/hosts: for this user alone, made again by each launch."""

    def __init__(self, job: JobDir) -> None:
        self.path = job.hosts
        self.launch, self.known = self.path / "launch.json", self.path / "known.json"
        self.certificate, self.key = self.path / "master.pem", self.path / "master.key"
        self.token, self.blobs = self.path / "token", self.path / "files"

    def write_launch(self, launch: HostsLaunch) -> None:
        files.write_atomic(self.launch, msgspec.json.encode(launch), mode=0o600)

    def read_launch(self) -> HostsLaunch | None:
        """None for a launch that no other host may join."""
        try:
            return msgspec.json.decode(self.launch.read_bytes(), type=HostsLaunch)
        except FileNotFoundError:
            return None


class JobHosts:
    """The fleet of a job, and the service that its hosts call."""

    def __init__(self, job: JobSettings, folder: JobDir, local: Engine, secret: str, launch: HostsLaunch) -> None:
        self._folder, self._secret, self._local, self.launch = folder, secret, local, launch
        self.own = HostsFolder(folder)
        self.emit: Callable[..., None] = lambda name, **_: None
        workers = RoleEngine(local, lambda role: role == WORKER)  # parameter servers take none of the places
        self.fleet = FleetEngine(
            workers, cores=launch.cores, file=self.own.known, lease_s=job.lease_s, now=clock.monotonic_s,
            emit=lambda name, **fields: self.emit(name, **fields), memory=launch.memory,
        )  # fmt: skip
        kit = b""
        if job.strategy == "allreduce":  # tables of parameter servers are on this host
            pair = {"certificate": self.own.certificate.read_bytes(), "key": self.own.key.read_bytes()}
            kit = msgspec.msgpack.encode(SuccessorKit(launch=launch, **pair))
        greet = Welcome(
            job=job.name, secret=secret, lease_s=job.lease_s, preload=launch.preload, files=launch.files,
            packages=launch.packages, store=launch.store, probe=launch.probe, kit=kit,
        )  # fmt: skip
        self._service = HostsService(
            self.fleet, greet, self.own.blobs, launch.versions, self._write_output, self._settle, self._agree
        )

    def _write_output(self, ref: str, data: bytes) -> None:
        with self._folder.log(ref).open("ab") as log:
            log.write(data)

    def _settle(self, data: bytes) -> bytes:
        path = self._folder.loss
        if data:
            files.write_atomic(path, data, replace=False)
        return path.read_bytes() if path.exists() else b""

    def _agree(self, data: bytes) -> bytes:
        """Settles what the script of a worker decides for the job; returns why that cannot be, if it cannot."""
        try:
            wanted = msgspec.json.decode(data, type=ScriptValues)
            settle(self._folder.path, epochs=wanted.epochs, global_batch=wanted.global_batch, seed=wanted.seed)
        except UsageError as error:
            return msgspec.json.encode((error.message, error.hint))
        except msgspec.DecodeError as error:
            return msgspec.json.encode((f"the call names no values of a script: {error}", ""))
        return b""

    def serve(self, server: Any) -> None:
        """Adds the port for other hosts, over TLS, and the service to `server`, which has not started."""
        server.add_generic_rpc_handlers((self._service.make_handler(),))
        pair = self.own.key.read_bytes(), self.own.certificate.read_bytes()
        server.add_secure_port(self.launch.listen, grpc.ssl_server_credentials([pair]))

    async def run_telling(self) -> None:
        """Emits what the page shows of the hosts: at once when one comes, goes or is away, and every TELL_S."""
        told: list[dict[str, Any]] = []
        told_at = 0.0
        while True:
            rows = list(self.fleet.describe())
            lasting = [{key: value for key, value in row.items() if key not in _FLEETING} for row in rows]
            now = clock.monotonic_s()
            if len(rows) + len(told) > 1 and (lasting != told or now >= told_at + TELL_S):
                told, told_at = lasting, now
                self.emit("hosts.measured", hosts=json.dumps(rows))
            await asyncio.sleep(TICK_S)

    async def run_watching_store(self) -> None:
        """Ends the job once another launch has its store: from a copy of its folder, say. Both would train it."""
        while self.launch.probe:
            await asyncio.sleep(STORE_S)
            if other := await asyncio.to_thread(find_other_launch, Path(self.launch.store), self.launch.probe):
                why = f"another launch has the checkpoints of this job in {self.launch.store}: {other}"
                self._master.fail("train", why, "the job continues there; two launches of a job need a store each")
                return

    async def attach(self, master: Master, server: Any) -> None:
        """Opens the port, and lets membership know what room the hosts bring and take."""
        self._master, self.emit, master.here = master, master.emit, self._local
        master.localize, master.hosts, master.avoid = self.localize, self.fleet.describe, self.fleet.avoid
        where = self.launch.store or master.job.checkpoints
        claims, leader = ViewClaims(where, self.launch.id), self.launch.leader
        master.leadership = Leadership(claims, leader, master.state.generation, master.emit)
        master.replicate, self.fleet.journal = self.replicate, lambda: self.copy_journal(master)
        master.publisher.replicate = lambda lines: self.fleet.copy_events(EventLines(lines))
        self.fleet.history = self.copy_history
        self.fleet.process_bytes = lambda: max(master.measures.memory.values(), default=0)
        self.fleet.on_room, self.fleet.on_leave = self.set_room, self.release_workers
        self.serve(server)
        self.set_room(await self.fleet.capacity())

    def replicate(self, rows: Sequence[Row]) -> None:
        """Sends rows of the journal to the hosts that could lead the job."""
        self.fleet.copy(JournalCopy(tuple((kind, json.dumps(body).encode()) for kind, body in rows)))

    def copy_journal(self, master: Master) -> Iterator[JournalCopy]:
        """The journal for a host that has just offered to lead."""
        rows = [(kind, body.encode()) for kind, body in master.journal.texts()]
        for at in range(0, max(1, len(rows)), ROWS):
            yield JournalCopy(tuple(rows[at : at + ROWS]), begins=at == 0)

    def copy_history(self) -> Iterator[EventLines]:
        """The job's events for a host that could lead it."""
        for number, lines in enumerate(self._master.publisher.read_history()):
            yield EventLines(lines, begins=number == 0)

    def set_room(self, workers: int) -> None:
        """The engine has room for this number of workers from now on."""
        least = self._master.policy.min_workers
        if workers < least:
            self.emit("job.waiting", room=workers, why=f"it needs room for {least} workers")
        self._master.handle(h.EngineRoom(workers))

    def release_workers(self, refs: Sequence[str]) -> None:
        """Lets workers leave between two steps: their host takes its cores back. Those that start are killed."""
        master = self._master
        for ref in refs:
            if ref in master.state.members:
                self.emit("worker.leaving", worker=ref)
                master.handle(h.Leaving(ref))
            else:
                master.spawn(self.fleet.kill(ref))
                master.note_death(h.Death(ref, "its host takes its cores back", blameless=True))

    async def dismiss(self, why: str) -> None:
        """Sends the hosts away, and waits until they have gone."""
        await self.fleet.dismiss(why, PART_S)

    def localize(self, spec: ProcessSpec) -> ProcessSpec:
        """The process with the address where it listens if it runs on this host."""
        own = {"TRUELINE_HOST": self.launch.address, "TRUELINE_PORTS": self.launch.ports}
        return msgspec.structs.replace(spec, env=spec.env | own)

    def find_fault(self, method: str, given: str) -> str:
        """Why a call with `given` in place of the secret is refused; empty: it is of a host with a valid token."""
        if not method.startswith(f"/{SERVICE}/") or not given.startswith("Bearer "):
            return REFUSED
        return find_fault(given.removeprefix("Bearer "), self._secret, now=time.time())


def open_hosts(job: JobSettings, folder: JobDir, local: Engine, secret: str) -> JobHosts | None:
    """None for a launch that no other host may join."""
    launch = HostsFolder(folder).read_launch()
    return None if launch is None else JobHosts(job, folder, local, secret, launch)


def mark_store(where: Path, launch: str) -> str:
    """Writes a file into the folder of the checkpoints, by which a host knows that it sees it; returns its name.

    `launch`: where the job is launched, for an earlier launch that still runs.
    """
    name = f"{_MARK}{time.time_ns():x}"
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in where.glob(f"{_MARK}*"):
        old.unlink(missing_ok=True)
    files.write_atomic(where / name, launch.encode())
    return name


def find_other_launch(where: Path, mark: str) -> str:
    """Which launch has marked the store since `mark` was written; empty: none, or the store is away."""
    try:
        others = [path for path in where.glob(f"{_MARK}*") if path.name > mark and not (where / mark).exists()]
        return max(others).read_text() if others else ""
    except OSError:
        return ""
