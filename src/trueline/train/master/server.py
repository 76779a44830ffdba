"""The master's process. No torch.

It may be killed at any instant: training continues, and the next master replays the journal, asks the engine which
workers run, and adopts them. Workers reconnect to the port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

import grpc
import msgspec

from trueline import clock
from trueline.engine.contract import Engine
from trueline.engine.local.process import watch_lifeline
from trueline.engine.open import open_engine
from trueline.errors import StorageError
from trueline.train import settings
from trueline.train.job_dir import JobDir, MasterRecord
from trueline.train.master.journal import Journal
from trueline.train.master.master import Master
from trueline.train.master.service import MasterService, SecretInterceptor
from trueline.train.monitor import server as page
from trueline.wire import train_pb2_grpc as pb_grpc

BURST = 100_000
"""Calls that may be pending: all workers reconnect at once after a master's death. gRPC's own limit is 1,000."""
PAGE_S, PAGE_SHARE = 1.0, 0.2
"""Delay of the page after a master's death, and the part of a processor that reading past events may take: the
reconnections of that moment already take processor time from the steps of training."""


async def run(job_dir: Path, engine: Engine, port: int, page_port: int = 0) -> int:
    """Serves the job in `job_dir` until it is stopped; returns the exit code."""
    job = settings.load(job_dir)
    folder = JobDir(job_dir)
    secret = folder.read_secret()
    journal = Journal(folder.journal)
    master = Master(job, job_dir, journal, engine, secret, clock.monotonic_s)
    live = page.Page(job_dir, page.token_of(secret), share=PAGE_SHARE)
    master.publisher.hook = live.add_event
    launch = folder.read_master() is None  # the launcher removes that of an earlier launch
    options = [("grpc.so_reuseport", 0), ("grpc.server.max_pending_requests", BURST),
               ("grpc.server.max_pending_requests_hard_limit", BURST)]  # fmt: skip
    server = grpc.aio.server(interceptors=[SecretInterceptor(secret, master.fail_unexpectedly)], options=options)
    pb_grpc.add_MasterServicer_to_server(MasterService(master), server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    master.address = f"127.0.0.1:{bound}"
    await server.start()
    where = MasterRecord(address=master.address, pid=os.getpid(), page=live.last_url)
    folder.write_master(where)
    await master.adopt(launch=launch)
    background = [master.spawn(master.run_engine()), master.spawn(master.run_clock())]
    if job.autoscale:
        background.append(master.spawn(master.run_scaling()))

    async def show() -> None:
        folder.write_master(msgspec.structs.replace(where, page=await live.open(page_port, master.emit)))

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
    await server.stop(0.2)
    journal.close()
    master.publisher.close()
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trueline.train.master.server")
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
