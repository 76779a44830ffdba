"""The master's state: a thin shell around `membership.decide`.

RPCs (`server.py`), engine events and time become its events; its actions become rows of the journal, answers to
workers, and orders to the engine.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from trueline import clock, events, files
from trueline.engine.contract import Engine, Kind, ProcessSpec, parse_ref
from trueline.errors import DiskFull, StorageError
from trueline.train.job_dir import JobDir
from trueline.train.master.claims import SUPERSEDED, Leadership
from trueline.train.master.journal import Journal, Row, apply_row
from trueline.train.master.measures import MemberMeasures
from trueline.train.master.progress import JobProgress
from trueline.train.master.publisher import EventPublisher
from trueline.train.master.room import DiskRoom
from trueline.train.master.saving import SaveRequests
from trueline.train.membership import decide as members
from trueline.train.membership import events as h
from trueline.train.membership.state import MembershipPolicy, State
from trueline.train.settings import WORKERS, JobSettings
from trueline.wire import train_pb2 as pb

TICK_S = 0.25
_HINTS = {
    "train": "the workers' logs in the job's folder say more",
    "state_lost": "begin again, with more workers or with --checkpoint-every, so that a state survives",
    "poison": "look at these records and at the code that reads them; --set-aside says how many may fail",
}
_EVENT_OF_ROW = {
    "SCALE": "job.scaled",
    "QUARANTINE": "worker.quarantined",
    "RETRY": "worker.retried",
    "SUSPECT": "record.suspected",
    "POISON": "record.set_aside",
    "CKPT": "checkpoint.saved",
}
"""Rows of the journal that are events too."""


class Master:
    """One job's master. All of it runs in one asyncio thread, so every decision is atomic."""

    def __init__(
        self, job: JobSettings, job_dir: Path, journal: Journal, engine: Engine, secret: str, now: clock.Clock
    ) -> None:
        self.job, self.job_dir, self.journal, self.engine, self.here, self.secret, self.now = (
            job, job_dir, journal, engine, engine, secret, now,
        )  # fmt: skip
        self.folder = JobDir(job_dir)
        self.policy = MembershipPolicy(
            workers=job.min_workers if job.autoscale else job.workers, min_workers=job.min_workers,
            lease_s=job.lease_s, max_failures=job.max_failures, set_aside=job.set_aside, tick_s=TICK_S,
        )  # fmt: skip
        self.born = now()
        self.state, self.progress, self.saving = State(workers=self.policy.workers), JobProgress(), SaveRequests()
        for kind, body in journal.rows():
            apply_row(self.state, kind, body, self.born)
            self.progress.apply(kind, body)
        if self.state.halting:  # else a successor would train on, and the operator wait
            self.saving.halt(self.state.halting, self.progress.logged)
        self.address = ""
        self.view = pb.View(generation=0)
        self.entries: dict[str, asyncio.Future[pb.Plan]] = {}
        self.finishing: dict[str, asyncio.Future[pb.Plan]] = {}
        self.view_changed = asyncio.Event()  # set by a new view; the next one gets another event
        self.publisher = EventPublisher(self.folder.events)
        self.room = DiskRoom(self.emit)
        self.localize: Callable[[ProcessSpec], ProcessSpec] = lambda spec: spec
        self.hosts: Callable[[], Sequence[dict[str, Any]]] = tuple
        self.avoid: Callable[[str, str], None] = lambda ref, why: None
        self.replicate: Callable[[Sequence[Row]], None] = lambda rows: None
        self.leadership: Leadership | None = None  # of a job that other hosts could lead
        self._backlog: list[Row] = []  # for the journal, in their order
        self._waiting: list[h.Action] = []  # until those rows are in the journal
        self._deaths = dict[str, h.Death]()
        self.measures = MemberMeasures(self.state, now, self.emit)
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopped = asyncio.Event()
        self.exit_code, self.failed = 0, False
        if self.state.generation:
            self.view = self._make_view("the master is back")

    def handle(self, event: h.Event) -> bool:
        """Decides on `event` and acts; returns False when its sender is fenced."""
        try:
            return self._carry_out(members.decide(self.state, event, self.now(), self.policy))
        except StorageError as error:
            self.fail(error.code, error.message, error.hint)
        except Exception as error:  # noqa: BLE001  the state may be inconsistent
            self.fail_unexpectedly(error)
        return True

    def _carry_out(self, actions: list[h.Action]) -> bool:
        if not actions:
            return True
        rows = [(action.kind, action.body) for action in actions if isinstance(action, h.Log)]
        self._backlog += rows
        self._waiting += actions
        if (rows or len(self._waiting) > len(actions)) and not self._flush():
            return True  # what is not in the journal does not happen, or not yet
        self._act_waiting()
        return not any(isinstance(action, h.Fence) for action in actions)

    def _act_waiting(self) -> None:
        """Carries out what is in the journal."""
        actions, self._waiting = self._waiting, []
        specs = [self._spec(action) for action in actions if isinstance(action, h.Start)]
        for action in actions:
            self._act(action)
        if specs:
            self.spawn(self._send_order(lambda: self.engine.add([s for s in specs if s.ref in self.state.pending])))

    def _act(self, action: h.Action) -> None:
        match action:
            case h.Log(kind, body):
                if kind in _EVENT_OF_ROW:
                    self.emit(_EVENT_OF_ROW[kind], **body)
            case h.Start():
                self.emit("worker.started", worker=action.ref)
            case h.Kill(ref, why):
                self.emit("worker.killed", worker=ref, why=why)
                self.spawn(self._send_order(lambda: self.engine.kill(ref)))
            case h.AvoidHost(ref, why):
                self.avoid(ref, why)
            case h.Publish(reason):
                self._publish_view(reason)
            case h.Release():
                self._release(action)
            case h.Truncate(steps):
                self.progress.truncate(steps)
                self.emit("log.truncated", steps=steps, why="the survivors had applied no more")
            case h.Finish():
                self._conclude()
            case h.FailJob(code, why):
                self.fail(code, why, _HINTS[code])
            case h.Fence(ref):
                self.emit("worker.fenced", worker=ref)

    def _spec(self, start: h.Start) -> ProcessSpec:
        env = {
            "TRUELINE_JOB": str(self.job_dir), "TRUELINE_MASTER": self.address, "TRUELINE_SECRET": self.secret,
            "TRUELINE_REF": start.ref, "OMP_NUM_THREADS": str(self.job.threads),
        }  # fmt: skip
        return self.localize(ProcessSpec(
            role=start.role, slot=start.slot, incarnation=start.incarnation, entry=f"{WORKERS[self.job.strategy]}:main",
            log=str(self.folder.log(start.ref)), env=env,
        ))  # fmt: skip

    def _make_view(self, reason: str) -> pb.View:
        state = self.state
        return pb.View(
            generation=state.generation, members=state.view, cut_below=state.cut_below, reason=reason,
            set_aside=sorted(state.set_aside), rotation=state.rotation, careful=state.careful,
        )  # fmt: skip

    def _publish_view(self, reason: str) -> None:
        self.view = self._make_view(reason)
        _resolve(self.entries, pb.Plan(superseded=True))
        _resolve(self.finishing, pb.Plan(superseded=True))
        self.view_changed.set()
        self.view_changed = asyncio.Event()
        self.progress.begin_regroup(self.state.generation, reason)
        self.emit("view.published", generation=self.state.generation, workers=len(self.state.view), why=reason)

    def _release(self, release: h.Release) -> None:
        most = max(release.steps)
        self.progress.reconstruct(self.state.committed)  # also of a checkpoint beyond the last report
        plan = pb.Plan(
            source=release.source, steps=release.steps, store=release.store, checkpoint=release.checkpoint,
            rates=release.rates, states=release.states, halts_from=self.saving.save_from if self.saving.halting else 0,
        )  # fmt: skip
        _resolve(self.entries, plan)
        if release.checkpoint:
            self.emit("job.restored", checkpoint=release.checkpoint, step=self.state.committed)
        self.emit("group.released", generation=self.view.generation, workers=len(release.steps), steps=most)

    def _conclude(self) -> None:
        state, last = self.state, self.progress.last_step
        faults = self.progress.find_faults(self.job, state.set_aside)
        if state.checkpoint_step != last:
            faults.append(f"the last checkpoint is of step {state.checkpoint_step}, not {last}")
        if faults:
            self.fail("records_miscounted", "; ".join(faults), "please report this with the job's folder")
            return
        summary = self.progress.summarize(self.job, state)
        self._backlog.append(("END", {"summary": summary}))
        if not self._end(summary) and not self.failed:
            self.spawn(self._end_later(summary))

    async def _end_later(self, summary: dict[str, Any]) -> None:
        while not self.failed and not self._end(summary):  # noqa: ASYNC110  no system tells of room
            await asyncio.sleep(TICK_S)

    def _end(self, summary: dict[str, Any]) -> bool:
        """Writes the end of the job, and ends it; False while the disk is full."""
        state = self.state
        if not self._flush():
            return False
        try:
            files.write_atomic(self.folder.summary, json.dumps(summary, indent=1).encode())
        except DiskFull as error:
            self.room.lack("summary", str(self.folder.summary), error.message, "the job ends once there is room")
            return False
        self.room.gain("summary")
        _resolve(self.finishing, pb.Plan(finished=True))
        self.emit("job.finished", steps=state.committed, summary=json.dumps(summary))
        return True

    def fail(self, code: str, why: str, hint: str) -> None:
        """Ends the job for all workers; only the first reason counts."""
        if self.failed:
            return
        self.state.phase, self.failed = "failed", True
        row = "FAIL", {"code": code, "why": why}
        self.replicate([row])
        with contextlib.suppress(StorageError):  # the reason may be a full disk
            self.journal.append(row)
        for ref in (*self.state.members, *self.state.pending):
            self.spawn(self.engine.kill(ref))
        self.emit("job.failed", code=code, why=why, hint=hint)

    def fail_unexpectedly(self, error: Exception) -> None:
        """Ends the job for an unexpected exception; the traceback goes to the log."""
        logging.getLogger("trueline").error("the master met an unexpected exception", exc_info=error)
        why = f"the master met an unexpected {type(error).__name__}: {error}"
        self.fail("internal", why, f"please report this with {self.folder.log('master')}; continue with --resume")

    def log(self, *rows: Row) -> None:
        """Appends to the journal, or to what waits for room on a full disk; another failure ends the job, since a later
        master would lack the rows."""
        self._backlog += rows
        if "journal" not in self.room.waiting:
            self._flush()

    def _flush(self) -> bool:
        """Writes what waits for the journal; False while a view is published or the disk is full, and after the end."""
        if (lead := self.leadership) is not None and (lead.busy or lead.lost):
            return False
        if lead is not None and (views := lead.begin(self._backlog)):
            self.spawn(self._publish(lead, views))
            return False
        try:
            self.journal.append(*self._backlog)
        except DiskFull as error:
            effect = "steps continue, and nothing else is decided until there is room"
            self.room.lack("journal", str(self.journal.path), error.message, effect)
            return False
        except StorageError as error:
            self.fail(error.code, error.message, "see to the disk, then continue with --resume")
            return False
        self.replicate(self._backlog)
        self._backlog.clear()
        self.room.gain("journal")
        return not self.failed

    async def _publish(self, lead: Leadership, views: list[dict[str, Any]]) -> None:
        """Publishes views, then carries out what waits for them, unless another master leads."""
        if not await lead.publish(views):
            self.exit_code = SUPERSEDED
            self.stopped.set()
        elif self._flush():
            self._act_waiting()

    def emit(self, name: str, **fields: events.Field) -> None:
        """Publishes an event: to the log, the job's folder, followers and the page."""
        self.publisher.publish([(name, fields)])

    def record_progress(self, progress: pb.Progress) -> int:
        """Enters a worker's report; returns the steps in the log."""
        report = self.progress.enter_report(progress, self.now())
        self.log(*report.rows)
        if report.fault:
            self.fail("records_miscounted", report.fault, "please report this with the job's folder")
        self.publisher.publish(report.events)
        return self.progress.logged

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` as a task; an exception in it ends the job."""
        task = asyncio.ensure_future(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except OSError as error:
            events.emit("engine.unreachable", why=str(error))
        except Exception as error:  # noqa: BLE001  otherwise the job would hang unnoticed
            self.fail_unexpectedly(error)

    async def _send_order(self, order: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Repeats an order until the engine has taken it; orders are idempotent."""
        while not self.stopped.is_set():
            try:
                await order()
                return
            except OSError as error:
                events.emit("engine.unreachable", why=str(error))
                await asyncio.sleep(TICK_S)  # the launcher starts the agent again

    async def run_engine(self) -> None:
        """Follows the engine's processes, across restarts of its agent."""
        while not self.stopped.is_set():
            with contextlib.suppress(OSError):  # the launcher restarts a dead agent; until then leases find the dead
                async for seen in self.engine.watch():
                    if seen.alive:
                        where = {"host": seen.host} if seen.host else {}
                        self.emit("worker.running", worker=seen.ref, pid=seen.pid, **where)
                    else:
                        lost = bool(seen.host) and seen.kind is Kind.LOST
                        self.note_death(h.Death(seen.ref, seen.reason, seen.code == 0, seen.failed, blameless=lost))
            await asyncio.sleep(TICK_S)

    def note_death(self, death: h.Death) -> None:
        """Collects the deaths of one turn of the loop, so that they cost one view."""
        if death.ref not in self.state.members and death.ref not in self.state.pending:
            return
        if not self._deaths:
            asyncio.get_running_loop().call_soon(self._handle_deaths)
        self._deaths[death.ref] = death

    def _handle_deaths(self) -> None:
        deaths, self._deaths = tuple(self._deaths.values()), {}
        if self.state.phase == "running":
            for death in deaths:
                self.emit("worker.lost", worker=death.ref, why=death.why)
        self.handle(h.Deaths(deaths))
        self.end_halt()

    async def adopt(self, *, launch: bool = True) -> None:
        """Adopts the running workers. `launch`: the launcher starts or resumes the job, not only its master."""
        if launch:  # told before the engine answers: hosts are submitted for that number of workers meanwhile
            self.saving, self.state.workers = SaveRequests(), self.policy.workers
        running = [seen.ref for seen in await self.engine.list() if seen.alive]
        alive = {ref for ref in running if parse_ref(ref)[0] == h.WORKER}
        if alive and self.state.phase == "running":
            for ref in self.state.members.keys() - alive:
                self.emit("worker.lost", worker=ref, why="died while the master was away")
        self.handle(h.Begin(frozenset(alive), launch))
        self.end_halt()

    async def run_clock(self) -> None:
        while not self.stopped.is_set():
            await asyncio.sleep(TICK_S)
            self.publisher.flush()
            if "journal" in self.room.waiting and self._flush():
                self._act_waiting()
            if not self._waiting:  # else no time passes for the members, who wait for what was decided
                self.handle(h.Tick())
                self.end_halt()

    @property
    def applied(self) -> int:
        """Steps that are known to be applied."""
        return max(self.progress.logged, self.state.committed)

    def halt(self, why: str) -> bool:
        """Ends the job at a step whose checkpoint is written; False if there is no group that could apply a step."""
        if self.state.phase != "running":
            return False
        if self.saving.halt(why, self.progress.logged):
            self.emit("job.halting", why=why)
            self.handle(h.Halt(why))
        return True

    def end_halt(self) -> None:
        """Ends a job that halts and of which no process has the state: all that is left is its newest checkpoint."""
        if self.saving.halting and self.state.phase == "gathering":
            self.spawn(self.stop(self.saving.halting, 0.0))

    async def stop(self, why: str, grace_s: float) -> None:
        steps = self.state.checkpoint_step
        if self.state.phase == "gathering" and self.state.checkpoint and steps < self.applied:
            self.log(("TRUNCATE", {"steps": steps}))
            self.progress.truncate(steps)
            self.emit("log.truncated", steps=steps, why="the processes that had applied more are gone")
        self.emit("job.stopping", why=why)
        self.state.phase = "finished" if self.state.phase == "finished" else "failed"
        with contextlib.suppress(OSError):  # the agent is gone, and its children with it
            for seen in await self.engine.list():
                if seen.alive:
                    await self.engine.kill(seen.ref, grace_s=grace_s)
        self.stopped.set()


def _resolve(waiting: dict[str, asyncio.Future[pb.Plan]], plan: pb.Plan) -> None:
    for future in waiting.values():
        if not future.done():
            future.set_result(plan)
    waiting.clear()
