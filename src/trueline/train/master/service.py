"""The master's gRPC service: turns the calls of workers, launchers and operators into events of the membership.

Every call carries the job's secret. An unexpected exception ends the job with code `internal` and its traceback in the
master's log: workers would take the gRPC error for a master that is away, and wait without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc

from trueline.train import settings
from trueline.train.master.master import Master
from trueline.train.membership import events as h
from trueline.train.membership.decide import scale_fault
from trueline.train.settings import beyond
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc

CALL_ENDED = (grpc.aio.AbortError, grpc.aio.InternalError)
"""What ends only the call: it was refused, or its caller is gone, as fenced workers are."""
Context = Any
"""grpc.aio.ServicerContext, whose stubs are generic to no use here."""


class MasterService(pb_grpc.MasterServicer):
    def __init__(self, master: Master) -> None:
        self.master = master

    async def _require(self, known: bool, ref: str, context: Context) -> None:
        if not known:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"fenced: {ref} is not of this job any more")

    async def _handle(self, event: h.WorkerEvent, context: Context) -> pb.Ack:
        await self._require(self.master.handle(event), event.ref, context)
        return pb.Ack()

    # Workers. --------------------------------------------------------------------------------------------------------

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
        await self._handle(h.Heartbeat(request.ref, request.step, request.phase, request.phase_s), context)
        committed = self.master.record_progress(request)
        return pb.Ack(committed=committed, save_from=self.master.save_from)

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
        ack = await self._handle(h.Saved(request.ref, request.step, request.path, request.digest), context)
        if request.step >= self.master.save_from:
            self.master.save_from = 0
        return ack

    async def Suspect(self, request: pb.Suspicion, context: Context) -> pb.Ack:
        event = h.Suspect(request.ref, tuple(request.records), request.why, request.where)
        return await self._handle(event, context)

    async def Try(self, request: pb.Trial, context: Context) -> pb.Ack:
        return await self._handle(h.Trial(request.ref, request.record, request.where), context)

    # Launchers and operators. ----------------------------------------------------------------------------------------

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.Ack:
        fault = scale_fault(request.workers, self.master.policy)
        if fault:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        self.master.handle(h.Scale(request.workers, request.why or "asked for"))
        return pb.Ack(committed=self.master.progress.logged)

    async def Save(self, request: pb.Cursor, context: Context) -> pb.Ack:
        committed = self.master.progress.logged
        self.master.save_from = max(committed, 1)
        return pb.Ack(committed=committed, save_from=self.master.save_from)

    async def Status(self, request: pb.Cursor, context: Context) -> pb.JobStatus:
        master, now = self.master, self.master.now()
        facts = master.progress.describe(master.job, master.state, now=now, uptime_s=now - master.born)
        return pb.JobStatus(json=json.dumps(facts))

    async def Follow(self, request: pb.Cursor, context: Context) -> AsyncIterator[pb.Events]:
        async for event in self.master.publisher.follow(request.after):
            yield event

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.Ack:
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

    def __init__(self, secret: str, on_crash: Callable[[Exception], None]) -> None:
        self._expected = f"Bearer {secret}".encode()
        self._on_crash = on_crash
        self._serializers: dict[str, CachedSerializer] = {}
        self._refusal = grpc.unary_unary_rpc_method_handler(self._refuse)

    async def _refuse(self, request: object, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the job's secret is missing or wrong")

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        given = dict(details.invocation_metadata).get("authorization", "")
        if not hmac.compare_digest(str(given).encode(), self._expected):
            return self._refusal
        handler: Any = await continuation(details)
        if handler is None:
            return None
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
