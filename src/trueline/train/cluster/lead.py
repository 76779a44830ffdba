"""What the head of a submitted job does once its agent has begun to import: it prepares the job and launches it."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from trueline.engine.cluster.open import open_scheduler
from trueline.engine.cluster.settings import LocalSettings, PodmanSettings
from trueline.engine.hosts import folder as travel
from trueline.engine.hosts import route
from trueline.train import api
from trueline.train import settings as job_settings
from trueline.train.cluster.address import find_address
from trueline.train.cluster.commands import HEAD
from trueline.train.cluster.duties import leading
from trueline.train.cluster.kept import restore_files
from trueline.train.cluster.store import JobLaunch, JobStore, SubmittedJob
from trueline.train.launch.launcher import LocalJob
from trueline.train.launch.preload import EarlyAgent


def run(store: JobStore, job: SubmittedJob, launch: JobLaunch, folder: Path, early: EarlyAgent) -> dict[str, Any]:
    """Leads the launch, whose code is in `folder`, to its end; returns the summary. Raises TruelineError."""
    prepare_folder(store, job, launch, folder)
    with LocalJob(folder, early) as running:
        scheduler = open_scheduler(launch.engine)
        with leading(store, job, launch, scheduler, role=HEAD, leader=running):
            return running.run()


def prepare_folder(store: JobStore, job: SubmittedJob, launch: JobLaunch, folder: Path) -> Path:
    """The job's folder with its code, ready to be launched. Raises what `train` raises before a job begins."""
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
