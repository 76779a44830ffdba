"""Lines that a test finds by the mark in their comment: `y = x[0]  # first row` has the mark "first row"."""

from __future__ import annotations

from pathlib import Path


def line_of(file: str, mark: str) -> int:
    """The number of the first line of `file` that ends with `# mark`."""
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        if line.endswith(f"# {mark}"):
            return number
    raise AssertionError(f"no line of {file} is marked {mark}")


def place_of(file: str, mark: str) -> str:
    """`name.py:12`, as messages name a line."""
    return f"{Path(file).name}:{line_of(file, mark)}"
