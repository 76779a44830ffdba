"""What of a job waits for room on a full disk: told once when it begins, once when there is room again."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trueline.files import free_space

Emit = Callable[..., None]


class DiskRoom:
    """`waiting`: by what waits (journal, checkpoint, summary), its path and since when (seconds since 1970)."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.waiting: dict[str, dict[str, Any]] = {}
        self._began: dict[str, float] = {}  # by the monotonic clock

    def lack(self, what: str, path: str, why: str, effect: str) -> None:
        """Notes that `what` cannot be written to `path`; `effect`: what the job does meanwhile."""
        if what not in self.waiting:
            facts = {"path": path, "free": free_space(Path(path)), "why": why, "effect": effect}
            self.waiting[what] = {"what": what, **facts, "since": time.time()}
            self._began[what] = time.monotonic()
            self._emit("disk.full", what=what, **facts)

    def gain(self, what: str) -> None:
        """Notes that `what` was written."""
        waited = self.waiting.pop(what, None)
        if waited is not None:
            seconds = time.monotonic() - self._began[what]
            self._emit("disk.has_room", what=what, path=waited["path"], seconds=seconds)
