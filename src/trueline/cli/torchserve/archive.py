"""`trueline torchserve archive`."""

from __future__ import annotations

from pathlib import Path

import click

from trueline.cli.options import json_option, say, verb

_EXAMPLES = """
trueline torchserve archive digits.bundle recipe.py --out store/digits.mar
    then: trueline serve --model-store store --load all --allow-code

trueline torchserve archive digits.bundle recipe.py --batch-size 32 --workers 2
    two processes, each asked up to 32 requests at a time
"""


@verb("archive", examples=_EXAMPLES)
@click.argument("bundle")
@click.argument("recipe")
@click.option("-o", "--out", metavar="FILE.mar", help="The archive to write; NAME.mar if left out.")
@click.option("--model-version", default="1.0", show_default=True, help="The version that it is served as.")
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Requests of one run.")
@click.option(
    "--max-batch-delay", type=click.IntRange(0), default=5, show_default=True, help="Milliseconds that one may wait."
)
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes.")
@click.option("--any-recipe", is_flag=True, help="Take a recipe that is not the one the bundle was captured from.")
@click.option("--overwrite", is_flag=True, help="Replace an archive that exists.")
@json_option
def command(
    bundle: str,
    recipe: str,
    out: str | None,
    model_version: str,
    batch_size: int,
    max_batch_delay: int,
    workers: int,
    any_recipe: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Put a bundle and its recipe into an archive to serve.

    A bundle alone takes tensors and gives tensors. In the archive, the recipe's own preprocess(request) makes the
    inputs of what a client sends, and postprocess(outputs) makes the answer; between them runs the proven program,
    which has to answer the golden examples before the first request. A server runs it in processes of its own, with
    --allow-code. /explanations/NAME says what each input adds to the answer (integrated gradients; needs
    trueline[explain] and the torch.export program).
    """
    from trueline.bundle.read import open_bundle
    from trueline.torchserve.recipe_archive import archive

    found = open_bundle(Path(bundle))
    made = archive(
        found,
        recipe,
        out or f"{found.name}.mar",
        version=model_version,
        batch_size=batch_size,
        max_batch_delay_ms=max_batch_delay,
        workers=workers,
        any_recipe=any_recipe,
        overwrite=overwrite,
    )
    folder = made.parent
    say(
        f"archive: {made}\nserve it: trueline serve --model-store {folder} --load {made.stem} --allow-code",
        {"path": str(made), "bundle": found.digest, "bytes": made.stat().st_size},
        as_json=as_json,
    )
