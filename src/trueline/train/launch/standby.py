"""A joined host as the master's standby: it leads the job when the master's host dies.

The master sends each joined host its journal as it grows, the list of hosts, and the certificate of the launch. A host
that hears no master for longer than a lease looks at the newest view in the job's store. If one of its own workers is
in that view, no other part of the group can apply a step without it, so the host starts a master from the journal, and
that adopts the running workers. The first view that it publishes decides whether it leads (`master/claims.py`).
"""

import asyncio
import contextlib
import json
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from trueline import events, files
from trueline.engine.hosts import route
from trueline.engine.hosts.messages import EventLines, HostList, JournalCopy, KnownHost, Welcome
from trueline.engine.hosts.standby import JoinRequest, LentHost
from trueline.engine.hosts.token import TokenFile, issue_token, write_token
from trueline.engine.local.process import Lifeline
from trueline.errors import DataError, PortInUse, StorageError
from trueline.train import settings as job_settings
from trueline.train.job_dir import JobDir
from trueline.train.launch.hosts import join_line
from trueline.train.launch.jobs import RUNS
from trueline.train.launch.launcher import LocalJob, Superseded
from trueline.train.master.claims import Leader, ViewClaims
from trueline.train.master.failover import MasterProcess, reserve_port
from trueline.train.master.hosts import HostsFolder, SuccessorKit
from trueline.train.master.journal import STEPS_AND_LAUNCH, Journal

MARGIN_S, TURN_S = 0.75, 3.0
"""What a host waits beyond the lease, so that a master that lives publishes the view without it first; and how long it
leaves each host before it in the list to lead."""


class StandbyMaster:
    """The `Standby` of `engine/hosts/relay.py`. `around`: what surrounds a job that this host leads."""

    def __init__(
        self,
        request: JoinRequest,
        around: Callable[[LocalJob], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._around = around
        self._own_address = route.announce(request.interface, route.split_address(request.address)[0])
        self._reserved = _reserve(self._own_address, request.ports)
        self.address = ""
        if self._reserved is not None:
            self.address = route.join_address(self._own_address, self._reserved.getsockname()[1])
        self.others: list[str] = []
        self._welcome: Welcome | None = None
        self._kit: SuccessorKit | None = None
        self._journal: Journal | None = None
        self._hosts: tuple[KnownHost, ...] = ()
        self._generation = -1
        self._over = False
        self._refused = 0
        self._job: SuccessorJob | None = None
        self._warm: WarmMaster | None = None

    def note(self, message: Welcome | JournalCopy | HostList | EventLines, job: Path) -> None:
        match message:
            case Welcome():
                self._welcome, self._path, self._refused = message, job / "standby.sqlite", 0
                self._events = job / "standby.events"
                self._kit = msgspec.msgpack.decode(message.kit, type=SuccessorKit) if message.kit else None
            case HostList():
                self._hosts = message.hosts
                self.others = [host.standby for host in self._hosts if host.standby not in ("", self.address)]
            case JournalCopy():
                self._copy_journal(message)
            case EventLines():
                with contextlib.suppress(OSError), self._events.open("wb" if message.begins else "ab") as file:
                    file.write(message.lines)  # a full disk: the page begins where this host leads

    def _copy_journal(self, message: JournalCopy) -> None:
        try:
            if message.begins:
                self._begin_journal()
            if self._journal is not None:
                self._journal.append_texts([(kind, body.decode()) for kind, body in message.rows])
        except StorageError as error:  # others can lead
            self._forget(error.message)
        for kind, body in message.rows:
            self._over = self._over or kind in ("END", "FAIL")
            if kind == "VIEW":
                self._generation = json.loads(body)["generation"]

    def _begin_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._path.unlink(missing_ok=True)
        self._journal, self._generation, self._over = Journal(self._path, STEPS_AND_LAUNCH), -1, False

    def _forget(self, why: str) -> None:
        self._journal = None
        events.emit("standby.ended", why=why)

    def may_lead(self, host_id: str, silent_s: float) -> bool:
        wait_s = self._find_wait_s(host_id)
        lease_s = self._welcome.lease_s if self._welcome is not None else math.inf
        if self._warm is None and wait_s < lease_s + TURN_S and silent_s >= lease_s / 2:  # the first in line
            with contextlib.suppress(DataError, OSError):  # what is not there yet is made when this host leads
                self._warm = WarmMaster(self._path.parent)
        return silent_s >= wait_s

    def _find_wait_s(self, host_id: str) -> float:
        line = [host.id for host in self._hosts if host.standby]
        if self._welcome is None or self._kit is None or self._journal is None or self._over or host_id not in line:
            return math.inf
        return self._welcome.lease_s + MARGIN_S + TURN_S * (line.index(host_id) + self._refused)

    async def lead(self, alive: list[str], host: LentHost, host_id: str) -> str | None:
        assert self._kit is not None
        try:
            claims = ViewClaims(self._kit.launch.store or self._location(host), self._kit.launch.id)
            newest = await asyncio.to_thread(claims.newest)
        except (StorageError, DataError, OSError) as error:
            events.emit("standby.waits", why=f"the job's store does not answer: {error}")
            newest = None
        ours = newest is not None and not set(newest.view["members"]).isdisjoint(alive)
        if newest is None or not ours or newest.leader.id != self._kit.launch.leader.id:
            self._refused += 1
            return None
        assert self._journal is not None
        if newest.generation > self._generation:
            self._journal.append(("VIEW", newest.view))
        self._journal.close()
        self._journal = None
        events.emit("standby.leads", host=newest.leader.host, generation=newest.generation)
        return await asyncio.to_thread(self._run, host, host_id)

    def _location(self, host: LentHost) -> str:
        return job_settings.load(host.job).checkpoints

    def _run(self, host: LentHost, host_id: str) -> str | None:
        folder, line = self._make_folder(host, host_id)
        self._job, self._warm = SuccessorJob(folder, host, line, self._warm), None
        try:
            with self._job as job, self._around(job):
                job.run()
        except Superseded:
            shutil.rmtree(folder, ignore_errors=True)  # another host has the job
            return None
        except KeyboardInterrupt:
            return f"the job was stopped; it is in {folder}"
        finally:
            self._job = None
        return f"the job finished here; it is in {folder}"

    def halt(self, why: str) -> bool:
        return self._job is not None and self._job.halt(why)

    def _make_folder(self, host: LentHost, host_id: str) -> tuple[Path, str]:
        """A job folder like that of the master's host, and the line by which other hosts join."""
        assert self._kit is not None
        assert self._welcome is not None
        launch, secret = self._kit.launch, self._welcome.secret
        path = _find_place(self._welcome.job)
        folder = JobDir(path)
        cache = files.user_cache() / "joined"
        own = HostsFolder(folder)
        own.blobs.mkdir(mode=0o700, parents=True)
        for one in launch.files:
            target = path / one.path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(cache / one.digest, target)
            shutil.copyfile(cache / one.digest, own.blobs / one.digest)
        shutil.move(self._path, folder.journal)
        if self._events.exists():
            shutil.move(self._events, folder.events)
        request = host.request
        job = job_settings.load(path)
        if job.script:  # which had decided nothing when its files were packed
            settled = job_settings.load(host.job)
            job = replace(job, epochs=settled.epochs, global_batch=settled.global_batch, seed=settled.seed)
        job = replace(job, listen=self.address, interface=request.interface, ports=request.ports, cores=request.cores)
        job_settings.save(job, path)
        folder.begin_succession(secret)
        for log in (host.job / "logs").glob("*-*.log"):
            (folder.logs / log.name).symlink_to(log)
        for private, content in ((own.certificate, self._kit.certificate), (own.key, self._kit.key)):
            private.touch(mode=0o600)
            private.write_bytes(content)
        rest = [known for known in self._hosts if known.id != host_id]
        files.write_atomic(own.known, msgspec.json.encode(rest), mode=0o600)
        token = issue_token(secret, now=time.time())
        write_token(own.token, TokenFile(job=job.name, token=token, ca=request.token.ca))
        leader = Leader(
            id=secrets.token_hex(8), host=request.name, address=self.address, token=str(own.token.absolute())
        )
        own_way = {"listen": self.address, "address": self._own_address, "ports": request.ports, "leader": leader}
        own.write_launch(msgspec.structs.replace(launch, **own_way, cores=request.cores))
        return path, join_line(self.address, own.token, request.token.ca)


class WarmMaster:
    """What a master imports, in a process that waits: a master that is silent for half of its lease may be dead."""

    def __init__(self, job: Path) -> None:
        self.life, self.log = Lifeline(), job / "standby.log"
        module = job_settings.MASTERS[job_settings.load(job).strategy]
        self.process = MasterProcess(module, [], life=self.life.reading, log=self.log)
        self.process.warm()


class SuccessorJob(LocalJob):
    """The job on a host that was joined to it: its agent runs and belongs to the host, and so do its workers."""

    def __init__(self, job_dir: Path, host: LentHost, line: str, warm: WarmMaster | None = None) -> None:
        super().__init__(job_dir)
        self._host, self._line, self._warm = host, line, warm
        self.inherited_bytes = self.folder.events.stat().st_size if self.folder.events.exists() else 0

    def _prepare(self, exits: contextlib.ExitStack) -> None:
        self.socket, self.lifeline = self._host.socket, self._host.lifeline
        self._master_life = self._warm.life if self._warm else Lifeline()
        exits.callback(self._clean)
        self._reserved = exits.enter_context(reserve_port())
        self.emit("hosts.listening", line=self._line)
        exits.callback(self._end_processes)
        self.agent = self._host.agent
        if self._warm is not None:
            self.folder.log("master").symlink_to(self._warm.log)
            self.master, self.master.later = self._warm.process, self._arguments()

    def _end_lifelines(self) -> None:
        self._master_life.end()
        if self.master is not None:
            self.master.end()

    def _clean(self) -> None:
        os.close(self._master_life.reading)
        for log in self.folder.logs.glob("*.log"):
            if log.is_symlink():  # of a worker that ran before; what it points to ends with this host's agent
                content = log.read_bytes()
                log.unlink()
                log.write_bytes(content)
        self._clean_folder()


def _reserve(address: str, ports: str) -> socket.socket | None:
    """A port for a master on this host, a free one of FIRST-LAST if they are given; None: there is none."""
    first, _, last = ports.partition("-")
    for port in range(int(last or first), int(first) - 1, -1) if ports else [0]:
        with contextlib.suppress(PortInUse):
            return reserve_port(route.join_address(address, port))
    return None


def _find_place(name: str) -> Path:
    """A new folder for the job: under ./runs as on the host where it began, or in the user's cache."""
    for runs in (RUNS, files.user_cache() / "runs"):
        for number in range(1, 1000):
            path = (runs / (name if number == 1 else f"{name}-{number}")).absolute()
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError:
                break
            return path
    raise StorageError(f"there is no place for the job {name}", hint=f"make {RUNS} writable, then join again")
