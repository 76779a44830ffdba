"""Options of the verbs that launch a job (train, run, resume), and the launch itself."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trueline.cli.options import Output, combine, section
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.train.settings import Fault

MLFLOW_WAIT_S = 60.0
"""How long a job that has ended waits until its last events are in MLflow."""
_result = section("What is computed (a resumed job keeps it)")
_workers = section("The workers (a resumed job may have others)")
_keeping = section("Checkpoints and evaluation")
_job = section("The job")

result_options = combine(
    _result("--epochs", type=int, metavar="N", help="Passes over the records; else the recipe's."),
    _result("--batch", "global_batch", type=int, metavar="N", help="Records of one step, over all workers."),
    _result("--seed", type=int, metavar="N", help="Decides the order of the records and the first weights."),
    _result("--micro-batch", type=int, metavar="N", help="Records of one forward: gradients are accumulated."),
    _result("--shuffle", type=click.Choice(["full", "windows", "none"]),
            help="windows: row groups, and records inside windows of them; none: the source's order."),
    _result("--bitwise", is_flag=True, default=None,
            help="The same weights to the last bit for any number of workers."),
    _result("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Of forward and loss (autocast)."),
    _result("--clip-norm", type=float, metavar="X", help="Largest norm of all gradients together."),
    _result("--ema", type=float, metavar="DECAY",
            help="Keep a moving average of the weights; 0.999: over some 1000 steps."),
)  # fmt: skip
worker_options = combine(
    _workers("--workers", metavar="N|MIN:MAX", help="Worker processes; else 3.", default=None),
    _workers("--autoscale/--no-autoscale", default=None, help="Between MIN and MAX, while another worker pays."),
    _workers("--lease", "lease_s", type=float, metavar="S", help="Replace a worker that is silent for this long."),
    _workers("--set-aside", type=int, metavar="N", help="Records that may be left out if they fail everywhere."),
    _workers("--max-failures", type=int, metavar="N", help="Deaths in a row that put a worker's slot in quarantine."),
)
checkpoint_options = combine(
    _keeping("--checkpoint-every", type=int, metavar="STEPS", help="Steps between checkpoints; else each epoch."),
    _keeping("--checkpoints", metavar="FOLDER|URL", help="Their place, e.g. s3://bucket/name; else the job's folder."),
    _keeping("--keep", type=int, metavar="N", help="Newest checkpoints that stay, beside the best."),
)
recipe_options = combine(
    worker_options,
    _workers("--compile/--no-compile", default=None, help="Use torch.compile."),
    _workers("--device", metavar="DEVICE", help="auto (CUDA where the machine has it), cpu, cuda, or cuda:N."),
    _workers(
        "--backend", metavar="NAME", help="Sums gradients: gloo (host memory, any device), nccl, or module:function."
    ),
    _workers("--readers", type=int, metavar="N", help="Processes of each worker that read records ahead."),
    checkpoint_options,
    _keeping("--evaluate-every", type=int, metavar="STEPS", help="Evaluate while training; else each epoch if asked."),
    _keeping("--monitor", metavar="[-]NAME", help="loss or a metric that decides which is best; -NAME: larger is."),
    _keeping("--patience", type=int, metavar="N", help="Stop after N evaluations without a better one."),
)
"""Options of a job with a recipe that may change when it is resumed."""
job_option = _job("--job", "job_dir", metavar="FOLDER", help="Where the job keeps its state; else runs/NAME-1.")
resume_option = _job("--resume", is_flag=True, help="Continue the job in --job from its newest checkpoint.")
how_options = combine(
    _job("--detach", is_flag=True, help="Run in the background; survives the terminal."),
    _job("--page-port", type=int, metavar="PORT", help="Of the live page; else, and if it is in use, any free one."),
    _job("--mlflow", is_flag=True, help="Log parameters, curves and certificates to an MLflow run, meanwhile."),
    _job("--tracking-uri", metavar="URI", help="To this store; else MLFLOW_TRACKING_URI, else ./mlflow.db."),
)
kill_option = _job("--kill", "kills", multiple=True, metavar="STEP[:WORKER]", help="Kill a worker there, to see.")


def parse_fault(text: str) -> Fault:
    """The fault in `STEP` or `STEP:WORKER`. Raises UsageError."""
    from trueline.train.settings import Fault

    step, _, slot = text.partition(":")
    if not step.isdecimal() or not (slot or "0").isdecimal():
        raise UsageError(f"--kill '{text}' is not STEP or STEP:WORKER", hint="for example --kill 20:1")
    return Fault(step=int(step), slot=int(slot or 0))


def launch(prepare: Callable[..., Path], given: dict[str, Any]) -> Output:
    """Launches the job in the folder that `prepare` returns for the options `given`."""
    detach, mlflow, uri = (given.pop(name) for name in ("detach", "mlflow", "tracking_uri"))
    folder = prepare(**given)
    with _log_to_mlflow(folder, uri, wait=not detach) if mlflow or uri else contextlib.nullcontext():
        if detach:
            return _detach(folder)
        from trueline.train import api

        try:
            result = api.launch(folder)
        except KeyboardInterrupt:
            click.echo(f"the job was stopped; continue it with `trueline resume {_name_of(folder)}`", err=True)
            raise
    lines = [result.summary.as_text(), f"checkpoint: {result.checkpoint}"]
    if result.chosen != result.checkpoint:
        lines.append(f"the best one, which stands for the job: {result.chosen}")
    paths = {"checkpoint": str(result.checkpoint), "chosen": str(result.chosen), "job": str(result.job_dir)}
    return Output("\n".join(lines), {**result.summary.as_dict(), **paths})


def _name_of(folder: Path) -> str:
    """The JOB argument for this folder: its name under ./runs, else its path."""
    return folder.name if folder.parent == Path("runs").resolve() else str(folder)


@contextlib.contextmanager
def _log_to_mlflow(folder: Path, tracking_uri: str | None, *, wait: bool) -> Iterator[None]:
    """A separate process logs the job to MLflow until the job ends; with `wait`, this one waits for it."""
    from trueline.registry.follow import start

    process = start(folder, tracking_uri=tracking_uri)
    try:
        yield
    finally:
        if wait:
            try:
                process.wait(MLFLOW_WAIT_S)
            except subprocess.TimeoutExpired:
                click.echo(f"MLflow is slow: {folder / 'logs' / 'mlflow.log'} shows its progress", err=True)


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
