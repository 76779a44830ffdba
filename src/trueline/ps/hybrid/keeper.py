"""Keeps the servers of a hybrid job, in the master's process: starts them, and brings them to the step of the workers.

The workers say where training stands. A server has applied as many steps, or one more: every member of the group had
pushed its part, and none had applied the step. Any other state is of a time that is lost (all workers died, and
training goes back to a checkpoint), so the server takes the tables of that checkpoint again. No torch.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import msgspec

from trueline import files
from trueline.engine.contract import ProcessSpec, parse_ref
from trueline.errors import DiskFull, StorageError, TrainError, TruelineError
from trueline.ps.dial import read_address
from trueline.ps.hybrid.calls import SERVICE, AlignTables, HybridAnswer, OpenTables, SaveTables
from trueline.ps.hybrid.kept import KeptTables, choose_cuts, list_parts
from trueline.ps.hybrid.mover import BucketMover
from trueline.ps.hybrid.table_files import TableFiles
from trueline.ps.link import ServerLink
from trueline.ps.master import cuts
from trueline.ps.master.servers import ServerMeter
from trueline.ps.master.shell import read_last_words
from trueline.ps.master.slots import Slots
from trueline.ps.messages import ModelSpec, Routing, ServerReport, describe_change
from trueline.ps.partition import make_routing, move_buckets
from trueline.ps.server.memory import describe_kill
from trueline.ps.tasks import FULL, LocatedServer, LocateServer, locate_server
from trueline.train.master.master import TICK_S, Master

SERVER = "server"
ENTRY = "trueline.ps.server.process:main"
STATS_S, SILENT_S = 1.0, 10.0
RETRY_S = 0.05
Context = Any


class ServerKeeper:
    """One job's servers. All of it is used in the master's asyncio thread."""

    def __init__(self, master: Master) -> None:
        self._master, self._folder = master, master.job_dir / "ps"
        self._files = TableFiles(choose_cuts(master.job, self._folder), max(2, master.job.keep), self._repeat)
        self._servers = Slots(SERVER, master.job.servers, master.job.max_failures + 2)
        self._links: dict[str, ServerLink] = {}
        self._meter = ServerMeter(master.emit)
        self._changing = asyncio.Lock()
        """One at a time opens the tables or brings them to a step."""
        self._kept = self._read()
        self._aligned = False
        self._mover = BucketMover(self._link, lambda routing: self._note(routing=routing))
        self._saves = 0, 0  # the steps of the last two checkpoints
        self._pace = (0.0, 0, 0.0)  # when a step was first seen, that step, and about how long a step takes

    @property
    def _file(self) -> Path:
        return self._folder / "tables.json"

    def _read(self) -> KeptTables | None:
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode(self._file.read_bytes(), type=KeptTables)
        return None

    def _note(self, **changes: Any) -> None:
        assert self._kept is not None
        self._keep(msgspec.structs.replace(self._kept, **changes))

    def _keep(self, kept: KeptTables) -> None:
        self._folder.mkdir(exist_ok=True)
        files.write_atomic(self._file, msgspec.json.encode(kept))
        self._kept = kept

    @property
    def _over(self) -> bool:
        return self._master.failed or self._master.stopped.is_set() or self._master.state.phase == "finished"

    # processes

    async def run(self) -> None:
        """Starts servers whenever they are not there, measures them, and changes their number, until the job ends."""
        master = self._master
        if self._kept is not None:
            count, asked = len(self._kept.routing.servers), master.job.servers
            if self._kept.asked != asked:  # `--resume --servers N`
                self._note(wanted=asked, asked=asked)
            self._servers.count = max(count, self._kept.wanted)
        with contextlib.suppress(OSError):  # the agent is away: its next one runs nothing
            for seen in await master.here.list():
                if parse_ref(seen.ref)[0] == SERVER:  # the engine starts no ref a second time
                    (self._servers.adopt if seen.alive else self._servers.note_started)(seen.ref)
        await asyncio.gather(self._watch(), self._tick(), self._follow_wanted())

    async def _watch(self) -> None:
        while not self._over:
            with contextlib.suppress(OSError):  # the launcher starts the agent again
                async for seen in self._master.here.watch():
                    if parse_ref(seen.ref)[0] != SERVER:
                        continue
                    if not seen.alive:
                        self._note_death(seen.ref, seen.reason)
                    elif self._master.here is not self._master.engine:  # which tells of workers alone
                        self._master.emit("worker.running", worker=seen.ref, pid=seen.pid)
            await asyncio.sleep(TICK_S)

    def _note_death(self, ref: str, why: str) -> None:
        if self._over or not self._servers.note_death(ref, self._master.now()):
            return
        self._master.emit("worker.lost", worker=ref, why=why)
        if (slot := self._servers.hopeless) >= 0:
            times, log = self._servers.most_failures, self._master.folder.log(ref)
            need = describe_kill(why, self._meter.find_report(ref))
            words = f"the last time: {why}: {read_last_words(log)}{need}"
            self._master.fail("train", f"server {slot} died {times} times in a row, {words}", f"see {log}")

    async def _tick(self) -> None:
        measured = 0.0
        while not self._over:
            await self._start_due()
            if self._kept is not None and self._master.now() >= measured + STATS_S:
                measured = self._master.now()
                await self._measure()
                for ref in self._servers.surplus:
                    with contextlib.suppress(OSError):  # the launcher starts the agent again
                        await self._master.here.kill(ref, grace_s=SILENT_S)
            await asyncio.sleep(TICK_S / 5)

    async def _start_due(self) -> None:
        due = self._servers.start_due(self._master.now())
        for ref in due:
            self._master.emit("worker.started", worker=ref)
        specs = [self._make_spec(ref) for ref in due]
        while specs and not self._over:
            try:
                await self._master.here.add(specs)
                return
            except OSError:
                await asyncio.sleep(TICK_S)  # the launcher starts the agent again

    def _make_spec(self, ref: str) -> ProcessSpec:
        master = self._master
        role, slot, incarnation = parse_ref(ref)
        env = {
            "TRUELINE_JOB": str(master.job_dir), "TRUELINE_MASTER": master.address, "TRUELINE_SECRET": master.secret,
            "TRUELINE_REF": ref, "OMP_NUM_THREADS": "1", "TRUELINE_PS_MEMORY": str(master.job.server_memory_mb << 20),
        }  # fmt: skip
        return master.localize(ProcessSpec(role=role, slot=slot, incarnation=incarnation, entry=ENTRY, env=env,
                                           log=str(master.folder.log(ref))))  # fmt: skip

    async def _measure(self) -> None:
        assert self._kept is not None
        for name in self._kept.routing.servers:
            try:
                report = await self._link(name).stats(SILENT_S)
                self._meter.add(name, report, self._master.now())
                self._servers.note_progress(report.ref)
                self._note_step(report.steps)
                if report.routing < 0 and self._aligned and not self._changing.locked():
                    self._master.fail("train", f"{report.ref} has lost what {name} held", "continue with --resume")
            except TimeoutError:
                for ref in self._servers.alive:
                    if ref.partition(".")[0] == name:
                        self._master.emit("worker.killed", worker=ref, why=f"no answer for {SILENT_S:.0f} s")
                        await self._master.here.kill(ref)
            except (OSError, TruelineError):
                continue  # it is away; the engine reports its death
        self._master.emit("servers.measured", servers=json.dumps(self.describe()["servers"]))

    def describe(self) -> dict[str, Any]:
        return {"servers": self._meter.describe()}

    # what workers ask

    def attach(self, server: Any) -> None:
        calls = {
            "Open": self._serve(OpenTables, lambda request: self.open(request.spec)),
            "Align": self._serve(AlignTables, lambda request: self.align(request.step)),
            "Save": self._serve(SaveTables, lambda request: self.save(request.step)),
            "Saved": self._serve(SaveTables, lambda request: self.wait_saved(request.step, request.folder)),
            "Locate": self._serve(LocateServer, self.locate),
        }
        handlers = {name: grpc.unary_unary_rpc_method_handler(call, bytes, bytes) for name, call in calls.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _serve(self, of: type[Any], act: Callable[[Any], Coroutine[Any, Any, msgspec.Struct]]) -> Any:
        async def call(data: bytes, context: Context) -> bytes:
            request = msgspec.msgpack.decode(data, type=of)
            state = self._master.state
            if request.ref not in state.members and request.ref not in state.pending:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION, f"fenced: {request.ref} is not of this job any more"
                )
            try:
                return msgspec.msgpack.encode(await act(request))
            except TruelineError as error:
                full = isinstance(error, DiskFull)
                await context.abort(FULL if full else grpc.StatusCode.ABORTED, error.message)
            raise AssertionError("abort raises")

        return call

    async def locate(self, request: LocateServer) -> LocatedServer:
        return locate_server(self._master.job_dir, request.server)

    async def open(self, spec: ModelSpec) -> HybridAnswer:
        """Configures the servers for the first worker's tables. Raises TrainError for other tables than the first's."""
        if self._kept is not None and self._kept.held and self._kept.spec == spec:
            return HybridAnswer(self._kept.routing)  # a worker asks again after each change of it
        async with self._pausing():
            if self._kept is None:
                count = self._servers.count
                names = [f"{SERVER}-{slot}" for slot in range(count)]
                routing = make_routing(names, spec.dense)
                self._keep(KeptTables(spec=spec, routing=routing, wanted=count, asked=count))
            assert self._kept is not None
            if self._kept.spec != spec:
                changed = describe_change(self._kept.spec, spec)
                raise TrainError(f"a worker has other tables than the job began with: {changed}")
            if not self._kept.held:
                for name in self._kept.routing.servers:
                    await self._repeat(name, self._configure)
                self._note(held=True)
            return HybridAnswer(self._kept.routing)

    async def _configure(self, link: ServerLink) -> None:
        assert self._kept is not None
        await link.configure(self._kept.spec, self._kept.routing)

    async def align(self, step: int) -> HybridAnswer:
        """Gives servers that are not at `step` the tables of its checkpoint. Raises TrainError when there are none."""
        async with self._pausing():
            assert self._kept is not None
            for name in self._kept.routing.servers:
                await self._repeat(name, lambda link: self._bring(link, step))
            self._aligned = True
        return HybridAnswer()

    async def _bring(self, link: ServerLink, step: int) -> None:
        assert self._kept is not None
        report = await link.stats()
        if report.routing >= 0 and report.steps in (step, step + 1):
            return
        parts = list_parts(self._master.job, self._folder, step)
        if step and not parts:
            raise TrainError(
                f"{link.ref} has {report.steps} steps, the workers have {step}, and no checkpoint of theirs has tables"
            )
        await link.configure(self._kept.spec, self._kept.routing, parts, fresh=True)
        self._master.emit("tables.restored", server=link.ref, step=step, before=report.steps)

    async def save(self, step: int) -> HybridAnswer:
        assert self._kept is not None
        self._saves = self._saves[1], step
        async with self._pausing(step):
            return HybridAnswer(folder=await self._files.begin(step, self._kept.routing.servers))

    async def wait_saved(self, step: int, folder: str) -> HybridAnswer:
        """Raises StorageError when a server that died while it wrote has gone on since."""
        servers = [f"{SERVER}-{slot}" for slot in range(int(folder.split(".")[1]))]
        return HybridAnswer(folder=str(await self._files.wait(step, folder, servers)))

    # their number

    def scale(self, servers: int) -> str:
        if servers < 1:
            return f"the number of servers is {servers}, expected 1 or more"
        if self._kept is None or not self._kept.held:
            return "the servers do not hold the tables yet; try again"
        try:
            self._note(wanted=servers)
        except DiskFull as error:
            return error.message
        return ""

    async def _follow_wanted(self) -> None:
        """Brings the servers to the number that is wanted, also that of a master before."""
        if self._kept is not None and self._kept.held:
            await self._spread()
        while not self._over:
            if self._kept is not None and self._kept.held and not self._is_settled(self._kept):
                await self._move_to(self._kept.wanted)
            await asyncio.sleep(TICK_S)

    @staticmethod
    def _is_settled(kept: KeptTables) -> bool:
        names = tuple(f"{SERVER}-{slot}" for slot in range(kept.wanted))
        return kept.routing.servers == names and kept.routing.owners == move_buckets(kept.routing, names, ()).owners

    async def _move_to(self, count: int) -> None:
        assert self._kept is not None
        before, names = len(self._kept.routing.servers), [f"{SERVER}-{slot}" for slot in range(count)]
        self._servers.count = max(count, before)
        self._master.emit("servers.scaling", before=before, servers=count)
        reports = list[ServerReport]()

        async def hear(link: ServerLink) -> None:
            reports.append(await link.stats())

        for name in dict.fromkeys((*self._kept.routing.servers, *names)):
            await self._repeat(name, hear)
        for stage in cuts.plan_stages(self._kept.routing, names, self._kept.spec, cuts.count_bytes(reports)):
            await self._move(stage)
            if self._kept.wanted != count:
                return
        await self._files.wait_all()  # one that leaves may be writing
        self._servers.count = count
        self._master.emit("servers.scaled", servers=count)

    async def _move(self, stage: Routing) -> None:
        while not self._over:
            assert self._kept is not None
            if self._kept.routing.version >= stage.version:
                return
            try:
                async with self._changing:
                    following = 2 * self._saves[1] - self._saves[0]  # the steps of the next checkpoint
                    await self._mover.move(self._kept.spec, self._kept.routing, stage, self._pace[2], following)
                return
            except cuts.CutBroken as error:
                self._master.emit("cut.broken", why=str(error))
                await self._spread()
                await asyncio.sleep(TICK_S)

    async def _spread(self) -> None:
        """Gives servers the routing that counts: what they have of a move that came to nothing goes."""
        async with self._changing:
            assert self._kept is not None
            for name in self._kept.routing.servers:
                await self._repeat(name, self._route)

    async def _route(self, link: ServerLink) -> None:
        assert self._kept is not None
        if (await link.stats()).routing >= 0:  # else `_measure` finds that it lost what it held
            await link.route(self._kept.routing)

    @contextlib.asynccontextmanager
    async def _pausing(self, steps: int = 0) -> AsyncIterator[None]:
        """Within the block no buckets move. `steps`: those that workers have made, as far as it is known."""
        self._mover.give_way(steps)
        async with self._changing:
            yield

    def _note_step(self, step: int) -> None:
        now, (since, earlier, _) = self._master.now(), self._pace
        if step > earlier:
            self._pace = now, step, (now - since) / (step - earlier) if since else 0.0

    def _link(self, name: str) -> ServerLink:
        if name not in self._links:
            master = self._master
            self._links[name] = ServerLink(lambda ref: read_address(master.job_dir, ref), name, master.secret.encode())
        return self._links[name]

    async def _repeat(self, name: str, act: Callable[[ServerLink], Coroutine[Any, Any, None]]) -> None:
        """Repeats `act` until the server is there. Raises the TruelineError with which it refuses."""
        while not self._over:
            try:
                await act(self._link(name))
                return
            except (OSError, TimeoutError):
                if parse_ref(f"{name}.0")[1] >= self._servers.count:
                    raise StorageError(f"{name} has left the job", hint="it is tried again") from None
                await asyncio.sleep(RETRY_S)  # the server is away: it is started again
        raise TrainError("the job is ending")
