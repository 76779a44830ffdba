"""What TorchServe tells of the machine: processor, memory, disk. Read from the kernel when somebody asks."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

_MIB, _GIB = 2**20, 2**30
_MEMINFO = Path("/proc/meminfo")
_LIBC = ctypes.CDLL(None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 4 * 2**20

Readings = dict[str, tuple[str, float]]


def readings() -> Readings:
    """By TorchServe's names: what each is, and its value. What the kernel does not tell is left out."""
    disk = shutil.disk_usage("/")
    cores = len(os.sched_getaffinity(0))
    found: Readings = {
        "CPUUtilization": ("Runnable processes over processors, percent", min(100.0, 100 * os.getloadavg()[0] / cores)),
        "DiskAvailable": ("Free disk, gigabytes", disk.free / _GIB),
        "DiskUsage": ("Used disk, gigabytes", disk.used / _GIB),
        "DiskUtilization": ("Used disk, percent", 100 * disk.used / max(1, disk.total)),
    }
    memory = _memory()
    if memory is not None:
        total, free = memory
        found |= {
            "MemoryAvailable": ("Free memory, megabytes", free / _MIB),
            "MemoryUsed": ("Used memory, megabytes", (total - free) / _MIB),
            "MemoryUtilization": ("Used memory, percent", 100 * (total - free) / max(1, total)),
        }
    return found


def keep_weights_apart() -> None:
    """From now on weights are mapped one by one, so that those of a version that leaves go back to the system whole.

    Left alone, glibc takes what is freed as a measure of what is usual, lays weights of up to 32 MiB among the rest,
    and keeps as much of them in each of its arenas. Requests are smaller, and stay there. Source: mallopt(3).
    """
    adjust = getattr(_LIBC, "mallopt", None)
    if adjust is not None:
        adjust(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        adjust(_M_TRIM_THRESHOLD, 4 * _LARGE_BYTES)


def give_back() -> None:
    """Hands back to the system what was freed in pieces, which is much after a load. Blocks for some milliseconds.

    Only glibc has it; elsewhere nothing happens.
    """
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _memory() -> tuple[int, int] | None:
    """Bytes in all, and those that are to be had."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemTotal"].split()[0]) * 1024, int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
