"""Requests that wait are run together: which, and when. Pure decisions; `lanes` is the shell around them.

An idle model runs what comes; while it runs, requests collect, and the next run takes them together. Whether it waits
for company is learned (`pace`) or set. Urgent requests go first, each level is worth some seconds of waiting, so that
none waits for ever. A batch that fails is run again item by item, so one bad item fails alone. What the queue cannot
hold is refused at once. It knows neither HTTP nor what a program is: a function from arrays to arrays.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from trueline import events
from trueline.bundle.padding import Padding
from trueline.serve.batching.latency_model import Pace

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

    Arrays = Mapping[str, Array]
    Outputs = dict[str, Array]
    Run = Callable[[Arrays], Outputs]


PRIORITIES = 5
"""Levels of priority; 1 goes first."""
USUAL = 3
"""The level of a request that names none."""
LEVEL_S = 0.5
"""A request goes before those of the next level that came up to so much earlier, and after all others of it."""
_MARGIN = 1.25
"""A run may take so much longer than was learned when a deadline is to be met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How requests may be put together, and how many may wait."""

    batch: bool = True
    """False: each request runs alone."""
    max_batch: int = 64
    """Rows of one run at most; a larger request still runs, alone."""
    max_delay_s: float | None = None
    """How long an idle model waits for company; None: as long as pays, by what was learned."""
    lanes: int = 1
    """Runs at the same time."""
    max_requests: int = 256
    max_bytes: int = 256 * 2**20
    """Bounds of what waits; a lone request is let in whatever its size."""


@dataclass(slots=True, eq=False)
class Item:
    """One request that waits. Items with an equal `key` may run together."""

    inputs: Arrays
    rows: int
    key: object
    num_bytes: int
    since: float
    deadline: float | None
    future: asyncio.Future[Outputs] | None = field(default=None, repr=False)
    priority: int = USUAL
    values: int = 0
    """Numbers in its inputs."""
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)
    """Of its deadline."""

    @property
    def rank(self) -> float:
        """Its place in the queue: the lower, the sooner. Within a level the older goes first."""
        return self.since + self.priority * LEVEL_S


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why."""

    run: tuple[Item, ...]
    expired: tuple[Item, ...]
    wake_at: float | None
    reason: str
    full: bool = False
    """Whether nobody who may still come would be let into this run."""


def decide(queue: Sequence[Item], *, busy: int, now: float, policy: Policy, pace: Pace | None = None) -> Decision:
    """What to run of `queue` (by rank) at `now`, while `busy` runs are under way.

    The first item is always in the run; those that fit beside it come along in their order. `wake_at` says when to
    ask again if nothing happens before. Without a `pace` or a delay an idle model runs at once what there is.
    """
    expired = tuple(item for item in queue if item.deadline is not None and item.deadline <= now)
    waiting = [item for item in queue if item not in expired] if expired else queue
    if not waiting:
        return Decision((), expired, None, "empty")
    if busy >= policy.lanes:
        return Decision((), expired, None, "busy")
    if not policy.batch:
        return Decision((waiting[0],), expired, None, "idle", full=True)
    learned = pace is not None and policy.max_delay_s is None
    bound = pace.curve.full(policy.max_batch) if pace is not None and learned else policy.max_batch
    run, rows, full = _together(waiting, bound)
    if rows < bound and len(run) == len(waiting):
        since = min(item.since for item in run)
        if pace is not None and learned:
            ready_at = pace.wait(rows, bound, since=since, now=now)
            ready_at = None if ready_at is None else min(ready_at, _latest(run, _MARGIN * pace.curve.at(bound)))
        else:
            ready_at = since + (policy.max_delay_s or 0.0)
        if ready_at is not None and now < ready_at:
            return Decision((), expired, ready_at, "filling")
    return Decision(run, expired, None, "idle", full=full)


def _together(waiting: Sequence[Item], bound: int) -> tuple[tuple[Item, ...], int, bool]:
    """The first item with those that fit beside it into `bound` rows, how many rows that are, and whether the next one
    of their kind would have to stay behind.
    """
    head = waiting[0]
    run, rows = [head], head.rows
    for item in waiting[1:]:
        if item.key != head.key:
            continue
        if rows + item.rows > bound:
            return tuple(run), rows, True
        run.append(item)
        rows += item.rows
    return tuple(run), rows, rows >= bound


def _latest(run: Sequence[Item], takes_s: float) -> float:
    """When a run that `takes_s` has to begin, so that no deadline passes."""
    return min((item.deadline for item in run if item.deadline is not None), default=math.inf) - takes_s


def refusal(num_waiting: int, bytes_waiting: int, num_bytes: int, expected_s: float, policy: Policy) -> str | None:
    """Why a request of `num_bytes` may not join the queue; None when it may."""
    if num_waiting >= policy.max_requests:
        return f"{num_waiting} requests wait for this model already, about {expected_s:.3g} s of work"
    if num_waiting and bytes_waiting + num_bytes > policy.max_bytes:
        return f"requests of {bytes_waiting} bytes wait for this model already"
    return None


def run_batch(
    run: Run, items: Sequence[Arrays], rows: Sequence[int], padding: Padding | None = None
) -> list[Outputs | Exception]:
    """One result for each item: from one run over all of them, or, when that fails, from one run each.

    With `padding` sequences of several lengths are filled up to the longest.
    """
    if len(items) == 1:
        return [_alone(run, items[0])]
    try:
        even = items if padding is None else padding.even(items)
        joined = {name: np.concatenate([item[name] for item in even]) for name in items[0]}
        results = _split(run(joined), rows)
        return [*results] if padding is None else _cut(padding, results, items)
    except Exception as error:  # noqa: BLE001 - blind on purpose: whatever failed, each item gets its own run
        events.emit("batch.failed", items=len(items), why=type(error).__name__)
        return [_alone(run, item) for item in items]


def _cut(padding: Padding, results: Sequence[Outputs], items: Sequence[Arrays]) -> list[Outputs | Exception]:
    return [padding.cut(result, item) for result, item in zip(results, items, strict=True)]


def _alone(run: Run, item: Arrays) -> Outputs | Exception:
    try:
        return run(item)
    except Exception as error:  # noqa: BLE001 - blind on purpose: it is handed to the one request that caused it
        return error


def _split(outputs: Outputs, rows: Sequence[int]) -> list[Outputs]:
    total, at = sum(rows), 0
    results: list[Outputs] = []
    if any(array.ndim == 0 or len(array) != total for array in outputs.values()):
        raise ValueError("an output's first dimension does not count the rows")
    for count in rows:
        results.append({name: array[at : at + count] for name, array in outputs.items()})
        at += count
    return results
