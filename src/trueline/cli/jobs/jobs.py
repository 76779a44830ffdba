"""`trueline jobs`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trueline.cli.jobs import _stores
from trueline.cli.options import Output, verb

if TYPE_CHECKING:
    from trueline.train.cluster.operate import StoredJob
    from trueline.train.launch.jobs import JobRecord

_EXAMPLES = """
trueline jobs
    the jobs under ./runs, the newest last

trueline jobs --runs /data/runs --json
    the jobs of another folder, one line of JSON for a script

trueline jobs --store s3://bucket/jobs
    the submitted jobs of a store: on which engine, why one waits, what each has cost

trueline jobs --page
    a page of all submitted jobs for the browser, until Ctrl-C: the queue, who waits for what, core-hours
"""


@verb("jobs", examples=_EXAMPLES)
@click.option("--runs", default="runs", metavar="FOLDER", show_default=True, help="Where the jobs' folders are.")
@_stores.store_option
@click.option("--page", is_flag=True, help="Serve a page of the submitted jobs on this machine, until Ctrl-C.")
@click.option("--page-port", type=int, default=0, metavar="PORT", help="Port of the page; else any free one.")
def command(runs: str, store: str | None, page: bool, page_port: int) -> Output:
    """List the training jobs of a folder, and those that were submitted.

    Shows each job's state (running, finished, failed, stopped; dead when its processes vanished without an end, e.g. in
    a power cut), its step, workers, loss and age, and why it ended. Submitted jobs are those of --store, else of all
    stores that were used on this machine; they may also be queued, with the engine's reason.
    """
    from trueline.train.launch.jobs import list_jobs

    if page:
        return _show_page(store, page_port)
    found = [] if store else sorted(list_jobs(Path(runs)), key=lambda job: job.started)
    stored = _list_stored(_stores.list_stores(store))
    if not found and not stored:
        click.echo(f"no jobs in {store or runs}", err=True)
    head = ("JOB", "STATE", "STEP", "WORKERS", "LOSS", "AGE", "WHY")
    tables = [format_table([head, *(_row(job, time.time()) for job in found)])] if found else []
    tables += [format_stored(of, jobs, time.time()) for of, jobs in stored.items()]
    facts = [job.as_dict() for job in found] + [job.as_dict() for jobs in stored.values() for job in jobs]
    return Output("\n\n".join(tables), facts)


def _show_page(store: str | None, port: int) -> Output:
    import asyncio
    import contextlib

    from trueline.train.cluster.page import show

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(show(lambda: _stores.list_stores(store), port, click.echo))
    return Output("", {})


def _list_stored(stores: Sequence[str]) -> dict[str, list[StoredJob]]:
    """The jobs of each store that has some; one that does not answer is named."""
    from trueline.errors import TruelineError
    from trueline.train.cluster import operate

    found = {}
    for store in stores:
        try:
            found[store] = operate.list_jobs(store)
        except (TruelineError, OSError) as error:
            click.echo(f"the store {store} cannot be read: {error}", err=True)
    return {store: jobs for store, jobs in found.items() if jobs}


def format_stored(store: str, jobs: Sequence[StoredJob], now: float) -> str:
    """The jobs of a store, and the hosts of those that run."""
    head = ("JOB", "ENGINE", "STATE", "STEP", "WORKERS", "LOSS", "CORE-H", "AGE", "WHY")
    rows = [
        (
            job.name, job.engine, job.state, f"{job.step}/{job.total}" if job.total else str(job.step or "-"),
            str(job.workers or "-"),
            "-" if job.loss is None else f"{job.loss:.4g}", f"{job.core_h:.2f}", format_age(now - job.started),
            job.why[:100],
        )
        for job in jobs
    ]  # fmt: skip
    return f"{store}\n{format_table([head, *rows])}"


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
