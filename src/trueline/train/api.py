"""`trueline.train`: a recipe in, a checkpoint and an account of every record out."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueline import events
from trueline.errors import UsageError
from trueline.recipe.contract import Recipe
from trueline.recipe.load import load_recipe
from trueline.train import settings as job_settings
from trueline.train.journal import Journal
from trueline.train.launch import LocalJob
from trueline.train.settings import Fault, JobSettings, parse_workers


@dataclass(frozen=True, slots=True)
class Summary:
    """The job in numbers; `as_text` is what the CLI prints."""

    facts: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return self.facts

    @property
    def exactly_once(self) -> bool:
        """True when the certificates of all epochs say so; a job that cannot say it has failed."""
        certificates = self.facts["certificates"]
        return len(certificates) == self.facts["epochs"] and all(
            certificate["records"] == self.facts["records"] and certificate["tally_max"] in (1, -1)
            for certificate in certificates
        )

    def as_text(self) -> str:
        facts = self.facts
        lines = [
            f"{facts['name']}: {facts['steps']} steps of {facts['global_batch']} records in {facts['seconds']:.1f} s, "
            f"{facts['workers_started']} workers started, {facts['generations']} generations",
            f"every one of the {facts['records']} records was applied exactly once in each of the "
            f"{facts['epochs']} epochs ({self._evidence()})",
        ]
        for regroup in facts["regroups"]:
            if regroup["gap_ms"]:
                lines.append(
                    f"generation {regroup['generation']}: {regroup['reason']}; "
                    f"next step after {regroup['gap_ms']:.0f} ms with {regroup['workers']} workers"
                )
        return "\n".join(lines)

    def _evidence(self) -> str:
        certificates = self.facts["certificates"]
        if all(certificate["tally_min"] == 1 for certificate in certificates):
            return "counted record by record in the gradients"
        return "counted and digested in the gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    checkpoint: Path
    job_dir: Path
    summary: Summary


def train(
    recipe: str | Path | Recipe,
    *,
    workers: str | int = 3,
    epochs: int | None = None,
    global_batch: int | None = None,
    seed: int | None = None,
    job_dir: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 0,
    faults: Sequence[Fault] = (),
    lease_s: float = 30.0,
) -> TrainResult:
    """Trains `recipe` with elastic workers on this machine and returns its last checkpoint.

    `workers` is a number, or `"2:8"` for a job that waits while it has fewer than two. What is left out comes from
    the recipe. `resume` goes on with the job in `job_dir` from its newest checkpoint. Raises RecipeError, TrainError,
    StorageError; no process is left behind in any case.
    """
    began = time.monotonic()
    found = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    folder = _job_dir(found, job_dir, resume=resume)
    low, high = parse_workers(str(workers))
    given = {"epochs": epochs, "global_batch": global_batch, "seed": seed}
    usual = job_settings.load(folder) if resume else found.defaults
    job = JobSettings(
        name=folder.name,
        recipe=_where(found, recipe),
        recipe_digest=found.digest,
        workers=high,
        min_workers=low,
        **{key: getattr(usual, key) if value is None else value for key, value in given.items()},
        find_unused_parameters=found.defaults.find_unused_parameters,
        checkpoint_every=checkpoint_every,
        faults=tuple(faults),
        lease_s=lease_s,
        threads=max(1, (os.cpu_count() or 1) // high),
    )
    _check(job)
    if resume:
        _prepare_resume(folder, job)
    job_settings.save(job, folder)
    events.emit("job.started", job=str(folder), workers=high, epochs=job.epochs)
    with LocalJob(folder) as running:
        facts = running.run()
    facts["seconds"] = time.monotonic() - began
    return TrainResult(checkpoint=Path(facts["checkpoint"]), job_dir=folder, summary=Summary(facts))


def _where(recipe: Recipe, given: str | Path | Recipe) -> str:
    if recipe.path is not None:
        return str(Path(recipe.path).resolve())
    if isinstance(given, str):
        return given
    raise UsageError(
        f"recipe '{recipe.name}' has no file that worker processes could load",
        hint="pass the path of its file or 'package.module:object'",
    )


def _check(job: JobSettings) -> None:
    for name in ("epochs", "global_batch"):
        if getattr(job, name) < 1:
            raise UsageError(f"{name} is {getattr(job, name)}, expected at least 1")


def _job_dir(recipe: Recipe, job_dir: str | Path | None, *, resume: bool) -> Path:
    """A new folder for the job, or the one to resume."""
    if resume:
        if job_dir is None:
            raise UsageError("resume needs the folder of the job", hint="add --job runs/NAME-1")
        return Path(job_dir).resolve()
    if job_dir is not None:
        folder = Path(job_dir).resolve()
        if (folder / "job.json").exists():
            raise UsageError(
                f"{folder} holds a job already",
                hint="add --resume to go on with it, or choose another folder",
            )
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    number = 1
    while True:
        folder = Path("runs").resolve() / f"{recipe.name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return folder


def _prepare_resume(folder: Path, job: JobSettings) -> None:
    """Puts the newest checkpoint that verifies into the journal. Raises UsageError when there is nothing to resume."""
    from trueline.state import checkpoint

    earlier = job_settings.load(folder)
    if earlier.recipe_digest != job.recipe_digest:
        raise UsageError(
            f"the recipe {job.recipe} was changed since the job in {folder} began",
            hint="restore the recipe, or train the changed one in a new job",
        )
    changed = [name for name in ("epochs", "global_batch", "seed") if getattr(earlier, name) != getattr(job, name)]
    if changed:
        before = ", ".join(f"{name} was {getattr(earlier, name)}" for name in changed)
        raise UsageError(
            f"the job in {folder} is another one: {before}", hint="leave these out to resume with the same"
        )
    if (folder / "summary.json").exists():
        raise UsageError(f"the job in {folder} has finished already", hint="capture its last checkpoint")
    newest = checkpoint.latest(folder / "checkpoints")
    journal = Journal(folder / "journal.sqlite")
    if newest is None:
        journal.append(("TRUNCATE", {"steps": 0}), ("CKPT", {"step": -1, "path": "", "digest": ""}))
        events.emit("job.restarted", why="there is no checkpoint: the job begins again from its first step")
    else:
        body = {"step": newest.step, "path": str(newest.path), "digest": newest.manifest["digest"]}
        journal.append(("CKPT", body))
    journal.close()
