"""How a server uses memory: what it frees stays with it, since the next push needs as much again."""

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress

from trueline.ps.messages import TableStats

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGE = 32 << 20


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
    costs = [f"{one.name} has {one.rows} rows of {one.bytes / one.rows:.0f} bytes" for one in tables if one.rows]
    return (
        f"no memory is left: {'; '.join(costs) or 'no table has rows'}; nothing that was acknowledged is lost\n"
        "add servers, or bound the tables with max_rows and evict or admit_after"
    )
