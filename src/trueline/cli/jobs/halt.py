"""`trueline halt`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from trueline.cli.jobs import _stores
from trueline.cli.options import Output, job_argument, verb

if TYPE_CHECKING:
    from trueline.train.cluster.store import JobStore

_EXAMPLES = """
trueline halt digits-1
    ends runs/digits-1 at its next step, once a checkpoint of it is written: no step is lost

trueline halt digits-1 --patience 0
    at once; prints how many steps `trueline resume digits-1` will do again
"""


@verb("halt", examples=_EXAMPLES, shows_progress=True)
@job_argument
@click.option("--patience", type=click.FloatRange(0), metavar="S", help="Wait no longer than this.")
@_stores.store_option
def command(job: str, patience: float | None, store: str | None) -> Output:
    """End a running job so that it can be resumed.

    It stops at the next step and writes a checkpoint of it, so that `trueline resume` continues with the step after it.
    Ctrl-C ends the wait; the job still halts. After --patience seconds it ends at once, and the output tells how many
    steps will be done again. JOB is a job's folder, its name under ./runs, or in a store. A submitted job that waits
    for its engine is withdrawn; --patience does not apply to it.
    """
    from trueline.train.launch import jobs

    if (where := _stores.find_stored(job, store)) is not None:
        return _halt_stored(where)
    left = jobs.halt(jobs.find_job(job), patience_s=math.inf if patience is None else patience)
    lost = max(left.step - left.checkpoint, 0)
    kept = f"the checkpoint of step {left.checkpoint} stays" if left.checkpoint else "there is no checkpoint"
    text = f"{left.name}: {left.state} after step {left.step} of {left.total}; {kept}, {lost} steps will be done again"
    return Output(text, {**left.as_dict(), "lost": lost})


def _halt_stored(where: JobStore) -> Output:
    from trueline.train.cluster import operate

    left = operate.halt(where)
    why = f" ({left.why})" if left.why else ""
    if where.read_job().manifest:
        return Output(f"{left.name}: {left.state}{why}; RESULT_DIR and CHECKPOINT_DIR stay", left.as_dict())
    kept = f"the checkpoint of step {left.checkpoint} stays" if left.checkpoint else "there is no checkpoint"
    again = f", {left.step - left.checkpoint} steps will be done again" if left.step > left.checkpoint else ""
    text = f"{left.name}: {left.state}{why} after step {left.step} of {left.total or '?'}; {kept}{again}"
    return Output(text, left.as_dict())
