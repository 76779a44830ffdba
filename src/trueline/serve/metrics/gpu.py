"""What TorchServe tells of NVIDIA devices, as `nvidia-smi` says it. Asked in a thread, at most once a minute.

A scrape gets what was last known, and never waits for the driver. Source: `nvidia-smi --help-query-gpu`.
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
_ASK = ("nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")
_TIMEOUT_S = 20.0

Readings = dict[str, dict[str, float]]
"""By TorchServe's names, and then by device."""


class Gpus:
    """The last readings of this machine's devices."""

    def __init__(self) -> None:
        self.last: Readings = {}
        self._asked_at: float | None = None
        self._asking: threading.Thread | None = None

    def look(self, now: float) -> Readings:
        """What is known at `now` (monotonic seconds); asks again in a thread when that is old, for the next look."""
        known = self.last  # a thread may be done before this returns
        if gpus() and (self._asked_at is None or now - self._asked_at >= EVERY_S):
            self._asked_at = now
            self._asking = threading.Thread(target=self._ask, name="gpus", daemon=True)
            self._asking.start()
        return known

    def wait(self) -> None:
        """Returns when nobody is asking."""
        if self._asking is not None:
            self._asking.join()

    def _ask(self) -> None:
        began = time.monotonic()
        try:
            done = subprocess.run(_ASK, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
            self.last = parsed(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self.last = {}
            events.emit("gpus.unread", why=str(error), took_s=time.monotonic() - began)


def parsed(text: str) -> Readings:
    """The lines of `nvidia-smi`: index, busy percent, MiB used, MiB in all. What a device does not tell is left out.

    Raises ValueError for what is none.

    >>> parsed("0, 30, 1024, 4096")
    {'GPUUtilization': {'0': 30.0}, 'GPUMemoryUsed': {'0': 1024.0}, 'GPUMemoryUtilization': {'0': 25.0}}
    """
    found: Readings = {name: {} for name in NAMES}
    for line in filter(None, map(str.strip, text.splitlines())):
        device, busy, used, total = (one.strip() for one in line.split(","))
        if not busy.startswith("["):  # "[N/A]"
            found["GPUUtilization"][device] = float(busy)
        if not used.startswith("["):
            found["GPUMemoryUsed"][device] = float(used)
            found["GPUMemoryUtilization"][device] = 100 * float(used) / max(1.0, float(total))
    return found
