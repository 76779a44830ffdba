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
@click.option("--job", metavar="FOLDER", help="Folder of the training job: its settings become the run's parameters.")
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="A parameter of the run; repeatable.")
@click.option("--metric", "metrics", multiple=True, metavar="NAME=VALUE", help="A metric of the run; repeatable.")
@tracking_option
def command(
    bundle: str, job: str | None, params: tuple[str, ...], metrics: tuple[str, ...], alias: str, **store: str | None
) -> Output:
    """Make a bundle the next version of a model in MLflow.

    Stores the bundle with its digest, parameters and metrics, and moves --alias to the new version, so that
    `trueline serve models:/NAME@champion` and mlflow.pyfunc.load_model find it. Without a tracking URI
    the store is ./mlflow.db; no server is needed.
    """
    from trueline.registry import register

    facts = run_facts(Path(job) if job else None, parse_pairs(params, "--param"), parse_pairs(metrics, "--metric"))
    version = register(bundle, alias=alias or None, run=facts, **store)
    aliases = f" ({', '.join(version.aliases)})" if version.aliases else ""
    return Output(f"{version.uri}{aliases}", {**dataclasses.asdict(version), "uri": version.uri})


def run_facts(job: Path | None, params: dict[str, str], metrics: dict[str, str]) -> RunFacts:
    """The run in MLflow: the job's plain facts, then the parameters and metrics given. Raises UsageError."""
    from trueline.registry import RunFacts

    try:
        numbers = {name: float(value) for name, value in metrics.items()}
    except ValueError as error:
        raise UsageError(f"a metric is a number: {error}") from error
    facts = _job_facts(job) if job else {}
    measured = {key: value for key, value in facts.items() if isinstance(value, float)}
    plain: dict[str, Any] = {key: value for key, value in facts.items() if isinstance(value, str | int | bool)}
    return RunFacts(params=plain | params, metrics=measured | numbers, job_dir=job)


def _job_facts(job: Path) -> dict[str, Any]:
    from trueline.train.job_dir import JobDir

    facts: dict[str, Any] = {}
    for file in (JobDir(job).settings, JobDir(job).summary):
        try:
            facts.update(json.loads(file.read_bytes()))
        except FileNotFoundError as error:
            raise UsageError(
                f"{job} holds no finished job: it has no {file.name}",
                hint="name the folder that `trueline train` printed",
            ) from error
    return facts
