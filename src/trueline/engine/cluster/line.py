"""Who may start, where the engine has no queue of its own: pure.

Heads wait by priority, then by time; the first one starts when there are slots for all that its job needs to begin, and
these stay reserved for the job. So two jobs never each hold a part of what both need. Hosts fill their job's
reservation, and beyond it what no head waits for.
"""

from collections.abc import Sequence

import msgspec

from trueline.engine.cluster.contract import job_of


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """A submission that lives. `gang`: slots that its job needs, of a head; 0: a host."""

    name: str
    slots: int
    gang: int = 0
    priority: int = 0
    submitted_at: float
    running: bool = False

    @property
    def need(self) -> int:
        return max(self.slots, self.gang)


def find_obstacle(own: Waiter, others: Sequence[Waiter], capacity: int) -> str:
    """Why `own` has to wait; empty: it may start."""
    held = _reserve(others)
    job = job_of(own.name)
    if not own.gang:
        running = sum(one.slots for one in others if one.running and job_of(one.name) == job)
        if running + own.slots <= held.get(job, 0):
            return ""
    ahead = [one for one in others if one.gang and not one.running and (not own.gang or _rank(one) < _rank(own))]
    if ahead:
        first = min(ahead, key=_rank)
        return f"waits behind {job_of(first.name)} (priority {first.priority})"
    free = capacity - sum(held.values())
    if own.need > free:
        takers = ", ".join(sorted(held)) or "no job"
        return f"waits for {own.need} free slots: {max(free, 0)} of {capacity} are free, {takers} has the others"
    return ""


def _rank(one: Waiter) -> tuple[int, float, str]:
    return -one.priority, one.submitted_at, one.name


def _reserve(others: Sequence[Waiter]) -> dict[str, int]:
    """Slots of each job: those in use, and those that its running head needs to begin."""
    slots: dict[str, int] = {}
    gangs: dict[str, int] = {}
    for one in others:
        if one.running:
            job = job_of(one.name)
            slots[job] = slots.get(job, 0) + one.slots
            gangs[job] = max(gangs.get(job, 0), one.need)
    return {job: max(count, gangs[job]) for job, count in slots.items()}
