"""The servers in numbers, for `trueline status`, the live page and the summary. Pure: `now` is an argument."""

from collections.abc import Callable
from typing import Any

from trueline.ps.messages import ServerReport

Emit = Callable[..., None]
_LEAST_S = 0.2
"""Between the two reports that make a rate."""


class ServerMeter:
    """The newest report of each server, by its ref without incarnation, and rates since the one before. `emit` tells
    when a server begins to wait, and when it continues."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._last: dict[str, tuple[float, ServerReport]] = {}
        self._shown: dict[str, dict[str, Any]] = {}

    def add(self, name: str, report: ServerReport, now: float) -> None:
        before = self._last.get(name)
        if before is not None and before[1].ref == report.ref and now - before[0] < _LEAST_S:
            return
        self._tell(name, before[1].lacking if before is not None else "", report.lacking)
        self._last[name] = now, report
        same = before is not None and before[1].ref == report.ref and before[1].pulls <= report.pulls
        self._shown[name] = describe_server(report, *((before[1], now - before[0]) if same and before else ()))

    def _tell(self, name: str, before: str, lacking: str) -> None:
        """Tells once what a server waits for, and once that it continues. Its words may change meanwhile."""
        if lacking and not before:
            self._emit("server.waits", server=name, why=lacking)
        elif before and not lacking:
            self._emit("server.continues", server=name)

    def find_report(self, ref: str) -> ServerReport | None:
        """The newest one of this server, of whichever incarnation."""
        return self._last.get(ref.partition(".")[0], (0.0, None))[1]

    def describe(self) -> list[dict[str, Any]]:
        return [self._shown[name] for name in sorted(self._shown, key=lambda name: (len(name), name))]


def describe_server(one: ServerReport, before: ServerReport | None = None, seconds: float = 1.0) -> dict[str, Any]:
    """`before`: an earlier report of the same process, `seconds` ago; without it rates are 0, and the slowest table is
    that of the whole time.

    `stale`: pushes by staleness, of which `staleness` is the mean. `slowest`: the table that took most processor time;
    `busy`: what part of a processor that was.
    """
    pushes, earlier = sum(one.staleness), before or one
    spent = {table.name: table.busy_s for table in earlier.tables} if before is not None else {}
    busy = {table.name: table.busy_s - spent.get(table.name, 0.0) for table in one.tables}
    slowest = max(busy, key=lambda name: busy[name], default="")
    last = max((at for at, count in enumerate(one.staleness) if count), default=-1)
    return {
        "ref": one.ref, "rows": sum(table.rows for table in one.tables),
        "bytes": sum(table.bytes for table in one.tables), "memory": one.memory, "pulls": one.pulls,
        "pushes": one.pushes, "duplicates": one.duplicates, "queued": one.queued, "lacking": one.lacking,
        "staleness": round(sum(n * c for n, c in enumerate(one.staleness)) / pushes, 2) if pushes else 0.0,
        "stale": list(one.staleness[: last + 1]),
        "pulls_per_s": round((one.pulls - earlier.pulls) / seconds, 1),
        "pushes_per_s": round((one.pushes - earlier.pushes) / seconds, 1),
        "largest": max(one.tables, key=lambda table: table.bytes).name if one.tables else "",
        "slowest": slowest if busy.get(slowest) else "",
        "busy": round(busy[slowest] / seconds, 4) if before is not None and busy else 0.0,
    }  # fmt: skip
