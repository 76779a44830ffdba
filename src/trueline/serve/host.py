"""TorchServe's readings of the machine, its GPUs, settings of glibc's allocator, and turns on the processor."""

import contextlib
import ctypes
import os
import platform
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MIB, _GIB = 2**20, 2**30
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LIBC = ctypes.CDLL(None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_APART_BYTES = 2**20
_MOST_BYTES = 32 * 2**20  # glibc's upper bound
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = struct.Struct("=IIQiIQQQII")
_KEEP_POLICY = 8
SLICE_NS = 100_000
"""The shortest that Linux takes."""
BESIDE_NICE = 5
"""Of processes beside the event loop."""
_LOCK = threading.Lock()
_opening = 0

Readings = dict[str, tuple[str, float]]


def readings() -> Readings:
    """By TorchServe's names: description and value. What the kernel does not report is left out."""
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


@contextmanager
def opening() -> Iterator[None]:
    """Maps a program's weights separately while it is opened, so that they return to the system when it is released.

    By default glibc adapts its threshold to freed sizes: it puts weights of up to 32 MiB in its arenas and keeps as
    much there. Buffers of requests should stay in the arenas, where they are reused without page faults. Without glibc
    it has no effect. Source: mallopt(3).
    """
    global _opening
    with _LOCK:
        _opening += 1
        _adjust(_APART_BYTES)
    try:
        yield
    finally:
        with _LOCK:
            _opening -= 1
            if not _opening:
                _adjust(_MOST_BYTES)


def _adjust(mapped_from: int) -> None:
    adjust = getattr(_LIBC, "mallopt", None)
    if adjust is not None:
        adjust(_M_MMAP_THRESHOLD, mapped_from)
        adjust(_M_TRIM_THRESHOLD, 2 * mapped_from)


def give_back() -> None:
    """Returns freed memory to the system. Blocks for less than a millisecond, after a load for a few."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _memory() -> tuple[int, int] | None:
    """Total and available bytes."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemTotal"].split()[0]) * 1024, int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def resident_bytes() -> int:
    """Memory that this process has; 0 where the kernel does not report it."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def usable_bytes() -> int:
    """Memory of the machine, or of the control group that this process is in; 0: unknown."""
    memory = _memory()
    bounds = [] if memory is None else [memory[0]]
    for path in _CGROUP_LIMITS:
        try:
            bounds.append(int(path.read_text()))
        except (OSError, ValueError):  # "max", or another version of control groups
            continue
    return min(bounds, default=0)


def run_memory_of(*, processes: int) -> int:
    """The default of what the runs of one of `processes` may hold: of all together, half of the memory there is."""
    return usable_bytes() // 2 // processes


def take_short_turns() -> None:
    """Asks for short turns on the processor, for this thread and those that it starts: the kernel then lets a thread
    that wakes up run at once, where it would wait up to a tick (4 ms) for another process to end its turn.

    Without effect before Linux 6.12. Source: sched_setattr(2); Linux, kernel/sched/fair.c, PREEMPT_SHORT.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None:  # Python has no call for it
        wish = _SCHED_ATTR.pack(_SCHED_ATTR.size, 0, _KEEP_POLICY, os.nice(0), 0, SLICE_NS, 0, 0, 0, 0)
        _LIBC.syscall(number, 0, wish, 0)


def yield_to_others() -> None:
    """Gives this process, alone in its session, less of the processor than others that want it.

    Linux weighs sessions against each other, so that the niceness of a process counts inside its session alone.
    Source: sched(7), "The autogroup feature".
    """
    os.nice(max(0, BESIDE_NICE - os.nice(0)))
    take_short_turns()
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as group:
        group.write(str(BESIDE_NICE))


def gpus() -> tuple[int, ...]:
    """The indices of NVIDIA devices, without a driver library."""
    try:
        return tuple(range(len(os.listdir("/proc/driver/nvidia/gpus"))))
    except OSError:
        return ()
