"""Where the time of a step goes, and how fast this worker computes.

Measured on the host: what a GPU does counts where the host waits for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from trueline.train import shares

PARTS = ("data", "compute", "wait", "commit")


@dataclass(slots=True)
class Pace:
    rate: float = 0.0
    """Records a second from the start of reading to the end of the local backward, smoothed; 0: not measured."""
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Seconds of the step at hand."""
    last_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Milliseconds of the last step that was applied."""
    _since: float = 0.0
    _ahead_s: float = 0.0
    """What reading the next step's batch took within this step."""
    _before_s: float = 0.0
    """What reading this step's batch took within the one before."""

    def begin(self) -> None:
        self.spent_s = dict.fromkeys(PARTS, 0.0)
        self._before_s, self._ahead_s = self._ahead_s, 0.0
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """The time since the last call was spent on `part`."""
        now = time.perf_counter()
        self.spent_s[part] += now - self._since
        self._since = now

    def computed(self) -> None:
        self.lap("compute")

    def read_ahead(self) -> None:
        """The time since the last call was spent on reading for the next step."""
        before = self.spent_s["data"]
        self.lap("data")
        self._ahead_s = self.spent_s["data"] - before

    def measured(self, records: int) -> None:
        """This worker's part of the step, `records` in number, is computed."""
        local_s = self._before_s + self.spent_s["data"] - self._ahead_s + self.spent_s["compute"]
        if records and local_s > 0:
            self.rate = shares.smoothed(self.rate, records / local_s)

    def applied(self) -> None:
        self.lap("commit")
        self.last_ms = {part: seconds * 1e3 for part, seconds in self.spent_s.items()}
