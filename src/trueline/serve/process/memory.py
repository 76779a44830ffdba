"""Gives memory back that a large request left with runtimes and the allocator.

Runtimes keep what their largest run has needed, and glibc what was freed, because runs as large may follow. This module
looks at the resident memory; when it is well above what it was and no run as large came for a while, the arenas are
shrunk. Small runs take no part in it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from trueline import events
from trueline.runtime.session import HoldsMemory
from trueline.serve import host
from trueline.serve.models.catalog import Models

LOOK_S = 0.25
WORTH_BYTES = 64 * 2**20
"""Less above the lowest is not given back."""
QUIET_S = 0.5
"""Without a run of at least half the size of the largest: until then, another one may need the memory."""
PAUSE_S = (1.0, 60.0)
"""Least and most time between two attempts, which doubles while they give nothing back."""


@dataclass(slots=True)
class MemoryHistory:
    """What was seen so far; pure."""

    lowest: int | None = None
    large_run_at: float = 0.0
    pause_s: float = PAUSE_S[0]
    tried_at: float = -PAUSE_S[0]

    def is_due(self, now: float, resident_bytes: int, large_run_at: float) -> bool:
        """Whether memory is to be given back at `now`, when the last large run was at `large_run_at`."""
        if self.lowest is None or resident_bytes < self.lowest:
            self.lowest = resident_bytes
        if large_run_at > self.large_run_at:
            self.large_run_at, self.pause_s = large_run_at, PAUSE_S[0]
        return (
            resident_bytes - self.lowest > WORTH_BYTES
            and now - large_run_at >= QUIET_S
            and now - self.tried_at >= self.pause_s
        )

    def note_given_back(self, now: float, num_bytes: int) -> None:
        """An attempt has lowered the resident memory by `num_bytes`."""
        self.tried_at = now
        self.pause_s = PAUSE_S[0] if num_bytes > WORTH_BYTES // 2 else min(2 * self.pause_s, PAUSE_S[1])


class MemoryKeeper:
    """Call `look` on the loop."""

    def __init__(self, models: Models, in_thread: Callable[[Callable[[], object]], asyncio.Future[object]]) -> None:
        self._models, self._in_thread = models, in_thread
        self._history = MemoryHistory()

    async def look(self) -> None:
        """Gives memory back if that is due."""
        versions = self._models.all()
        at = max([one.stats.largest_at for one in versions], default=0.0)
        before = host.resident_bytes()
        running = any(one.stats.running for one in versions)
        if not self._history.is_due(monotonic(), before, at) or running:
            return
        holders = []
        for one in versions:
            one.stats.largest_values = 0
            if one.state == "ready" and one.handler is None and isinstance(one.program.loaded.session, HoldsMemory):
                holders.append(one.program.loaded.session)
        await self._in_thread(lambda: _give_back(holders))
        after = host.resident_bytes()
        self._history.note_given_back(monotonic(), before - after)
        events.emit("memory.given_back", mib=max(0, before - after) // 2**20, resident_mib=after // 2**20)


def _give_back(holders: Sequence[HoldsMemory]) -> None:
    for one in holders:
        one.release_memory()
    onnx = sys.modules.get("trueline.runtime.onnx")
    if onnx is not None:  # else no program of ONNX Runtime was opened
        onnx.shrink_memory()
    host.give_back()
