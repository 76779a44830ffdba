"""`trueline init`."""

from __future__ import annotations

from pathlib import Path

import click

from trueline.cli.options import json_option, say, verb

_EXAMPLES = """
trueline init digits
    writes digits/recipe.py, which trains as it is

trueline init digits --into experiments
    writes experiments/digits/recipe.py
"""


@verb("init", examples=_EXAMPLES)
@click.argument("name")
@click.option("--into", default=".", metavar="FOLDER", help="Where the new folder goes.")
@json_option
def command(name: str, into: str, as_json: bool) -> None:
    """Write a recipe to start from.

    Makes the folder NAME with a commented recipe.py in it: a model, a loss, an optimizer and a dataset, which
    train, evaluate, capture and serve as they are. Change one blank after the other into your own. Nothing
    that exists is overwritten.
    """
    from trueline.recipe.template import write_recipe

    written = write_recipe(name, Path(into))
    say(str(written.path), {"recipe": str(written.path)}, as_json=as_json)
    click.echo(f"{written.note}; next: trueline train {written.path}", err=True)
