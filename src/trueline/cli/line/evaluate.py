"""`trueline evaluate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import click

from trueline.cli._progress import progress
from trueline.cli.options import checkpoint_path, json_option, quiet_option, recipe_argument, say, verb
from trueline.recipe.contract import MODES

if TYPE_CHECKING:
    from trueline.recipe.contract import Mode

_EXAMPLES = """
trueline evaluate digits/recipe.py runs/digits-1
    loss and metrics of the job's checkpoint over the evaluation records

trueline evaluate digits/recipe.py runs/digits-1 --mode training --json
    the same over the training records, for a script

trueline evaluate digits/recipe.py runs/digits-1 --workers 4
    four processes share the records; the numbers are the same, also when some are killed

trueline evaluate digits/recipe.py runs/digits-1 --mode training --out losses/
    loss and metrics of each record, as Parquet: the largest losses are often wrong labels
"""


@verb("evaluate", examples=_EXAMPLES)
@recipe_argument
@click.argument("checkpoint")
@click.option("--mode", type=click.Choice(MODES), default="evaluation", show_default=True, help="Which records.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Processes that share the work.")
@click.option(
    "--device", metavar="DEVICE", help="auto, cpu, cuda, or cuda:N of the machine; the recipe's if left out, else auto."
)
@click.option("--out", metavar="FOLDER/", help="Also write loss and metrics of each record, to a folder or URI.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["parquet", "jsonl"]),
    default="parquet",
    show_default=True,
    help="Of the parts in that folder.",
)
@json_option
@quiet_option
def command(
    recipe: str,
    checkpoint: str,
    mode: str,
    workers: int,
    device: str | None,
    out: str | None,
    format_: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure a checkpoint over all evaluation records.

    Says the loss and the recipe's metrics. Each record counts once, whatever the size of the last batch.
    CHECKPOINT is a checkpoint (a path or a URL), or the folder of a job:
    its best one if the job has --monitor or --patience, else its newest.
    """
    from trueline.recipe.load import load_recipe

    loaded = load_recipe(recipe)
    from trueline.batch.evaluate import evaluate

    with progress(quiet=quiet):
        found = evaluate(
            loaded if workers == 1 else recipe,
            checkpoint_path(checkpoint),
            mode=cast("Mode", mode),
            workers=workers,
            device=device,
            out=out,
            format=format_,
        )
    say(found.as_text(), found.as_dict(), as_json=as_json)
