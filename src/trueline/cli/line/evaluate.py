"""`trueline evaluate`."""

from typing import Any

import click

from trueline.cli.options import Output, batch_options, checkpoint_path, recipe_argument, verb

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


@verb("evaluate", examples=_EXAMPLES, shows_progress=True)
@recipe_argument
@click.argument("checkpoint")
@click.option("--out", metavar="FOLDER/", help="Also write loss and metrics of each record, to a folder or URI.")
@batch_options("evaluation")
def command(recipe: str, checkpoint: str, workers: int, **options: Any) -> Output:
    """Measure a checkpoint over all evaluation records.

    Prints the loss and the recipe's metrics. Each record counts once, whatever the size of the last batch. CHECKPOINT
    is a checkpoint (a path or a URL), or the folder of a job: its best one if the job has --monitor or --patience, else
    its newest.
    """
    from trueline.recipe.load import load_recipe

    loaded = load_recipe(recipe)  # before the import of torch, so that a wrong path is an error at once
    from trueline.batch.evaluate import evaluate

    source = loaded if workers == 1 else recipe
    evaluation = evaluate(source, checkpoint_path(checkpoint), workers=workers, **options)
    return Output(evaluation.as_text(), evaluation.as_dict())
