"""`trueline scale`."""

import click

from trueline.cli.jobs import _stores
from trueline.cli.options import Output, job_argument, verb

_EXAMPLES = """
trueline scale digits-1 5
    runs/digits-1 continues with five workers: new ones join between two steps

trueline scale digits-1 1
    all but one leave between two steps; no step fails

trueline scale clicks-1 --servers 3
    a job with parameter servers continues with three of them; rows move while it trains
"""


@verb("scale", examples=_EXAMPLES)
@job_argument
@click.argument("workers", type=int, required=False)
@click.option("--servers", type=int, metavar="N", help="Parameter servers, of a job that has some.")
@_stores.store_option
def command(job: str, workers: int | None, servers: int | None, store: str | None) -> Output:
    """Give a running job another number of workers.

    Workers join and leave between two steps, and the result does not depend on their number. A slot in
    quarantine is tried again. The number stays until the next scale. JOB is a job's folder, its name under ./runs, or
    in a store; there the head submits the hosts that are missing.
    """
    from trueline.errors import UsageError
    from trueline.train.launch import jobs

    for name, number in (("WORKERS", workers), ("--servers", servers)):
        if number is not None and number < 1:
            raise UsageError(f"{name} is {number}, expected at least 1")
    if workers is None and servers is None:
        raise UsageError("nothing to scale", hint="trueline scale JOB 5, or trueline scale JOB --servers 3")
    if (where := _stores.find_stored(job, store)) is not None:
        from trueline.train.cluster import operate

        if workers is None:
            raise UsageError(
                "a submitted job keeps the parameter servers that it was submitted with", hint="trueline scale JOB 5"
            )
        operate.scale(where, workers)
        return Output(f"{where.name}: {workers} workers from now on", {"job": where.name, "workers": workers})
    folder = jobs.find_job(job)
    jobs.scale(folder, workers or 0, servers=servers or 0)
    wanted = [f"{number} {what}" for number, what in ((workers, "workers"), (servers, "servers")) if number]
    facts = {"job": str(folder), "workers": workers, "servers": servers}
    return Output(f"{folder.name}: {' and '.join(wanted)} from now on", facts)
