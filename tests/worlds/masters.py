"""A master without workers: an engine that starts nothing, a gRPC service, and a job of two steps."""

import asyncio
import contextlib
import dataclasses
import json
import queue
import threading

import grpc
import numpy as np

from trueline.train.master.journal import Journal
from trueline.train.master.master import Master
from trueline.train.master.server import MasterService, SecretInterceptor
from trueline.train.membership import events as h
from trueline.train.settings import JobSettings
from trueline.train.step import ledger
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc

JOB = JobSettings(name="x", recipe="x.py", recipe_digest="", workers=2, epochs=1, global_batch=4, seed=0, min_workers=1)
ALONE = dataclasses.replace(JOB, workers=1)
"""A job of one worker."""
RECORDS, STEPS = 8, 2
WAIT_S = 60
A, B = "worker-0.0", "worker-1.0"
SECRET = (("authorization", "Bearer secret"),)
CERTIFICATE = pb.Certificate(
    epoch=0, steps=STEPS, records=RECORDS, digest=ledger.digest_of_all(RECORDS), tally_min=1, tally_max=1
)


class NoEngine:
    """Starts nothing and records the requests."""

    def __init__(self) -> None:
        self.started, self.killed = [], []

    async def add(self, specs):
        self.started += [spec.ref for spec in specs]

    async def kill(self, ref, *, grace_s=0.0):
        self.killed.append(ref)

    async def list(self):
        return []

    async def capacity(self):
        return 2


def said(master):
    return [(event.name, json.loads(event.fields)) for event in master.publisher.recent]


def rows(master):
    """The entries of its journal: kind and body."""
    text = "SELECT kind, body FROM log ORDER BY seq"
    return [(kind, json.loads(body)) for kind, body in master.journal._db.execute(text)]


def master_of(job_dir, job=JOB, *, journal=Journal, engine=None):
    """A master in `job_dir` whose clock is stopped."""
    return Master(job, job_dir, journal(job_dir / "log"), engine or NoEngine(), "secret", lambda: 0.0)


@contextlib.asynccontextmanager
async def _listening(job, job_dir):
    """A master with an engine that starts nothing, and its address."""
    master = Master(job, job_dir, Journal(job_dir / "log"), NoEngine(), "secret", asyncio.get_running_loop().time)
    server = grpc.aio.server(interceptors=[SecretInterceptor("secret", master.fail_unexpectedly)])
    pb_grpc.add_MasterServicer_to_server(MasterService(master), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await master.adopt()
    yield master, f"127.0.0.1:{port}"
    await server.stop(None)
    master.journal.close()


@contextlib.asynccontextmanager
async def serving(job, job_dir):
    """A master with an engine that starts nothing, and a client's stub."""
    async with _listening(job, job_dir) as (master, address), grpc.aio.insecure_channel(address) as channel:
        yield master, pb_grpc.MasterStub(channel)


@contextlib.contextmanager
def served(job, job_dir):
    """The address of such a master that runs in a thread of its own."""
    addresses, loop, over = queue.SimpleQueue(), asyncio.new_event_loop(), asyncio.Event()

    async def serve():
        async with _listening(job, job_dir) as (_, address):
            addresses.put(address)
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield addresses.get(timeout=WAIT_S)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def at_work(master, *, steps=0):
    """Two workers in one group that have applied `steps` steps and have reported them."""
    if not master.state.pending:
        master.handle(h.Begin())
    master.progress.accept_facts(RECORDS, STEPS, 0)
    for ref in (A, B):
        master.handle(h.Ready(ref, f"{ref}:1"))
    for ref in (A, B):
        master.handle(h.Entered(ref, master.state.generation, -1))
    applied = [pb.Applied(step=step, generation=1, records=4, digest=step, workers=2) for step in range(steps)]
    master.record_progress(pb.Progress(ref=A, generation=1, step=steps, applied=applied))
    for ref in (A, B):
        master.handle(h.Heartbeat(ref, steps))


def finish(master, *, certificate=CERTIFICATE, checkpoint_step=STEPS):
    """Completes the job; returns the master's replies to the two workers."""
    at_work(master, steps=STEPS)
    if certificate is not None:
        master.record_progress(pb.Progress(ref=A, certificates=[certificate]))
    if checkpoint_step is not None:
        master.handle(h.Saved(A, checkpoint_step, f"/job/step-{checkpoint_step}"))
    futures = {ref: asyncio.get_running_loop().create_future() for ref in (A, B)}
    master.finishing.update(futures)
    for ref in (A, B):
        master.handle(h.Finished(ref, master.state.generation))
    return futures


def other_digest():
    return pb.Certificate(epoch=0, steps=STEPS, records=RECORDS, digest=ledger.digest(np.arange(1, RECORDS + 1)),
                          tally_min=1, tally_max=1)  # fmt: skip
