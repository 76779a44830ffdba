"""`trueline resume`."""

from typing import Any

from trueline.cli.jobs import _launch
from trueline.cli.options import Output, job_argument, verb

_EXAMPLES = """
trueline resume digits-1
    continues runs/digits-1 from its newest checkpoint, with the settings it had

trueline resume runs/digits-1 --workers 8 --detach
    the same with other workers, in the background; the result does not depend on them
"""


@verb("resume", examples=_EXAMPLES, shows_progress=True)
@job_argument
@_launch.training_options(without=_launch.FIXED)
@_launch.how_options
def command(job: str, **given: Any) -> Output:
    """Continue a job that halted, failed or lost its processes.

    It starts from the newest checkpoint that verifies, and without a checkpoint from its first step. Settings
    that decide what is computed stay as they were, and the recipe must not have changed. JOB is a job's
    folder, or its name under ./runs.
    """
    from trueline.train.api import prepare_resume
    from trueline.train.launch.jobs import find_job

    return _launch.launch(lambda **changed: prepare_resume(find_job(job), **changed), given)
