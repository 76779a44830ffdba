"""`trueline jobs`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trueline.cli.options import json_option, verb

if TYPE_CHECKING:
    from trueline.train.launch.jobs import JobRecord

_EXAMPLES = """
trueline jobs
    the jobs under ./runs, the one that began last at the end

trueline jobs --runs /data/runs --json
    those of another folder, one line of JSON for a script
"""


@verb("jobs", examples=_EXAMPLES)
@click.option("--runs", default="runs", metavar="FOLDER", show_default=True, help="Where the jobs' folders are.")
@json_option
def command(runs: str, as_json: bool) -> None:
    """List the training jobs of a folder.

    Says what each is (running, finished, failed, stopped; dead when its processes went without an end, e.g. in
    a power cut), how far it is, with how many workers and which loss, how old it is, and why it ended.
    """
    from trueline.train.launch.jobs import list_jobs

    found = sorted(list_jobs(Path(runs)), key=lambda job: job.started)
    if as_json:
        click.echo(json.dumps([job.as_dict() for job in found]))
    elif found:
        head = ("JOB", "STATE", "STEP", "WORKERS", "LOSS", "AGE", "WHY")
        click.echo(table([head, *(_row(job, time.time()) for job in found)]))
    else:
        click.echo(f"no jobs in {runs}", err=True)


def _row(job: JobRecord, now: float) -> tuple[str, ...]:
    steps = f"{job.step}/{job.total}" if job.total else "-"
    loss = "-" if job.loss is None else f"{job.loss:.4g}"
    return (job.name, job.state, steps, str(job.workers or "-"), loss, age(now - job.started), job.why[:80])


def age(seconds: float) -> str:
    """
    >>> age(42), age(90), age(7300), age(200000)
    ('42 s', '1 min', '2 h', '2 d')
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text in columns.

    >>> table([("a", "b"), ("long", "c")])
    'a     b\\nlong  c'
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
