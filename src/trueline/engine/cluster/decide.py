"""How many hosts a job asks its scheduler for, and which it gives back. Pure: time is an argument.

A host counts from its submission until the scheduler lists its end or the master loses it. What the scheduler lists is
late (a dead node: half a minute), so a host that the master has lost is cancelled and replaced at once. A host that
ends before it has joined is a failure, and failures are tried again later each time.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from trueline.engine.cluster.contract import SubmissionReport, SubmissionState

JOIN_S, MOST_JOIN_S = 120.0, 900.0
"""A host that runs for longer without joining is given up; one that the master hears prepare itself, after the second.
On a busy machine the import of torch takes a minute, and a host that is started again begins it again."""
SETTLE_S = 5.0
"""A scheduler may list a submission this much later than it took it."""
FIRST_S, LAST_S = 1.0, 60.0
"""How long the next submission waits after one failure, and at most."""
YIELD_S = 30.0
"""How long a launch that cannot begin holds its slots, at least."""
ROLE = "host-"


@dataclass(slots=True, kw_only=True)
class HostEntry:
    """A submitted host. Times are in seconds; 0: not yet."""

    submitted_at: float
    running_at: float = 0.0
    heard_at: float = 0.0
    """When it prepared itself to join, as the master heard."""
    joined_at: float = 0.0
    leaving: bool = False
    reason: str = ""


@dataclass(slots=True)
class HostPlan:
    """The hosts by their role, `host-3`; `next` is the number of the next one, which no host had before."""

    hosts: dict[str, HostEntry] = field(default_factory=dict)
    next: int = 1
    failures: int = 0
    retry_at: float = 0.0


@dataclass(frozen=True, slots=True)
class SubmitHost:
    role: str
    why: str


@dataclass(frozen=True, slots=True)
class CancelHost:
    role: str
    why: str
    grace: bool


@dataclass(frozen=True, slots=True)
class HostEnded:
    """A host that the scheduler lists as ended, or no more."""

    role: str
    why: str


HostAction = SubmitHost | CancelHost | HostEnded


def count_hosts(workers: int, slots: int) -> int:
    """Hosts that `workers` need beside the one that leads the job, where each has `slots`.

    >>> [count_hosts(workers, 2) for workers in (1, 2, 3, 8)]
    [0, 0, 1, 3]
    """
    return max(0, -(-workers // slots) - 1)


def adopt(plan: HostPlan, listed: Mapping[str, SubmissionReport], own: str, now: float) -> None:
    """Enters hosts that another leader of the launch has submitted; `own`: the role of this one."""
    for role, report in listed.items():
        number = role.removeprefix(ROLE)
        if role.startswith(ROLE) and number.isdecimal():
            plan.next = max(plan.next, int(number) + 1)
            if role != own and report.state is not SubmissionState.ENDED:
                plan.hosts.setdefault(role, HostEntry(submitted_at=now))


def decide(
    plan: HostPlan,
    hosts: int,
    listed: Mapping[str, SubmissionReport],
    joined: Collection[str] | None,
    now: float,
    *,
    arriving: Collection[str] = (),
) -> list[HostAction]:
    """Brings `plan` to `hosts` hosts. `listed`: what the scheduler says, by role; `joined`: the roles that the master
    hears, None while it does not answer; `arriving`: those of them that prepare themselves."""
    actions: list[HostAction] = []
    for role, entry in tuple(plan.hosts.items()):
        entry.heard_at = now if role in arriving else entry.heard_at
        actions += _follow(plan, role, entry, listed.get(role), joined, now)
    staying = {role: entry for role, entry in plan.hosts.items() if not entry.leaving}
    for role in sorted(staying, key=lambda role: _rank(role, staying[role]))[: max(0, len(staying) - hosts)]:
        plan.hosts[role].leaving = True
        actions.append(CancelHost(role, f"{hosts} hosts are enough", grace=True))
    for _ in range(hosts - len(staying) if now >= plan.retry_at else 0):
        role = f"{ROLE}{plan.next}"
        plan.next += 1
        plan.hosts[role] = HostEntry(submitted_at=now)
        actions.append(SubmitHost(role, f"the job has room for {hosts} hosts beside the one that leads it"))
    return actions


def _rank(role: str, entry: HostEntry) -> tuple[bool, bool, int]:
    """The order in which hosts are given back: those that wait, those that have not joined, the newest."""
    return bool(entry.running_at), bool(entry.joined_at), -int(role.removeprefix(ROLE))


def _follow(
    plan: HostPlan,
    role: str,
    entry: HostEntry,
    report: SubmissionReport | None,
    joined: Collection[str] | None,
    now: float,
) -> list[HostAction]:
    """Enters what is known of one host; returns what follows from its end."""
    if joined is not None and role in joined and not entry.joined_at:
        entry.joined_at, plan.failures, plan.retry_at = now, 0, 0.0
    if report is None and now - entry.submitted_at < SETTLE_S:
        return []
    if report is None or report.state is SubmissionState.ENDED:
        del plan.hosts[role]
        if not entry.joined_at and not entry.leaving:
            fail(plan, now)
        return [
            HostEnded(role, report.reason if report is not None and report.reason else "its scheduler lists it no more")
        ]
    entry.reason = report.reason
    if report.state is SubmissionState.RUNNING and not entry.running_at:
        entry.running_at = now
    lost = joined is not None and entry.joined_at and role not in joined
    if lost and not entry.leaving:
        del plan.hosts[role]
        return [CancelHost(role, "the job has lost it", grace=False)]
    waited_s, silent_s = now - entry.running_at, now - max(entry.running_at, entry.heard_at)
    if entry.running_at and not entry.joined_at and (silent_s > JOIN_S or waited_s > MOST_JOIN_S):
        del plan.hosts[role]
        fail(plan, now)
        return [CancelHost(role, f"it did not join within {waited_s:.0f} s", grace=False)]
    return []


def gives_way(plan: HostPlan, *, waited_s: float, name: str, number: int) -> bool:
    """Whether a launch that cannot begin gives its slots back, while a host waits in the scheduler's queue.

    Two jobs that each hold half of what both need would wait for each other forever. Each gives way after a time of its
    own, by the `name` of the job and the `number` of the launch, and queues again; later launches are more patient.
    """
    waits = any(not entry.running_at and not entry.leaving for entry in plan.hosts.values())
    return waits and has_waited_enough(waited_s, name=name, number=number)


def has_waited_enough(waited_s: float, *, name: str, number: int) -> bool:
    share = hashlib.sha256(f"{name}.{number}".encode()).digest()[0] / 256
    return waited_s > YIELD_S * (1 + share) * min(number, 10)


def fail(plan: HostPlan, now: float) -> float:
    """Notes a failure; returns after how many seconds a host is submitted again."""
    wait_s = min(LAST_S, FIRST_S * 2.0 ** min(plan.failures, 16))
    plan.failures, plan.retry_at = plan.failures + 1, now + wait_s
    return wait_s
