"""`trueline halt`."""

from __future__ import annotations

import click

from trueline.cli._progress import progress
from trueline.cli.options import job_argument, json_option, quiet_option, say, verb

_EXAMPLES = """
trueline halt digits-1
    asks for a checkpoint, waits up to 30 s for it, then ends every process of runs/digits-1

trueline halt digits-1 --patience 0
    at once; says how many steps `trueline resume digits-1` will do again
"""


@verb("halt", examples=_EXAMPLES)
@job_argument
@click.option("--patience", type=float, default=30.0, metavar="S", show_default=True, help="Wait for a checkpoint.")
@json_option
@quiet_option
def command(job: str, patience: float, as_json: bool, quiet: bool) -> None:
    """End a running job so that it can be resumed.

    It writes a checkpoint first, if it can in time; steps after the newest checkpoint are lost and will be done
    again, which is said. Ctrl-C while it waits leaves the job running. JOB is a job's folder,
    or its name under ./runs.
    """
    from trueline.train.launch import jobs

    folder = jobs.find_job(job)
    with progress(quiet=quiet):
        left = jobs.halt(folder, patience_s=patience)
    lost = left.step - left.checkpoint
    kept = f"the checkpoint of step {left.checkpoint} stays" if left.checkpoint else "there is no checkpoint"
    text = f"{left.name}: {left.state} after step {left.step} of {left.total}; {kept}, {lost} steps will be done again"
    say(text, {**left.as_dict(), "lost": lost}, as_json=as_json)
