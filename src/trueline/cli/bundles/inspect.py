"""`trueline bundle inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from trueline.cli.options import json_option, say, tracking_option, verb

_EXAMPLES = """
trueline bundle inspect digits.bundle
    signature, proven range, programs, every comparison, lineage

trueline bundle inspect models:/digits@champion --json
    the same of a registered bundle, for a script

trueline bundle inspect digits.bundle --graph --format torch_export
    the program itself, one operator a line

trueline bundle inspect digits.bundle --graph --as ssa
    the same in SSA form; --as code is the other one
"""


@verb("inspect", examples=_EXAMPLES)
@click.argument("bundle")
@click.option("--graph", is_flag=True, help="Print the program itself, with the lines that it came from.")
@click.option(
    "--as", "form", type=click.Choice(["code", "ssa"]), help="With --graph: as code or in SSA form; else its own form."
)
@click.option("--format", "format_", metavar="NAME", help="Which program of the bundle, with --graph; else the served.")
@tracking_option
@json_option
def command(
    bundle: str,
    graph: bool,
    form: Literal["code", "ssa"] | None,
    format_: str | None,
    tracking_uri: str | None,
    as_json: bool,
) -> None:
    """Say what a bundle takes, gives and was proven for.

    Inputs, outputs and their proven range; the programs and which is served; every attempt to make one, with the reason
    of those that were refused; every comparison with the eager model; the golden examples and the lineage. --graph
    prints a program instead, one value a line with the line of your file that it came from: ONNX as its own text and
    torch.export as code unless --as says otherwise, TorchScript as its source. AOTInductor's is machine code.

    Every file is verified against its digest first; nothing in the bundle is run. BUNDLE is a folder, a
    packed file, or a registered model, models:/NAME@ALIAS or models:/NAME/VERSION.
    """
    from trueline.bundle import describe
    from trueline.bundle.read import open_bundle
    from trueline.errors import UsageError

    path = Path(bundle)
    if bundle.startswith("models:"):
        from trueline.registry import resolve

        path = resolve(bundle, tracking_uri=tracking_uri).path
    found = open_bundle(path)
    if graph:
        from trueline.runtime import graph as graphs

        entry = found.program(format_)
        code = graphs.text(entry.format, found.path / entry.file, form)
        say(code, {"path": str(found.path), "format": entry.format, "graph": code}, as_json=as_json)
        return
    if format_ is not None or form is not None:
        raise UsageError("--format and --as say what --graph prints; give --graph too")
    say(describe.describe(found), describe.to_json(found), as_json=as_json)
