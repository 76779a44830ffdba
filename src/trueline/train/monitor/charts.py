"""What the live page draws of a job, of bounded size and pure: times are arguments, in seconds since 1970.

**StepCurves**: steps as curves, whose adjacent points merge as the job gets longer. **Lanes**: workers over time, a
lane for each slot, a span for each life in it. Of many lives the two adjacent ones that take the least room merge.

    slot 0  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━▶        a life: started ─▶ ready ─▶ ended (died, left, finished)
    slot 1  ━━━━━━━━✕  ──━━━━━━━━━━━━━━━▶        ✕ a death; ── started and not ready yet
"""

import itertools
import math
import operator
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from trueline.engine.contract import parse_ref

CAPACITY = 512
PHASES = ("data", "compute", "wait", "commit")
WINDOW_S = 10.0  # over how long a rate is measured
End = Literal["", "died", "left", "finished", "stopped", "unseen"]
WORKER = "worker"
MAX_SPANS = 24
MAX_LANES = 200  # lanes that the page shows; more are counted


class Point(NamedTuple):
    """One step, or several merged ones: sums, and the extremes of the loss. A tuple, since there are many."""

    step: int
    at: float  # when the last of them was applied
    loss: float
    records: int
    seconds: float  # since the step before; 0 for the first one of the job
    phases_ms: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    workers: int = 0
    num: int = 1
    low: float = math.inf
    high: float = -math.inf


def merge(a: Point, b: Point) -> Point:
    return Point(
        step=a.step, at=b.at, loss=a.loss + b.loss, records=a.records + b.records, seconds=a.seconds + b.seconds,
        phases_ms=tuple(map(operator.add, a.phases_ms, b.phases_ms)), workers=b.workers,
        num=a.num + b.num, low=min(a.low, b.low), high=max(a.high, b.high),
    )  # fmt: skip


class StepCurves:
    """At most `capacity` points, each of `width` steps but for the last one."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity, self.width = capacity, 1
        self.points: list[Point] = []

    def add(self, point: Point) -> None:
        """Adds the next step; one that is there already replaces it and all later ones: the job went back."""
        self.rewind(point.step)
        self._append(point._replace(low=point.loss, high=point.loss))
        if len(self.points) > self.capacity:
            self.width *= 2
            points, self.points = self.points, []
            for earlier in points:
                self._append(earlier)

    def _append(self, point: Point) -> None:
        last = self.points[-1] if self.points else None
        if last is not None and last.step // self.width == point.step // self.width:
            self.points[-1] = merge(last, point)
        else:
            self.points.append(point)

    def rewind(self, steps: int) -> None:
        """Drops the points from step `steps` on; one that straddles it goes whole."""
        while self.points and self.points[-1].step + self.points[-1].num > steps:
            self.points.pop()

    def columns(self) -> dict[str, list[float | int | None]]:
        """By column: mean loss, records a second, milliseconds a step; None where the loss is not finite."""
        points = self.points
        return {
            "step": [point.step + point.num - 1 for point in points],
            "at": [round(point.at, 3) for point in points],
            "loss": [finite(point.loss / point.num) for point in points],
            "low": [finite(point.low) for point in points],
            "high": [finite(point.high) for point in points],
            "rate": [round(point.records / point.seconds, 2) if point.seconds else None for point in points],
            "workers": [point.workers for point in points],
            **{name: [round(point.phases_ms[i] / point.num, 3) for point in points] for i, name in enumerate(PHASES)},
        }


def finite(value: float) -> float | None:
    """`value` in six digits, or None for NaN and infinity, which JSON lacks.

    >>> finite(0.12345678), finite(float("nan")), finite(float("inf"))
    (0.123457, None, None)
    """
    return float(f"{value:.6g}") if math.isfinite(value) else None


class Recent:
    """Records and steps a second over the last ten seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int]] = deque()
        self._records = self._steps = 0

    def add(self, at: float, records: int) -> None:
        self._records, self._steps = self._records + records, self._steps + 1
        mark = (at, self._records, self._steps)
        if len(self._marks) > 1 and at - self._marks[-2][0] < WINDOW_S / 50:
            self._marks[-1] = mark
        else:
            self._marks.append(mark)
        while len(self._marks) > 2 and self._marks[1][0] < at - WINDOW_S:
            self._marks.popleft()

    def rates(self, now: float) -> tuple[float, float]:
        """Records and steps a second; zeros when nothing was applied for as long as the window."""
        if len(self._marks) < 2 or now - self._marks[-1][0] > WINDOW_S:
            return 0.0, 0.0
        (since, records, steps), (until, *_) = self._marks[0], self._marks[-1]
        seconds = max(until - since, 1e-6)
        return (self._records - records) / seconds, (self._steps - steps) / seconds


class CumulativeHistogram:
    """Counts by upper bound, as in Prometheus."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.cells, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.cells[sum(value > bound for bound in self.bounds)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.cells)

    def cumulative(self) -> list[tuple[str, float]]:
        """Values up to each bound.

        >>> gaps = CumulativeHistogram((0.1, 1.0)); gaps.add(0.1); gaps.add(7.0); gaps.cumulative()
        [('0.1', 1), ('1.0', 1), ('+Inf', 2)]
        """
        names = (*map(repr, self.bounds), "+Inf")
        return list(zip(names, itertools.accumulate(self.cells), strict=True))


@dataclass(slots=True, kw_only=True)
class Span:
    ref: str
    start: float
    ready: float | None = None
    end: float | None = None
    how: End = ""  # how it ended; empty while it lives
    why: str = ""
    leaving: bool = False
    deaths: int = 0

    def row(self) -> list[str | float | int | None]:
        """For the page: ref, start, ready, end, how, deaths, why."""
        times = (self.start, self.ready, self.end)
        return [self.ref, *(None if at is None else round(at, 3) for at in times), self.how, self.deaths, self.why]


@dataclass(slots=True)
class Lane:
    spans: list[Span] = field(default_factory=list)
    quarantined: str = ""
    does: str = ""  # of a state on its way to the worker

    @property
    def alive(self) -> Span | None:
        return self.spans[-1] if self.spans and self.spans[-1].end is None else None

    def add(self, span: Span) -> None:
        self.spans.append(span)
        if len(self.spans) > MAX_SPANS:
            closed = self.spans[:-1]
            extents = [(b.end or b.start) - a.start for a, b in itertools.pairwise(closed)]
            at = extents.index(min(extents))
            a, b = self.spans[at : at + 2]
            ready = b.ready if a.ready is None else a.ready
            merged = replace(b, start=a.start, ready=ready, deaths=a.deaths + b.deaths)
            self.spans[at : at + 2] = [merged]


class Lanes:
    def __init__(self) -> None:
        self.by_slot: dict[tuple[str, int], Lane] = {}
        """By role and slot."""
        self._leaving = 0

    def start(self, ref: str, at: float, last: float) -> None:
        """Begins a life; the one before in the same slot, if its end was not seen, ended by `last`."""
        lane = self.by_slot.setdefault(parse_ref(ref)[:2], Lane())
        lane.quarantined, lane.does, span = "", "", lane.alive
        if lane.spans and parse_ref(ref)[2] <= parse_ref(lane.spans[-1].ref)[2]:
            return  # known already, or followed by another
        if span is not None:
            self._close(span, last, "unseen", "its end was not seen")
        lane.add(Span(ref=ref, start=at))

    def mark_ready(self, ref: str, at: float) -> None:
        span = self._living(ref)
        if span is None:
            self.start(ref, at, at)
            span = self._living(ref)
        if span is not None and span.ready is None:
            span.ready = at

    def mark_leaving(self, ref: str) -> None:
        span = self._living(ref)
        if span is not None and not span.leaving:
            span.leaving = True
            self._leaving += 1

    def end(self, ref: str, at: float, how: End, why: str) -> bool:
        """Ends a life; returns whether that is new."""
        span = self._living(ref)
        if span is None:
            return False
        self._close(span, at, how, why)
        span.deaths += how == "died"
        return True

    def apply_view(self, at: float) -> None:
        """Ends the lives of workers that were leaving."""
        for span in self.living() if self._leaving else ():
            if span.leaving:
                self._close(span, at, "left", "left as planned")

    def end_all(self, at: float, how: End) -> None:
        for span in self.living():
            self._close(span, at, how, "")

    def note(self, ref: str, does: str) -> None:
        self.by_slot.setdefault(parse_ref(ref)[:2], Lane()).does = does

    def quarantine(self, slot: int, why: str) -> None:
        self.by_slot.setdefault((WORKER, slot), Lane()).quarantined = why or "it kept dying"

    def living(self) -> list[Span]:
        return [lane.alive for lane in self.by_slot.values() if lane.alive is not None]

    def rows(self) -> list[dict[str, object]]:
        """For the page, workers and the lowest slots first."""
        ordered = sorted(self.by_slot.items(), key=lambda item: (item[0][0] != WORKER, item[0]))
        return [
            {
                "role": role,
                "slot": slot,
                "quarantined": lane.quarantined,
                "does": lane.does if lane.alive else "",
                "spans": [span.row() for span in lane.spans],
            }
            for (role, slot), lane in ordered[:MAX_LANES]
        ]

    def _close(self, span: Span, at: float, how: End, why: str) -> None:
        self._leaving -= span.leaving
        span.end, span.how, span.why, span.leaving = max(at, span.start), how, why, False

    def _living(self, ref: str) -> Span | None:
        lane = self.by_slot.get(parse_ref(ref)[:2])
        span = lane.alive if lane is not None else None
        return span if span is not None and span.ref == ref else None
