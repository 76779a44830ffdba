"""A notebook of the docs: its code cells are blocks, and the texts that it keeps under them are what they print."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.blocks import Block
from docs.session import LIMIT_S, Failed
from docs.shown import difference


def blocks_of_notebook(page: Path) -> list[Block]:
    """Each code cell; `line` is its number among all cells."""
    cells = enumerate(_read(page).cells, 1)
    return [Block(page, number, "python", "script", cell.source) for number, cell in cells if cell.cell_type == "code"]


def run_notebook(page: Path) -> None:
    """Runs the cells in a kernel and an empty folder. Raises Failed for a cell that fails or prints another text."""
    import nbclient

    book, kept = _read(page), _read(page)
    with tempfile.TemporaryDirectory(prefix="trueline-docs-") as folder:
        os.environ.pop("PYTHONPATH", None)  # the kernel imports what is installed
        client = nbclient.NotebookClient(book, timeout=LIMIT_S, resources={"metadata": {"path": folder}})
        try:
            client.execute()
        except nbclient.exceptions.CellExecutionError as error:
            raise Failed(f"{page}\n{error}") from None
    for number, (shown, cell) in enumerate(zip(kept.cells, book.cells, strict=True), 1):
        if found := difference(_printed(shown), _printed(cell)) if _printed(shown) else None:
            raise Failed(f"{page}: cell {number}: {found}\nall of it:\n{_printed(cell)}")


def _read(page: Path) -> Any:
    import nbformat

    return nbformat.read(page, as_version=4)


def _printed(cell: Any) -> str:
    def texts() -> Iterator[str]:
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stdout":
                yield output.text

    return "".join(texts())
