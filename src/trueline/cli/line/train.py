"""`trueline train`."""

from __future__ import annotations

from typing import Any

from trueline.cli.jobs import _launch
from trueline.cli.options import recipe_argument, verb

_EXAMPLES = """
trueline train digits/recipe.py --workers 3
    three worker processes share each step; the last checkpoint's path is printed

trueline train digits/recipe.py --workers 2:8 --kill 20:1 --kill 40
    worker 1 is killed at step 20 and worker 0 at step 40; the loss curve does not change

trueline train digits/recipe.py --monitor -accuracy --patience 3 --detach
    in the background; evaluates after each epoch and stops after three without a better accuracy

trueline train digits/recipe.py --job runs/digits-1 --resume
    goes on with a job that lost every process, from its newest checkpoint
"""


@verb("train", examples=_EXAMPLES)
@recipe_argument
@_launch.training_options()
@_launch.job_option
@_launch.resume_option
@_launch.how_options
@_launch.kill_option
def command(recipe: str, kills: tuple[str, ...], **given: Any) -> None:
    """Train the recipe's model with elastic worker processes.

    Each optimizer step takes --batch records, however many workers share it: workers may join, leave and be
    killed, and the sequence of steps stays the same. Every record is applied exactly once in each epoch,
    which is counted and printed at the end. RECIPE is a file, a folder with a recipe.py, or
    package.module:object. What is left out is the recipe's.
    """
    from trueline.train.api import prepare

    faults = [_launch.parse_fault(kill) for kill in kills]
    _launch.launch(lambda **job: prepare(recipe, faults=faults, **job), given)
