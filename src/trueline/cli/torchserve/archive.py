"""`trueline torchserve archive`."""

from pathlib import Path
from typing import Any

import click

from trueline.cli.options import Output, overwrite_option, verb

_EXAMPLES = """
trueline torchserve archive digits.bundle recipe.py --out store/digits.mar
    then: trueline serve --model-store store --load all --allow-code

trueline torchserve archive digits.bundle recipe.py --batch-size 32 --workers 2
    two processes, each with batches of up to 32 requests
"""


@verb("archive", examples=_EXAMPLES)
@click.argument("bundle")
@click.argument("recipe")
@click.option("-o", "--out", metavar="FILE.mar", help="The archive to write; else NAME.mar.")
@click.option("--model-version", "version", default="1.0", show_default=True, help="Version of the model in it.")
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Requests in a batch.")
@click.option("--max-batch-delay", "max_batch_delay_ms", type=click.IntRange(0), default=5, show_default=True,
              help="Milliseconds that a request may wait for its batch.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes.")
@click.option("--any-recipe", is_flag=True, help="Take a recipe that is not the one the bundle was captured from.")
@overwrite_option
def command(bundle: str, recipe: str, out: str | None, **options: Any) -> Output:
    """Put a bundle and its recipe into an archive to serve.

    A bundle alone takes tensors and gives tensors. In the archive, the recipe's own preprocess(request) makes the
    inputs from a client's request, and postprocess(outputs) makes the response; between them runs the proven program,
    which has to answer the golden records correctly before the first request. A server runs it in its own processes,
    with --allow-code. /explanations/NAME shows what each input adds to the answer (integrated gradients; needs
    trueline[explain] and the torch.export program).
    """
    from trueline.bundle.read import open_bundle
    from trueline.torchserve.recipe_archive import archive

    opened = open_bundle(Path(bundle))
    path = archive(opened, recipe, out or f"{opened.name}.mar", **options)
    text = f"archive: {path}\nserve it: trueline serve --model-store {path.parent} --load {path.stem} --allow-code"
    return Output(text, {"path": str(path), "bundle": opened.digest, "bytes": path.stat().st_size})
