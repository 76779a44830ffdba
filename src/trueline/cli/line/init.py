"""`trueline init`."""

from pathlib import Path

import click

from trueline.cli.options import Output, verb

TEMPLATES = ("tabular", "text", "images", "own-loop")
"""Those of `recipe.template`, which the help does not load."""

_EXAMPLES = """
trueline init digits
    writes digits/recipe.py, which trains as it is

trueline init flats --template tabular
    writes flats/recipe.py and a table with empty cells, categories and texts, which it learns

trueline init digits --into experiments
    writes experiments/digits/recipe.py
"""


@verb("init", examples=_EXAMPLES)
@click.argument("name")
@click.option("--into", default=".", metavar="FOLDER", help="Where the new folder goes.")
@click.option("--template", type=click.Choice(TEMPLATES), help="What to start from; else a small classifier.")
def command(name: str, into: str, template: str | None) -> Output:
    """Write a recipe to start from.

    Makes the folder NAME with a commented recipe.py in it: a model, a loss, an optimizer and a dataset, which
    train, evaluate, capture and serve as they are. Change one blank after the other into your own. Existing files are
    never overwritten. With --template it starts from tables, texts, images or a training loop of your own.
    """
    from trueline.recipe.template import write_recipe, write_template

    written = write_recipe(name, Path(into)) if template is None else write_template(name, Path(into), template)
    verb = "run" if template == "own-loop" else "train"
    click.echo(f"{written.note}; next: trueline {verb} {written.path}", err=True)
    return Output(str(written.path), {"recipe": str(written.path)})
