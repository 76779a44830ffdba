"""`trueline bundle export-cpp`."""

from pathlib import Path

import click

from trueline.cli.options import Output, verb

_EXAMPLES = """
trueline bundle export-cpp digits.bundle digits-cpp
    writes digits-cpp; then: cd digits-cpp && ./build.sh && ./replay

trueline bundle export-cpp digits.bundle digits-cpp --format aotinductor
    the same around the machine code that AOTInductor compiled
"""


@verb("export-cpp", examples=_EXAMPLES)
@click.argument("bundle")
@click.argument("folder")
@click.option("--format", metavar="NAME", help="torchscript or aotinductor; torchscript if the bundle has it.")
def command(bundle: str, folder: str, format: str | None) -> Output:
    """Write a C++ project that runs a bundle without Python.

    It loads the program with libtorch, rejects inputs outside the proven range, replays the bundle's golden records and
    exits non-zero if an answer differs. It builds with CMake, or with its build.sh and the libtorch of an installed
    torch. The bundle needs a program for C++: `trueline capture --for cpp`.
    """
    from trueline.capture.cpp.export import export_cpp

    project = export_cpp(Path(bundle), Path(folder), format=format)
    names = sorted(path.name for path in project.iterdir())
    text = f"{project}: {', '.join(names)}\nbuild it: cd {project} && ./build.sh && ./replay"
    return Output(text, {"path": str(project), "files": names})
