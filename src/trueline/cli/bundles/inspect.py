"""`trueline bundle inspect`."""

from pathlib import Path
from typing import Literal

import click

from trueline.cli.options import Output, tracking_option, verb

_EXAMPLES = """
trueline bundle inspect digits.bundle
    signature, proven range, programs, every comparison, lineage

trueline bundle inspect models:/digits@champion --json
    the same of a registered bundle, for a script

trueline bundle inspect digits.bundle --graph --format torch_export
    the program itself, one operator a line

trueline bundle inspect digits.bundle --graph --as ssa
    the same in SSA form; --as code is the alternative
"""


@verb("inspect", examples=_EXAMPLES)
@click.argument("bundle")
@click.option("--graph", is_flag=True, help="Print a program, with the source lines of its operators.")
@click.option("--as", "form", type=click.Choice(["code", "ssa"]), help="Form of --graph; else the format's usual one.")
@click.option("--format", metavar="NAME", help="Program for --graph; else the one that is served.")
@tracking_option
def command(
    bundle: str, graph: bool, form: Literal["code", "ssa"] | None, format: str | None, tracking_uri: str | None
) -> Output:
    """Show a bundle's signature, programs, proofs and lineage.

    Inputs, outputs and their proven range; the programs and which is served; every attempt to make one, with the reason
    if it was refused; every comparison with the eager model; the golden records and the lineage. --graph prints a
    program instead, one value a line with the line of your file that it came from: ONNX as its own text and
    torch.export as code unless --as selects another form, TorchScript as its source. AOTInductor's is machine code.

    Every file is verified against its digest first; nothing in the bundle runs. BUNDLE is a folder, a packed file, or a
    registered model, models:/NAME@ALIAS or models:/NAME/VERSION.
    """
    from trueline.bundle import describe
    from trueline.bundle.read import open_bundle
    from trueline.errors import UsageError

    path = Path(bundle)
    if bundle.startswith("models:"):
        from trueline.registry import resolve

        path = resolve(bundle, tracking_uri=tracking_uri).path
    opened = open_bundle(path)
    if graph:
        from trueline.runtime import graph as graphs

        entry = opened.program(format)
        code = graphs.text(entry.format, opened.path / entry.file, form)
        return Output(code, {"path": str(opened.path), "format": entry.format, "graph": code})
    if format is not None or form is not None:
        raise UsageError("--format and --as select what --graph prints; give --graph too")
    return Output(describe.describe(opened), describe.to_json(opened))
