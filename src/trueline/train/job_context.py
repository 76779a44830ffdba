"""What an `Elastic` that a user's script makes has of the job it is in: where checkpoints go, injected faults.

The script decides on epochs, records of a step and seed. The first worker that has made its Elastic writes them into
JOB/job.json, where the master and a later launch find them; whoever says something else afterwards is refused.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from trueline.data.source import Source
from trueline.errors import UsageError
from trueline.train import settings as job_settings
from trueline.train.settings import Fault, JobSettings
from trueline.train.step.checkpointer import Keeper
from trueline.train.step.plan import JobPlan


def of_script(plan: JobPlan, source: Source) -> tuple[Keeper | None, tuple[Fault, ...]]:
    """Keeper and faults of the job in TRUELINE_JOB; none where there is no job. Raises UsageError."""
    job_dir = os.environ.get("TRUELINE_JOB")
    if job_dir is None:
        return None, ()
    job = settle(Path(job_dir), epochs=plan.epochs, global_batch=plan.global_batch, seed=plan.seed)
    facts = {
        "recipe": {"name": Path(job.script[0] if job.script else job.recipe).stem, "digest": job.recipe_digest},
        "data": source.fingerprint(),
    }
    return Keeper.of(job, Path(job_dir), facts), job.faults


def settle(folder: Path, **said: int) -> JobSettings:
    """The job's settings with what the script says of its steps. Raises UsageError when the job began otherwise."""
    job = job_settings.load(folder)
    if not job.epochs:
        job = msgspec.structs.replace(job, **said)
        job_settings.save(job, folder)
    for name, value in said.items():
        if getattr(job, name) != value:
            raise UsageError(
                f"the script made an Elastic with {name}={value}, and the job began with {getattr(job, name)}",
                hint="make one Elastic, the same in every worker and after every resume",
            )
    return job
