"""`trueline publish`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trueline.cli.options import Output, job_argument, verb

if TYPE_CHECKING:
    from trueline.capture.proof.attempt import TableRows
    from trueline.ps.publish import Published

_EXAMPLES = """
trueline publish clicks-1 --to models/
    the newest checkpoint as models/clicks/1.bundle, the next time as models/clicks/2.delta

trueline publish clicks-1 --to models/ --every 10
    every ten minutes, until the job has ended

trueline serve --model-store models/ --load clicks --watch --follow 10
    a server that applies deltas, and turns to each when its golden examples hold
"""


@verb("publish", examples=_EXAMPLES, shows_progress=True)
@job_argument
@click.option("--to", "store", type=click.Path(path_type=Path), required=True, metavar="STORE", help="Model store.")
@click.option("--every", type=click.FloatRange(0, min_open=True), metavar="MINUTES", help="Again, until the job ends.")
@click.option("--name", default="", metavar="NAME", help="Of the model in the store; else the recipe's.")
@click.option("--table-rows", type=click.Choice(["float32", "float16", "int8"]), default="float32", show_default=True,
              help="How rows of embedding tables are stored.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(0, min_open=True), metavar="N", help="Bound on each capture.")
def command(
    job: str, store: Path, every: float | None, name: str, table_rows: TableRows, minutes: float | None
) -> Output:
    """Publish a job's checkpoint as the next version of a model.

    The first version is a bundle, each later one a delta: the rows of embedding tables that changed since the version
    before, all other weights that changed, golden examples and proofs. Each version is captured and proven as by
    `trueline capture --format onnx`; a model that is not proven is not published. A running job writes a checkpoint
    first. A server that follows the store applies deltas without a pause; where it does not see the store, copy the
    delta there. JOB is a job's folder, or its name under ./runs.
    """
    from trueline.ps import publish
    from trueline.train.job_dir import JobDir
    from trueline.train.launch import jobs

    folder = jobs.find_job(job)
    publisher = publish.Publisher(folder, store, name=name, table_rows=table_rows, minutes=minutes)
    publish.save_now(folder)
    found = publisher.publish()
    if every is None:
        return Output(_describe(found, publisher.name), None if found is None else found.as_dict())
    where = JobDir(folder)
    count = publish.repeat(
        publisher, 60 * every, save=lambda: publish.save_now(folder),
        ended=lambda seconds: publish.wait_for_end(where, seconds),
    )  # fmt: skip
    count += found is not None
    return Output(f"{publisher.name}: {count} versions published", {"name": publisher.name, "versions": count})


def _describe(found: Published | None, name: str) -> str:
    if found is None:
        return f"{name}: the newest checkpoint is published already, or there is none"
    return f"{name} {found.version}: {found.path}, {found.bytes} bytes, of step {found.step}"
