"""The master: the torch-free process that knows who is in the job.

A thin shell around `members.decide`: it turns RPCs, engine events and time into its events and its actions into rows
of the journal, answers to workers, and orders to the engine. It may be killed at any instant: training goes on, and
the next master replays the journal, asks the engine what runs, and adopts it (workers reconnect to the same port).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import msgspec

from trueline import clock, events, files
from trueline.engine import lifeline
from trueline.engine.contract import Engine, ProcessSpec, make_ref
from trueline.engine.local import LocalEngine
from trueline.errors import StorageError
from trueline.train import members, settings
from trueline.train.account import Account
from trueline.train.journal import Journal, Row, replay
from trueline.train.settings import JobSettings
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc

TICK_S = 0.25
_HINTS = {
    "train": "the workers' logs in the job's folder say more",
    "state_lost": "begin again, with more workers or with --checkpoint-every, so that a state survives",
}
Context = Any
"""grpc.aio.ServicerContext; its stubs are generic in ways that say nothing here."""


class Master(pb_grpc.MasterServicer):
    """One job's master. All of it runs in one asyncio thread, so every decision is atomic."""

    def __init__(
        self, job: JobSettings, job_dir: Path, journal: Journal, engine: Engine, secret: str, now: clock.Clock
    ) -> None:
        self.job, self.job_dir, self.journal, self.engine, self.secret, self.now = (
            job, job_dir, journal, engine, secret, now,
        )  # fmt: skip
        self.policy = members.Policy(
            workers=job.workers,
            min_workers=job.min_workers,
            lease_s=job.lease_s,
            max_failures=job.max_failures,
        )
        self.state, rows = replay(journal.rows(), now())
        self.account = Account(rows)
        self.address = ""
        self.view = pb.View(generation=0)
        self._entries: dict[str, asyncio.Future[pb.Plan]] = {}
        self._finishing: dict[str, asyncio.Future[pb.Plan]] = {}
        self._changed, self._followers = asyncio.Event(), asyncio.Event()
        self._said: list[pb.Event] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopped = asyncio.Event()
        self.failed = False
        if self.state.generation:
            self.view = self._as_view("the master is back")

    # Decisions and what they cause. ------------------------------------------------------------------------------

    def happen(self, event: members.Event) -> bool:
        """Decides on `event` and acts; False when its sender is fenced."""
        decision = members.decide(self.state, event, self.now(), self.policy)
        self.state = decision.state
        for action in decision.actions:
            self._act(action)
        return not any(isinstance(action, members.Fence) for action in decision.actions)

    def _act(self, action: members.Action) -> None:
        match action:
            case members.Start(slot, incarnation):
                self._start(slot, incarnation)
            case members.Kill(ref, why):
                self.say("worker.killed", worker=ref, why=why)
                self._spawn(self.engine.kill(ref))
            case members.Publish(reason):
                self._publish(reason)
            case members.Release(source, steps, checkpoint):
                self._release(source, steps, checkpoint)
            case members.Truncate(steps):
                self.account.truncate(steps)
                self.log(("TRUNCATE", {"steps": steps}))
                self.say("log.truncated", steps=steps, why="the survivors had applied no more")
            case members.Finish():
                self._conclude()
            case members.FailJob(code, why):
                self._fail(code, why, _HINTS[code])
            case members.Fence(ref):
                self.say("worker.fenced", worker=ref)

    def _start(self, slot: int, incarnation: int) -> None:
        ref = make_ref("worker", slot, incarnation)
        self.log(("START", {"ref": ref}))
        env = {
            "TRUELINE_JOB": str(self.job_dir),
            "TRUELINE_MASTER": self.address,
            "TRUELINE_SECRET": self.secret,
            "TRUELINE_REF": ref,
            "OMP_NUM_THREADS": str(self.job.threads),
        }
        log = str(self.job_dir / "logs" / f"{ref}.log")
        spec = ProcessSpec(
            role="worker",
            slot=slot,
            incarnation=incarnation,
            entry="trueline.train.worker:main",
            log=log,
            env=env,
        )
        self.say("worker.started", worker=ref)
        self._spawn(self.engine.add([spec]))

    def _as_view(self, reason: str) -> pb.View:
        state = self.state
        return pb.View(generation=state.generation, members=list(state.view), cut_below=state.cut_below, reason=reason)

    def _publish(self, reason: str) -> None:
        self.view = self._as_view(reason)
        body = {"generation": self.state.generation, "members": list(self.state.view),
                "cut_below": self.state.cut_below, "reason": reason}  # fmt: skip
        self.log(("VIEW", body))
        for future in (*self._entries.values(), *self._finishing.values()):
            if not future.done():
                future.set_result(pb.Plan(superseded=True))
        self._entries.clear()
        self._finishing.clear()
        self._changed.set()
        self._changed = asyncio.Event()
        self.account.regrouping(self.state.generation, reason)
        self.say("view.published", generation=self.state.generation, workers=len(self.state.view), why=reason)

    def _release(self, source: int, steps: tuple[int, ...], checkpoint: str) -> None:
        self.account.reconstruct(max(max(steps), 0))
        store = self.state.members[self.state.view[0]].store
        plan = pb.Plan(source=source, steps=steps, store=store, checkpoint=checkpoint)
        for future in self._entries.values():
            if not future.done():
                future.set_result(plan)
        self._entries.clear()
        if checkpoint:
            self.say("job.restored", checkpoint=checkpoint, step=self.state.committed)
        self.say("group.released", generation=self.state.generation, workers=len(self.state.view), steps=max(steps))

    def _conclude(self) -> None:
        faults = self.account.faults(self.job.epochs)
        if self.state.checkpoint_step != self.account.total_steps:
            faults.append(
                f"the last checkpoint is of step {self.state.checkpoint_step}, not {self.account.total_steps}"
            )
        if faults:
            self._fail("records_miscounted", "; ".join(faults), "please report this with the job's folder")
            return
        for future in self._finishing.values():
            if not future.done():
                future.set_result(pb.Plan(finished=True))
        summary = self.account.summary(self.job, self.state)
        self.log(("END", {"summary": summary}))
        files.write_atomic(self.job_dir / "summary.json", json.dumps(summary, indent=1).encode())
        self.say("job.finished", steps=self.state.committed, summary=json.dumps(summary))

    def _fail(self, code: str, why: str, hint: str) -> None:
        if self.state.phase == "failed" and self.failed:
            return
        self.state, self.failed = replace(self.state, phase="failed"), True
        with contextlib.suppress(StorageError):  # what is to be told may be that the disk is full
            self.journal.append(("FAIL", {"code": code, "why": why}))
        for ref in (*self.state.members, *self.state.pending):
            self._spawn(self.engine.kill(ref))
        self.say("job.failed", code=code, why=why, hint=hint)

    def log(self, *rows: Row) -> None:
        """Appends to the journal; one that cannot be written ends the job: a later master would know too little."""
        try:
            self.journal.append(*rows)
        except StorageError as error:
            self._fail(error.code, error.message, "free some space, then go on with --resume")

    def say(self, name: str, **fields: events.Field) -> None:
        """Reports to the log and to everybody who follows."""
        events.emit(name, **fields)
        self._said.append(pb.Event(seq=len(self._said) + 1, name=name, fields=json.dumps(fields)))
        self._heard()

    def _heard(self) -> None:
        followers, self._followers = self._followers, asyncio.Event()
        followers.set()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(_reported(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What the engine and time bring. -----------------------------------------------------------------------------

    async def run_engine(self) -> None:
        """Follows the engine for ever; an agent that was restarted is asked again."""
        while not self.stopped.is_set():
            with contextlib.suppress(OSError):  # the launcher restarts a dead agent; until then leases have to do
                async for seen in self.engine.watch():
                    if seen.alive:
                        self.say("worker.running", worker=seen.ref, pid=seen.pid)
                    else:
                        self._gone(seen.ref, seen.reason)
            await asyncio.sleep(TICK_S)

    def _gone(self, ref: str, why: str) -> None:
        if self.state.phase == "running" and (ref in self.state.members or ref in self.state.pending):
            self.say("worker.lost", worker=ref, why=why)
        self.happen(members.Gone(ref, why))

    async def adopt(self) -> None:
        """After a restart: what died while the master was away, and what was started but is not in a view yet."""
        known = {seen.ref: seen for seen in await self.engine.list()}
        if not any(seen.alive for seen in known.values()):
            self.state = replace(self.state, phase="gathering", view=(), members={}, pending={}, failures={})
        for ref in tuple(self.state.members):
            if ref not in known or not known[ref].alive:
                self._gone(ref, "died while the master was away")
        waiting = {ref: self.now() for ref, seen in known.items() if seen.alive and ref not in self.state.members}
        self.state = replace(self.state, pending={**self.state.pending, **waiting})
        self.happen(members.Begin())

    async def run_clock(self) -> None:
        while not self.stopped.is_set():
            await asyncio.sleep(TICK_S)
            self.happen(members.Tick())

    # RPCs of workers. ----------------------------------------------------------------------------------------------

    async def Watch(self, request: pb.Hello, context: Context) -> AsyncIterator[pb.View]:
        newcomer = request.ref not in self.state.members
        fault, rows = self.account.accept(request.num_records, request.total_steps)
        self.log(*rows)
        if fault:
            self._fail("data", fault, "every worker must see the same records")
        await self._let_in(self.happen(members.Ready(request.ref, request.store)), request.ref, context)
        if newcomer:
            self.say("worker.joined", worker=request.ref, total_steps=request.total_steps)
        sent = 0
        while True:
            changed = self._changed
            if self.view.generation > sent:
                sent = self.view.generation
                yield self.view
            else:
                await changed.wait()

    async def _let_in(self, known: bool, ref: str, context: Context) -> None:
        if not known:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"fenced: {ref} is not of this job any more")

    async def Enter(self, request: pb.Entry, context: Context) -> pb.Plan:
        happened = members.Entered(request.ref, request.generation, request.step)
        return await self._wait(self._entries, happened, request, context)

    async def Finish(self, request: pb.Entry, context: Context) -> pb.Plan:
        if self.state.phase == "finished":
            return pb.Plan(finished=True)
        happened = members.Done(request.ref, request.generation)
        return await self._wait(self._finishing, happened, request, context)

    async def _wait(
        self,
        waiting: dict[str, asyncio.Future[pb.Plan]],
        happened: members.Event,
        request: pb.Entry,
        context: Context,
    ) -> pb.Plan:
        if request.generation != self.state.generation:
            return pb.Plan(superseded=True)
        future = waiting[request.ref] = asyncio.get_running_loop().create_future()
        await self._let_in(self.happen(happened), request.ref, context)
        plan: pb.Plan = await future
        return plan

    async def Report(self, request: pb.Progress, context: Context) -> pb.Ack:
        await self._let_in(self.happen(members.Heard(request.ref, request.step)), request.ref, context)
        rows, fault = self.account.report(request)
        self.log(*rows)
        if fault:
            self._fail("records_miscounted", fault, "please report this with the job's folder")
        for kind, body in rows:
            if kind == "COMMIT":
                self.say("step.applied", total=self.account.total_steps, **body)
            elif kind == "EPOCH":
                self.say("epoch.certified", **body)
        return pb.Ack(committed=self.account.logged)

    async def Leave(self, request: pb.Worker, context: Context) -> pb.Ack:
        await self._let_in(self.happen(members.Leaving(request.ref)), request.ref, context)
        self.say("worker.leaving", worker=request.ref)
        return pb.Ack()

    async def Broken(self, request: pb.Fault, context: Context) -> pb.Ack:
        happened = members.GroupBroken(request.ref, request.generation, request.what)
        await self._let_in(self.happen(happened), request.ref, context)
        return pb.Ack()

    async def Fail(self, request: pb.Fault, context: Context) -> pb.Ack:
        known = request.ref in self.state.members or request.ref in self.state.pending
        await self._let_in(known, request.ref, context)
        code, _, why = request.what.partition("|")
        self._fail(code, f"{request.ref}: {why}", request.detail)
        return pb.Ack()

    async def Saved(self, request: pb.Checkpoint, context: Context) -> pb.Ack:
        await self._let_in(request.ref in self.state.members, request.ref, context)
        body: dict[str, events.Field] = {"step": request.step, "path": request.path, "digest": request.digest}
        self.log(("CKPT", body))
        self.state = replace(self.state, checkpoint=request.path, checkpoint_step=request.step)
        self.say("checkpoint.saved", **body)
        return pb.Ack()

    # RPCs of the launcher. -------------------------------------------------------------------------------------------

    async def Follow(self, request: pb.Cursor, context: Context) -> AsyncIterator[pb.Event]:
        after = request.after
        while True:
            followers = self._followers
            while after < len(self._said):
                after += 1
                yield self._said[after - 1]
            await followers.wait()

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.Ack:
        self.say("job.stopping", why=request.why)
        self.state = replace(self.state, phase="failed" if self.state.phase != "finished" else "finished")
        with contextlib.suppress(OSError):  # the agent is gone, and its children with it
            for seen in await self.engine.list():
                if seen.alive:
                    await self.engine.kill(seen.ref, grace_s=request.grace_s)
        self.stopped.set()
        return pb.Ack()


async def _reported(work: Awaitable[None]) -> None:
    try:
        await work
    except OSError as error:
        events.emit("engine.unreachable", why=str(error))


class _Secret(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers nobody without the job's secret."""

    def __init__(self, secret: str) -> None:
        self._wanted = f"Bearer {secret}"
        self._refusal = grpc.unary_unary_rpc_method_handler(self._refuse)

    async def _refuse(self, request: object, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the job's secret is missing or wrong")

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        given = dict(details.invocation_metadata).get("authorization", "")
        return await continuation(details) if hmac.compare_digest(str(given), self._wanted) else self._refusal


async def run(job_dir: Path, engine: Engine, port: int) -> int:
    """Serves the job in `job_dir` until it is stopped; returns the exit code."""
    job = settings.load(job_dir)
    secret = (job_dir / "secret").read_text()
    journal = Journal(job_dir / "journal.sqlite")
    master = Master(job, job_dir, journal, engine, secret, clock.monotonic_s)
    options = [("grpc.so_reuseport", 0)]
    server = grpc.aio.server(interceptors=[_Secret(secret)], options=options)
    pb_grpc.add_MasterServicer_to_server(master, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    master.address = f"127.0.0.1:{bound}"
    await server.start()
    files.write_atomic(job_dir / "master.json", msgspec.json.encode({"address": master.address, "pid": os.getpid()}))
    await master.adopt()
    background = [asyncio.ensure_future(master.run_engine()), asyncio.ensure_future(master.run_clock())]
    await master.stopped.wait()
    for task in background:
        task.cancel()
    await server.stop(0.2)
    journal.close()
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trueline.train.master")
    parser.add_argument("job_dir", type=Path)
    parser.add_argument("--agent", required=True, help="Unix socket of the local engine's agent")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lifeline.watch_in_thread()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    sys.exit(asyncio.run(run(arguments.job_dir, LocalEngine(arguments.agent), arguments.port)))


if __name__ == "__main__":
    main()
