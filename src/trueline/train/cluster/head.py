"""The head of a submitted job: fetches its code from the store, begins an agent, and leads the job.

The agent of the workers imports torch, which takes most of the time until the first step. It begins before this process
imports what a launcher needs.

`python -m trueline.train.cluster.head STORE/JOB LAUNCH`, started by a scheduler. A launch that has ended is not begun
again: a client may have halted it while the head was queued.
"""

import asyncio
import json
import logging
import os
import socket
import sys
import time
from pathlib import Path

from trueline import events, files
from trueline.engine.hosts import folder as travel
from trueline.errors import JobStopped, StorageError, TruelineError, UsageError
from trueline.files import TemporaryFolder
from trueline.train.cluster.store import JobStore, LaunchEnd, SubmittedJob
from trueline.train.launch.preload import EarlyAgent
from trueline.train.reasons import LEFT_OUT_EXIT


def note_start(store: JobStore, **fields: events.Field) -> None:
    """Writes an event from before the job has a folder."""
    events.emit("head.started", **fields)
    line = {"at": time.time(), "seq": 0, "name": "head.started", "fields": fields}
    store.append("logs/events.log", json.dumps(line).encode() + b"\n")


def fetch_code(store: JobStore, job: SubmittedJob, folder: Path) -> None:
    """Puts the recipe's folder into the job's. Raises StorageError."""

    async def fetch(digest: str) -> bytes:
        data = store.get(f"files/{digest}")
        if data is None:
            raise StorageError(f"{store.where} has lost files/{digest}, which the job needs")
        return data

    asyncio.run(travel.unpack(job.files, folder, files.user_cache() / "joined", fetch))


def run(store: JobStore, number: int) -> int:
    """Leads the launch to its end; returns the exit code. Raises TruelineError."""
    job, launch = store.read_job(), store.last_launch()
    if launch is None or launch.number != number or store.read_end(number) is not None:
        raise UsageError(f"launch {number} of {store.where} has ended, or another one has begun")
    temporary = TemporaryFolder.after_sweep("head")
    scratch = temporary.path
    os.chdir(scratch)
    folder = scratch / job.name
    folder.mkdir(mode=0o700)
    try:
        note_start(store, host=socket.gethostname(), engine=launch.on)
        fetch_code(store, job, folder)
        with EarlyAgent(job.settings.get("strategy", "allreduce"), folder / (job.script or (job.recipe,))[0]) as early:
            from trueline.train.cluster import lead  # which imports half a second

            summary = lead.run(store, job, launch, folder, early)
        return LEFT_OUT_EXIT if summary.get("set_aside") else 0
    except BaseException as error:
        from trueline.train.launch.shutdown import describe_end  # gRPC

        outcome, why = describe_end(error)
        store.end_launch(number, LaunchEnd(outcome=outcome, why=why, ended=time.time()))
        raise
    finally:
        temporary.remove()


def main() -> None:
    where, number = sys.argv[1:]
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s")
    try:
        code = run(JobStore(where), int(number))
    except JobStopped as error:
        print(error.message, file=sys.stderr)  # noqa: T201 - the log of this process
        code = 0
    except TruelineError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
    sys.exit(code)


if __name__ == "__main__":
    main()
