"""TorchServe's metrics of NVIDIA devices, read from `nvidia-smi` in a thread, at most once a minute.

A scrape gets the last readings and never waits for the driver. Source: `nvidia-smi --help-query-gpu`.
"""

from __future__ import annotations

import subprocess
import threading
import time

from trueline import events
from trueline.serve.host import gpus

NAMES = {
    "GPUUtilization": "Busy NVIDIA device, percent",
    "GPUMemoryUsed": "Used memory of an NVIDIA device, megabytes",
    "GPUMemoryUtilization": "Used memory of an NVIDIA device, percent",
}
EVERY_S = 60.0
_COMMAND = ("nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")
_TIMEOUT_S = 20.0

Readings = dict[str, dict[str, float]]
"""By TorchServe's names, and then by device."""


class Gpus:
    """The last readings of this machine's devices."""

    def __init__(self) -> None:
        self.last: Readings = {}
        self._read_at: float | None = None
        self._thread: threading.Thread | None = None

    def read(self, now: float) -> Readings:
        """The last readings at `now` (monotonic seconds); when they are old, a thread fetches new ones for later."""
        last = self.last  # the thread may end before this returns
        if gpus() and (self._read_at is None or now - self._read_at >= EVERY_S):
            self._read_at = now
            self._thread = threading.Thread(target=self._fetch, name="gpus", daemon=True)
            self._thread.start()
        return last

    def wait(self) -> None:
        """Returns when no thread is reading."""
        if self._thread is not None:
            self._thread.join()

    def _fetch(self) -> None:
        began = time.monotonic()
        try:
            done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
            self.last = parse(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self.last = {}
            events.emit("gpus.unread", why=str(error), took_s=time.monotonic() - began)


def parse(text: str) -> Readings:
    """Lines of `nvidia-smi`: index, busy percent, MiB used, MiB in total. Values that a device lacks are left out.

    Raises ValueError for other text.

    >>> parse("0, 30, 1024, 4096")
    {'GPUUtilization': {'0': 30.0}, 'GPUMemoryUsed': {'0': 1024.0}, 'GPUMemoryUtilization': {'0': 25.0}}
    """
    readings: Readings = {name: {} for name in NAMES}
    for line in filter(None, map(str.strip, text.splitlines())):
        device, busy, used, total = (one.strip() for one in line.split(","))
        if not busy.startswith("["):  # "[N/A]"
            readings["GPUUtilization"][device] = float(busy)
        if not used.startswith("["):
            readings["GPUMemoryUsed"][device] = float(used)
            readings["GPUMemoryUtilization"][device] = 100 * float(used) / max(1.0, float(total))
    return readings
