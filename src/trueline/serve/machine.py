"""What TorchServe tells of the machine: processor, memory, disk. Read from the kernel when somebody asks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_MIB, _GIB = 2**20, 2**30
_MEMINFO = Path("/proc/meminfo")

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


def _memory() -> tuple[int, int] | None:
    """Bytes in all, and those that are to be had."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemTotal"].split()[0]) * 1024, int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
