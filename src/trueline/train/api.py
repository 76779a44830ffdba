"""`trueline.train`: trains a recipe and returns a checkpoint with an account of every record.

A job is prepared, then launched in this process or in one of its own. Its folder holds all that a launcher needs:
settings, and the checkpoint to continue from if it is resumed.
"""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, Unpack

from trueline import events, files
from trueline.bundle.describe import describe_loss
from trueline.checkpoint import manifest
from trueline.columns.fitted import encode as encode_columns
from trueline.errors import StorageError, UsageError
from trueline.extras import expect_package
from trueline.recipe.contract import Recipe
from trueline.recipe.load import load_recipe, locate_recipe
from trueline.storage.location import Location, parse_location, split_location
from trueline.train import settings as job_settings
from trueline.train.job_dir import JobDir
from trueline.train.launch.jobs import format_set_aside
from trueline.train.launch.launcher import LocalJob
from trueline.train.launch.preload import EarlyAgent
from trueline.train.master.journal import Journal
from trueline.train.monitor.notebook import progress
from trueline.train.monitor.plot import Plot, plot_job
from trueline.train.settings import Fault, JobSettings, Overrides, apply_overrides, parse_workers, refuse_changes

USUAL_WORKERS = 3
SLOW_READING = 0.25
"""From this fraction of the steps' time on, reading is the bottleneck."""
HOW = {True: "record by record in the gradients", False: "and digested in the gradients"}
MUCH_S = 5.0
"""A shorter job gets no advice."""


def count_of(number: int, what: str) -> str:
    """
    >>> count_of(1, "epoch"), count_of(12, "epoch")
    ('1 epoch', '12 epochs')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The job in numbers; the CLI prints `as_text`."""

    facts: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return self.facts

    @property
    def left_out(self) -> int:
        """Records that were set aside: the job has finished without them."""
        return len(self.facts.get("set_aside") or ())

    @property
    def exactly_once(self) -> bool:
        """Whether the certificates prove it, for the records that were not set aside or cut off by an early stop."""
        facts, certificates = self.facts, self.facts["certificates"]
        whole = [certificate for certificate in certificates if not self._partial(certificate)]
        ended = facts.get("stopped_early") or len(certificates) == facts["epochs"]
        once = all(certificate["tally_max"] in (1, -1) for certificate in certificates)
        full = len(whole) >= len(certificates) - bool(facts.get("stopped_early"))
        return bool(ended and once and full)

    def as_text(self) -> str:
        facts = self.facts
        tallied = all(certificate["tally_min"] == 1 for certificate in facts["certificates"])
        size = f"of {facts['global_batch']} records " if facts["global_batch"] else ""  # a script's is not known
        lines = [
            f"{facts['name']}: {count_of(facts['steps'], 'step')} {size}in {facts['seconds']:.1f} s, "
            f"{count_of(facts['workers_started'], 'worker')} started, {count_of(facts['generations'], 'generation')}",
            f"{self._claim()} (counted {facts.get('counted') or HOW[tallied]})",
        ]
        if facts["certificates"] and facts["certificates"][-1].get("reduction"):
            lines.append(f"the loss of a step is {describe_loss(facts['certificates'][-1])}")
        lines += format_set_aside(facts.get("set_aside") or [])
        lines += [f"quarantined: worker {slot['slot']}: {slot['why']}" for slot in facts.get("quarantined") or ()]
        if facts.get("best"):
            lines.append(self._best(facts["best"]))
        lines += self._reading()
        for regroup in facts["regroups"]:
            if regroup["gap_ms"]:
                lines.append(
                    f"generation {regroup['generation']}: {regroup['reason']}; "
                    f"next step after {regroup['gap_ms']:.0f} ms with {count_of(regroup['workers'], 'worker')}"
                )
        return "\n".join(lines)

    def _reading(self) -> list[str]:
        """Advice for a job whose steps wait for their records."""
        reading_s, steps_s = self.facts.get("reading_s", 0.0), self.facts.get("steps_s", 0.0)
        if steps_s < MUCH_S or reading_s < SLOW_READING * steps_s:
            return []
        return [
            f"reading took {reading_s / steps_s:.0%} of the steps' time: --readers 2 reads records ahead, "
            "--shuffle windows decodes each row group of a file once an epoch"
        ]

    def _left_out(self) -> str:
        aside = self.facts.get("set_aside") or []
        if not aside:
            return ""
        drawn = any(certificate.get("set_aside_of") for certificate in self.facts["certificates"])
        which = f"but the draws of {len(aside)}" if drawn else f"but {len(aside)}"
        return f" {which} that failed wherever {'they' if len(aside) > 1 else 'it'} went"

    def _best(self, best: dict[str, Any]) -> str:
        values = ", ".join(f"{name} {value:.4g}" for name, value in [("loss", best["loss"]), *best["metrics"].items()])
        stopped = ", and training stopped as no later one was better" if self.facts["stopped_early"] else ""
        evaluations = count_of(len(self.facts["evaluations"]), "evaluation")
        return f"best of {evaluations}: step {best['step']}, {values}{stopped}"

    def _partial(self, certificate: dict[str, Any]) -> bool:
        return bool(certificate["records"] + len(certificate.get("set_aside", ())) < self.facts["records"])

    def _claim(self) -> str:
        *whole, last = self.facts["certificates"]
        if not whole and self._partial(last):
            once = f"none of the {self.facts['records']} records was applied twice in the one epoch"
            return f"{once}, stopped after {count_of(last['steps'], 'step')}"
        records = f"every one of the {self.facts['records']} records{self._left_out()}"
        return f"{records} was applied exactly once in {self._epochs()}"

    def _epochs(self) -> str:
        *whole, last = self.facts["certificates"]
        if not self._partial(last):
            return f"each of the {len(whole) + 1} epochs" if whole else "the one epoch"
        return (
            f"each of the {count_of(len(whole), 'whole epoch')}, and at most once in the last one, "
            f"stopped after {count_of(last['steps'], 'step')}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    checkpoint: Location
    """The last one; a URL when the checkpoints lie in an object store."""
    job_dir: Path
    summary: JobSummary

    @property
    def best(self) -> Location | None:
        """The checkpoint of the best evaluation; None without one, or if it was pruned."""
        return manifest.best(split_location(self.checkpoint)[0]) if self.summary.facts.get("best") else None

    @property
    def chosen(self) -> Location:
        """The job's result: its best checkpoint if `monitor` or `patience` is set, else the last."""
        return (self.best if job_settings.load(self.job_dir).wants_best else None) or self.checkpoint

    def plot(self) -> Plot:
        """The loss of each step, with a mark at each change of the workers."""
        return plot_job(self.job_dir)

    def _repr_html_(self) -> str:
        lines = [*self.summary.as_text().splitlines(), f"checkpoint: {self.chosen}"]
        return f"<pre>{escape(chr(10).join(lines))}</pre>{self.plot().svg}"


def train(
    recipe: str | Path | Recipe,
    *,
    workers: str | int | None = None,
    job_dir: str | Path | None = None,
    resume: bool = False,
    faults: Sequence[Fault] = (),
    **wanted: Unpack[Overrides],
) -> TrainResult:
    """Trains `recipe` with elastic workers on this machine and returns its last checkpoint.

    `workers` is a number (default 3), or `"2:8"` for a job that waits while it has fewer than two. Settings that are
    not `wanted` come from the recipe. `resume` continues the job in `job_dir` from its newest checkpoint and keeps its
    settings; those that decide what is computed cannot be changed. Raises RecipeError, TrainError, StorageError,
    UsageError; leaves no process behind in any case.
    """
    return launch(prepare(recipe, workers=workers, job_dir=job_dir, resume=resume, faults=faults, **wanted))


def launch(folder: Path, early: EarlyAgent | None = None) -> TrainResult:
    """Runs the job prepared in `folder` to its end. `early`: its agent, if that has begun. Raises as `train` does."""
    began = time.monotonic()
    with progress(), LocalJob(folder, early) as running:
        facts = running.run()
    facts["seconds"] = time.monotonic() - began
    return TrainResult(checkpoint=parse_location(facts["checkpoint"]), job_dir=folder, summary=JobSummary(facts))


def prepare(
    recipe: str | Path | Recipe,
    *,
    workers: str | int | None = None,
    job_dir: str | Path | None = None,
    resume: bool = False,
    faults: Sequence[Fault] = (),
    **wanted: Unpack[Overrides],
) -> Path:
    """The folder of a job that is ready to be launched. Arguments and errors are those of `train`."""
    expect_package("torch")
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    where = locate_recipe(loaded, recipe)
    if resume:
        if job_dir is None:
            raise UsageError("resume needs the folder of the job", hint="add --job runs/NAME-1")
        return prepare_resume(job_dir, recipe=loaded, workers=workers, faults=faults, **wanted)
    low, high = parse_workers(str(workers or USUAL_WORKERS))
    job = JobSettings(
        name=loaded.name, recipe=where, recipe_digest=loaded.digest, workers=high, min_workers=low,
        faults=tuple(faults), **asdict(loaded.defaults),
    )  # fmt: skip
    _refuse_absent(faults, high)
    job = apply_overrides(job, wanted, cores=_cores(), metrics=_metrics(loaded))
    if job.new_layers and not job.weights:
        raise UsageError("--new-layers says what --weights leaves out, and there are no weights", hint="add --weights")
    loaded = loaded.with_columns()  # fitted once, and before any process starts
    folder = _new(job, job_dir, loaded)
    if loaded.fitted is not None:
        files.write_atomic(JobDir(folder).columns, encode_columns(loaded.fitted))
    return folder


def _refuse_absent(faults: Sequence[Fault], workers: int) -> None:
    for fault in faults:
        if fault.slot >= workers:
            raise UsageError(f"there is no worker {fault.slot} to kill: {count_of(workers, 'worker')}, numbered from 0")


def prepare_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    workers: str | int | None = None,
    job_dir: str | Path | None = None,
    faults: Sequence[Fault] = (),
    **wanted: Unpack[Overrides],
) -> Path:
    """As `prepare`, for a Python file with a custom loop over `trueline.Elastic`."""
    path = Path(script).resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint="name a Python file that loops over trueline.Elastic")
    low, high = parse_workers(str(workers or USUAL_WORKERS))
    # A script that has a common name is called by its folder.
    name = path.parent.name if path.stem in ("train", "main", "run", "__main__") else path.stem
    job = JobSettings(
        name=name, recipe="", recipe_digest=files.sha256_file(path), script=(str(path), *arguments),
        workers=high, min_workers=low, epochs=0, global_batch=0, seed=0, faults=tuple(faults),
    )  # fmt: skip
    _refuse_absent(faults, high)
    return _new(apply_overrides(job, wanted, cores=_cores()), job_dir)


def prepare_resume(
    job_dir: str | Path,
    *,
    recipe: Recipe | None = None,
    workers: str | int | None = None,
    faults: Sequence[Fault] = (),
    **wanted: Unpack[Overrides],
) -> Path:
    """Prepares an earlier job to continue from its newest checkpoint. Raises UsageError if it runs or is finished."""
    folder = Path(job_dir).resolve()
    expect_package("torch")
    earlier = job_settings.load(folder)
    JobDir(folder).expect_idle()
    low, high = parse_workers(str(workers)) if workers is not None else (earlier.min_workers, earlier.workers)
    file = Path(earlier.script[0] if earlier.script else earlier.recipe)
    if recipe is None and not earlier.script and (wanted.get("monitor") or not file.is_file()):
        recipe = load_recipe(earlier.recipe)
    digest = recipe.digest if recipe is not None else files.sha256_file(file)
    later = replace(earlier, workers=high, min_workers=low, faults=tuple(faults), recipe_digest=digest)
    if wanted.get("weights"):
        wanted["weights"] = _absolute(str(wanted["weights"]))
    known = _metrics(recipe) if recipe is not None else {earlier.monitor.removeprefix("-"): None}
    later = apply_overrides(later, wanted, cores=_cores(), metrics=known)
    refuse_changes(earlier, later, str(folder))
    if JobDir(folder).summary.exists():
        raise UsageError(f"the job in {folder} has finished already", hint="capture its last checkpoint")
    if later.strategy != "ps":  # parameter servers read their own logs, which are further
        _restore_checkpoint(folder, later)
    job_settings.save(
        replace(later, checkpoints=_absolute(later.checkpoints), publish_to=_absolute(later.publish_to)), folder
    )
    return folder


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _metrics(recipe: Recipe | None) -> Mapping[str, Any]:
    return recipe.metrics() if recipe is not None and recipe.metrics is not None else {}


def _new(job: JobSettings, job_dir: str | Path | None, recipe: Recipe | None = None) -> Path:
    """A new folder with the job's settings, and the weights that it starts from: `job_dir`, or the next free one under
    ./runs."""
    if job.checkpoints:
        _expect_room(job.checkpoints)
    folder = _next_free(job.name) if job_dir is None else Path(job_dir).resolve()
    if JobDir(folder).settings.exists():
        raise UsageError(f"{folder} holds a job already", hint="add --resume to continue it, or choose another folder")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the model, what it learned from, and secrets
    except OSError as error:
        raise files.storage_error(error, folder) from error
    if job.weights and recipe is not None:
        job = _start_from(job, recipe, folder)
    if recipe is not None and recipe.path is not None and files.user_cache() in recipe.path.parents:
        kept = folder / "recipe.py"  # of a notebook: the job outlives the cache
        files.write_atomic(kept, recipe.path.read_bytes())
        job = replace(job, recipe=str(kept))
    job_settings.save(
        replace(job, name=folder.name, checkpoints=_absolute(job.checkpoints), publish_to=_absolute(job.publish_to)),
        folder,
    )
    return folder


def _start_from(job: JobSettings, recipe: Recipe, folder: Path) -> JobSettings:
    """`job` with what its weights are; `folder` then has a copy of them. Raises CheckpointError if they do not fit."""
    from trueline.checkpoint import model_files  # torch

    layers = [name.strip() for name in job.new_layers.split(",") if name.strip()]
    source, target = parse_location(job.weights), JobDir(folder).weights
    try:
        facts = model_files.store_weights(recipe.make_model(), source, target, recipe=recipe.name, new_layers=layers)
    except BaseException:
        with contextlib.suppress(OSError):  # it holds something else
            folder.rmdir()
        raise
    shown = {name: ", ".join(facts[name]) or "none" for name in ("new", "unused")}
    events.emit("weights.loaded", path=job.weights, tensors=facts["loaded"], **shown)
    return replace(job, weights=_absolute(job.weights), started_from=facts)


def _expect_room(checkpoints: str) -> None:
    """Raises UsageError if the location holds checkpoints, StorageError if it cannot be written."""
    where = parse_location(checkpoints)
    if isinstance(where, Path):
        try:
            where.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot write checkpoints to {where}: {error.strerror}", hint="name another") from error
    there = manifest.steps(where)
    if there:
        raise UsageError(
            f"{checkpoints} holds checkpoints already, of step {there[-1]} and before",
            hint="choose another folder, or continue the job that they belong to: trueline resume JOB",
        )


def _absolute(place: str) -> str:
    """A local path as an absolute one; a URL unchanged."""
    where = parse_location(place)
    return str(where.resolve()) if place and isinstance(where, Path) else place


def _next_free(name: str) -> Path:
    number = 1
    while True:
        folder = Path("runs").resolve() / f"{name}-{number}"
        try:
            folder.mkdir(mode=0o700, parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise files.storage_error(error, folder) from error


def _restore_checkpoint(folder: Path, job: JobSettings) -> None:
    """Enters the newest valid checkpoint in the journal; without one the job begins from its first step."""
    where = job.checkpoints or JobDir(folder).checkpoints
    manifest.sweep(where)  # files of a dead writer; no process of the job is alive
    newest = manifest.find_latest(where)
    journal = Journal(JobDir(folder).journal)
    if newest is None:
        journal.append(("TRUNCATE", {"steps": 0}), ("CKPT", {"step": -1, "path": "", "digest": ""}))
        events.emit("job.restarted", why="there is no checkpoint: the job begins again from its first step")
    else:
        path, said = newest
        body = {"step": int(said["step"]), "path": str(path), "digest": said["digest"]}
        journal.append(("CKPT", body))
    journal.close()
