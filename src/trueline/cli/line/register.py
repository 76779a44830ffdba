"""`trueline register`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trueline.cli.options import Output, parse_pairs, tracking_option, verb
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.registry import RunFacts

_EXAMPLES = """
trueline register digits.bundle --metric accuracy=0.983
    version 1 of model digits, alias champion, in ./mlflow.db (see it with `mlflow ui`)

trueline register digits.bundle --alias challenger --job runs/digits-1
    the next version under another alias, with the job's settings and results as its run
"""


@verb("register", examples=_EXAMPLES)
@click.argument("bundle")
@click.option("--name", metavar="NAME", help="Name of the model; else the bundle's own.")
@click.option("--alias", default="champion", show_default=True, help="Alias to move to it; '' for none.")
@click.option(
    "--job", metavar="FOLDER", help="Folder of the training job; else that of ./runs which has the bundle's checkpoint."
)
@click.option("--artifact", "artifacts", multiple=True, metavar="FILE",
              help="A file that the run keeps, as doctor.html; repeatable.")  # fmt: skip
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="A parameter of the run; repeatable.")
@click.option("--metric", "metrics", multiple=True, metavar="NAME=VALUE", help="A metric of the run; repeatable.")
@tracking_option
def command(
    bundle: str,
    job: str | None,
    params: tuple[str, ...],
    metrics: tuple[str, ...],
    artifacts: tuple[str, ...],
    alias: str,
    **store: str | None,
) -> Output:
    """Make a bundle the next version of a model in MLflow.

    Stores the bundle with its signature, an example, its evidence and its lineage in words, and moves --alias to the
    new version, so that `trueline serve models:/NAME@champion` and mlflow.pyfunc.load_model find it. The run is the
    training job's: its start and end, parameters, curves and data set. Without a tracking URI the store is
    ./mlflow.db; no server is needed.
    """
    from trueline.registry import register

    given = parse_pairs(params, "--param"), parse_pairs(metrics, "--metric")
    facts = run_facts(Path(job) if job else find_job(Path(bundle)), *given)
    facts = dataclasses.replace(facts, artifacts=tuple(map(Path, artifacts)))
    version = register(bundle, alias=alias or None, run=facts, **store)
    aliases = f" ({', '.join(version.aliases)})" if version.aliases else ""
    return Output(f"{version.uri}{aliases}", {**dataclasses.asdict(version), "uri": version.uri})


def find_job(bundle: Path) -> Path | None:
    """The job in ./runs, or around the bundle, whose checkpoint the bundle was captured from, by its digest."""
    from trueline.bundle import open_bundle

    digest = open_bundle(bundle).manifest.lineage.checkpoint_digest
    head = f'{{"digest": "{digest}"'.encode()  # how a checkpoint's manifest begins
    for job in [*Path("runs").glob("*"), bundle.absolute().parent]:
        for manifest in job.glob("checkpoints/step-*/checkpoint.json"):
            with manifest.open("rb") as file:
                if digest and file.read(len(head)) == head and (job / "summary.json").exists():
                    return job
    return None


def run_facts(job: Path | None, params: dict[str, str], metrics: dict[str, str]) -> RunFacts:
    """The run in MLflow: the job's plain facts, then the parameters and metrics given. Raises UsageError."""
    from trueline.registry import RunFacts

    try:
        numbers = {name: float(value) for name, value in metrics.items()}
    except ValueError as error:
        raise UsageError(f"a metric is a number: {error}") from error
    settings, summary = _job_facts(job) if job else ({}, {})
    measured = {key: value for key, value in summary.items() if isinstance(value, float)}
    plain: dict[str, Any] = {key: value for key, value in settings.items() if isinstance(value, str | int | float)}
    plain |= {key: value for key, value in summary.items() if isinstance(value, str | int)}
    return RunFacts(params=plain | params, metrics=measured | numbers, job_dir=job)


def _job_facts(job: Path) -> list[dict[str, Any]]:
    """The settings and the summary of a finished job. Raises UsageError."""
    from trueline.train.job_dir import JobDir

    facts: list[dict[str, Any]] = []
    for file in (JobDir(job).settings, JobDir(job).summary):
        try:
            facts.append(json.loads(file.read_bytes()))
        except FileNotFoundError as error:
            raise UsageError(
                f"{job} holds no finished job: it has no {file.name}",
                hint="name the folder that `trueline train` printed",
            ) from error
    return facts
