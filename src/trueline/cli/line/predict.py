"""`trueline predict`."""

from typing import Any

import click

from trueline.cli.options import Output, batch_options, checkpoint_path, recipe_argument, verb

_EXAMPLES = """
trueline predict digits/recipe.py runs/digits-1 --out answers.parquet
    the eager model of the job's best or newest checkpoint, over dataset("prediction")

trueline predict digits/recipe.py digits.bundle --out answers.parquet --mode evaluation
    the bundle's proven program, over the evaluation records

trueline predict digits/recipe.py s3://bucket/digits/step-00000276 --out answers.parquet --workers 4
    a checkpoint in an object store; four processes share the records and write the same file

trueline predict digits/recipe.py digits.bundle --out s3://bucket/answers/ --workers 4
    parts of 16,384 records each, written as they are computed; run again after a crash, it writes the missing ones
"""


@verb("predict", examples=_EXAMPLES, shows_progress=True)
@recipe_argument
@click.argument("source")
@click.option("--out", required=True, metavar="FILE|FOLDER/",
              help="File to write, .parquet or .jsonl; or a folder or URI for parts.")  # fmt: skip
@batch_options("prediction")
def command(recipe: str, source: str, out: str, workers: int, **options: Any) -> Output:
    """Write the model's outputs to a file, or by parts to a folder.

    SOURCE is a checkpoint (or the folder of a job), which the eager model runs, or a bundle, whose proven
    program runs without the model's code. The records are the recipe's dataset("prediction"), or those of --mode.
    """
    from trueline.recipe.load import load_recipe

    loaded = load_recipe(recipe)
    from trueline.batch.predict import predict

    done = predict(loaded if workers == 1 else recipe, checkpoint_path(source), out, workers=workers, **options)
    parts = f" ({done.parts} parts written)" if done.parts else ""
    facts = {"records": done.records, "path": str(done.path), "parts": done.parts}
    return Output(f"{done.records} records: {done.path}{parts}", facts)
