"""The processes of a submitted job as a scheduler gets them."""

import sys
import time
from pathlib import Path

import msgspec

from trueline import files
from trueline.engine.cluster.contract import Scheduler, Submission, make_name
from trueline.engine.cluster.pool_records import PYTHON
from trueline.engine.cluster.settings import (
    AnySettings,
    HostsSettings,
    KubernetesSettings,
    LocalSettings,
    PodmanSettings,
    RaySettings,
    SlurmSettings,
)
from trueline.train.cluster.store import JobLaunch, JobStore, SubmittedJob
from trueline.train.settings import parse_workers

HEAD = "head"
WITHOUT_GANGS = (SlurmSettings, KubernetesSettings)
"""Engines that start a job's processes one by one, each as soon as there is room."""


def queue_again(store: JobStore, job: SubmittedJob, launch: JobLaunch, scheduler: Scheduler) -> None:
    """Submits the job's next launch, before this one ends: the job is never without one."""
    following = msgspec.structs.replace(launch, number=launch.number + 1, submitted=time.time())
    if store.begin_launch(following):
        scheduler.submit(describe_submission(store, job, following, HEAD))


def describe_submission(store: JobStore, job: SubmittedJob, launch: JobLaunch, role: str) -> Submission:
    """The head or a host. The log lies in the store if that is a folder, else where the engine's settings say."""
    engine = launch.engine
    package, host = ("learners", "learner") if job.manifest else ("cluster", "host")
    module = f"trueline.train.{package}.{HEAD if role == HEAD else host}"
    where = [str(store.where), str(launch.number)]
    low, high = parse_workers(launch.workers or job.workers)
    slots = high + job.servers if job.servers else engine.slots
    name = make_name(job.unique_name, launch.number, role)
    return Submission(
        name=name,
        command=(engine.python or _find_python(engine), "-m", module, *where,
                 *(() if role == HEAD else (role,))),
        slots=slots, memory_mb=engine.memory_mb, log=str(_find_log_folder(store, launch) / f"{name}.log"),
        priority=job.priority, gang=max(low, slots) if role == HEAD else 0,
    )  # fmt: skip


def _find_python(engine: AnySettings) -> str:
    if isinstance(engine, HostsSettings):
        return PYTHON
    in_image = isinstance(engine, KubernetesSettings) or (isinstance(engine, PodmanSettings) and engine.image)
    return "python3" if in_image else sys.executable


def _find_log_folder(store: JobStore, launch: JobLaunch) -> Path:
    if isinstance(launch.engine, SlurmSettings | RaySettings) and launch.engine.logs:
        return Path(launch.engine.logs)
    if isinstance(store.where, Path):
        return store.where / "logs"
    return (
        files.user_cache() / "submitted" if isinstance(launch.engine, LocalSettings | PodmanSettings) else Path("/tmp")
    )
