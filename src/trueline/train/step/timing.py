"""Where the time of a step goes, and how fast this worker computes.

Measured on the host: what a GPU does counts where the host waits for it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from trueline.train.step import load_balance


@dataclass(slots=True)
class StepTimer:
    rate: float = 0.0
    """Records a second from the start of reading to the end of the local backward, smoothed; 0: not measured."""
    last_ms: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Milliseconds of the last step that was applied: reading, computing, waiting, committing."""
    _measured: int = 0
    """Steps in which it was."""
    _data_s: float = 0.0
    _compute_s: float = 0.0
    _wait_s: float = 0.0
    """Seconds of the step at hand."""
    _since: float = 0.0
    _ahead_s: float = 0.0
    """What reading the next step's batch took within this step."""
    _step_s: float = math.inf
    """Of the last step. One that is longer than those beside it counts as they do: somebody stood still in it."""
    _before_s: float = 0.0
    """What reading this step's batch took within the one before."""

    def begin(self) -> None:
        self._data_s = self._compute_s = self._wait_s = 0.0
        self._before_s, self._ahead_s = self._ahead_s, 0.0
        self._since = time.perf_counter()

    def _lap(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        took_s, self._since = now - self._since, now
        return took_s

    def end_reading(self) -> None:
        """The time since the last call was spent on reading,"""
        self._data_s += self._lap()

    def end_computing(self) -> None:
        """on the local part of a step,"""
        self._compute_s += self._lap()

    def end_reading_ahead(self) -> None:
        """on reading for the next step,"""
        self._ahead_s = self._lap()
        self._data_s += self._ahead_s

    def end_waiting(self, records: int) -> None:
        """on waiting for the sums. This worker's part of the step was `records` in number."""
        self._wait_s += self._lap()
        local_s = self._before_s + self._data_s - self._ahead_s + self._compute_s
        if records and local_s > 0:
            # What a process loads and allocates in its first step says nothing of the next ones.
            before = self.rate if self._measured != 1 else 0.0
            before_s, self._step_s = self._step_s, self._data_s + self._compute_s + self._wait_s
            usual_s = min(before_s, self._step_s)
            self.rate = load_balance.smooth_rate(before, records, local_s, usual_s, max(0, self._measured - 1))
            self._measured += 1

    def end_committing(self) -> None:
        """on what makes an applied step of them."""
        commit_s = self._lap()
        self.last_ms = self._data_s * 1e3, self._compute_s * 1e3, self._wait_s * 1e3, commit_s * 1e3
