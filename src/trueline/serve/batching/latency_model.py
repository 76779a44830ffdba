"""Learns how long runs take and when requests come, and decides whether to start a run now or to wait for more.

Two curves are learned, both forgetting exponentially:

    t(n)   seconds of a run of n rows: linear between the sizes that were seen, and beyond the last
    h(s)   rows that came within s seconds after the last answer. Independent clients send evenly; clients that wait for
           their answers return together, and a run that starts before they have returned splits them forever

A run that starts now does n / t(n) rows a second; one that starts w later, when m more rows have come,
(n + m) / (w + t(n + m)). The best w is chosen if it is better by a margin, and never longer than a run takes. Rows
beyond the size where n / t(n) stops growing wait for the next run.

Pure; `now` is an argument. Sources: Inoue, Queueing Analysis of GPU-Based Inference Servers with Dynamic Batching
(2021), on why an idle server that starts at once is near the optimum for independent clients; BentoML's dispatcher.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

_MARGIN = 1.05
"""How much better waiting has to be than starting now."""
_ENOUGH = 0.98
"""A full batch is the smallest size that reaches this share of the best rows per second."""
_WORTH_MORE = 0.9
"""Larger sizes are tried while the largest reaches this share of the best rows per second."""
_WEIGHT = 0.2
"""Of a new run in the mean of its size class."""
_STALE_RUNS = 1000
"""A size that was not seen for this many runs is forgotten, and so tried again."""
_KEEP = 0.95
"""The weight of earlier arrivals, at each answer."""
_FINEST_S = 1e-5
_PER_OCTAVE = 4
_EDGES = tuple(_FINEST_S * 2 ** (at / _PER_OCTAVE) for at in range(20 * _PER_OCTAVE))
"""Bounds of the intervals after an answer, up to ten seconds."""
_MIN_CYCLES = 3.0


@dataclass(slots=True)
class _Seen:
    """Runs of one size class."""

    rows: float
    took_s: float
    runs: int
    last: int


class Curve:
    """t(n).

    >>> curve = Curve({1: 0.010, 9: 0.018})
    >>> [round(curve.at(rows), 3) for rows in (1, 5, 17)]
    [0.01, 0.014, 0.026]
    """

    def __init__(self, seed: Mapping[int, float]) -> None:
        """`seed`: seconds by rows, measured before the first request."""
        self._runs = 0
        self._seen = {_size_class(rows): _Seen(rows, took_s, 1, 0) for rows, took_s in seed.items()}
        self._rows: list[float] = []
        self._took_s: list[float] = []
        self._update()

    def add(self, rows: int, took_s: float) -> None:
        """A run of `rows` took `took_s`; an outlier counts at most three times the mean."""
        self._runs += 1
        kind = _size_class(rows)
        seen = self._seen.get(kind)
        if seen is None:
            self._seen[kind] = _Seen(rows, took_s, 1, self._runs)
        else:
            weight = max(_WEIGHT, 1 / (seen.runs + 1))
            seen.took_s += weight * (min(took_s, 3 * seen.took_s) - seen.took_s)
            seen.rows += weight * (rows - seen.rows)
            seen.runs += 1
            seen.last = self._runs
        if self._runs % _STALE_RUNS == 0:
            fresh = {kind: one for kind, one in self._seen.items() if self._runs - one.last < _STALE_RUNS}
            self._seen = fresh or self._seen
        self._update()

    def _update(self) -> None:
        """Updates the points of the curve, which never falls."""
        self._rows, self._took_s = [], []
        longest = 0.0
        for one in sorted(self._seen.values(), key=lambda one: one.rows):
            longest = max(longest, one.took_s)
            self._rows.append(one.rows)
            self._took_s.append(longest)

    def at(self, rows: float) -> float:
        """Seconds of a run of `rows`; 0 while nothing is known."""
        xs, ys = self._rows, self._took_s
        if not xs:
            return 0.0
        if rows <= xs[0]:
            return ys[0]
        if len(xs) == 1:  # of a single size, half of the run is assumed to be constant
            return ys[0] * (1 + rows / xs[0]) / 2
        right = min(bisect_right(xs, rows), len(xs) - 1)
        x, y = xs[right - 1], ys[right - 1]
        return y + (ys[right] - y) * (rows - x) / (xs[right] - x)

    def full(self, bound: int) -> int:
        """The size of a full batch, at most `bound`: from where on more rows per run are no more rows per second.

        While the largest size seen is about as good as the best, one twice as large is tried.
        """
        sizes = [rows for rows in self._rows if 1 <= rows <= bound]
        if not sizes:
            return bound
        rates = [rows / max(1e-9, self.at(rows)) for rows in sizes]
        best = max(rates)
        if _size_class(sizes[-1]) < _size_class(bound) and rates[-1] >= _WORTH_MORE * best:
            return min(bound, math.ceil(2 * sizes[-1]))
        chosen = next(rows for rows, rate in zip(sizes, rates, strict=True) if rate >= _ENOUGH * best)
        return bound if _size_class(chosen) == _size_class(bound) else max(1, round(chosen))


def _size_class(rows: float) -> int:
    """Sizes of one class are learned as one: 1, 2, 3, 4, 6, 8, 11 and so on."""
    return round(2 * math.log2(max(1.0, rows)))


class Returns:
    """h(s): rows that came within s seconds after an answer.

    Counts arrivals, and the time during which they could have come, by intervals after the answer, so that a run that
    ends early does not distort the later intervals.
    """

    def __init__(self) -> None:
        self._came = [0.0] * (len(_EDGES) + 1)
        self._open_s = [0.0] * (len(_EDGES) + 1)
        self._weight = 1.0
        self._cycles = 0.0
        self.last: float | None = None
        """Time of the last answer."""
        self._sum: list[float] = []
        self.num_since = 0
        """Rows that came since the last answer."""

    def count_arrival(self, rows: int, now: float) -> None:
        if self.last is not None:
            self._came[_interval(now - self.last)] += self._weight * rows
            self.num_since += rows

    def count_answer(self, now: float, horizon_s: float) -> None:
        """Of arrivals later than `horizon_s` after an answer nothing is used."""
        if self.last is not None:
            self._count_open(now - self.last)
            self._weight /= _KEEP
            self._cycles = self._cycles * _KEEP + 1
            if self._weight > 1e100:
                self._came = [one / self._weight for one in self._came]
                self._open_s = [one / self._weight for one in self._open_s]
                self._weight = 1.0
        self.last, self.num_since = now, 0
        self._update(horizon_s)

    def _count_open(self, length_s: float) -> None:
        begin = 0.0
        for at, end in enumerate(_EDGES):
            if length_s <= end:
                self._open_s[at] += self._weight * (length_s - begin)
                return
            self._open_s[at] += self._weight * (end - begin)
            begin = end

    def _update(self, horizon_s: float) -> None:
        total, begin, self._sum = 0.0, 0.0, []
        for at, end in enumerate(_EDGES):
            open_s = self._open_s[at]
            if begin > horizon_s or open_s < 0.5 * self._weight * (end - begin):
                return
            total += self._came[at] / open_s * (end - begin)
            self._sum.append(total)
            begin = end

    def after(self, now: float, until: float) -> list[tuple[float, float]]:
        """(time, rows expected until then), from `now` to `until`."""
        if self.last is None or self._cycles < _MIN_CYCLES:
            return []
        since_s = now - self.last
        first = _interval(since_s)
        if first >= len(self._sum):
            return []
        below, low = (self._sum[first - 1], _EDGES[first - 1]) if first else (0.0, 0.0)
        so_far = below + (self._sum[first] - below) * (since_s - low) / (_EDGES[first] - low)
        expected = []
        for at in range(first, len(self._sum)):
            when = self.last + _EDGES[at]
            if when > until:
                break
            more = min(self._sum[at] - so_far, self._sum[at] - self.num_since)
            expected.append((when, more))
        return expected


def _interval(since_s: float) -> int:
    if since_s < _FINEST_S:
        return 0
    return min(len(_EDGES), int(_PER_OCTAVE * math.log2(since_s / _FINEST_S)) + 1)


class LatencyModel:
    """What was learned of one model's runs and requests."""

    def __init__(self, seed: Mapping[int, float] | None = None) -> None:
        self.curve = Curve(seed or {})
        self.returns = Returns()
        self._until = 0.0
        self._enough = 0

    def count_arrival(self, rows: int, now: float) -> None:
        self.returns.count_arrival(rows, now)

    def count_run(self, rows: int, took_s: float, now: float) -> None:
        self.curve.add(rows, took_s)
        self.returns.count_answer(now, 2 * self.curve.at(rows))
        self._until = 0.0

    def wait(self, rows: int, bound: int, *, since: float, now: float) -> float | None:
        """Until when to wait with `rows`, the oldest since `since`, for at most `bound` rows; None: start now."""
        if now < self._until and rows < self._enough:
            return self._until
        self._until = 0.0
        start_s = self.curve.at(rows)
        if not start_s:
            return None
        best, chosen = _MARGIN * rows / start_s, None
        idle_since = since if self.returns.last is None else max(since, self.returns.last)
        for when, more in self.returns.after(now, idle_since + start_s):
            total = min(bound, rows + more)
            rate = total / (when - now + self.curve.at(total))
            if total > rows and rate > best:
                best, chosen, self._enough = rate, when, math.ceil(total)
        if chosen is None or chosen <= now:
            return None
        self._until = chosen
        return chosen
