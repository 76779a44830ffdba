"""A worker: the recipe's blanks in an `Elastic` loop. Forked by the agent, it lives until the job ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from trueline import __version__
from trueline.errors import CheckpointError, TruelineError
from trueline.recipe.contract import Recipe
from trueline.recipe.load import load_recipe
from trueline.train import settings as job_settings
from trueline.train.calls import call
from trueline.train.elastic import Elastic, connect
from trueline.train.keeper import Keeper
from trueline.train.settings import JobSettings


def main() -> int:
    """Trains as the environment says (TRUELINE_JOB, _MASTER, _SECRET, _REF); returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    job_dir = Path(os.environ["TRUELINE_JOB"])
    settings = job_settings.load(job_dir)
    torch.set_num_threads(settings.threads)
    job: Elastic | None = None
    try:
        recipe = load_recipe(settings.recipe)
        check_digest(recipe, settings)
        job = build(recipe, settings, job_dir)
        _leave_on_sigterm(job)
        train(recipe, job)
        return 0
    except Exception as error:  # noqa: BLE001  the process boundary: everybody would meet this error, so the job ends
        _report(job, error)
        return 1


def check_digest(recipe: Recipe, settings: JobSettings) -> None:
    if recipe.digest != settings.recipe_digest:
        raise CheckpointError(
            f"the recipe {settings.recipe} was changed since the job began",
            hint="start a new job with the changed recipe, or restore the old one",
        )


def build(recipe: Recipe, settings: JobSettings, job_dir: Path) -> Elastic:
    """The job's loop: same seed, same model in every worker."""
    torch.manual_seed(settings.seed)
    model = recipe.model().train()
    optimizer = recipe.optimizer(model.parameters())
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler is not None else None
    source = recipe.source("training")
    facts: dict[str, Any] = {
        "trueline": __version__,
        "torch": str(torch.__version__),
        "recipe": {"name": recipe.name, "digest": recipe.digest},
        "data": source.fingerprint(),
        "job": {"name": settings.name, "seed": settings.seed, "global_batch": settings.global_batch,
                "epochs": settings.epochs, "num_records": source.num_records},
    }  # fmt: skip
    return Elastic(
        model,
        optimizer,
        source,
        global_batch=settings.global_batch,
        epochs=settings.epochs,
        seed=settings.seed,
        scheduler=scheduler,
        find_unused_parameters=settings.find_unused_parameters,
        keeper=Keeper(job_dir / "checkpoints", facts, every=settings.checkpoint_every),
        faults=settings.faults,
    )


def train(recipe: Recipe, job: Elastic) -> None:
    model = job.model
    for batch in job:
        job.step(recipe.loss(call(model, batch.inputs), batch.labels).mean())


def _leave_on_sigterm(job: Elastic) -> None:
    def leave(*_: object) -> None:
        threading.Thread(target=job.leave, name="leave", daemon=True).start()  # gRPC must not run in a signal handler

    signal.signal(signal.SIGTERM, leave)


def place_of(error: Exception) -> str:
    """Where the user's code raised: the innermost frame that is not Trueline's or a library's, in words."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    users = [frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith(ours)]
    frame = users[-1] if users else frames[-1]
    return f"at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}; the worker's log has the whole traceback"


def _report(job: Elastic | None, error: Exception) -> None:
    traceback.print_exc()
    what = error.message if isinstance(error, TruelineError) else f"{type(error).__name__}: {error}"
    detail = error.hint if isinstance(error, TruelineError) else place_of(error)
    code = error.code if isinstance(error, TruelineError) else "recipe_raised"
    fail = job.fail if job is not None else connect(lambda _: None).fail
    fail(f"{code}|{what}", detail)
