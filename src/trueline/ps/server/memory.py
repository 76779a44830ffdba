"""How a server uses memory: what it frees stays with it, since the next push needs as much again."""

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress

from trueline.ps.messages import ServerReport, TableStats

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGE = 32 << 20
_MORE_ROOM = "add servers, or bound the tables with max_rows and evict or admit_after"


def keep_freed() -> None:
    """Has malloc keep freed blocks of up to 32 MB: fresh pages for each push cost more than its arithmetic."""
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_TRIM_THRESHOLD, 8 * _LARGE)


def resident_bytes() -> int:
    """What this process has in memory (/proc/self/statm, proc(5))."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def describe_need(tables: Sequence[TableStats]) -> str:
    """For a server without memory: what its rows cost, and what to do."""
    return f"no memory is left: {_describe_rows(tables)}; nothing that was acknowledged is lost\n{_MORE_ROOM}"


def describe_kill(why: str, report: ServerReport | None) -> str:
    """For a server that was killed again and again, which is how a system without memory ends it; `report`: its last
    one. Empty for one that ended otherwise."""
    if "SIGKILL" not in why or report is None:
        return ""
    held = f"it had {report.memory / 1e9:.2f} GB in memory: {_describe_rows(report.tables)}"
    return f"; where the system lacked memory ({held}), {_MORE_ROOM}"


def _describe_rows(tables: Sequence[TableStats]) -> str:
    costs = [f"{one.name} has {one.rows} rows of {one.bytes / one.rows:.0f} bytes" for one in tables if one.rows]
    return "; ".join(costs) or "no table has rows"
