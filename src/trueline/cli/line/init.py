"""`trueline init`."""

from pathlib import Path

import click

from trueline.cli.options import Output, verb
from trueline.errors import UsageError

TEMPLATES = ("tabular", "text", "images", "own-loop")
"""Those of `recipe.template`, which the help does not load."""

_EXAMPLES = """
trueline init digits
    writes digits/recipe.py, which trains as it is

trueline init customers customers.csv --label left
    writes customers/recipe.py for this table, and its records in two parts; the columns are guessed

trueline init flats --template tabular
    writes flats/recipe.py and a table with empty cells, categories and texts, which it learns

trueline init digits --into experiments
    writes experiments/digits/recipe.py
"""


@verb("init", examples=_EXAMPLES)
@click.argument("name")
@click.argument("records", nargs=-1, metavar="[RECORDS]...")
@click.option("--label", metavar="COLUMN", help="With RECORDS: the column to learn from the others.")
@click.option("--into", default=".", metavar="FOLDER", help="Where the new folder goes.")
@click.option("--template", type=click.Choice(TEMPLATES), help="What to start from; else a small classifier.")
def command(name: str, records: tuple[str, ...], label: str | None, into: str, template: str | None) -> Output:
    """Write a recipe to start from.

    Makes the folder NAME with a commented recipe.py in it: a model, a loss, an optimizer and a dataset, which
    train, evaluate, capture and serve as they are. Change one blank after the other into your own. Existing files are
    never overwritten. With --template it starts from tables, texts, images or a training loop of your own.

    RECORDS are a table of yours (CSV, Parquet, JSON Lines, ... or a table of a database): what its columns are is
    guessed and written into the recipe, and a fifth of the records is kept for evaluation.
    """
    if records:
        from trueline.recipe.from_records import write_for_records

        if template is not None:
            raise UsageError(
                "--template brings records of its own, and RECORDS are given", hint="leave one of them out"
            )
        written = write_for_records(name, Path(into), list(records), label or "")
        steps = f"trueline ship {written.path} --workers 2 --serve"
    else:
        from trueline.recipe.template import write_recipe, write_template

        if label is not None:
            raise UsageError("--label names a column of RECORDS, and there are none", hint="trueline init NAME my.csv")
        written = write_recipe(name, Path(into)) if template is None else write_template(name, Path(into), template)
        steps = f"trueline {'run' if template == 'own-loop' else 'train'} {written.path}"
    click.echo(f"{written.note}; next: {steps}" if not records else f"{written.note}\nnext: {steps}", err=True)
    return Output(str(written.path), {"recipe": str(written.path)})
