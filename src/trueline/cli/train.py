"""`trueline train`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from trueline.cli._progress import progress
from trueline.cli.options import json_option, quiet_option, recipe_argument, say, verb

if TYPE_CHECKING:
    from trueline.train.settings import Fault

_EXAMPLES = """
trueline train digits/recipe.py --workers 3
    three worker processes share each step; the last checkpoint's path is printed

trueline train digits/recipe.py --workers 2:8 --kill 20:1 --kill 40
    worker 1 is killed at step 20 and worker 0 at step 40; the loss curve does not change

trueline train digits/recipe.py --job runs/digits-1 --resume
    goes on with a job that lost every process, from its newest checkpoint
"""


def parse_fault(text: str) -> Fault:
    """The fault in `STEP` or `STEP:WORKER`. Raises UsageError."""
    from trueline.errors import UsageError
    from trueline.train.settings import Fault

    step, _, slot = text.partition(":")
    if not step.isdecimal() or not (slot or "0").isdecimal():
        raise UsageError(f"--kill '{text}' is not STEP or STEP:WORKER", hint="for example --kill 20:1")
    return Fault(step=int(step), slot=int(slot or 0))


@verb("train", examples=_EXAMPLES)
@recipe_argument
@click.option("--workers", default="3", metavar="N|MIN:MAX", help="Worker processes.", show_default=True)
@click.option("--epochs", type=int, metavar="N", help="Times that every record is trained; the recipe's if left out.")
@click.option("--batch", "global_batch", type=int, metavar="N", help="Records of one step, over all workers.")
@click.option("--seed", type=int, metavar="N", help="Decides the order of the records and the first weights.")
@click.option("--job", "job_dir", metavar="FOLDER", help="Where the job keeps its state; runs/NAME-1 if left out.")
@click.option("--resume", is_flag=True, help="Go on with the job in --job from its newest checkpoint.")
@click.option("--checkpoint-every", type=int, metavar="STEPS", help="Steps between checkpoints; else each epoch.")
@click.option("--kill", "kills", multiple=True, metavar="STEP[:WORKER]", help="Kill a worker there (SIGKILL), to see.")
@json_option
@quiet_option
def command(
    recipe: str,
    workers: str,
    epochs: int | None,
    global_batch: int | None,
    seed: int | None,
    job_dir: str | None,
    resume: bool,
    checkpoint_every: int | None,
    kills: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> None:
    """Train the recipe's model with elastic worker processes.

    Each optimizer step takes --batch records, however many workers share it: workers may join, leave and be
    killed, and the sequence of steps stays the same. Every record is applied exactly once in each epoch,
    which is counted and printed at the end. RECIPE is a file, a folder with a recipe.py, or
    package.module:object.
    """
    from trueline.train.api import train

    faults = [parse_fault(kill) for kill in kills]
    with progress(quiet=quiet):
        result = train(
            recipe,
            workers=workers,
            epochs=epochs,
            global_batch=global_batch,
            seed=seed,
            job_dir=job_dir,
            resume=resume,
            checkpoint_every=checkpoint_every or 0,
            faults=faults,
        )
    facts = {**result.summary.as_dict(), "checkpoint": str(result.checkpoint), "job": str(result.job_dir)}
    say(f"{result.summary.as_text()}\ncheckpoint: {result.checkpoint}", facts, as_json=as_json)
