"""`trueline halt`."""

import click

from trueline.cli.options import Output, job_argument, verb

_EXAMPLES = """
trueline halt digits-1
    requests a checkpoint, waits up to 30 s for it, then ends every process of runs/digits-1

trueline halt digits-1 --patience 0
    at once; prints how many steps `trueline resume digits-1` will do again
"""


@verb("halt", examples=_EXAMPLES, shows_progress=True)
@job_argument
@click.option("--patience", type=float, default=30.0, metavar="S", show_default=True, help="Wait for a checkpoint.")
def command(job: str, patience: float) -> Output:
    """End a running job so that it can be resumed.

    It writes a checkpoint first, if it can in time; the output tells how many steps after the newest checkpoint are
    lost and will be done again. Ctrl-C during the wait leaves the job running. JOB is a job's folder,
    or its name under ./runs.
    """
    from trueline.train.launch import jobs

    left = jobs.halt(jobs.find_job(job), patience_s=patience)
    lost = left.step - left.checkpoint
    kept = f"the checkpoint of step {left.checkpoint} stays" if left.checkpoint else "there is no checkpoint"
    text = f"{left.name}: {left.state} after step {left.step} of {left.total}; {kept}, {lost} steps will be done again"
    return Output(text, {**left.as_dict(), "lost": lost})
