"""`trueline ship`."""

from __future__ import annotations

import click

from trueline.cli._progress import progress
from trueline.cli.options import json_option, quiet_option, recipe_argument, say, tracking_option, verb

_EXAMPLES = """
trueline ship digits/recipe.py
    trains (and kills a worker on the way), evaluates, captures, registers, serves, compares every answer

trueline ship digits/recipe.py --workers 2:4 --epochs 3 --alias challenger --no-drill
    a shorter job with two to four workers that nobody kills, registered beside the champion
"""


@verb("ship", examples=_EXAMPLES)
@recipe_argument
@click.option("--workers", default="3", metavar="N|MIN:MAX", help="Worker processes.", show_default=True)
@click.option("--epochs", type=int, metavar="N", help="Times that every record is trained; the recipe's if left out.")
@click.option("--out", metavar="BUNDLE", help="The bundle to write; inside the job's folder if left out.")
@click.option("--name", metavar="NAME", help="Name of the registered model; the recipe's if left out.")
@click.option("--alias", default="champion", show_default=True, help="Alias to move to the new version.")
@click.option("--drill/--no-drill", default=True, show_default=True, help="Kill a worker a third of the way.")
@tracking_option
@json_option
@quiet_option
def command(
    recipe: str,
    workers: str,
    epochs: int | None,
    out: str | None,
    name: str | None,
    alias: str,
    drill: bool,
    tracking_uri: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Walk the whole line, from a recipe to proven answers.

    Trains, evaluates, captures, registers, serves and compares: the last stage asks a server for the held-out
    records and compares every answer with the eager model's. Stops at the first stage that does not hold,
    with its reason, and leaves what was made until then. RECIPE is a file, a folder with a recipe.py, or
    package.module:object.
    """
    from trueline.ship import ship

    with progress(quiet=quiet):
        shipped = ship(
            recipe,
            workers=workers,
            epochs=epochs,
            out=out,
            name=name,
            alias=alias,
            tracking_uri=tracking_uri,
            drill=drill,
        )
    say(shipped.as_text(), shipped.as_dict(), as_json=as_json)
