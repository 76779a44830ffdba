"""`trueline run`."""

from typing import Any

import click

from trueline.cli.jobs import _launch
from trueline.cli.options import Output, verb

_EXAMPLES = """
trueline run own_loop.py --workers 3
    the script runs in three processes, which share each step of its loop over trueline.Elastic

trueline run own_loop.py --workers 3 --kill 40:1
    kills worker 1 at step 40; the others continue, and a new worker joins

trueline run own_loop.py --workers 2:8 --listen host-a:7700 --checkpoints /shared/run-1
    other hosts join it; the folder of the script travels to them

trueline run own_loop.py --workers 2:8 --detach -- --lr 0.1
    in the background; arguments after -- go to the script
"""

_OF_THE_SCRIPT = (
    *_launch.FIXED, "compile", "find_unused_parameters", "readers", "backend", "device",
    "evaluate_every", "monitor", "patience",
)  # fmt: skip
"""What the script decides (its loop, options and evaluation), and what needs a recipe."""


@verb("run", examples=_EXAMPLES, shows_progress=True)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@_launch.training_options(without=_OF_THE_SCRIPT)
@_launch.job_option
@_launch.how_options
@_launch.kill_option
def command(script: str, arguments: tuple[str, ...], kills: tuple[str, ...], **given: Any) -> Output:
    """Run a training loop of your own in elastic worker processes.

    SCRIPT is a Python file with a loop over trueline.Elastic, which decides what a step is: model, optimizer,
    records, batch and epochs are the script's. Alone (`python SCRIPT`) it trains in one process; here the job
    survives deaths, is checkpointed and can be resumed. ARGUMENTS are the script's.
    """
    from trueline.train.api import prepare_script

    faults = [_launch.parse_fault(kill) for kill in kills]
    return _launch.launch(lambda **job: prepare_script(script, arguments, faults=faults, **job), given)
