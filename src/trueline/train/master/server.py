"""The master's process and its gRPC service, which turns calls into events of the membership. No torch.

It may be killed at any instant: training continues, and the next master replays the journal and adopts the running
workers. Every call carries the job's secret. An unexpected exception ends the job with code `internal`: workers would
take the gRPC error for a master that is away, and wait without end.
"""

import argparse
import asyncio
import contextlib
import hmac
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import msgspec

from trueline import clock, events
from trueline.engine.contract import Engine
from trueline.engine.hosts.messages import PULSES
from trueline.engine.local.process import watch_lifeline
from trueline.engine.open import open_engine
from trueline.errors import DiskFull, StorageError
from trueline.train import settings
from trueline.train.job_dir import JobDir, MasterRecord
from trueline.train.master.hosts import REFUSED, JobHosts, open_hosts
from trueline.train.master.journal import STEPS_AND_LAUNCH, Journal
from trueline.train.master.master import TICK_S, Master
from trueline.train.master.scaling import run_scaling
from trueline.train.membership import events as h
from trueline.train.membership.decide import scale_fault
from trueline.train.monitor import server as page
from trueline.train.settings import beyond
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc

BURST = 100_000
"""Calls that may be pending: all workers reconnect at once after a master's death. gRPC's own limit is 1,000."""
OPTIONS = [("grpc.so_reuseport", 1), ("grpc.server.max_pending_requests", BURST),
           ("grpc.server.max_pending_requests_hard_limit", BURST)]  # fmt: skip
PAGE_S, PAGE_SHARE = 1.0, 0.2
"""Delay of the page after a master's death, and the part of a processor that reading past events may take: the
reconnections of that moment already take processor time from the steps of training."""
CALL_ENDED = (grpc.aio.AbortError, grpc.aio.InternalError)
"""What ends only the call: it was refused, or its caller is gone, as fenced workers are."""
Written = TypeVar("Written")
Context = Any  # grpc.aio.ServicerContext, whose stubs are generic to no use here


class Attendant(Protocol):
    """What a strategy that stands above train adds to the master."""

    def attach(self, server: Any) -> None:
        """Adds its services to the gRPC server, which is not started yet."""

    async def run(self) -> None:
        """Works beside the master until it is cancelled."""

    def describe(self) -> dict[str, Any]:
        """What it adds to the job's status."""

    def scale(self, servers: int) -> str:
        """Begins to change the number of servers; why it does not, or empty."""


Accompany = Callable[[Master], Attendant]


class MasterService(pb_grpc.MasterServicer):
    def __init__(self, master: Master, attendant: Attendant | None = None) -> None:
        self.master, self.attendant = master, attendant

    async def _require(self, known: bool, ref: str, context: Context) -> None:
        if not known:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"fenced: {ref} is not of this job any more")

    async def _handle(self, event: h.WorkerEvent, context: Context) -> pb.Ack:
        await self._require(self.master.handle(event), event.ref, context)
        return pb.Ack()

    async def Watch(self, request: pb.Hello, context: Context) -> AsyncIterator[pb.View]:
        master = self.master
        if master.job.script and not master.job.epochs:
            master.job = settings.load(master.job_dir)  # settled by the first worker whose script made its Elastic
        newcomer = request.ref not in master.state.members
        fault, rows = master.progress.accept_facts(
            request.num_records, request.total_steps, request.shard_records, tuple(request.blocks)
        )
        master.log(*rows)
        if fault:
            master.fail("data", fault, "every worker must see the same records and build the same model")
        if rows:
            why = f"the job has {request.total_steps} steps"
            for missed in beyond(master.job.faults, request.total_steps):
                master.emit("fault.unreachable", step=missed.step, slot=missed.slot, why=why)
            if master.folder.read_loss().get("half"):
                master.emit("sums.ordered")
        await self._handle(h.Ready(request.ref, request.store, request.state), context)
        if newcomer:
            master.emit("worker.joined", worker=request.ref, total_steps=request.total_steps)
        sent = 0
        while True:
            changed = master.view_changed
            if master.view.generation > sent:
                sent = master.view.generation
                yield master.view
            else:
                await changed.wait()

    async def Enter(self, request: pb.Entry, context: Context) -> pb.Plan:
        if request.HasField("progress") and request.ref in self.master.state.members:
            self.master.record_progress(request.progress)
        event = h.Entered(request.ref, request.generation, request.step, request.rate)
        return await self._wait(self.master.entries, event, context)

    async def Finish(self, request: pb.Entry, context: Context) -> pb.Plan:
        if self.master.state.phase == "finished":
            return pb.Plan(finished=True)
        return await self._wait(self.master.finishing, h.Finished(request.ref, request.generation), context)

    async def _wait(
        self, waiting: dict[str, asyncio.Future[pb.Plan]], event: h.Entered | h.Finished, context: Context
    ) -> pb.Plan:
        if event.generation != self.master.state.generation:
            return pb.Plan(superseded=True)
        future = waiting[event.ref] = asyncio.get_running_loop().create_future()
        await self._handle(event, context)
        plan: pb.Plan = await future
        return plan

    async def Report(self, request: pb.Progress, context: Context) -> pb.Ack:
        moves = request.moved, request.to_move, request.sending
        await self._handle(h.Heartbeat(request.ref, request.step, request.phase, request.phase_s, *moves), context)
        self.master.measures.note_transfer(request.ref)
        self.master.measures.note_memory(request.ref, request.memory)
        committed, saving = self.master.record_progress(request), self.master.saving
        return pb.Ack(committed=committed, save_from=saving.save_from, halting=bool(saving.halting))

    async def Leave(self, request: pb.Worker, context: Context) -> pb.Ack:
        ack = await self._handle(h.Leaving(request.ref), context)
        self.master.emit("worker.leaving", worker=request.ref)
        return ack

    async def ReportBrokenGroup(self, request: pb.Fault, context: Context) -> pb.Ack:
        return await self._handle(h.GroupBroken(request.ref, request.generation, request.what), context)

    async def Fail(self, request: pb.Fault, context: Context) -> pb.Ack:
        state = self.master.state
        await self._require(request.ref in state.members or request.ref in state.pending, request.ref, context)
        code, _, why = request.what.partition("|")
        self.master.fail(code, f"{request.ref}: {why}", request.detail)
        return pb.Ack()

    async def RecordCheckpoint(self, request: pb.Checkpoint, context: Context) -> pb.Ack:
        master = self.master
        if request.full:
            effect = "training continues, and the checkpoint is written once there is room"
            master.room.lack("checkpoint", request.path, request.full, effect)
            return pb.Ack()
        ack = await self._handle(h.Saved(request.ref, request.step, request.path, request.digest), context)
        master.room.gain("checkpoint")
        if master.saving.note(request.step, last=request.last, applied=master.applied):
            master.spawn(master.stop(master.saving.halting, 0.0))
        return ack

    async def Suspect(self, request: pb.Suspicion, context: Context) -> pb.Ack:
        event = h.Suspect(request.ref, tuple(request.records), request.why, request.where)
        return await self._handle(event, context)

    async def Try(self, request: pb.Trial, context: Context) -> pb.Ack:
        return await self._handle(h.Trial(request.ref, request.record, request.where), context)

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.Ack:
        workers, servers = request.workers, request.servers
        fault = "" if servers and not workers else scale_fault(workers, self.master.policy)
        if servers and not fault:
            fault = "the job has no parameter servers" if self.attendant is None else self.attendant.scale(servers)
        if fault:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        if workers or not servers:
            self.master.handle(h.Scale(workers, request.why or "asked for"))
        return pb.Ack(committed=self.master.progress.logged)

    async def Save(self, request: pb.Cursor, context: Context) -> pb.Ack:
        committed = self.master.progress.logged
        return pb.Ack(committed=committed, save_from=self.master.saving.want(committed))

    async def Status(self, request: pb.Cursor, context: Context) -> pb.JobStatus:
        master, now = self.master, self.master.now()
        facts = master.progress.describe(master.job, master.state, now=now, uptime_s=now - master.born)
        more = {"waiting": list(master.room.waiting.values()), "hosts": list(master.hosts())}
        if master.job.script and more["hosts"]:
            with contextlib.suppress(OSError):  # the launcher restarts a dead agent
                more["processes"] = msgspec.to_builtins(await master.engine.list())
        more |= self.attendant.describe() if self.attendant is not None else {}
        return pb.JobStatus(json=json.dumps({**facts, **more}))

    async def Follow(self, request: pb.Cursor, context: Context) -> AsyncIterator[pb.Events]:
        async for event in self.master.publisher.follow(request.after):
            yield event

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.Ack:
        if request.save and self.master.halt(request.why):
            return pb.Ack(save_from=self.master.saving.save_from, halting=True)
        await self.master.stop(request.why, request.grace_s)
        return pb.Ack()


class CachedSerializer:
    """Serializes a message that goes to all workers once: a view of ten thousand workers goes to ten thousand."""

    def __init__(self, serialize: Callable[[Any], bytes]) -> None:
        self._serialize, self._message, self._data = serialize, None, b""

    def __call__(self, message: Any) -> bytes:
        if message is not self._message:
            self._message, self._data = message, self._serialize(message)
        return self._data


class SecretInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the job's secret, and passes unexpected exceptions to `on_crash`."""

    def __init__(
        self, secret: str, on_crash: Callable[[Exception], None], find_fault: Callable[[str, str], str] | None = None
    ) -> None:
        """`find_fault(method, given)`: why a call without the secret is refused; empty: it has another right."""
        self._expected = f"Bearer {secret}".encode()
        self._on_crash = on_crash
        self._find_fault = find_fault or (lambda method, given: REFUSED)
        self._serializers: dict[str, CachedSerializer] = {}

    @staticmethod
    def _make_refusal(why: str) -> Any:
        async def refuse(request: object, context: Context) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

        return grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        given = str(dict(details.invocation_metadata).get("authorization", ""))
        if not hmac.compare_digest(given.encode(), self._expected) and (
            fault := self._find_fault(str(details.method), given)
        ):
            return self._make_refusal(fault)
        handler: Any = await continuation(details)
        if handler is None:
            return None
        if handler.request_streaming:
            return handler._replace(stream_stream=self._guard_stream(handler.stream_stream))
        once = self._serializers.setdefault(details.method, CachedSerializer(handler.response_serializer))
        if handler.response_streaming:
            return handler._replace(unary_stream=self._guard_stream(handler.unary_stream), response_serializer=once)
        return handler._replace(unary_unary=self._guard(handler.unary_unary), response_serializer=once)

    @contextlib.contextmanager
    def _reporting_crashes(self) -> Iterator[None]:
        try:
            yield
        except CALL_ENDED:
            raise
        except Exception as error:
            self._on_crash(error)
            raise

    def _guard(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: Context) -> Any:
            with self._reporting_crashes():
                return await method(request, context)

        return call

    def _guard_stream(self, method: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: Context) -> AsyncIterator[Any]:
            with self._reporting_crashes():
                async for message in method(request, context):
                    yield message

        return call


async def run(job_dir: Path, engine: Engine, port: int, page_port: int = 0, accompany: Accompany | None = None) -> int:
    """Serves the job in `job_dir` until it is stopped; returns the exit code."""
    job, folder = settings.load(job_dir), JobDir(job_dir)
    lock, secret = folder.hold_master(), folder.read_secret()
    journal = await write_when_room(lambda: Journal(folder.journal, STEPS_AND_LAUNCH))
    hosts = open_hosts(job, folder, engine, secret)
    master = Master(job, job_dir, journal, engine if hosts is None else hosts.fleet, secret, clock.monotonic_s)
    live = page.Page(job_dir, page.token_of(secret), share=PAGE_SHARE)
    master.publisher.hook = live.add_event
    launch = folder.read_master() is None  # the launcher removes that of an earlier launch
    interceptors = [SecretInterceptor(secret, master.fail_unexpectedly, hosts.find_fault if hosts else None)]
    server = grpc.aio.server(interceptors=interceptors, options=OPTIONS if hosts is None else [*OPTIONS, *PULSES])
    attendant = None if accompany is None else accompany(master)
    pb_grpc.add_MasterServicer_to_server(MasterService(master, attendant), server)
    master.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    if hosts is not None:
        await hosts.attach(master, server)
    if attendant is not None:
        attendant.attach(server)
    await server.start()
    where = MasterRecord(address=master.address, pid=os.getpid(), page=live.last_url)
    await write_when_room(lambda: folder.write_master(where))
    await master.adopt(launch=launch)
    beside = [] if hosts is None else [hosts.fleet.run(), hosts.run_telling(), hosts.run_watching_store()]
    beside += [] if attendant is None else [attendant.run()]
    beside += [run_scaling(master)] if job.autoscale else []
    background = [master.spawn(one) for one in (master.run_engine(), master.run_clock(), *beside)]

    async def show() -> None:
        shown = msgspec.structs.replace(where, page=await live.open(page_port, master.emit))
        await write_when_room(lambda: folder.write_master(shown))

    async def show_later() -> None:
        await asyncio.sleep(PAGE_S)
        with contextlib.suppress(StorageError):  # the address there is usually right already
            await show()

    if launch:
        await show()
    else:
        background.append(master.spawn(show_later()))
    await master.stopped.wait()
    for task in background:
        task.cancel()
    await live.close()
    await part(server, None if master.exit_code else hosts)
    journal.close()
    master.publisher.flush()
    os.close(lock)
    return master.exit_code


async def part(server: grpc.aio.Server, hosts: JobHosts | None) -> None:
    """Ends the server's calls, after those of the hosts: they hear that the job is over."""
    if hosts is not None:
        await hosts.dismiss("the job is over")
    await server.stop(0.2)


async def write_when_room(write: Callable[[], Written]) -> Written:
    """The result of `write`, which is repeated while the disk is full. Raises StorageError for other reasons."""
    while True:
        try:
            return write()
        except DiskFull as error:
            events.emit("disk.full", what="master", why=error.message)
            await asyncio.sleep(TICK_S)


def main(accompany: Accompany | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m trueline.train.master.server")
    parser.add_argument("job_dir", type=Path)
    parser.add_argument("--agent", required=True, help="Unix socket of the local engine's agent")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--page-port", type=int, default=0, help="of the live page; 0: any")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch_lifeline()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    engine = open_engine(arguments.agent)
    sys.exit(asyncio.run(run(arguments.job_dir, engine, arguments.port, arguments.page_port, accompany)))


if __name__ == "__main__":
    main()
