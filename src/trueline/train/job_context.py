"""Job context for an `Elastic` created in a user script: checkpoint location and injected faults.

The script decides on epochs, global batch and seed. The first worker that makes its Elastic writes them to
JOB/job.json for the master and later launches; an Elastic with other values is refused.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from trueline.data.source import Source
from trueline.errors import UsageError
from trueline.train import settings as job_settings
from trueline.train.settings import Fault, JobSettings
from trueline.train.step.checkpointer import Checkpointer
from trueline.train.step.plan import JobPlan


def of_script(plan: JobPlan, source: Source) -> tuple[Checkpointer | None, tuple[Fault, ...]]:
    """Checkpointer and faults of the job in TRUELINE_JOB; none where there is no job. Raises UsageError."""
    job_dir = os.environ.get("TRUELINE_JOB")
    if job_dir is None:
        return None, ()
    job = settle(Path(job_dir), epochs=plan.epochs, global_batch=plan.global_batch, seed=plan.seed)
    facts = {
        "recipe": {"name": Path(job.script[0] if job.script else job.recipe).stem, "digest": job.recipe_digest},
        "data": source.fingerprint(),
    }
    return Checkpointer.of(job, Path(job_dir), facts), job.faults


def settle(folder: Path, *, epochs: int, global_batch: int, seed: int) -> JobSettings:
    """The job's settings with the script's values. Raises UsageError when the job began with others."""
    job = job_settings.load(folder)
    if not job.epochs:
        job = replace(job, epochs=epochs, global_batch=global_batch, seed=seed)
        job_settings.save(job, folder)
    for name, value in (("epochs", epochs), ("global_batch", global_batch), ("seed", seed)):
        if getattr(job, name) != value:
            raise UsageError(
                f"the script made an Elastic with {name}={value}, and the job began with {getattr(job, name)}",
                hint="make one Elastic, the same in every worker and after every resume",
            )
    return job
