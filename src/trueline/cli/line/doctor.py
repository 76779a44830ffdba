"""`trueline doctor`."""

from __future__ import annotations

import click

from trueline.cli._progress import progress
from trueline.cli.options import checkpoint_path, json_option, quiet_option, recipe_argument, say, verb

_EXAMPLES = """
trueline doctor recipe.py
    every submodule: can it be captured, and if not, the line, the reason and a proven rewrite

trueline doctor recipe.py --dynamic x:1
    the second dimension of input x varies from request to request, as the batch does

trueline doctor recipe.py --apply healed --html doctor.html
    writes a copy of the recipe with the rewrites, and the report as a page
"""


@verb("doctor", examples=_EXAMPLES)
@recipe_argument
@click.option("--checkpoint", metavar="PATH", help="Examine the model with these parameters; untrained if left out.")
@click.option("--dynamic", multiple=True, metavar="INPUT:DIM", help="A dimension that varies, e.g. x:1; repeatable.")
@click.option("--apply", "folder", metavar="DIR", help="Write a copy of the recipe with the rewrites into DIR.")
@click.option("--html", metavar="FILE", help="Write the report as a page.")
@click.option("--no-onnx", is_flag=True, help="Do not try the rewrites in ONNX Runtime.")
@click.option("--no-diffs", is_flag=True, help="Leave the diffs out of the text.")
@json_option
@quiet_option
def command(
    recipe: str,
    checkpoint: str | None,
    dynamic: tuple[str, ...],
    folder: str | None,
    html: str | None,
    no_onnx: bool,
    no_diffs: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Say what cannot be captured, why, and how to rewrite it.

    Each submodule of your own is traced, scripted and exported by itself, on what the whole model really asks it: a yes
    in the table is a program that was right on all of these calls. For one that fails, the first blocking line is
    named. Where a rewrite to torch.where, cond, while_loop or scan can be derived, it is shown as a diff, after it was
    exported and found equal to the original on every probe; where none can, the report says what was tried.

    Your files stay as they are. --apply writes a copy that you read, train on and capture in their place. How far the
    model is is kept in NAME.doctor.json beside the recipe, and the next run says how far it was.
    """
    from trueline.doctor import report
    from trueline.doctor.api import doctor

    with progress(quiet=quiet):
        found = doctor(
            recipe,
            checkpoint_path(checkpoint) if checkpoint else None,
            dynamic=_dims(dynamic),
            apply=folder,
            html=html,
            onnx=not no_onnx,
        )
    say(report.text(found, diffs=not no_diffs), found.facts(), as_json=as_json)


def _dims(given: tuple[str, ...]) -> dict[str, list[int]]:
    """`("x:1",)` as `{"x": [1]}`. Raises UsageError."""
    from trueline.errors import UsageError

    found: dict[str, list[int]] = {}
    for one in given:
        name, separator, dim = one.rpartition(":")
        if not separator or not name or not dim.isdigit():
            raise UsageError(f"--dynamic '{one}' is not INPUT:DIM", hint="for example --dynamic x:1")
        found.setdefault(name, []).append(int(dim))
    return found
