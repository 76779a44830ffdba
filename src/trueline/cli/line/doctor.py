"""`trueline doctor`."""

from typing import Any

import click

from trueline.cli.options import Output, checkpoint_path, recipe_argument, verb

_EXAMPLES = """
trueline doctor recipe.py
    every submodule: can it be captured, and if not, the line, the reason and a proven rewrite

trueline doctor recipe.py --dynamic x:1
    the second dimension of input x varies from request to request, as the batch does

trueline doctor recipe.py --apply healed --html doctor.html
    writes a copy of the recipe with the rewrites, and the report as a page
"""


@verb("doctor", examples=_EXAMPLES, shows_progress=True)
@recipe_argument
@click.option("--checkpoint", metavar="PATH", help="Examine the model with these parameters; else untrained.")
@click.option("--dynamic", multiple=True, metavar="INPUT:DIM", help="A dimension that varies, e.g. x:1; repeatable.")
@click.option("--apply", metavar="DIR", help="Write a copy of the recipe with the rewrites into DIR.")
@click.option("--html", metavar="FILE", help="Write the report as a page.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="List what was not examined after this time; 30, and more for large models, when left out.",
)
@click.option("--no-onnx", is_flag=True, help="Do not try the rewrites in ONNX Runtime.")
@click.option("--no-diffs", is_flag=True, help="Leave the diffs out of the text.")
def command(recipe: str, checkpoint: str | None, dynamic: tuple[str, ...], **given: Any) -> Output:
    """Find what cannot be captured, why, and how to rewrite it.

    Each submodule of your own is traced, scripted and exported by itself, on the calls that the whole model makes to
    it: a yes in the table is a program that was right on all of these calls. For one that fails, the report names the
    first blocking line. If a rewrite to torch.where, cond, while_loop or scan can be derived, the report shows it as a
    diff, after it was exported and found equal to the original on every probe; if not, the report lists what was tried.

    Your files stay as they are. --apply writes a copy that you read, train on and capture instead. NAME.doctor.json
    beside the recipe keeps the progress, and the next run reports it.
    """
    from trueline.doctor import report
    from trueline.doctor.api import doctor

    source = checkpoint_path(checkpoint) if checkpoint else None
    varying, onnx = _parse_dims(dynamic), not given["no_onnx"]
    where, minutes = {name: given[name] for name in ("apply", "html")}, given["minutes"]
    findings = doctor(recipe, source, dynamic=varying, onnx=onnx, minutes=minutes, **where)
    return Output(report.text(findings, diffs=not given["no_diffs"]), findings.facts())


def _parse_dims(given: tuple[str, ...]) -> dict[str, list[int]]:
    """`("x:1",)` as `{"x": [1]}`. Raises UsageError."""
    from trueline.errors import UsageError

    dims: dict[str, list[int]] = {}
    for text in given:
        name, separator, dim = text.rpartition(":")
        if not separator or not name or not dim.isdigit():
            raise UsageError(f"--dynamic '{text}' is not INPUT:DIM", hint="for example --dynamic x:1")
        dims.setdefault(name, []).append(int(dim))
    return dims
