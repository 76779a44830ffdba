"""Autoscaling: how many workers a job should have, by the throughput that each brings. Pure.

If the last worker brought at least half of what a worker brings on average, or that was not measured, one more is
added; else one less, and not again for ten minutes. Throughput is smoothed, and forgotten after ten minutes: the
machine, the network or the data may have changed. `Scaling` changes in place.
"""

from dataclasses import dataclass, field

SETTLE_S = 10.0  # length of a measurement, which restarts when the number of workers changes
FORGET_S = 600.0
PAYS = 0.5  # a worker pays when it brings this part of the average worker
SMOOTH = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    low: int
    high: int
    capacity: int | None = None  # workers for which the engine has room; None: unknown

    @property
    def top(self) -> int:
        return max(self.low, self.high if self.capacity is None else min(self.high, self.capacity))


@dataclass(slots=True)
class Scaling:
    speeds: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Workers -> records a second, smoothed, and when that was measured last."""
    _workers: int = 0
    _since: float = 0.0
    _records: int = 0

    def measure(self, workers: int, records: int, now: float) -> bool:
        """Enters the records that the job has applied in all; returns whether that completes a measurement."""
        for count in [count for count, (_, at) in self.speeds.items() if now - at > FORGET_S]:
            del self.speeds[count]
        if workers != self._workers or records < self._records:
            self._workers, self._since, self._records = workers, now, records
            return False
        took_s = now - self._since
        if took_s < SETTLE_S:
            return False
        newest = (records - self._records) / took_s
        before = self.speed(workers)
        self.speeds[workers] = (newest if before is None else SMOOTH * newest + (1 - SMOOTH) * before, now)
        self._since, self._records = now, records
        return True

    def speed(self, workers: int) -> float | None:
        return self.speeds[workers][0] if workers in self.speeds else None


def decide(scaling: Scaling, workers: int, records: int, now: float, bounds: Bounds) -> tuple[int, str]:
    """The target number of workers and why; the present number, without a reason, when it need not change.

    `workers` are those of a group at work, `records` what the job has applied in all.
    """
    measured = scaling.measure(workers, records, now)
    if workers < bounds.low:
        return bounds.low, f"at least {bounds.low} workers"
    if workers > bounds.top:
        return bounds.top, f"there is room for {bounds.top} workers"
    here = scaling.speed(workers) if measured else None
    if here is None:
        return workers, ""
    below, above = scaling.speed(workers - 1), scaling.speed(workers + 1)
    if workers > bounds.low and below is not None and not pays(below, here, workers):
        return workers - 1, f"{here:.0f} records/s with {workers} workers, {below:.0f} with {workers - 1}"
    if workers < bounds.top and (above is None or pays(here, above, workers + 1)):
        return workers + 1, f"{here:.0f} records/s with {workers} workers: one more may pay"
    return workers, ""


def pays(before: float, after: float, workers: int) -> bool:
    """Whether the last of `workers` workers brings enough.

    >>> pays(300.0, 360.0, 4), pays(300.0, 340.0, 4)
    (True, False)
    """
    return after - before >= PAYS * before / (workers - 1)
