"""The master of a parameter-server job: a shell around ledger and slots, in one asyncio thread.

Workers request minibatches and commit them; the engine reports starts and deaths; the master polls the servers once a
second. Everything that outlives the master is with the servers, but for routing, spec and checkpoints (the journal).
"""

import asyncio
import base64
import contextlib
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trueline import files
from trueline.engine.contract import Engine, parse_ref
from trueline.errors import DiskFull, TruelineError
from trueline.ps.master import cuts
from trueline.ps.master.checkpoints import Checkpoints
from trueline.ps.master.ledger import MinibatchLedger
from trueline.ps.master.report import describe, summarize
from trueline.ps.master.shell import SAVER, SERVER, TICK_S, WORKER, JobShell, describe_routing, read_last_words
from trueline.ps.messages import Routing, ServerReport, describe_change
from trueline.ps.partition import make_routing, move_buckets
from trueline.ps.server.memory import describe_kill
from trueline.ps.tasks import CommitRequest, Join
from trueline.train.master.journal import Journal
from trueline.train.master.publisher import NamedEvent
from trueline.train.settings import JobSettings

STATS_S, JOURNAL_S = 1.0, 1.0
START_S = 180.0
SILENT_S = 10.0
"""A server that answers nothing for longer is killed and started again."""


class PsMaster(JobShell):
    """One job's master."""

    def __init__(
        self, job: JobSettings, job_dir: Path, journal: Journal, engine: Engine, secret: str, now: Callable[[], float]
    ) -> None:
        super().__init__(job, job_dir, journal, engine, secret, now)
        self._step_logged, self._journal_at = -1, 0.0
        self._scaling = asyncio.Lock()
        self.checkpoints = Checkpoints(self, settle=self.settle, stop=self.stop, conclude=self.conclude)

    # processes

    async def adopt(self) -> None:
        """Takes over what the engine runs."""
        for seen in await self.engine.list():
            role = parse_ref(seen.ref)[0]
            if role == SAVER:
                await self.checkpoints.adopt(seen)
            elif seen.alive and role in self.rosters:
                self.rosters[role].adopt(seen.ref)
                self.heard[seen.ref] = self.now()
        if self.routing is not None:  # those that will be added or taken are there as well
            self.servers.count = max(self.wanted_servers, len(self.routing.servers))
        await self.start_due()
        if self.routing is not None:
            self.spawn(self.settle())

    async def start_due(self) -> None:
        if self.failed or self.phase == "finished":
            return
        due = [ref for roster in self.rosters.values() for ref in roster.start_due(self.now())]
        for ref in due:
            self.log_later("START", ref=ref)
            self.heard[ref] = self.now() + START_S  # it imports first
            self.emit("worker.started", worker=ref)
        if due:
            await self.order(lambda: self.engine.add([self.make_spec(ref) for ref in due]))

    async def run_engine(self) -> None:
        """Follows the engine's processes, across restarts of its agent."""
        while not self.stopped.is_set():
            with contextlib.suppress(OSError):  # until there is one again, silence finds the dead
                async for seen in self.engine.watch():
                    if seen.alive:
                        where = {"host": seen.host} if seen.host else {}
                        self.emit("worker.running", worker=seen.ref, pid=seen.pid, **where)
                    else:
                        await self.note_death(seen.ref, seen.reason, seen.code)
            await asyncio.sleep(TICK_S)

    async def note_death(self, ref: str, why: str, code: int | None = None) -> None:
        role = parse_ref(ref)[0]
        if role == SAVER:
            self.checkpoints.note_exit(ref, code, why)
            return
        roster = self.rosters[role]
        if not roster.note_death(ref, self.now()):
            return
        self.heard.pop(ref, None)
        if self.phase in ("finished", "failed") or self.halting:
            return
        self.emit("worker.lost", worker=ref, why=why)
        if role == WORKER:
            self.deaths.append({"generation": len(self.deaths) + 1, "reason": f"{ref} died: {why}", "gap_ms": 0.0,
                                "workers": len(roster.alive)})  # fmt: skip
            if self.ledger is not None:
                self.ledger.release(ref)
            self.wake()
        elif role == SERVER and self.routing is not None:
            self.spawn(self.settle())
        if (slot := roster.hopeless) >= 0:
            times, log = roster.most_failures, self.folder.log(ref)
            need = describe_kill(why, self.meter.find_report(ref))
            words = f"the last time: {why}: {read_last_words(log)}{need}"
            self.fail("train", f"{role} {slot} died {times} times in a row, {words}", f"see {log}")
        await self.start_due()

    # the model and its servers

    async def join(self, request: Join) -> Routing:
        """A worker is ready: the first one tells what the model is. Returns when the servers hold it."""
        while self.spec is None:  # on a full disk it is tried again
            with self.waiting_for_room("model", self.journal.path, "training begins once there is room"):
                self._begin_model(request)
                break
            await asyncio.sleep(TICK_S)
        self._check_model(request)
        self.heard[request.ref] = self.now()
        self.emit("worker.joined", worker=request.ref, total_steps=self.total_steps)
        await self.ready.wait()
        assert self.routing is not None
        return self.routing

    def _begin_model(self, request: Join) -> None:
        """Raises DiskFull, with nothing done."""
        routing = make_routing([f"{SERVER}-{n}" for n in range(self.servers.count)], request.spec.dense)
        facts = {
            "spec": base64.b64encode(msgspec.msgpack.encode(request.spec)).decode(),
            "num_records": request.num_records, "blocks": list(request.blocks), "parts": self.parts,
        }  # fmt: skip
        self.log(("PS_MODEL", facts), describe_routing(routing))
        self.spec, self.num_records, self.blocks = request.spec, request.num_records, request.blocks
        self.routing = routing
        self.log_later("FACTS", num_records=self.num_records, total_steps=self.total_steps, shard_records=0)
        self.spawn(self.settle())

    def _check_model(self, request: Join) -> None:
        if request.spec != self.spec:
            changed = describe_change(self.spec, request.spec)
            why = "every worker builds the model that the job began with: restore it, or start a new job"
            self.fail("spec", f"{request.ref} builds another model than the job began with: {changed}", why)
        elif request.num_records != self.num_records:
            sees = f"{request.num_records} records, and the job began with {self.num_records}"
            self.fail("data", f"{request.ref} sees {sees}", "every worker must see the same records")

    async def settle(self) -> None:
        """Configures servers that have started, and takes from all of them what is done; waits until all are there."""
        async with self.cutting:
            stats = await self._configure_all()
            if not stats:
                return
            for one in stats:
                self.note_report(one)
            applied = [one.applied for one in stats]
            if self.ledger is None:
                self.ledger = MinibatchLedger(grid=self.grid, epochs=self.job.epochs, staleness=self.job.staleness,
                                     lease_s=max(self.job.lease_s, 3.0))  # fmt: skip
                self.ledger.restore(applied)
                if self.ledger.steps:
                    self.emit("job.restored", checkpoint="the servers' logs", step=self.ledger.steps)
            elif self._lacks(applied):
                self.emit("job.restored", checkpoint="a server that lost minibatches", step=self.ledger.steps)
                self.ledger.restore(applied)
            if self.phase == "gathering":
                self.phase = "running"
                self.emit("view.published", generation=1, workers=len(self.workers.alive), why="the servers are there")
            self.ready.set()
            self.wake()

    async def _configure_all(self) -> list[ServerReport]:
        """What all servers of the routing hold; nothing at the end of the job."""
        while not self.stopped.is_set() and not self.failed:
            assert self.routing is not None
            asked = (self._configure(ref) for ref in self.routing.servers)
            found = await asyncio.gather(*asked, return_exceptions=True)  # all have ended
            errors = [one for one in found if isinstance(one, BaseException)]
            if not errors:
                self.disk_room.gain("servers")
                return [one for one in found if isinstance(one, ServerReport)]
            for error in errors:
                if isinstance(error, DiskFull):
                    self.disk_room.lack("servers", str(self.job_dir / "ps"), error.message, "workers wait for it")
                elif isinstance(error, TruelineError):
                    self.fail(error.code, error.message, error.hint)
                elif not isinstance(error, OSError):
                    raise error
            await asyncio.sleep(0.05)  # a server is away: the engine starts it
        return []

    def _lacks(self, applied: list[Any]) -> bool:
        """Whether a server lacks minibatches that are committed: it lost its log. They are trained again."""
        assert self.ledger is not None
        done = self.ledger.done
        for one in applied:
            own = one.get(self.ledger.epoch, ())
            if any(not any(low <= start and stop <= high for low, high in own) for start, stop in done):
                return True
        return False

    async def _configure(self, ref: str) -> ServerReport:
        assert self.spec is not None
        assert self.routing is not None
        link = self.link(ref)
        stats = await link.stats()
        if stats.routing < 0:
            await link.configure(self.spec, self.routing, self.checkpoints.parts)
            stats = await link.stats()
        await link.route(self.routing)  # also if it has it: a move that came to nothing ends with that
        if stats.routing < self.routing.version:
            stats = await link.stats()
        self.servers.note_progress(stats.ref)
        self.heard[stats.ref] = self.now()
        return stats

    # minibatches

    def commit(self, request: CommitRequest) -> bool:
        """Enters minibatches that all servers have; False: the worker has lost its lease."""
        assert self.ledger is not None
        self.heard[request.ref] = self.now()
        before = self.ledger.steps
        if not self.ledger.commit(request.token, request.epoch, request.upto, self.now()):
            return False
        self.workers.note_progress(request.ref)
        self.computed[request.ref] = self.computed.get(request.ref, 0) + len(request.computed)
        after, named = self.ledger.steps, list[NamedEvent]()
        for at, one in enumerate(request.computed):
            self.loss = one.loss
            self.recent.append((self.now(), one.records))
            step = min(before + at, after - 1) if after > before else after
            if self.job.staleness == 0 and after == before:
                continue  # a part of a step that is not whole
            named.append(("step.applied", {
                "total": self.total_steps, "step": step, "generation": 1, "records": one.records, "digest": 0,
                "loss": one.loss, "workers": len(self.workers.alive), "gap_ms": 0.0, "at_ns": request.at_ns,
                "data_ms": one.data_ms, "compute_ms": one.compute_ms, "wait_ms": one.wait_ms, "commit_ms": 0.0,
                "redone": 0, "learning_rate": one.lr, "gradient_norm": one.norm,
            }))  # fmt: skip
        self.publisher.publish(named)
        self._log_step()
        self.wake()
        return True

    def _log_step(self) -> None:
        """Writes the steps into the journal once a second: `trueline jobs` reads them there when no master answers."""
        assert self.ledger is not None
        step = self.ledger.steps - 1
        if step > self._step_logged and self.now() >= self._journal_at:
            self._step_logged, self._journal_at = step, self.now() + JOURNAL_S
            loss = self.loss if math.isfinite(self.loss) else None
            self.log_later("COMMIT", step=step, generation=1, records=0, digest=0, loss=loss, workers=0, gap_ms=0.0,
                           at_ns=0)  # fmt: skip

    async def run_clock(self) -> None:
        asked = 0.0
        while not self.stopped.is_set():
            await asyncio.sleep(TICK_S)
            self.publisher.flush()
            self.write_rows()
            now = self.now()
            limit = max(self.job.lease_s, 3.0)
            for ref in self.workers.alive:
                if now - self.heard.get(ref, now) > limit:
                    await self.kill(ref, f"silent for {now - self.heard[ref]:.1f} s")
            for ref in [*self.workers.surplus, *self.servers.surplus]:
                await self.order(partial(self.engine.kill, ref, grace_s=limit))
            await self.start_due()
            if now >= asked and self.ready.is_set():
                asked = now + STATS_S
                self.spawn(self._ask_servers())
            if self.ledger is not None and self.ready.is_set() and not self.failed:
                await self.checkpoints.run_due()

    async def _ask_servers(self) -> None:
        assert self.routing is not None
        for ref in self.routing.servers:
            try:
                stats = await self.link(ref).stats(SILENT_S)
                self.note_report(stats)
                self.heard[stats.ref] = self.now()
            except TimeoutError:
                for alive in self.servers.alive:
                    if alive.partition(".")[0] == ref:
                        await self.kill(alive, f"no answer for {SILENT_S:.0f} s")
            except (OSError, TruelineError):
                continue  # it is away; the engine reports its death
        self.emit("servers.measured", servers=json.dumps(self.meter.describe()))

    # the end

    async def scale_servers(self, count: int) -> None:
        """Hands buckets to more or fewer servers, a few in each cut; training continues between."""
        async with self._scaling:
            await self._scale_servers(count)

    async def _scale_servers(self, count: int) -> None:
        assert self.routing is not None
        assert self.spec is not None
        wanted = [f"{SERVER}-{number}" for number in range(count)]
        if move_buckets(self.routing, wanted, self.spec.dense).owners == self.routing.owners:
            self.servers.count = count
            return
        self.servers.count = max(count, len(self.routing.servers))
        await self.start_due()
        self.emit("servers.scaling", before=len(self.routing.servers), servers=count)
        reports = [await self._wait_for(ref) for ref in dict.fromkeys([*self.routing.servers, *wanted])]
        for stage in cuts.plan_stages(self.routing, wanted, self.spec, cuts.count_bytes(filter(None, reports))):
            await self._move(stage)
        self.servers.count = count
        self.emit("servers.scaled", servers=count)

    async def _wait_for(self, ref: str) -> ServerReport | None:
        """Until it answers: before, there is no need for a cut. None: the job ends."""
        while not self.stopped.is_set() and not self.failed:
            with contextlib.suppress(OSError):
                return await self.link(ref).stats()
            await asyncio.sleep(0.05)
        return None

    async def _move(self, stage: Routing) -> None:
        while not self.stopped.is_set() and not self.failed:
            assert self.routing is not None
            assert self.spec is not None
            if self.routing.version >= stage.version:
                return
            try:
                async with self.checkpoints.cut() as (links, _):
                    both = links | {ref: self.link(ref) for ref in stage.servers}
                    await cuts.move(both, self.routing, stage, self.spec, self.set_routing)
                return
            except cuts.CutBroken as error:
                self.emit("cut.broken", why=str(error))
                await asyncio.sleep(TICK_S)
                await self.settle()

    async def conclude(self) -> None:
        """All minibatches are done and the last checkpoint is written. Raises OSError if a server is away."""
        assert self.ledger is not None
        assert self.routing is not None
        reports = await asyncio.gather(*(self.link(ref).stats(SILENT_S) for ref in self.routing.servers))
        if any(one.routing < self.routing.version for one in reports):
            return  # it has begun again, and holds nothing until it is configured; this is called at the next tick too
        summary = summarize(self, reports)
        with self.waiting_for_room("summary", self.folder.summary, "the job ends once there is room"):
            files.write_atomic(self.folder.summary, json.dumps(summary, indent=1).encode())
            self.log(("END", {"summary": summary}))
            self.phase = "finished"
        if self.phase != "finished":
            return
        self.emit("job.finished", steps=self.ledger.steps, summary=json.dumps(summary))
        self.wake()

    def status(self) -> dict[str, Any]:
        return describe(self, time.time())

    async def stop(self, why: str, grace_s: float) -> None:
        self.emit("job.stopping", why=why)
        self.phase = "finished" if self.phase == "finished" else "failed"
        with contextlib.suppress(OSError):  # the agent is gone, and its children with it
            for seen in await self.engine.list():
                if seen.alive:
                    await self.engine.kill(seen.ref, grace_s=grace_s)
        for link in self.links.values():
            with contextlib.suppress(OSError, TruelineError):
                await link.close()
        self.stopped.set()
