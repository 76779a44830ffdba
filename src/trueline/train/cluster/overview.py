"""All jobs of the stores at one time, for the page of jobs. Pure: what was read and the time are arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

from trueline.train.cluster.operate import StoredJob

WAITING, RUNNING = ("queued",), ("starting", "running", "silent")
MAX_ENDED = 100
"""Ended jobs that the page lists, the newest; more are counted."""


def summarize(stores: Mapping[str, Sequence[StoredJob]], faults: Mapping[str, str], now: float) -> dict[str, Any]:
    """The state of the page. `faults`: why a store cannot be read."""
    jobs = [job for found in stores.values() for job in found]
    waiting = sorted((job for job in jobs if job.state in WAITING), key=lambda job: (-job.priority, job.launched))
    running = sorted((job for job in jobs if job.state in RUNNING), key=lambda job: (-job.priority, job.launched))
    ended = [job for job in jobs if job.state not in WAITING + RUNNING]
    ended.sort(key=lambda job: job.ended or job.launched, reverse=True)
    return {
        "at": now, "stores": list(stores), "faults": dict(faults),
        "waiting": [job.as_dict() for job in waiting],
        "running": [job.as_dict() for job in running],
        "ended": [job.as_dict() for job in ended[:MAX_ENDED]], "num_ended": len(ended),
        "workers": sum(job.workers for job in running),
        "core_h": sum(job.core_h for job in jobs), "by_engine": sum_by_engine(jobs),
    }  # fmt: skip


def sum_by_engine(jobs: Sequence[StoredJob]) -> list[tuple[str, int, float]]:
    """Engine, jobs, core-hours, the dearest engine first. A job that moved counts where it is.

    >>> job = StoredJob(name="a-1", state="running", why="", engine="slurm:staging", launch=1, core_h=2.0, started=1.0,
    ...                 store="/s")
    >>> sum_by_engine([job, job])
    [('slurm', 2, 4.0)]
    """
    counts: dict[str, list[float]] = {}
    for job in jobs:
        count = counts.setdefault(job.engine.partition(":")[0] or "none", [0, 0.0])
        count[0] += 1
        count[1] += job.core_h
    return sorted(((name, int(n), h) for name, (n, h) in counts.items()), key=lambda one: (-one[2], one[0]))
