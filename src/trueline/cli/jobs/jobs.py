"""`trueline jobs`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trueline.cli.options import Output, verb

if TYPE_CHECKING:
    from trueline.train.launch.jobs import JobRecord

_EXAMPLES = """
trueline jobs
    the jobs under ./runs, the newest last

trueline jobs --runs /data/runs --json
    the jobs of another folder, one line of JSON for a script
"""


@verb("jobs", examples=_EXAMPLES)
@click.option("--runs", default="runs", metavar="FOLDER", show_default=True, help="Where the jobs' folders are.")
def command(runs: str) -> Output:
    """List the training jobs of a folder.

    Shows each job's state (running, finished, failed, stopped; dead when its processes vanished without an end, e.g. in
    a power cut), its step, workers, loss and age, and why it ended.
    """
    from trueline.train.launch.jobs import list_jobs

    found = sorted(list_jobs(Path(runs)), key=lambda job: job.started)
    if not found:
        click.echo(f"no jobs in {runs}", err=True)
    head = ("JOB", "STATE", "STEP", "WORKERS", "LOSS", "AGE", "WHY")
    text = format_table([head, *(_row(job, time.time()) for job in found)]) if found else ""
    return Output(text, [job.as_dict() for job in found])


def _row(job: JobRecord, now: float) -> tuple[str, ...]:
    steps = f"{job.step}/{job.total}" if job.total else "-"
    loss = "-" if job.loss is None else f"{job.loss:.4g}"
    return (job.name, job.state, steps, str(job.workers or "-"), loss, format_age(now - job.started), job.why[:80])


def format_age(seconds: float) -> str:
    """
    >>> format_age(42), format_age(90), format_age(7300), format_age(200000)
    ('42 s', '1 min', '2 h', '2 d')
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text in columns.

    >>> format_table([("a", "b"), ("long", "c")])
    'a     b\\nlong  c'
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
