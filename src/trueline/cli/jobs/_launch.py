"""Options of the verbs that launch a job (train, run, resume), and the launch itself."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trueline.cli._progress import progress
from trueline.cli.options import Decorator, Function, json_option, quiet_option, say, section, setting_options
from trueline.recipe.settings import TrainingSettings
from trueline.settings import declared

if TYPE_CHECKING:
    from trueline.train.api import TrainResult
    from trueline.train.settings import Fault

LOGGED_S = 60.0
"""How long a job that has ended waits for the last of it to be in MLflow."""
_workers = section("The workers (a resumed job may have others)")
_job = section("The job")


def _all(*decorators: Decorator[Any]) -> Decorator[Any]:
    def decorate(function: Function) -> Function:
        for one in reversed(decorators):
            function = one(function)
        return function

    return decorate


def training_options(*, without: Collection[str] = ()) -> Decorator[Any]:
    """`--workers` and the settings of a job, of which those left out are the recipe's."""
    workers = _workers("--workers", metavar="N|MIN:MAX", default=None, help="Worker processes; 3 if left out.")
    return _all(setting_options(TrainingSettings, without=without, unset=True), workers)


FIXED = tuple(one.name for one in declared(TrainingSettings) if one.setting.fixed)
"""Settings that a resumed job keeps."""
job_option = _job("--job", "job_dir", metavar="FOLDER", help="Where the job keeps its state; runs/NAME-1 if left out.")
resume_option = _job("--resume", is_flag=True, help="Go on with the job in --job from its newest checkpoint.")
how_options = _all(
    _job("--detach", is_flag=True, help="Run in the background; survives the terminal."),
    _job("--mlflow", is_flag=True, help="Log parameters, curves and certificates to an MLflow run, meanwhile."),
    _job("--tracking-uri", metavar="URI", help="To this store; MLFLOW_TRACKING_URI or ./mlflow.db when left out."),
    json_option,
    quiet_option,
)
_HOW = ("detach", "quiet", "as_json", "mlflow", "tracking_uri")
"""Of the options, what is about the launch; the others are the job's."""
kill_option = _job("--kill", "kills", multiple=True, metavar="STEP[:WORKER]", help="Kill a worker there, to see.")


def parse_fault(text: str) -> Fault:
    """The fault in `STEP` or `STEP:WORKER`. Raises UsageError."""
    from trueline.errors import UsageError
    from trueline.train.settings import Fault

    step, _, slot = text.partition(":")
    if not step.isdecimal() or not (slot or "0").isdecimal():
        raise UsageError(f"--kill '{text}' is not STEP or STEP:WORKER", hint="for example --kill 20:1")
    return Fault(step=int(step), slot=int(slot or 0))


def launch(prepare: Callable[..., Path], given: dict[str, Any]) -> None:
    """Launches the job whose folder `prepare` makes of the options `given`, and says the result."""
    detach, quiet, as_json, mlflow, uri = (given.pop(name) for name in _HOW)
    with contextlib.ExitStack() as stack:
        stack.enter_context(progress(quiet=quiet or detach))
        folder = prepare(**given)
        if mlflow or uri:
            stack.enter_context(_logged(folder, uri, wait=not detach))
        if detach:
            _detach(folder, as_json=as_json)
            return
        from trueline.train import api

        try:
            result = api.launch(folder)
        except KeyboardInterrupt:
            click.echo(f"the job was stopped; go on with `trueline resume {_short(folder)}`", err=True)
            raise
    say(_text(result), _facts(result), as_json=as_json)


def _short(folder: Path) -> str:
    """What a verb finds the job by: its name under ./runs, else its folder."""
    return folder.name if folder.parent == Path("runs").resolve() else str(folder)


def _text(result: TrainResult) -> str:
    lines = [result.summary.as_text(), f"checkpoint: {result.checkpoint}"]
    if result.chosen != result.checkpoint:
        lines.append(f"the best one, which stands for the job: {result.chosen}")
    return "\n".join(lines)


def _facts(result: TrainResult) -> dict[str, Any]:
    paths = {"checkpoint": str(result.checkpoint), "chosen": str(result.chosen), "job": str(result.job_dir)}
    return {**result.summary.as_dict(), **paths}


@contextlib.contextmanager
def _logged(folder: Path, tracking_uri: str | None, *, wait: bool) -> Iterator[None]:
    """A process of its own logs the job to MLflow until the job ends; with `wait`, until that is done."""
    from trueline.registry.follow import start

    process = start(folder, tracking_uri=tracking_uri)
    try:
        yield
    finally:
        if wait:
            try:
                process.wait(LOGGED_S)
            except subprocess.TimeoutExpired:
                click.echo(f"MLflow is slow: {folder / 'logs' / 'mlflow.log'} says how far it is", err=True)


def _detach(folder: Path, *, as_json: bool) -> None:
    from trueline.train.launch.launcher import detach

    pid = detach(folder)
    text = (
        f"{folder} runs in the background (process {pid})\n"
        f"  trueline logs -f {_short(folder)}    follow it\n"
        f"  trueline status {_short(folder)}     see how it is\n"
        f"  trueline halt {_short(folder)}       end it after a checkpoint"
    )
    say(text, {"job": str(folder), "pid": pid}, as_json=as_json)
