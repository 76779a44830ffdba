"""Counters of requests: written on the event loop, read by a scrape."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

BOUNDS_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BOUNDS_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Histogram:
    """Counts by upper bound; the last cell is for larger values."""

    __slots__ = ("bounds", "cells", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.cells = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.cells[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.cells)


@dataclass(slots=True, eq=False)
class VersionStats:
    """Counters of one version. Seconds are sums over requests."""

    request_s: Histogram = field(default_factory=lambda: Histogram(BOUNDS_S))
    batch_s: Histogram = field(default_factory=lambda: Histogram(BOUNDS_S))
    failed: int = 0
    failed_s: float = 0.0
    decode_s: float = 0.0
    encode_s: float = 0.0
    queue_s: float = 0.0
    infer_s: float = 0.0
    last_at: float = 0.0  # of the last answer, in seconds since the epoch; 0: none
    running: set[int] = field(default_factory=set)
    """Threads in which the program runs now."""
    largest_values: int = 0
    """Numbers in the inputs of the largest run beside the loop since memory was last given back."""
    largest_at: float = 0.0
    """When the last run of at least half that size ended, in monotonic seconds."""
    runs_by_rows: dict[int, list[float]] = field(default_factory=dict)
    """Rows of a run -> number of such runs, and their seconds."""

    def count_run(self, requests: int, rows: int, took_s: float, waited_s: float) -> None:
        """One run of `rows` over `requests`, which waited `waited_s` in total."""
        self.batch_s.add(took_s)
        self.infer_s += took_s * requests
        self.queue_s += waited_s
        runs = self.runs_by_rows.get(rows)
        if runs is None:
            runs = self.runs_by_rows[rows] = [0, 0.0]
        runs[0] += 1
        runs[1] += took_s

    def count_size(self, values: int, now: float) -> None:
        """A run of `values` numbers ended at `now`."""
        if 2 * values >= self.largest_values:
            self.largest_values, self.largest_at = max(values, self.largest_values), now

    def count_answers(self, began_s: list[float], decode_s: float, encode_s: float, now: float, at: float) -> None:
        """Requests that began at `began_s`, in order, and were answered together at `now`, `at` since the epoch."""
        self.decode_s += decode_s
        self.encode_s += encode_s
        self.last_at = at
        longest, shortest = now - began_s[0], now - began_s[-1]
        cell = bisect_left(BOUNDS_S, longest)
        if cell == bisect_left(BOUNDS_S, shortest):
            self.request_s.cells[cell] += len(began_s)
            self.request_s.total += now * len(began_s) - sum(began_s)
            return
        for began in began_s:
            self.request_s.add(now - began)

    @property
    def rows(self) -> int:
        return sum(rows * int(count) for rows, (count, _) in list(self.runs_by_rows.items()))

    @property
    def batch_rows(self) -> Histogram:
        found = Histogram(BOUNDS_ROWS)
        for rows, (count, _) in list(self.runs_by_rows.items()):
            found.add(rows, int(count))
        return found


@dataclass(slots=True, eq=False)
class ServerStats:
    """Counts of the whole server."""

    by_status: Counter[int] = field(default_factory=Counter)
