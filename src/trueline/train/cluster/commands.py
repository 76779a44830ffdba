"""The processes of a submitted job as a scheduler gets them."""

import sys
from pathlib import Path

from trueline import files
from trueline.engine.cluster.contract import Submission, make_name
from trueline.engine.cluster.settings import AnySettings, LocalSettings, PodmanSettings, RaySettings, SlurmSettings
from trueline.train.cluster.store import JobLaunch, JobStore, SubmittedJob
from trueline.train.settings import parse_workers

HEAD = "head"


def describe_submission(store: JobStore, job: SubmittedJob, launch: JobLaunch, role: str) -> Submission:
    """The head or a host. The log lies in the store if that is a folder, else where the engine's settings say."""
    engine = launch.engine
    package, host = ("learners", "learner") if job.manifest else ("cluster", "host")
    module = f"trueline.train.{package}.{HEAD if role == HEAD else host}"
    where = [str(store.where), str(launch.number)]
    low, _ = parse_workers(launch.workers or job.workers)
    name = make_name(job.unique_name, launch.number, role)
    return Submission(
        name=name,
        command=(engine.python or _find_python(engine), "-m", module, *where,
                 *(() if role == HEAD else (role,))),
        slots=engine.slots, memory_mb=engine.memory_mb, log=str(_find_log_folder(store, launch) / f"{name}.log"),
        priority=job.priority, gang=max(low, engine.slots) if role == HEAD else 0,
    )  # fmt: skip


def _find_python(engine: AnySettings) -> str:
    return "python3" if isinstance(engine, PodmanSettings) and engine.image else sys.executable


def _find_log_folder(store: JobStore, launch: JobLaunch) -> Path:
    if isinstance(launch.engine, SlurmSettings | RaySettings) and launch.engine.logs:
        return Path(launch.engine.logs)
    if isinstance(store.where, Path):
        return store.where / "logs"
    return (
        files.user_cache() / "submitted" if isinstance(launch.engine, LocalSettings | PodmanSettings) else Path("/tmp")
    )
