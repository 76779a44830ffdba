"""One server in numbers, for `trueline status`, the live page and the summary. Pure."""

from typing import Any

from trueline.ps.messages import ServerReport


def describe_server(one: ServerReport) -> dict[str, Any]:
    pushes = sum(one.staleness)
    return {
        "ref": one.ref, "rows": sum(table.rows for table in one.tables),
        "bytes": sum(table.bytes for table in one.tables), "memory": one.memory, "pulls": one.pulls,
        "pushes": one.pushes, "duplicates": one.duplicates, "queued": one.queued, "lacking": one.lacking,
        "staleness": round(sum(n * c for n, c in enumerate(one.staleness)) / pushes, 2) if pushes else 0.0,
        "largest": max(one.tables, key=lambda table: table.bytes).name if one.tables else "",
    }  # fmt: skip
