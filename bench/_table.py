"""Output of a benchmark: a table, then one JSON object as the last line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The rows under their headers, columns aligned.

    >>> print(table(["step", "us"], [["decode", 12.34], ["run", 7.0]]))
    step       us
    decode  12.34
    run         7
    """
    cells = [list(headers), *([_text(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    return "\n".join(_line(row, widths) for row in cells)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if at == 0 else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def report(headers: Sequence[str], rows: Sequence[Sequence[object]], result: Mapping[str, object]) -> None:
    """Prints the table, then `result` as one line of JSON."""
    print(table(headers, rows))
    print(json.dumps(result))
