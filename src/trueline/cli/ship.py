"""`trueline ship`."""

from __future__ import annotations

import click

from trueline.cli._progress import progress
from trueline.cli.options import json_option, quiet_option, recipe_argument, say, tracking_option, verb

_EXAMPLES = """
trueline ship digits/recipe.py
    trains, evaluates, captures, registers; prints what to serve

trueline ship digits/recipe.py --workers 2:4 --epochs 3 --alias challenger
    a shorter job with two to four workers, registered beside the champion
"""


@verb("ship", examples=_EXAMPLES)
@recipe_argument
@click.option("--workers", default="3", metavar="N|MIN:MAX", help="Worker processes.", show_default=True)
@click.option("--epochs", type=int, metavar="N", help="Times that every record is trained; the recipe's if left out.")
@click.option("--out", metavar="BUNDLE", help="The bundle to write; inside the job's folder if left out.")
@click.option("--alias", default="champion", show_default=True, help="Alias to move to the new version.")
@tracking_option
@json_option
@quiet_option
def command(
    recipe: str,
    workers: str,
    epochs: int | None,
    out: str | None,
    alias: str,
    tracking_uri: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Walk the whole line: train, evaluate, capture, register.

    Stops at the first step that does not hold, with its reason, and leaves what was made until then. RECIPE
    is a file, a folder with a recipe.py, or package.module:object.
    """
    from trueline.line import ship

    with progress(quiet=quiet):
        shipped = ship(recipe, workers=workers, epochs=epochs, out=out, alias=alias, tracking_uri=tracking_uri)
    say(shipped.as_text(), shipped.as_dict(), as_json=as_json)
