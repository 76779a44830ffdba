"""`trueline scale`."""

from __future__ import annotations

import click

from trueline.cli.options import job_argument, json_option, say, verb

_EXAMPLES = """
trueline scale digits-1 5
    runs/digits-1 goes on with five workers: new ones join between two steps

trueline scale digits-1 1
    all but one leave between two steps; no step fails
"""


@verb("scale", examples=_EXAMPLES)
@job_argument
@click.argument("workers", type=int)
@json_option
def command(job: str, workers: int, as_json: bool) -> None:
    """Give a running job another number of workers.

    Workers join and leave between two steps, and the result does not depend on how many there are. A place in
    quarantine is tried again. The number stays until the next scale. JOB is a job's folder, or its name under ./runs.
    """
    from trueline.train.launch import jobs

    folder = jobs.find_job(job)
    jobs.scale(folder, workers)
    say(f"{folder.name}: {workers} workers from now on", {"job": str(folder), "workers": workers}, as_json=as_json)
