"""What the master of a parameter-server job knows and can do: rosters, links, journal, events. `master.py` decides."""

import asyncio
import base64
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trueline.engine.contract import Engine, ProcessSpec, parse_ref
from trueline.errors import DiskFull, StorageError
from trueline.ps.dial import read_address
from trueline.ps.link import ServerLink
from trueline.ps.master.ledger import MinibatchGrid, MinibatchLedger
from trueline.ps.master.servers import ServerMeter
from trueline.ps.master.slots import Slots
from trueline.ps.messages import ModelSpec, Routing, ServerReport
from trueline.train.job_dir import JobDir
from trueline.train.master.journal import Journal, Row
from trueline.train.master.publisher import EventPublisher
from trueline.train.master.room import DiskRoom
from trueline.train.settings import JobSettings

TICK_S = 0.25
WORKER, SERVER, SAVER, FACE = "worker", "server", "saver", "face"
ENTRIES = {
    WORKER: "trueline.ps.worker:main",
    SERVER: "trueline.ps.server.process:main",
    SAVER: "trueline.ps.saver:main",
    FACE: "trueline.ps.face:main",
}
RECENT = 4096


def read_last_words(log: Path) -> str:
    """What a process wrote before its end: the last two lines, an error and what to do."""
    with contextlib.suppress(OSError):
        return "; ".join(log.read_text(errors="replace").strip().splitlines()[-2:])
    return ""


def describe_routing(routing: Routing) -> Row:
    """The journal's row for it."""
    return "PS_ROUTING", {"routing": base64.b64encode(msgspec.msgpack.encode(routing)).decode()}


class JobShell:
    """One job. All of it is used in one asyncio thread."""

    def __init__(
        self, job: JobSettings, job_dir: Path, journal: Journal, engine: Engine, secret: str, now: Callable[[], float]
    ) -> None:
        self.job, self.job_dir, self.journal, self.engine, self.secret, self.now = (
            job, job_dir, journal, engine, secret, now,
        )  # fmt: skip
        self.folder = JobDir(job_dir)
        self.born = now()
        self.publisher = EventPublisher(self.folder.events)
        self.disk_room, self._unwritten = DiskRoom(self.emit), list[Row]()
        """What of the job waits for room on a full disk, and rows of the journal that do."""
        self.workers = Slots(WORKER, job.workers, job.max_failures + 2)
        self.wanted_workers, self.room = job.workers, -1  # how many there shall be, and room for how many; -1: for any
        self.localize: Callable[[ProcessSpec], ProcessSpec] = lambda spec: spec
        self.hosts: Callable[[], Sequence[dict[str, Any]]] = tuple
        self.servers = Slots(SERVER, job.servers, job.max_failures + 2)
        faces = Slots(FACE, 1 if job.grpc_port else 0, job.max_failures + 2)
        self.rosters = {SERVER: self.servers, WORKER: self.workers, FACE: faces}
        self.wanted_servers = job.servers
        self.checkpoint_path, self.checkpoint_step = "", -1
        self.spec: ModelSpec | None = None
        self.routing: Routing | None = None
        self.num_records = 0
        self.parts = job.workers if job.staleness == 0 else 1
        """Minibatches of a step; a resumed job keeps them."""
        self.blocks: tuple[int, ...] = ()
        self.ledger: MinibatchLedger | None = None
        self.links: dict[str, ServerLink] = {}
        self.stats: dict[str, ServerReport] = {}
        self.meter = ServerMeter(self.emit)
        self.heard: dict[str, float] = {}  # of workers and servers, when something last came from them
        self.memory, self.computed = dict[str, int](), dict[str, int]()  # by worker: bytes, minibatches
        self.recent: deque[tuple[float, int]] = deque(maxlen=RECENT)  # time and records of committed minibatches
        self.loss = math.nan
        self.deaths: list[dict[str, Any]] = []
        self.address = ""
        self.phase, self.failed, self.halting = "gathering", False, ""
        self.ready = asyncio.Event()
        """All servers hold the model, and the ledger is theirs."""
        self.changed = asyncio.Event()
        """Something was committed or freed: another minibatch may begin. Each change makes a new one."""
        self.stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.cuts = 0
        self.cutting = asyncio.Lock()
        """Servers are in a cut, or learn what they have: one at a time, or what one moves the other drops."""
        self.wanted = 0
        """An operator asks for a checkpoint of this step or a later one; 0: for none."""
        for kind, body in journal.rows():
            self._apply(kind, body)

    def _apply(self, kind: str, body: dict[str, Any]) -> None:
        """Enters a row of the journal."""
        match kind:
            case "START":
                role = parse_ref(body["ref"])[0]
                if role in self.rosters:
                    self.rosters[role].note_started(body["ref"])
            case "PS_MODEL":
                self.spec = msgspec.msgpack.decode(base64.b64decode(body["spec"]), type=ModelSpec)
                self.num_records, self.blocks = body["num_records"], tuple(body["blocks"])
                self.parts = body["parts"]
            case "PS_ROUTING":
                self.routing = msgspec.msgpack.decode(base64.b64decode(body["routing"]), type=Routing)
            case "CKPT":
                self.checkpoint_path, self.checkpoint_step = body["path"], body["step"]
            case "SCALE":
                self.set_workers(body["workers"])
            case "PS_SCALE":
                self.wanted_servers = body["servers"]
            case "HALT":  # else a successor would train on, and the operator wait
                self.halting = body["why"]

    def emit(self, name: str, **fields: Any) -> None:
        self.publisher.publish([(name, fields)])

    def log(self, *rows: Row) -> None:
        """Writes rows to the journal, all or none of them. Raises StorageError; DiskFull: it may be repeated."""
        self.journal.append(*self._unwritten, *rows)
        self._unwritten.clear()
        self.disk_room.gain("journal")

    def log_later(self, kind: str, **body: Any) -> None:
        """As `log`; while the disk is full the row waits in memory. Raises StorageError for other reasons."""
        self._unwritten.append((kind, body))
        self.write_rows()

    def write_rows(self) -> None:
        """Writes what waits for room in the journal, if there is some now."""
        if self._unwritten:
            with self.waiting_for_room("journal", self.journal.path, "training continues without it"):
                self.log()

    @contextlib.contextmanager
    def waiting_for_room(self, what: str, path: Path, effect: str) -> Iterator[None]:
        """Notes that what the block writes to `path` waits for room, or that it has it; the caller repeats it."""
        try:
            yield
        except DiskFull as error:
            self.disk_room.lack(what, str(path), error.message, effect)
        else:
            self.disk_room.gain(what)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` as a task; an exception in it ends the job."""
        task = asyncio.ensure_future(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except StorageError as error:
            self.fail(error.code, error.message, "see to the disk, then continue with --resume")
        except Exception as error:  # noqa: BLE001  otherwise the job would hang unnoticed
            self.fail_unexpectedly(error)

    def fail(self, code: str, why: str, hint: str) -> None:
        """Ends the job; only the first reason counts."""
        if self.failed or self.phase == "finished":
            return
        self.failed, self.phase = True, "failed"
        with contextlib.suppress(StorageError):  # the reason may be a full disk
            self.log(("FAIL", {"code": code, "why": why}))
        self.emit("job.failed", code=code, why=why, hint=hint)

    def fail_unexpectedly(self, error: Exception) -> None:
        logging.getLogger("trueline").error("the master met an unexpected exception", exc_info=error)
        why = f"the master met an unexpected {type(error).__name__}: {error}"
        self.fail("internal", why, f"please report this with {self.folder.log('master')}; continue with --resume")

    def wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def link(self, ref: str) -> ServerLink:
        """The connection to `server-SLOT`."""
        if ref not in self.links:
            self.links[ref] = ServerLink(lambda name: read_address(self.job_dir, name), ref, self.secret.encode())
        return self.links[ref]

    def make_spec(self, ref: str, **more: str) -> ProcessSpec:
        role, slot, incarnation = parse_ref(ref)
        env = {
            "TRUELINE_JOB": str(self.job_dir), "TRUELINE_MASTER": self.address, "TRUELINE_SECRET": self.secret,
            "TRUELINE_REF": ref, "OMP_NUM_THREADS": str(self.job.threads),
            "TRUELINE_PS_MEMORY": str(self.job.server_memory_mb << 20), **more,
        }  # fmt: skip
        return self.localize(ProcessSpec(
            role=role, slot=slot, incarnation=incarnation, entry=ENTRIES[role], log=str(self.folder.log(ref)), env=env
        ))  # fmt: skip

    async def order(self, order: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Repeats an order until the engine has taken it; orders are idempotent."""
        while not self.stopped.is_set():
            try:
                await order()
                return
            except OSError:
                await asyncio.sleep(TICK_S)  # the launcher starts the agent again

    async def kill(self, ref: str, why: str) -> None:
        self.emit("worker.killed", worker=ref, why=why)
        await self.order(lambda: self.engine.kill(ref))

    def halt(self, why: str) -> None:
        """Ends the job after a checkpoint, also when this master dies meanwhile. Raises StorageError."""
        if not self.halting:
            self.log_later("HALT", why=why)
            self.halting = why
            self.emit("job.halting", why=why)

    def set_workers(self, count: int) -> None:
        """As many workers are to run, where there is room for them."""
        self.wanted_workers = count
        self.workers.count = count if self.room < 0 else min(count, self.room)

    def set_room(self, workers: int) -> None:
        """The hosts have room for this number of workers from now on."""
        if not workers and self.room:
            self.emit("job.waiting", room=0, why="it needs room for one worker")
        self.room = workers
        self.set_workers(self.wanted_workers)

    def set_servers(self, count: int) -> None:
        """Notes how many servers the job shall have, for a successor too. Raises StorageError."""
        if count != self.wanted_servers:
            self.log_later("PS_SCALE", servers=count)
            self.wanted_servers = count

    def set_routing(self, routing: Routing) -> None:
        """Raises StorageError: what is not in the journal does not happen."""
        self.log(describe_routing(routing))
        self.routing = routing

    @property
    def grid(self) -> MinibatchGrid:
        return MinibatchGrid(num_records=self.num_records, batch=self.job.global_batch, parts=self.parts)

    @property
    def total_steps(self) -> int:
        return self.grid.steps * self.job.epochs if self.num_records else 0

    def note_report(self, report: ServerReport) -> None:
        name = report.ref.partition(".")[0]
        self.stats[name] = report
        self.meter.add(name, report, self.now())
