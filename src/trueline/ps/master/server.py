"""The master's process and its gRPC services: that of operators and launchers, as of every job, and that of workers. No
torch.

It may be killed at any instant: workers continue with what they have leased, and wait for the next master, which asks
the servers what is done.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec

from trueline import clock
from trueline.engine.contract import Engine
from trueline.engine.hosts.messages import PULSES
from trueline.engine.local.process import watch_lifeline
from trueline.engine.open import open_engine
from trueline.ps.master.hosts import TravellingWorkers
from trueline.ps.master.master import PsMaster
from trueline.ps.master.shell import FACE, WORKER
from trueline.ps.tasks import (
    SERVICE,
    Answer,
    CommitRequest,
    Described,
    Failed,
    Join,
    Joined,
    LeaseReply,
    LeaseRequest,
    LocateServer,
    WorkerCall,
    locate_server,
)
from trueline.train import settings
from trueline.train.job_dir import JobDir, MasterRecord
from trueline.train.master.hosts import open_hosts
from trueline.train.master.journal import Journal
from trueline.train.master.server import OPTIONS, SecretInterceptor, part, write_when_room
from trueline.train.monitor import server as page
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc

Context = Any
_encode = msgspec.msgpack.encode


class TasksService:
    """What workers call, in msgpack. One that was given up is refused, and ends."""

    def __init__(self, master: PsMaster) -> None:
        self.master = master

    def make_handler(self) -> Any:
        calls = {
            "Join": self._join, "Lease": self._lease, "Commit": self._commit, "Route": self._route,
            "Beat": self._beat, "Leave": self._leave, "Fail": self._fail, "Describe": self._describe,
            "Locate": self._locate,
        }  # fmt: skip
        return grpc.method_handlers_generic_handler(
            SERVICE, {name: grpc.unary_unary_rpc_method_handler(call, bytes, bytes) for name, call in calls.items()}
        )

    async def _require(self, ref: str, context: Context) -> None:
        if not any(ref in self.master.rosters[role].alive for role in (WORKER, FACE)):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"fenced: {ref} is not of this job any more")

    async def _join(self, data: bytes, context: Context) -> bytes:
        request = msgspec.msgpack.decode(data, type=Join)
        await self._require(request.ref, context)
        return _encode(Joined(await self.master.join(request), self.master.parts))

    async def _lease(self, data: bytes, context: Context) -> bytes:
        request, master = msgspec.msgpack.decode(data, type=LeaseRequest), self.master
        await self._require(request.ref, context)
        until = master.now() + request.wait_s
        while True:
            changed = master.changed
            master.heard[request.ref] = master.now()
            if master.phase == "finished":
                return _encode(LeaseReply(finished=True))
            if master.ready.is_set() and master.ledger is not None and not master.ledger.finished:
                ends = master.halting and not master.ledger.is_fenced  # of a cut that begins, leases are still needed
                grant = None if ends else master.ledger.lease(request.ref, master.now())
                if grant is not None:
                    return _encode(LeaseReply(grant.token, grant.epoch, grant.start, grant.stop, master.ledger.steps))
            left = until - master.now()
            if left <= 0:
                return _encode(LeaseReply())
            try:
                await asyncio.wait_for(changed.wait(), left)
            except TimeoutError:
                continue

    async def _commit(self, data: bytes, context: Context) -> bytes:
        request = msgspec.msgpack.decode(data, type=CommitRequest)
        await self._require(request.ref, context)
        await self.master.ready.wait()
        return _encode(Answer(self.master.commit(request)))

    async def _route(self, data: bytes, context: Context) -> bytes:
        request = msgspec.msgpack.decode(data, type=WorkerCall)
        await self._require(request.ref, context)
        await self.master.ready.wait()
        assert self.master.routing is not None
        return _encode(Joined(self.master.routing))

    async def _describe(self, data: bytes, context: Context) -> bytes:
        request, master = msgspec.msgpack.decode(data, type=WorkerCall), self.master
        await self._require(request.ref, context)
        await master.ready.wait()
        assert master.spec is not None
        assert master.routing is not None
        master.rosters[FACE].note_progress(request.ref)
        return _encode(Described(master.spec, master.routing))

    async def _locate(self, data: bytes, context: Context) -> bytes:
        request = msgspec.msgpack.decode(data, type=LocateServer)
        await self._require(request.ref, context)
        return _encode(locate_server(self.master.job_dir, request.server))

    async def _beat(self, data: bytes, context: Context) -> bytes:
        request, master = msgspec.msgpack.decode(data, type=WorkerCall), self.master
        await self._require(request.ref, context)
        master.heard[request.ref], master.memory[request.ref] = master.now(), request.memory
        if master.ledger is not None:
            master.ledger.beat(request.ref, master.now())
        return _encode(Answer())

    async def _leave(self, data: bytes, context: Context) -> bytes:
        request = msgspec.msgpack.decode(data, type=WorkerCall)
        self.master.emit("worker.leaving", worker=request.ref)
        if self.master.ledger is not None:
            self.master.ledger.release(request.ref)
            self.master.wake()
        return _encode(Answer())

    async def _fail(self, data: bytes, context: Context) -> bytes:
        request = msgspec.msgpack.decode(data, type=Failed)
        await self._require(request.ref, context)
        self.master.fail(request.code, f"{request.ref}: {request.why}", request.detail)
        return _encode(Answer())


class OperatorService(pb_grpc.MasterServicer):
    """What launchers and operators call; the rest of the service is of other strategies."""

    def __init__(self, master: PsMaster) -> None:
        self.master = master

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.Ack:
        master = self.master
        if min(request.workers, request.servers) < 0:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the number of workers or servers is negative")
        if request.workers:
            before = master.wanted_workers
            master.set_workers(request.workers)
            master.log_later("SCALE", workers=request.workers, again=False)
            master.emit("job.scaled", before=before, workers=request.workers, why=request.why or "asked for")
            await master.start_due()
        if request.servers:
            if not master.ready.is_set():
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the servers are not all there; try again")
            master.set_servers(request.servers)
            master.spawn(master.scale_servers(request.servers))
        return pb.Ack(committed=master.ledger.steps if master.ledger else 0)

    async def Save(self, request: pb.Cursor, context: Context) -> pb.Ack:
        steps = self.master.ledger.steps if self.master.ledger else 0
        self.master.wanted = max(steps, 1)
        return pb.Ack(committed=steps, save_from=self.master.wanted)

    async def Status(self, request: pb.Cursor, context: Context) -> pb.JobStatus:
        return pb.JobStatus(json=msgspec.json.encode(self.master.status()).decode())

    async def Follow(self, request: pb.Cursor, context: Context) -> AsyncIterator[pb.Events]:
        async for bundle in self.master.publisher.follow(request.after):
            yield bundle

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.Ack:
        master = self.master
        if request.save and master.phase == "running":
            master.halt(request.why)
            return pb.Ack(halting=True)
        await master.stop(request.why, request.grace_s)
        return pb.Ack()


async def run(job_dir: Path, engine: Engine, port: int, page_port: int = 0) -> int:
    """Serves the job in `job_dir` until it is stopped; returns the exit code."""
    job, folder = settings.load(job_dir), JobDir(job_dir)
    lock, secret = folder.hold_master(), folder.read_secret()
    journal = await write_when_room(lambda: Journal(folder.journal))
    hosts = open_hosts(job, folder, engine, secret)
    travelling = None if hosts is None else TravellingWorkers(hosts, engine)
    own = engine if travelling is None else travelling.engine
    master = PsMaster(job, job_dir, journal, own, secret, clock.monotonic_s)
    if folder.read_master() is None:  # the launcher starts or resumes the job, and not only its master
        master.halting = ""
        master.set_workers(job.workers)
        master.set_servers(job.servers)
    live = page.Page(job_dir, page.token_of(secret))
    master.publisher.hook = live.add_event
    interceptor = SecretInterceptor(secret, master.fail_unexpectedly, hosts.find_fault if hosts else None)
    server = grpc.aio.server(interceptors=[interceptor], options=OPTIONS if hosts is None else [*OPTIONS, *PULSES])
    pb_grpc.add_MasterServicer_to_server(OperatorService(master), server)  # type: ignore[abstract]  # of its stubs alone
    server.add_generic_rpc_handlers((TasksService(master).make_handler(),))
    master.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    if travelling is not None:
        await travelling.attach(master, server)
    await server.start()
    where = MasterRecord(address=master.address, pid=os.getpid(), page=live.last_url)
    await write_when_room(lambda: folder.write_master(where))
    await master.adopt()
    beside = [] if hosts is None else [hosts.fleet.run(), hosts.run_telling(), hosts.run_watching_store()]
    background = [master.spawn(one) for one in (master.run_engine(), master.run_clock(), *beside)]
    if master.routing is not None:
        background.append(master.spawn(rescale(master)))
    shown = msgspec.structs.replace(where, page=await live.open(page_port, master.emit))
    await write_when_room(lambda: folder.write_master(shown))
    await master.stopped.wait()
    for task in background:
        task.cancel()
    await live.close()
    await part(server, hosts)
    journal.close()
    master.publisher.flush()
    os.close(lock)
    return 0


async def rescale(master: PsMaster) -> None:
    """A resumed job gets the number of servers in its settings, and a restarted master ends what its predecessor
    began."""
    await master.ready.wait()
    await master.scale_servers(master.wanted_servers)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trueline.ps.master.server")
    parser.add_argument("job_dir", type=Path)
    parser.add_argument("--agent", required=True, help="Unix socket of the local engine's agent")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--page-port", type=int, default=0, help="of the live page; 0: any")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch_lifeline()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    sys.exit(asyncio.run(run(arguments.job_dir, open_engine(arguments.agent), arguments.port, arguments.page_port)))


if __name__ == "__main__":
    main()
