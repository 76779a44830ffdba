"""`trueline resume`."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline.cli.jobs import _launch, _stores
from trueline.cli.options import Output, job_argument, verb
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.engine.cluster.settings import AnySettings
    from trueline.train.cluster.store import JobStore
    from trueline.train.launch.preload import EarlyAgent

_EXAMPLES = """
trueline resume digits-1
    continues runs/digits-1 from its newest checkpoint, with the settings it had

trueline resume runs/digits-1 --workers 8 --detach
    the same with other workers, in the background; the result does not depend on them

trueline resume digits-1 --on slurm
    a submitted job continues on this engine, whichever it ran on before
"""


@verb("resume", examples=_EXAMPLES, shows_progress=True)
@job_argument
@_launch.training_options(without=_launch.FIXED)
@_launch.how_options
@_stores.on_option()
@_stores.store_option
def command(job: str, on: str | None, store: str | None, **given: Any) -> Output:
    """Continue a job that halted, failed or lost its processes.

    It starts from the newest checkpoint that verifies, and without a checkpoint from its first step. Settings
    that decide what is computed stay as they were, and the recipe must not have changed. JOB is a job's folder, its
    name under ./runs, or in a store: then it is submitted again, to the engine that it had or another one (--on).
    """
    engine = _stores.read_engine(on) if on else None
    if (where := _stores.find_stored(job, store)) is not None:
        return _resume_stored(where, on, engine, given)
    if on:
        raise UsageError(f"job '{job}' is in no store, so that no engine can have it", hint="leave --on out")
    from trueline.train.launch.jobs import find_job

    folder = find_job(job)
    with _begin_agent(folder, detach=given["detach"]) as early:
        from trueline.train.api import prepare_resume

        return _launch.launch(lambda **changed: prepare_resume(folder, **changed), given, early)


def _begin_agent(folder: Path, *, detach: bool) -> AbstractContextManager[EarlyAgent | None]:
    """The job's agent, which imports torch while this process does; none where the job does not start here."""
    from trueline.train.job_dir import JobDir
    from trueline.train.launch.preload import EarlyAgent
    from trueline.train.settings import load

    settings, where = load(folder), JobDir(folder)
    if detach or where.is_held() or where.summary.exists():
        return contextlib.nullcontext()
    users = settings.script[0] if settings.script else settings.recipe
    return EarlyAgent(settings.strategy, Path(users))


def _resume_stored(where: JobStore, on: str | None, engine: AnySettings | None, given: dict[str, Any]) -> Output:
    from trueline.train.cluster import operate

    workers = given.pop("workers")
    if other := [name for name, value in given.items() if value]:
        raise UsageError(
            f"a submitted job keeps its settings: {', '.join(other)} cannot be given",
            hint="only --workers and --on can",
        )
    if (manifest := where.read_job().manifest) and engine is not None:
        from trueline.train.learners.submission import fit_stored_manifest

        engine = fit_stored_manifest(manifest, engine)
    if manifest and workers:
        raise UsageError("the number of learners is the manifest's", hint="leave --workers out")
    launch = operate.resume(where, on=on or "", engine=engine, workers=workers or "")
    text = f"{where.name} is submitted to {launch.on} again\n  trueline logs -f {where.name}    follow it"
    return Output(text, {"job": where.name, "store": str(where.where), "engine": launch.on, "launch": launch.number})
