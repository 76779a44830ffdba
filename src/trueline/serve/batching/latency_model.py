"""How long a run takes, when requests come, and so: start now, or wait for company?

Needs no settings: all of it is learned from what happens. Two curves are kept, both forgetting exponentially:

    t(n)   seconds of a run of n rows, by sizes that were seen; between them a line, beyond the last its slope
    h(s)   rows that have come s seconds after the last answer went out. Requests of strangers come evenly; clients that
           ask again once they are answered come back together, and running before they are back splits them for ever

A run that starts now does n / t(n) rows a second. One that starts w later does (n + m) / (w + t(n + m)), m being what
h says will have come: it waits for the best such w, if that is better by a margin, and never longer than the run itself
takes. Rows beyond the size where n / t(n) stops growing wait for the next run: they would only make this one late.

`now` is an argument; no clock, no loop. Sources: Inoue, Queueing Analysis of GPU-Based Inference Servers with Dynamic
Batching (2021), for why an idle server that runs what it has is near the best when strangers ask; BentoML's
dispatcher for fitting t(n) as it runs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

_MARGIN = 1.05
"""How much better waiting has to be than starting now."""
_ENOUGH = 0.98
"""Of the best rows per second: the smallest size that reaches this share is the size of a full batch."""
_WORTH_MORE = 0.9
"""Of the best rows per second: a largest size that falls below this shows that larger ones are no better."""
_WEIGHT = 0.2
"""Of a new run in the mean of its size."""
_STALE_RUNS = 1000
"""A size that was not seen for so many runs is forgotten, and so tried again."""
_KEEP = 0.95
"""Of what was seen of arrivals, at each answer."""
_FINEST_S = 1e-5
_PER_OCTAVE = 4
_EDGES = tuple(_FINEST_S * 2 ** (at / _PER_OCTAVE) for at in range(20 * _PER_OCTAVE))
"""Bounds of the moments after an answer, to ten seconds."""
_MIN_CYCLES = 3.0


@dataclass(slots=True)
class _Seen:
    """Runs of about one size."""

    rows: float
    took_s: float
    runs: int
    last: int


class Curve:
    """t(n), as it is now.

    >>> curve = Curve({1: 0.010, 9: 0.018})
    >>> [round(curve.at(rows), 3) for rows in (1, 5, 17)]
    [0.01, 0.014, 0.026]
    """

    def __init__(self, seed: Mapping[int, float]) -> None:
        """`seed`: seconds by rows, as measured before there were requests."""
        self._runs = 0
        self._seen = {_size_class(rows): _Seen(rows, took_s, 1, 0) for rows, took_s in seed.items()}
        self._rows: list[float] = []
        self._took_s: list[float] = []
        self._draw()

    def add(self, rows: int, took_s: float) -> None:
        """A run of `rows` took `took_s`. A lone outlier counts for three times what was expected at most."""
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
        self._draw()

    def _draw(self) -> None:
        """The points of the curve: it never falls as rows grow."""
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
        if len(xs) == 1:  # half of a run that was seen alone is taken to be the same for any size
            return ys[0] * (1 + rows / xs[0]) / 2
        right = min(bisect_right(xs, rows), len(xs) - 1)
        x, y = xs[right - 1], ys[right - 1]
        return y + (ys[right] - y) * (rows - x) / (xs[right] - x)

    def full(self, bound: int) -> int:
        """The size of a full batch, at most `bound`: where more rows no longer make more rows per second.

        While the largest size that was seen is about as good as the best, one twice as large is worth a try.
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
    """Sizes that are learned as one: 1, 2, 3, 4, 6, 8, 11 and so on."""
    return round(2 * math.log2(max(1.0, rows)))


class Returns:
    """h(s): rows that have come s seconds after an answer.

    Counts arrivals and the time in which they could have come, by moments after the answer, so that a run that ends
    early hides nothing of what would have come later.
    """

    def __init__(self) -> None:
        self._came = [0.0] * (len(_EDGES) + 1)
        self._open_s = [0.0] * (len(_EDGES) + 1)
        self._weight = 1.0
        self._cycles = 0.0
        self.last: float | None = None
        """When the last answer went out."""
        self._sum: list[float] = []
        self.num_since = 0
        """Rows that have come since the last answer."""

    def arrived(self, rows: int, now: float) -> None:
        if self.last is not None:
            self._came[_moment(now - self.last)] += self._weight * rows
            self.num_since += rows

    def answered(self, now: float, horizon_s: float) -> None:
        """An answer went out; what comes more than `horizon_s` after one is of no interest."""
        if self.last is not None:
            self._expose(now - self.last)
            self._weight /= _KEEP
            self._cycles = self._cycles * _KEEP + 1
            if self._weight > 1e100:
                self._came = [one / self._weight for one in self._came]
                self._open_s = [one / self._weight for one in self._open_s]
                self._weight = 1.0
        self.last, self.num_since = now, 0
        self._draw(horizon_s)

    def _expose(self, length_s: float) -> None:
        begin = 0.0
        for at, end in enumerate(_EDGES):
            if length_s <= end:
                self._open_s[at] += self._weight * (length_s - begin)
                return
            self._open_s[at] += self._weight * (end - begin)
            begin = end

    def _draw(self, horizon_s: float) -> None:
        total, begin, self._sum = 0.0, 0.0, []
        for at, end in enumerate(_EDGES):
            open_s = self._open_s[at]
            if begin > horizon_s or open_s < 0.5 * self._weight * (end - begin):
                return
            total += self._came[at] / open_s * (end - begin)
            self._sum.append(total)
            begin = end

    def after(self, now: float, until: float) -> list[tuple[float, float]]:
        """(when, rows that are to come until then), for moments from `now` to `until`."""
        if self.last is None or self._cycles < _MIN_CYCLES:
            return []
        since_s = now - self.last
        first = _moment(since_s)
        if first >= len(self._sum):
            return []
        below, low = (self._sum[first - 1], _EDGES[first - 1]) if first else (0.0, 0.0)
        so_far = below + (self._sum[first] - below) * (since_s - low) / (_EDGES[first] - low)
        found = []
        for at in range(first, len(self._sum)):
            when = self.last + _EDGES[at]
            if when > until:
                break
            more = min(self._sum[at] - so_far, self._sum[at] - self.num_since)
            found.append((when, more))
        return found


def _moment(since_s: float) -> int:
    if since_s < _FINEST_S:
        return 0
    return min(len(_EDGES), int(_PER_OCTAVE * math.log2(since_s / _FINEST_S)) + 1)


class Pace:
    """What one model has learned of its runs and its requests."""

    def __init__(self, seed: Mapping[int, float] | None = None) -> None:
        self.curve = Curve(seed or {})
        self.returns = Returns()
        self._until = 0.0
        self._enough = 0

    def arrived(self, rows: int, now: float) -> None:
        """A request of `rows` came."""
        self.returns.arrived(rows, now)

    def ran(self, rows: int, took_s: float, now: float) -> None:
        """A run of `rows` took `took_s` and is answered."""
        self.curve.add(rows, took_s)
        self.returns.answered(now, 2 * self.curve.at(rows))
        self._until = 0.0

    def wait(self, rows: int, bound: int, *, since: float, now: float) -> float | None:
        """Until when to wait with `rows` at hand, the oldest since `since`, and `bound` a full batch; None: start."""
        if now < self._until and rows < self._enough:
            return self._until
        self._until = 0.0
        start_s = self.curve.at(rows)
        if not start_s:
            return None
        best, chosen = _MARGIN * rows / start_s, None
        idle_since = since if self.returns.last is None else max(since, self.returns.last)
        for when, more in self.returns.after(now, idle_since + start_s):
            company = min(bound, rows + more)
            rate = company / (when - now + self.curve.at(company))
            if company > rows and rate > best:
                best, chosen, self._enough = rate, when, math.ceil(company)
        if chosen is not None and chosen > now:
            self._until = chosen
            return chosen
        return None
