"""The head of a submitted job: fetches settings, code and journal from the store, and launches the job.

The agent of its workers begins to import torch first, since this process has to import it as well.

`python -m trueline.train.cluster.head STORE/JOB LAUNCH`, started by a scheduler. A launch that has ended is not begun
again: a client may have halted it while the head was queued.
"""

import asyncio
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from trueline import files
from trueline.engine.cluster.open import open_scheduler
from trueline.engine.cluster.settings import LocalSettings, PodmanSettings
from trueline.engine.hosts import folder as travel
from trueline.engine.hosts import route
from trueline.errors import JobStopped, StorageError, TruelineError, UsageError
from trueline.train import settings as job_settings
from trueline.train.cluster.address import find_address
from trueline.train.cluster.commands import HEAD
from trueline.train.cluster.duties import leading, note_start
from trueline.train.cluster.kept import restore_files
from trueline.train.cluster.store import JobLaunch, JobStore, LaunchEnd, SubmittedJob
from trueline.train.launch.launcher import LocalJob
from trueline.train.launch.preload import EarlyAgent
from trueline.train.launch.shutdown import describe_end
from trueline.train.reasons import LEFT_OUT_EXIT


def prepare_folder(store: JobStore, job: SubmittedJob, launch: JobLaunch, folder: Path) -> Path:
    """The job's folder with its code, ready to be launched. Raises what `train` raises before a job begins."""
    from trueline.train import api  # torch, which the agent is to begin with first

    where = _find_place(store, job, launch)
    code, *arguments = job.script or (job.recipe,)
    users = code if ":" in code else str(folder / code)
    if ":" in code:
        sys.path.insert(0, str(folder / travel.CODE))
    if restore_files(store, folder):
        earlier = job_settings.load(folder)  # the head before had another folder
        moved = {"script": (users, *arguments)} if job.script else {"recipe": users}
        job_settings.save(replace(earlier, **moved), folder)
        return api.prepare_resume(folder, workers=launch.workers or None, **where)
    workers, settings = launch.workers or job.workers, job.settings | where
    if job.script:
        return api.prepare_script(users, arguments, workers=workers, job_dir=folder, **settings)
    return api.prepare(users, workers=workers, job_dir=folder, **settings)


def _find_place(store: JobStore, job: SubmittedJob, launch: JobLaunch) -> dict[str, Any]:
    """Where the job listens for its hosts, and where its checkpoints are."""
    if job.servers:
        return {"checkpoints": store.checkpoints}
    engine = launch.engine
    interface = engine.interface or ("127.0.0.1" if isinstance(engine, LocalSettings | PodmanSettings) else "")
    address = find_address(interface)
    return {
        "listen": route.join_address(address, 0), "interface": interface or address, "cores": engine.slots,
        "ports": engine.ports, "checkpoints": store.checkpoints,
    }  # fmt: skip


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
    scratch = Path(tempfile.mkdtemp(prefix="trueline-head-"))
    os.chdir(scratch)
    folder = scratch / job.name
    folder.mkdir(mode=0o700)
    try:
        note_start(store, "head.started", host=socket.gethostname(), engine=launch.on)
        fetch_code(store, job, folder)
        with EarlyAgent(job.settings.get("strategy", "allreduce"), folder / (job.script or (job.recipe,))[0]) as early:
            prepare_folder(store, job, launch, folder)
            with LocalJob(folder, early) as running:
                scheduler = open_scheduler(launch.engine)
                with leading(store, job, launch, scheduler, role=HEAD, leader=running):
                    summary = running.run()
        return LEFT_OUT_EXIT if summary.get("set_aside") else 0
    except BaseException as error:
        outcome, why = describe_end(error)
        store.end_launch(number, LaunchEnd(outcome=outcome, why=why, ended=time.time()))
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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
