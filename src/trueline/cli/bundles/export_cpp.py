"""`trueline bundle export-cpp`."""

from __future__ import annotations

from pathlib import Path

import click

from trueline.cli.options import json_option, say, verb

_EXAMPLES = """
trueline bundle export-cpp digits.bundle digits-cpp
    writes digits-cpp; then: cd digits-cpp && ./build.sh && ./replay

trueline bundle export-cpp digits.bundle digits-cpp --format aotinductor
    the same around the machine code that AOTInductor compiled
"""


@verb("export-cpp", examples=_EXAMPLES)
@click.argument("bundle")
@click.argument("folder")
@click.option("--format", "format_", metavar="NAME", help="torchscript or aotinductor; torchscript if there is one.")
@json_option
def command(bundle: str, folder: str, format_: str | None, as_json: bool) -> None:
    """Write a C++ project that runs a bundle without Python.

    It loads the program with libtorch, refuses what is outside the proven range, replays the bundle's golden
    examples and exits non-zero when an answer differs. It builds with CMake, or with the script beside it and
    the libtorch of an installed torch. The bundle needs a program for C++: `trueline capture --for cpp`.
    """
    from trueline.capture.cpp.export import export_cpp

    made = export_cpp(Path(bundle), Path(folder), format=format_)
    names = sorted(path.name for path in made.iterdir())
    say(
        f"{made}: {', '.join(names)}\nbuild it: cd {made} && ./build.sh && ./replay",
        {"path": str(made), "files": names},
        as_json=as_json,
    )
