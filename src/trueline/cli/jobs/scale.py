"""`trueline scale`."""

import click

from trueline.cli.options import Output, job_argument, verb

_EXAMPLES = """
trueline scale digits-1 5
    runs/digits-1 continues with five workers: new ones join between two steps

trueline scale digits-1 1
    all but one leave between two steps; no step fails
"""


@verb("scale", examples=_EXAMPLES)
@job_argument
@click.argument("workers", type=int)
def command(job: str, workers: int) -> Output:
    """Give a running job another number of workers.

    Workers join and leave between two steps, and the result does not depend on their number. A slot in
    quarantine is tried again. The number stays until the next scale. JOB is a job's folder, or its name under ./runs.
    """
    from trueline.train.launch import jobs

    folder = jobs.find_job(job)
    jobs.scale(folder, workers)
    return Output(f"{folder.name}: {workers} workers from now on", {"job": str(folder), "workers": workers})
