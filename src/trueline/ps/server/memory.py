"""How a server uses memory: what it frees stays with it, since the next push needs as much again, and new rows wait
when there is no more, since a system without memory kills."""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from trueline.ps.messages import ServerReport, TableStats
from trueline.ps.tables.held import Held, Push

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGE = 32 << 20
_RESERVE, _STEP = 64 << 20, 256 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_V2 = "memory.max", "memory.current", ("inactive_file", "active_file")
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
"""Limit, use, and what of it is copies of files, which the kernel takes back (cgroups(7))."""
_LESS = "bound the tables of a new job with max_rows and evict, or admit_after"
_MORE_ROOM = f"give this machine more, or halt the job and resume it on a larger one; or {_LESS}"
_MORE_OF_BOUND = f"trueline scale JOB --servers N adds servers, and resume --server-memory-mb raises it; or {_LESS}"


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


class MemoryBudget:
    """What a server may still take. `bound`: bytes that it may have; 0: what the system leaves."""

    def __init__(self, bound: int = 0, find_left: Callable[[], int] | None = None) -> None:
        self._bound, self._find_left = bound, find_left or find_system_left
        self._left = 0

    def take(self, held: Held, push: Push) -> str:
        """Empty, or why the rows of the push have to wait. The system tells once for each _STEP bytes."""
        need = held.count_growth(push)
        if need > self._left:
            left = self._measure()
            if need > left:
                need = held.count_growth(push, exact=True)
            self._left = min(left, max(_STEP, need))  # an index that doubles takes more than a step at once
        if need > max(0, self._left):
            bound = f", of {self._bound / 1e9:.2f} GB that it may have (--server-memory-mb)" if self._bound else ""
            have = f"it has {resident_bytes() / 1e9:.2f} GB{bound}: {_describe_rows(held.stats)}"
            more = _MORE_OF_BOUND if self._bound else _MORE_ROOM
            return f"no memory for new rows: {have}; they wait, and nothing is lost: {more}"
        self._left -= need
        return ""

    def _measure(self) -> int:
        left = self._find_left()
        return min(left, self._bound - resident_bytes()) if self._bound else left


def find_system_left() -> int:
    """Bytes that the machine and this process's cgroups leave, without a reserve for snapshots and moves."""
    return min(_list_left(), default=_STEP) - max(_RESERVE, resident_bytes() // 8)


def _list_left() -> Iterator[int]:
    """Bytes that the machine leaves, and each cgroup with a limit (version 2 or 1)."""
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        yield int(lines["MemAvailable"].split()[0]) * 1024
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = _CGROUPS / controllers
                names = _V1 if controllers else _V2
                for folder in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
                    if folder.is_relative_to(root):
                        yield from _read_limit(folder, *names)


def _read_limit(folder: Path, most: str, used: str, files: Sequence[str]) -> Iterator[int]:
    with suppress(OSError, ValueError):  # "max": it has none
        limit, taken = (int((folder / name).read_text()) for name in (most, used))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        yield limit - taken + sum(int(stat.get(name, 0)) for name in files)


def _describe_rows(tables: Sequence[TableStats]) -> str:
    costs = [f"{one.name} has {one.rows} rows of {one.bytes / one.rows:.0f} bytes" for one in tables if one.rows]
    return "; ".join(costs) or "no table has rows"
