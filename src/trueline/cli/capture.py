"""`trueline capture`."""

from __future__ import annotations

from pathlib import Path

import click

from trueline.cli._progress import progress
from trueline.cli.options import checkpoint_path, json_option, quiet_option, recipe_argument, say, verb

_EXAMPLES = """
trueline capture digits/recipe.py runs/digits-1
    every format is emitted and proven; writes digits.bundle

trueline capture digits/recipe.py runs/digits-1 --format onnx --out serving/digits.bundle --overwrite
    ONNX only, in place of an older bundle

trueline capture digits/recipe.py runs/digits-1 --for onnxruntime,cpp
    the programs that ONNX Runtime and a C++ program need

trueline capture model.onnx --out model.bundle
    wraps a program that comes as a file
"""


@verb("capture", examples=_EXAMPLES)
@recipe_argument
@click.argument("checkpoint", required=False)
@click.option("-o", "--out", metavar="BUNDLE", help="The bundle to write; NAME.bundle if left out.")
@click.option(
    "--format", "formats", multiple=True, metavar="NAME", help="onnx, torch_export, torchscript, …; repeatable."
)
@click.option("--for", "targets", metavar="NAMES", help="Where it is to run: onnxruntime, openvino, torch, cpp, …")
@click.option("--any", "any_format", is_flag=True, help="Try all formats; one that is proven is enough.")
@click.option("--overwrite", is_flag=True, help="Replace a bundle that exists.")
@json_option
@quiet_option
def command(
    recipe: str,
    checkpoint: str | None,
    out: str | None,
    formats: tuple[str, ...],
    targets: str | None,
    any_format: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Turn a checkpoint into a bundle of proven programs.

    They run without the model's code. Each is compared with the eager model on other batch sizes, other
    values and extremes before it is sealed. One that disagrees on any probe is refused, with the line of your
    model that is the reason, and nothing is written. CHECKPOINT is a checkpoint or the folder of a job.
    RECIPE may also be a program file, .onnx or .pt2; it is then wrapped as it is, and takes no CHECKPOINT.
    """
    from trueline.capture.api import capture
    from trueline.capture.from_file import capture_file, is_program
    from trueline.errors import UsageError
    from trueline.recipe.load import load_recipe
    from trueline.runtime.session import USUAL, formats_for

    if any_format and (formats or targets):
        raise UsageError("--any tries the usual formats; leave --format and --for out")
    wanted = (*formats, *(formats_for(targets.split(",")) if targets is not None else ()))
    asked = None if any_format else wanted or None
    with progress(quiet=quiet):
        if is_program(recipe):
            if checkpoint is not None:
                raise UsageError(f"{recipe} is a program and takes no checkpoint, got '{checkpoint}'")
            target = Path(out or f"{Path(recipe).stem}.bundle")
            captured = capture_file(recipe, target, formats=asked, overwrite=overwrite)
        else:
            if checkpoint is None:
                raise UsageError("name the checkpoint, or the folder of the job that trained it")
            found = load_recipe(recipe)
            captured = capture(
                found,
                checkpoint_path(checkpoint),
                Path(out or f"{found.name}.bundle"),
                formats=None if any_format else wanted or USUAL,
                overwrite=overwrite,
            )
    lines = [
        f"{one.format}: {one.verdict}" + (f" ({one.why or one.how})" if one.why or one.how else "")
        for one in captured.programs
    ]
    facts = {
        "path": str(captured.path),
        "digest": captured.digest,
        "programs": [{"format": one.format, "verdict": one.verdict, "why": one.why} for one in captured.programs],
    }
    say("\n".join([*lines, f"bundle: {captured.path}"]), facts, as_json=as_json)
