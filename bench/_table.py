"""Output of a benchmark: what was run, a table in which misses are marked, then one JSON object as the last line."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MISSED = "MISSED"
_UNITS = {"µs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 1e-2, "MB": 1.0, "": 1.0}


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


def missed(measured: str, goal: str) -> bool:
    """Whether `measured` is not what `goal` asks for: a bound, or the same text. What was not measured misses nothing.

    >>> missed("59 ms", "<= 60 ms"), missed("1.2 s", "<= 60 ms"), missed("98.1%", ">= 99 %"), missed("never", "<= 3")
    (False, True, True, True)
    >>> missed("0 / 0", "0 / 0"), missed("0 / 1", "0 / 0"), missed("0.98", ""), missed("-", "<= 1")
    (False, True, False, False)
    """
    if not goal or measured in ("-", "left out"):
        return False
    bound = re.fullmatch(r"(<=|>=) ?(.+)", goal)
    if bound is None:
        return measured != goal
    value, limit = _number(measured), _number(bound[2])
    return not (value <= limit if bound[1] == "<=" else value >= limit)


def _number(text: str) -> float:
    found = re.match(r"(-?[\d.]+(?:e[-+]?\d+)?) ?(µs|us|ms|s|%|MB)?", text)
    return float(found[1]) * _UNITS[found[2] or ""] if found else math.nan


def mark(rows: Sequence[tuple[str, str, str, str]]) -> list[tuple[str, str, str, str, str]]:
    """Rows of (what, measured, goal, detail) with a mark of those that miss their goal."""
    return [(what, text, goal, MISSED if missed(text, goal) else "", detail) for what, text, goal, detail in rows]


def provenance() -> dict[str, object]:
    """Which code was measured, when, and on what: the keys that every benchmark's JSON has."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    packages = {}
    for name in ("torch", "onnxruntime"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "commit": (git("rev-parse", "--short=8", "HEAD") or "unknown") + changed,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **packages,
        "load": round(os.getloadavg()[0], 1),
    }


_RUN = provenance()
"""When the benchmark began: a commit made meanwhile was not measured."""


def report(headers: Sequence[str], rows: Sequence[Sequence[object]], result: Mapping[str, object]) -> None:
    """Prints what was run, the table, then `result` as one line of JSON, with what was run under `run`."""
    print(", ".join(f"{name} {value}" for name, value in _RUN.items()))
    print(table(headers, rows))
    print(json.dumps({**result, "run": _RUN}))
