"""The diagnosis as text: the table, what blocks each row, the rewrites as diffs. Pure: values in, text out."""

from __future__ import annotations

from pathlib import Path

from trueline.doctor.diagnosis import Diagnosis, Rewrite, Row

MARKS = {True: "yes", False: "no"}
STATUS = {
    "ready": "ready",
    "rewritten": "needs a rewrite: below",
    "waits": "ready with the rewrites below",
    "blocked": "needs a rewrite by hand",
}


def text(diagnosis: Diagnosis, *, diffs: bool = True) -> str:
    """The whole report."""
    head = ("submodule", "class", "trace", "script", "export", "status")
    table = [head, *(_cells(row) for row in diagnosis.rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    causes = [part for row in diagnosis.rows for part in _cause(row)]
    shown = [part for rewrite in diagnosis.rewrites for part in _rewrite(rewrite)] if diffs else []
    return "\n".join([*lines, *causes, *shown, "", summary(diagnosis)])


def summary(diagnosis: Diagnosis) -> str:
    """`1 of 3 submodules, was 0, can be exported; 3 of 3 with the rewrites`."""
    rewrites = f"; {diagnosis.healed} of {len(diagnosis.rows)} with the rewrites" if diagnosis.rewrites else ""
    comma = "" if diagnosis.before is None else ","
    return f"{diagnosis.progress}{comma} can be exported{rewrites}"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.path,
        row.class_name,
        MARKS[row.traceable],
        MARKS[row.scriptable],
        MARKS[row.exportable],
        STATUS[row.status],
    )


def _cause(row: Row) -> list[str]:
    if row.cause is None:
        return ["", f"{row.path}: {row.why_not}"] if row.why_not else []
    lines = [
        "",
        f"{row.path}: {row.cause.words}",
        f"  {shorten_path(row.cause.file)}:{row.cause.line}: {row.cause.source}",
    ]
    return [*lines, f"  no rewrite: {row.why_not}"] if row.why_not else lines


def _rewrite(rewrite: Rewrite) -> list[str]:
    return ["", f"{rewrite.class_name}: {'; then '.join(rewrite.steps)}", f"  {proof(rewrite)}", rewrite.diff.rstrip()]


def proof(rewrite: Rewrite) -> str:
    """What was proven of a rewrite, in one line."""
    onnx = f"; ONNX: {rewrite.onnx}" if rewrite.onnx else ""
    explicit = f" with its state explicit ({', '.join(rewrite.state)})" if rewrite.state else ""
    in_order = ", one after the other," if rewrite.state else ""
    return (
        f"exported{explicit} and equal to the original on {rewrite.probes} calls{in_order} "
        f"(largest difference {rewrite.max_abs_error:.2g}){onnx}"
    )


def shorten_path(file: str) -> str:
    """A path from here, where that is shorter."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file
