"""Simulates a model's queue with a virtual clock: what settings would do under a load, without running anything.

Decisions come from `policy.decide` and the pace from `latency_model.LatencyModel`, as in the server; times of runs
come from a curve t(n), and clients are drawn from a seed. It shows how close the learned pace comes to the best
settings of a grid search, and finds these for a measured curve.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trueline.serve.batching.latency_model import LatencyModel
from trueline.serve.batching.policy import Item, Policy, decide

Takes = Callable[[int], float]
"""Seconds of a run by its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Independent requests at a mean rate (Poisson), or `clients` that send the next `think_s` after a response."""

    per_second: float = 0.0
    clients: int = 0
    think_s: float = 0.0
    """Drawn evenly between half and one and a half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results at the clients, without the first fifth."""

    per_second: float
    p99_s: float
    mean_rows: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Static settings and their results."""

    max_batch: int
    max_delay_s: float
    outcome: Outcome


def rehearse(takes: Takes, load: Load, policy: Policy, *, requests: int, seed: int = 0) -> Outcome:
    """The outcome of `requests` requests. A policy without a delay learns its pace from nothing."""
    return _Stage(takes, load, policy, requests, random.Random(seed)).play()


class _Stage:
    def __init__(self, takes: Takes, load: Load, policy: Policy, requests: int, rng: random.Random) -> None:
        self._takes = takes
        self._load = load
        self._policy = policy
        self._left = requests
        self._rng = rng
        self._pace = LatencyModel() if policy.max_delay_s is None else None
        self._queue: list[Item] = []
        self._busy = 0
        self._order = itertools.count()
        self._events: list[tuple[float, int, tuple[Item, ...] | None]] = []
        self._wake_at: float | None = None
        self._answers: list[tuple[float, float]] = []
        self._runs = 0

    def play(self) -> Outcome:
        for _ in range(self._load.clients):
            self._ask_at(self._rng.random() * (self._load.think_s or 1e-3))
        if not self._load.clients:
            self._ask_at(self._gap_s())
        while self._events or self._wake_at is not None:
            now = self._next()
            self._run_what_is_due(now)
        return self._outcome()

    def _next(self) -> float:
        """Moves to the next event and applies it; wake-ups come last."""
        if self._wake_at is not None and (not self._events or self._wake_at < self._events[0][0]):
            return self._wake_at
        now, _, ran = heapq.heappop(self._events)
        if ran is None:
            self._arrive(now)
        else:
            self._answer(ran, now)
        return now

    def _ask_at(self, when: float) -> None:
        if self._left:
            self._left -= 1
            heapq.heappush(self._events, (when, next(self._order), None))

    def _gap_s(self) -> float:
        return self._rng.expovariate(self._load.per_second)

    def _arrive(self, now: float) -> None:
        self._queue.append(Item({}, 1, None, 0, now, None))
        if self._pace is not None:
            self._pace.count_arrival(1, now)
        if not self._load.clients:
            self._ask_at(now + self._gap_s())

    def _answer(self, ran: tuple[Item, ...], now: float) -> None:
        self._busy -= 1
        if self._pace is not None:
            self._pace.count_run(len(ran), self._takes(len(ran)), now)
        for item in ran:
            self._answers.append((now, now - item.since))
            if self._load.clients:
                self._ask_at(now + self._load.think_s * self._rng.uniform(0.5, 1.5))

    def _run_what_is_due(self, now: float) -> None:
        while True:
            found = decide(self._queue, busy=self._busy, now=now, policy=self._policy, model=self._pace)
            self._wake_at = found.wake_at
            if not found.run:
                return
            del self._queue[: len(found.run)]
            self._busy += 1
            self._runs += 1
            heapq.heappush(self._events, (now + self._takes(len(found.run)), next(self._order), found.run))

    def _outcome(self) -> Outcome:
        kept = self._answers[len(self._answers) // 5 :]
        took_s = sorted(waited for _, waited in kept)
        return Outcome(
            per_second=(len(kept) - 1) / max(1e-9, kept[-1][0] - kept[0][0]),
            p99_s=took_s[int(0.99 * (len(took_s) - 1))],
            mean_rows=len(self._answers) / self._runs,
        )


def grid(
    takes: Takes,
    load: Load,
    *,
    requests: int,
    batches: Iterable[int] = (1, 2, 4, 8, 16, 32, 64),
    delays: Sequence[float] = (0.0, 0.1, 0.3, 1.0, 3.0),
    seed: int = 0,
) -> list[Setting]:
    """Every static setting of a grid, the best throughput first. `delays` are in runs of one row."""
    found = []
    for max_batch in batches:
        for delay in delays if max_batch > 1 else delays[:1]:
            policy = Policy(max_batch=max_batch, max_delay_s=delay * takes(1))
            outcome = rehearse(takes, load, policy, requests=requests, seed=seed)
            found.append(Setting(max_batch=max_batch, max_delay_s=delay * takes(1), outcome=outcome))
    return sorted(found, key=lambda one: -one.outcome.per_second)


def ratio(learned: Outcome, settings: Iterable[Setting]) -> float:
    """Throughput of the learned pace over that of the best setting whose p99 is no worse (to 5 %)."""
    fair = [one.outcome.per_second for one in settings if one.outcome.p99_s <= 1.05 * learned.p99_s]
    return learned.per_second / max(fair, default=learned.per_second)
