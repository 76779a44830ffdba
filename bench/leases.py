"""Leased tasks with one slow worker: the time until all records are committed, over the ideal.

    python -m bench.leases [--seconds 10] [--workers 8] [--slow 0.1]

Processes lease ranges from a coordinator over pipes. They sleep for the cost of a record, so the figure shows the
leases and not the number of cores. For comparison with guided leases: fixed tasks of 8,192 records, and a static split
(computed, not run: it ends with the slow worker's share).
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing import connection
from typing import Any, Protocol

from bench._table import report

from trueline.train.membership.leases import Lease, Leases

RATE = 10_000.0
"""Records a second of a worker that is not slow."""
FIXED = 8192


class Tasks(Protocol):
    """Assigns ranges to workers; every strategy has the same two calls."""

    @property
    def finished(self) -> bool: ...

    def lease(self, worker: str, now: float) -> Lease | None: ...

    def commit(self, token: int, upto: int, now: float) -> Any: ...


class FixedTasks:
    """Tasks of one size, in order."""

    def __init__(self, num_records: int, size: int) -> None:
        self._left = [
            Lease(token=at, start=at, stop=min(at + size, num_records)) for at in range(0, num_records, size)
        ][::-1]
        self._open = len(self._left)

    @property
    def finished(self) -> bool:
        return not self._open

    def lease(self, worker: str, now: float) -> Lease | None:
        return self._left.pop() if self._left else None

    def commit(self, token: int, upto: int, now: float) -> None:
        self._open -= 1


def work(pipe: connection.Connection, rate: float) -> None:
    """A worker: leases ranges until there are none, and sleeps for the cost of their records."""
    while (found := pipe.recv()) is not None:
        start, stop = found
        time.sleep((stop - start) / rate)
        pipe.send(stop)


def makespan(tasks: Tasks, rates: list[float]) -> tuple[float, int]:
    """Seconds from the first lease to the last commit, and how many leases that took."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[Any, int] = {}
    processes = []
    for number, rate in enumerate(rates):
        here, there = context.Pipe()
        processes.append(context.Process(target=work, args=(there, rate), daemon=True))
        processes[-1].start()
        there.close()
        pipes[here] = number
    for pipe in pipes:  # a process that still starts is not waited for later
        pipe.send((0, 0))
    for pipe in pipes:
        pipe.recv()
    held: dict[Any, Lease] = {}
    began, leases = time.monotonic(), 0

    def give(pipe: Any) -> None:
        nonlocal leases
        found = tasks.lease(f"worker-{pipes[pipe]}", time.monotonic())
        if found is not None:
            held[pipe] = found
            leases += 1
            pipe.send((found.start, found.stop))

    for pipe in pipes:
        give(pipe)
    while not tasks.finished:
        for ready in connection.wait(list(held)):
            done = held.pop(ready)
            ready.recv()  # type: ignore[union-attr]
            tasks.commit(done.token, done.stop, time.monotonic())
            give(ready)
    took_s = time.monotonic() - began
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    return took_s, leases


def straggler(seconds: float = 10.0, workers: int = 8, slow: float = 0.1) -> dict[str, float]:
    """Ratios to the ideal, in one run."""
    rates = [RATE] * (workers - 1) + [RATE * slow]
    num_records = int(seconds * sum(rates))
    guided, guided_leases = makespan(Leases(epoch=0, num_records=num_records, lease_s=3600.0), rates)
    fixed, fixed_leases = makespan(FixedTasks(num_records, FIXED), rates)
    static = num_records / workers / min(rates)
    return {
        "straggler_ratio": guided / seconds,
        "straggler_fixed_ratio": fixed / seconds,
        "straggler_static_ratio": static / seconds,
        "leases": guided_leases,
        "fixed_tasks": fixed_leases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the ideal")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--slow", type=float, default=0.1, help="speed of the slow one, of the others'")
    given = parser.parse_args()
    result = straggler(given.seconds, given.workers, given.slow)
    report(["figure", "value"], [[name, value] for name, value in result.items()], result)


if __name__ == "__main__":
    main()
