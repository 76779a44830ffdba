"""Workers over time, as the page shows them: one lane for each slot, one span for each life in it.

    slot 0  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━▶        a life: started ─▶ ready ─▶ ended (died, left, finished)
    slot 1  ━━━━━━━━✕  ──━━━━━━━━━━━━━━━▶        ✕ a death; ── started and not ready yet

Pure, and bounded: a lane of many lives merges the two adjacent lives that take the least room in the picture and counts
their deaths. A worker's death may be reported twice (given up, then seen to end); it counts once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

from trueline.engine.contract import parse_ref

End = Literal["", "died", "left", "finished", "stopped", "unseen"]
MAX_SPANS = 24
MAX_LANES = 200
"""Lanes that the page shows; more are counted."""


@dataclass(slots=True, kw_only=True)
class Span:
    ref: str
    start: float
    ready: float | None = None
    end: float | None = None
    how: End = ""
    """How it ended; empty while it lives."""
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

    @property
    def alive(self) -> Span | None:
        return self.spans[-1] if self.spans and self.spans[-1].end is None else None

    def add(self, span: Span) -> None:
        self.spans.append(span)
        if len(self.spans) > MAX_SPANS:
            closed = self.spans[:-1]
            extents = [(b.end or b.start) - a.start for a, b in itertools.pairwise(closed)]
            at = extents.index(min(extents))
            self.spans[at : at + 2] = [_merge(self.spans[at], self.spans[at + 1])]


def _merge(a: Span, b: Span) -> Span:
    return Span(
        ref=b.ref, start=a.start, ready=a.ready if a.ready is not None else b.ready, end=b.end, how=b.how, why=b.why,
        deaths=a.deaths + b.deaths,
    )  # fmt: skip


class Lanes:
    """All slots of a job."""

    def __init__(self) -> None:
        self.by_slot: dict[int, Lane] = {}
        self._leaving = 0

    def start(self, ref: str, at: float, last: float) -> None:
        """Begins a life; the one before in the same slot, if its end was not seen, ended by `last`."""
        lane = self._lane(ref)
        span = lane.alive
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

    def record_death(self, ref: str, at: float, why: str) -> bool:
        """Returns whether this death is new."""
        span = self._living(ref)
        if span is None:
            return False
        self._close(span, at, "died", why)
        span.deaths += 1
        return True

    def record_departure(self, ref: str, at: float) -> None:
        span = self._living(ref)
        if span is not None:
            self._close(span, at, "left", "left as planned")

    def apply_view(self, at: float) -> None:
        """Ends the lives of workers that were leaving."""
        for span in self.living() if self._leaving else ():
            if span.leaving:
                self._close(span, at, "left", "left as planned")

    def end_all(self, at: float, how: End) -> None:
        for span in self.living():
            self._close(span, at, how, "")

    def quarantine(self, slot: int, why: str) -> None:
        self.by_slot.setdefault(slot, Lane()).quarantined = why or "it kept dying"

    def living(self) -> list[Span]:
        return [lane.alive for lane in self.by_slot.values() if lane.alive is not None]

    def rows(self) -> list[dict[str, object]]:
        """For the page, the lowest slots first."""
        shown = sorted(self.by_slot)[:MAX_LANES]
        return [
            {"slot": slot, "quarantined": lane.quarantined, "spans": [span.row() for span in lane.spans]}
            for slot, lane in ((slot, self.by_slot[slot]) for slot in shown)
        ]

    def _close(self, span: Span, at: float, how: End, why: str) -> None:
        self._leaving -= span.leaving
        span.end, span.how, span.why, span.leaving = max(at, span.start), how, why, False

    def _lane(self, ref: str) -> Lane:
        lane = self.by_slot.setdefault(parse_ref(ref)[1], Lane())
        lane.quarantined = ""
        return lane

    def _living(self, ref: str) -> Span | None:
        lane = self.by_slot.get(parse_ref(ref)[1])
        span = lane.alive if lane is not None else None
        return span if span is not None and span.ref == ref else None
