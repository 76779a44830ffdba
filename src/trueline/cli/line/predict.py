"""`trueline predict`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import click

from trueline.cli._progress import progress
from trueline.cli.options import checkpoint_path, json_option, quiet_option, recipe_argument, say, verb
from trueline.recipe.contract import MODES

if TYPE_CHECKING:
    from trueline.recipe.contract import Mode

_EXAMPLES = """
trueline predict digits/recipe.py runs/digits-1 --out answers.parquet
    the eager model of the job's best or newest checkpoint answers for dataset("prediction")

trueline predict digits/recipe.py digits.bundle --out answers.parquet --mode evaluation
    the bundle's proven program answers for the evaluation records

trueline predict digits/recipe.py s3://bucket/digits/step-00000276 --out answers.parquet --workers 4
    a checkpoint in an object store; four processes share the records and write the same file

trueline predict digits/recipe.py digits.bundle --out s3://bucket/answers/ --workers 4
    parts of 16,384 records each, written as they are computed; run again after a crash, it writes what is missing
"""


@verb("predict", examples=_EXAMPLES)
@recipe_argument
@click.argument("source")
@click.option(
    "--out",
    required=True,
    metavar="FILE|FOLDER/",
    help="File to write, .parquet or .jsonl; or a folder or URI for parts.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["parquet", "jsonl"]),
    default="parquet",
    show_default=True,
    help="Of the parts in a folder.",
)
@click.option("--mode", type=click.Choice(MODES), default="prediction", show_default=True, help="Which records.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Processes that share the work.")
@click.option(
    "--device", metavar="DEVICE", help="auto, cpu, cuda, or cuda:N of the machine; the recipe's if left out, else auto."
)
@json_option
@quiet_option
def command(
    recipe: str,
    source: str,
    out: str,
    format_: str,
    mode: str,
    workers: int,
    device: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the model's outputs to a file, or by parts to a folder.

    SOURCE is a checkpoint (or the folder of a job), which the eager model runs, or a bundle, whose proven
    program runs without the model's code. The recipe gives the records: dataset("prediction") unless --mode
    says otherwise.
    """
    from trueline.recipe.load import load_recipe

    loaded = load_recipe(recipe)
    from trueline.batch.predict import predict

    with progress(quiet=quiet):
        found = predict(
            loaded if workers == 1 else recipe,
            checkpoint_path(source),
            out,
            mode=cast("Mode", mode),
            workers=workers,
            format=format_,
            device=device,
        )
    facts = {"records": found.records, "path": str(found.path), "parts": found.parts}
    parts = f" ({found.parts} parts written)" if found.parts else ""
    say(f"{found.records} records: {found.path}{parts}", facts, as_json=as_json)
