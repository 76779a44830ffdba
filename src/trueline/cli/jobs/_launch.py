"""Options of the verbs that launch a job (train, run, resume), and the launch itself."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trueline.cli.options import Decorator, Output, combine, section, setting_options
from trueline.errors import UsageError
from trueline.recipe.settings import TrainingSettings
from trueline.settings import declared_settings

if TYPE_CHECKING:
    from trueline.train.launch.preload import EarlyAgent
    from trueline.train.settings import Fault

TRACKER_WAIT_S = 60.0
"""How long a job that has ended waits until its last events are in MLflow or another tracker."""
_job = section("The job")
FIXED = tuple(one.name for one in declared_settings(TrainingSettings) if one.setting.fixed)
"""Settings that a resumed job keeps."""


def training_options(*, without: Collection[str] = ()) -> Decorator[Any]:
    """`--workers` and the settings of a job; the recipe sets what they leave out."""
    workers = section("The workers (a resumed job may have others)")
    count = workers("--workers", metavar="N|MIN:MAX", default=None, help="Worker processes; else 3.")
    return combine(setting_options(TrainingSettings, without=without, unset=True), count)


job_option = _job("--job", "job_dir", metavar="FOLDER", help="Where the job keeps its state; else runs/NAME-1.")
resume_option = _job("--resume", is_flag=True, help="Continue the job in --job from its newest checkpoint.")
how_options = combine(
    _job("--detach", is_flag=True, help="Run in the background; survives the terminal."),
    _job(
        "--track",
        "trackers",
        multiple=True,
        metavar="TRACKER",
        help="Log to wandb, mlflow or module:function meanwhile; repeatable.",
    ),
    _job("--mlflow", is_flag=True, help="Log parameters, curves and certificates to an MLflow run, meanwhile."),
    _job("--tracking-uri", metavar="URI", help="To this store; else MLFLOW_TRACKING_URI, else ./mlflow.db."),
)
kill_option = _job("--kill", "kills", multiple=True, metavar="STEP[:WORKER]", help="Kill a worker there, to see.")
qat_option = _job("--qat", is_flag=True, help="Train --weights further for int8: as NAME-qat.py beside RECIPE.")


def derive_qat(recipe: str, weights: str | None, *, resume: bool) -> str:
    """The recipe that trains `recipe` for int8. Raises UsageError, and what deriving it raises."""
    from trueline.compress.derive.qat import write_qat_recipe

    if resume:
        raise UsageError("--qat is for a new job; a job that trains for int8 keeps its own recipe", hint="leave it out")
    if not weights:
        raise UsageError(
            "--qat needs the trained weights that it begins with",
            hint="train first, then: trueline train RECIPE --qat --weights CHECKPOINT",
        )
    return str(write_qat_recipe(recipe, weights))


def parse_fault(text: str) -> Fault:
    """The fault in `STEP` or `STEP:WORKER`. Raises UsageError."""
    from trueline.train.settings import Fault

    step, _, slot = text.partition(":")
    if not step.isdecimal() or not (slot or "0").isdecimal():
        raise UsageError(f"--kill '{text}' is not STEP or STEP:WORKER", hint="for example --kill 20:1")
    return Fault(step=int(step), slot=int(slot or 0))


def launch(prepare: Callable[..., Path], given: dict[str, Any], early: EarlyAgent | None = None) -> Output:
    """Launches the job in the folder that `prepare` returns for the options `given`; `early`: its agent, if begun."""
    detach, mlflow, uri, trackers = (given.pop(name) for name in ("detach", "mlflow", "tracking_uri", "trackers"))
    trackers = dict.fromkeys([*trackers, *(["mlflow"] if mlflow or uri else [])])
    if trackers:
        from trueline.registry.follow import check_tracker

        for name in trackers:
            check_tracker(name)
    folder = prepare(**given)
    with contextlib.ExitStack() as tracking:
        for name in trackers:
            tracking.enter_context(_track(folder, name, uri, wait=not detach))
        if detach:
            return _detach(folder)
        from trueline.train import api

        try:
            result = api.launch(folder, early)
        except KeyboardInterrupt:
            click.echo(f"the job was stopped; continue it with `trueline resume {_name_of(folder)}`", err=True)
            raise
    lines = [result.summary.as_text(), f"checkpoint: {result.checkpoint}"]
    if result.chosen != result.checkpoint:
        lines.append(f"the best one, which stands for the job: {result.chosen}")
    paths = {"checkpoint": str(result.checkpoint), "chosen": str(result.chosen), "job": str(result.job_dir)}
    left_out = result.summary.left_out
    facts = {**result.summary.as_dict(), **paths, "left_out": left_out}
    return Output("\n".join(lines), facts, warn_left_out(left_out))


def warn_left_out(left_out: int) -> int:
    """The exit code of a job that has finished without that many records; warns if there are any."""
    from trueline.train.reasons import LEFT_OUT_EXIT

    if not left_out:
        return 0
    many = f"{left_out} records were" if left_out > 1 else "1 record was"
    click.secho(f"warning: {many} left out of the training (exit code {LEFT_OUT_EXIT})", fg="yellow", err=True)
    return LEFT_OUT_EXIT


def _name_of(folder: Path) -> str:
    """The JOB argument for this folder: its name under ./runs, else its path."""
    return folder.name if folder.parent == Path("runs").resolve() else str(folder)


@contextlib.contextmanager
def _track(folder: Path, tracker: str, tracking_uri: str | None, *, wait: bool) -> Iterator[None]:
    """A separate process logs the job to `tracker` until the job ends; with `wait`, this one waits for it."""
    from trueline.registry.follow import log_of, start

    process = start(folder, tracker=tracker, tracking_uri=tracking_uri)
    try:
        yield
    finally:
        if wait:
            try:
                if process.wait(TRACKER_WAIT_S):
                    why = f"{log_of(folder, tracker)} has the reason"
                    click.secho(f"warning: the job is not in {tracker} as a whole: {why}", fg="yellow", err=True)
            except subprocess.TimeoutExpired:
                click.echo(f"{tracker} is slow: {log_of(folder, tracker)} shows its progress", err=True)


def _detach(folder: Path) -> Output:
    from trueline.train.launch.launcher import detach

    pid, name = detach(folder), _name_of(folder)
    text = (
        f"{folder} runs in the background (process {pid})\n"
        f"  trueline logs -f {name}    follow it\n"
        f"  trueline status {name}     see how it is\n"
        f"  trueline halt {name}       end it after a checkpoint"
    )
    return Output(text, {"job": str(folder), "pid": pid})
