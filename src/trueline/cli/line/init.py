"""`trueline init`."""

from pathlib import Path

import click

from trueline.cli.options import Output, verb

_EXAMPLES = """
trueline init digits
    writes digits/recipe.py, which trains as it is

trueline init digits --into experiments
    writes experiments/digits/recipe.py
"""


@verb("init", examples=_EXAMPLES)
@click.argument("name")
@click.option("--into", default=".", metavar="FOLDER", help="Where the new folder goes.")
def command(name: str, into: str) -> Output:
    """Write a recipe to start from.

    Makes the folder NAME with a commented recipe.py in it: a model, a loss, an optimizer and a dataset, which
    train, evaluate, capture and serve as they are. Change one blank after the other into your own. Existing files are
    never overwritten.
    """
    from trueline.recipe.template import write_recipe

    written = write_recipe(name, Path(into))
    click.echo(f"{written.note}; next: trueline train {written.path}", err=True)
    return Output(str(written.path), {"recipe": str(written.path)})
