"""Decides which waiting requests run together, and when. Pure; `queue` is the shell around it.

An idle model runs what there is; while it runs, requests collect for the next run. Whether it waits for more requests
is learned (`latency_model`) or set. Urgent requests run first, but each level is worth some seconds of waiting, so none
waits forever. A failed batch runs again item by item, so that only the bad item fails. A full queue rejects at once.
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
from trueline.serve.batching.latency_model import LatencyModel

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

    Arrays = Mapping[str, Array]
    Outputs = dict[str, Array]
    Run = Callable[[Arrays], Outputs]


PRIORITIES = 5
"""Levels of priority; 1 goes first."""
USUAL = 3
"""The default level."""
LEVEL_S = 0.5
"""A request runs before requests of the next level that came up to this much earlier."""
_MARGIN = 1.25
"""How much longer than learned a run may take when a deadline is near."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How requests are batched, and how many may wait."""

    batch: bool = True
    """False: each request runs alone."""
    max_batch: int = 64
    """Rows of one run; a larger request runs alone."""
    max_delay_s: float | None = None
    """How long an idle model waits for more requests; None: as learned."""
    lanes: int = 1
    """Parallel runs."""
    max_requests: int = 256
    max_bytes: int = 256 * 2**20
    """Of all waiting requests; a request of any size may wait alone."""


@dataclass(slots=True, eq=False)
class Item:
    """One waiting request. Items with equal `key` may run together."""

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
        """The lowest runs first: within a level the oldest."""
        return self.since + self.priority * LEVEL_S


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why."""

    run: tuple[Item, ...]
    expired: tuple[Item, ...]
    wake_at: float | None
    reason: str
    full: bool = False
    """Whether no further request could join this run."""


def decide(
    queue: Sequence[Item], *, busy: int, now: float, policy: Policy, model: LatencyModel | None = None
) -> Decision:
    """What to run of `queue` (by rank) at `now`, while `busy` runs are active.

    A run has the first item and, in their order, those that fit beside it. `wake_at` is when to decide again if nothing
    happens before. Without `model` or a delay an idle model runs at once what there is.
    """
    expired = tuple(item for item in queue if item.deadline is not None and item.deadline <= now)
    waiting = [item for item in queue if item not in expired] if expired else queue
    if not waiting:
        return Decision((), expired, None, "empty")
    if busy >= policy.lanes:
        return Decision((), expired, None, "busy")
    if not policy.batch:
        return Decision((waiting[0],), expired, None, "idle", full=True)
    learned = model if policy.max_delay_s is None else None
    bound = learned.curve.full(policy.max_batch) if learned is not None else policy.max_batch
    run, rows, full = _fill(waiting, bound)
    if rows < bound and len(run) == len(waiting):
        since = min(item.since for item in run)
        if learned is not None:
            ready_at = learned.wait(rows, bound, since=since, now=now)
            if ready_at is not None:  # no later than the first deadline allows
                deadline = min((item.deadline for item in run if item.deadline is not None), default=math.inf)
                ready_at = min(ready_at, deadline - _MARGIN * learned.curve.at(bound))
        else:
            ready_at = since + (policy.max_delay_s or 0.0)
        if ready_at is not None and now < ready_at:
            return Decision((), expired, ready_at, "filling")
    return Decision(run, expired, None, "idle", full=full)


def _fill(waiting: Sequence[Item], bound: int) -> tuple[tuple[Item, ...], int, bool]:
    """The first item and those that fit beside it into `bound` rows, their rows, and whether the run is full."""
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


def refusal(num_waiting: int, bytes_waiting: int, num_bytes: int, expected_s: float, policy: Policy) -> str | None:
    """Why a request of `num_bytes` may not join the queue; None: it may."""
    if num_waiting >= policy.max_requests:
        return f"{num_waiting} requests wait for this model already, about {expected_s:.3g} s of work"
    if num_waiting and bytes_waiting + num_bytes > policy.max_bytes:
        return f"requests of {bytes_waiting} bytes wait for this model already"
    return None


def run_batch(
    run: Run, items: Sequence[Arrays], rows: Sequence[int], padding: Padding | None = None
) -> list[Outputs | Exception]:
    """One result for each item: from one run over all, or, if that fails, from a run of its own.

    With `padding` shorter sequences are padded to the longest.
    """
    if len(items) == 1:
        return [_run_alone(run, items[0])]
    try:
        even = items if padding is None else padding.even(items)
        joined = {name: np.concatenate([item[name] for item in even]) for name in items[0]}
        results = _split(run(joined), rows)
        if padding is None:
            return [*results]
        return [padding.cut(result, item) for result, item in zip(results, items, strict=True)]
    except Exception as error:  # noqa: BLE001 - blind on purpose: each item gets a run of its own
        events.emit("batch.failed", items=len(items), why=type(error).__name__)
        return [_run_alone(run, item) for item in items]


def _run_alone(run: Run, item: Arrays) -> Outputs | Exception:
    try:
        return run(item)
    except Exception as error:  # noqa: BLE001 - blind on purpose: the request that caused it gets it
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
