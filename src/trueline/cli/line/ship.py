"""`trueline ship`."""

import os
import sys
from typing import Any

import click

from trueline.cli.jobs._launch import warn_left_out
from trueline.cli.options import Output, recipe_argument, tracking_option, verb
from trueline.errors import UsageError
from trueline.events import printable

_EXAMPLES = """
trueline ship digits/recipe.py
    trains (and kills a worker on the way), evaluates, captures, registers, serves, compares every answer

trueline ship digits/recipe.py --workers 2 --serve
    the same with two workers, and then serves the bundle until Ctrl-C

trueline ship digits/recipe.py --compress accuracy=1%
    registers and serves the fastest quantized program that loses at most 0.01 of the accuracy

trueline ship digits/recipe.py --workers 2:4 --epochs 3 --alias challenger --no-drill
    a shorter job with two to four workers and no kill, registered beside the champion
"""


@verb("ship", examples=_EXAMPLES, shows_progress=True)
@recipe_argument
@click.option("--workers", default="3", metavar="N|MIN:MAX", help="Worker processes.", show_default=True)
@click.option("--epochs", type=int, metavar="N", help="Passes over the records; else the recipe's.")
@click.option("--out", metavar="BUNDLE", help="The bundle to write; else inside the job's folder.")
@click.option("--name", metavar="NAME", help="Name of the registered model; else the recipe's.")
@click.option("--alias", default="champion", show_default=True, help="Alias to move to the new version.")
@click.option("--compress", metavar="METRIC=N%", help="Then quantize within this budget: accuracy=1%.")
@click.option("--drill/--no-drill", default=True, show_default=True, help="Kill a worker a third of the way.")
@click.option(
    "--serve", type=click.IntRange(-1, 65535), is_flag=False, flag_value=-1, metavar="[PORT]",
    help="Then serve the bundle until Ctrl-C, as `trueline serve` does.",
)  # fmt: skip
@tracking_option
@click.pass_context
def command(ctx: click.Context, /, recipe: str, serve: int | None, **options: Any) -> Output:
    """Walk the whole line, from a recipe to proven answers.

    Trains, evaluates, captures, registers, serves and compares: the last stage sends the held-out records to a server
    and compares every answer with the eager model's, or with the compressed program's (--compress). Stops at the first
    stage that fails, with its reason, and keeps everything made until then. RECIPE is a file, a folder with a
    recipe.py, or package.module:object.
    """
    from trueline.ship import ship

    if serve is not None and (ctx.params["as_json"] or ctx.params["quiet"]):
        raise UsageError("--serve runs until Ctrl-C and prints what to ask", hint="leave out --json and --quiet")
    shipped = ship(recipe, **options)
    code = warn_left_out(shipped.trained.summary.left_out)
    if serve is not None:  # the server takes the place of this process, which holds torch and a model
        click.echo(printable(shipped.as_text(), multiline=True))
        sys.stdout.flush()
        port = ["--port", str(serve)] if serve >= 0 else []
        os.execv(sys.executable, [sys.executable, "-m", "trueline", "serve", str(shipped.bundle), *port])
    return Output(shipped.as_text(), shipped.as_dict(), code)
