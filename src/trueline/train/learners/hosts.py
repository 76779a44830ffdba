"""Which learners are submitted to the scheduler, and again when they are lost. Pure: time is an argument.

A submission is never named twice, so that an old one cannot be taken for a new one: learner-2, learner-2-2, ...
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trueline.engine.cluster.contract import SubmissionReport, SubmissionState
from trueline.engine.cluster.decide import FIRST_S, JOIN_S, LAST_S, SETTLE_S, has_waited_enough

MOST_FAILURES = 5
"""Submissions in a row that end before they have joined; after them the job fails with the last reason."""


@dataclass(slots=True)
class LearnerEntry:
    """The submission of one learner. Times are in seconds; 0: not yet. `role`: empty while there is none."""

    number: int
    role: str = ""
    count: int = 0
    submitted_at: float = 0.0
    running_at: float = 0.0
    joined: bool = False
    failures: int = 0
    retry_at: float = 0.0
    reason: str = "it is not submitted yet"


@dataclass(frozen=True, slots=True)
class SubmitLearner:
    number: int
    role: str


@dataclass(frozen=True, slots=True)
class CancelLearner:
    role: str
    why: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A learner that cannot be started."""

    why: str


EntryAction = SubmitLearner | CancelLearner | GiveUp


def review(entries: Collection[LearnerEntry], listed: Mapping[str, SubmissionReport], now: float) -> list[EntryAction]:
    """`listed`: what the scheduler says, by role."""
    actions: list[EntryAction] = []
    for entry in entries:
        if entry.role and not entry.joined:
            actions += _follow(entry, listed.get(entry.role), now)
        if entry.failures >= MOST_FAILURES:
            return [*actions, GiveUp(f"learner {entry.number} cannot be started: {entry.reason}")]
        if not entry.role and now >= entry.retry_at:
            entry.count += 1
            entry.role = f"learner-{entry.number}" + (f"-{entry.count}" if entry.count > 1 else "")
            entry.submitted_at, entry.running_at, entry.reason = now, 0.0, ""
            actions.append(SubmitLearner(entry.number, entry.role))
    return actions


def _follow(entry: LearnerEntry, report: SubmissionReport | None, now: float) -> list[EntryAction]:
    """Enters what the scheduler says of a learner that has not joined."""
    if report is None and now - entry.submitted_at < SETTLE_S:
        return []
    if report is None or report.state is SubmissionState.ENDED:
        fail(entry, report.reason if report is not None and report.reason else "its scheduler lists it no more", now)
        return []
    entry.reason = report.reason
    if report.state is SubmissionState.RUNNING and not entry.running_at:
        entry.running_at = now
    if entry.running_at and now - entry.running_at > JOIN_S:
        role = entry.role
        fail(entry, f"it did not join within {JOIN_S:.0f} s", now)
        return [CancelLearner(role, entry.reason)]
    return []


def gives_way(entries: Collection[LearnerEntry], *, waited_s: float, name: str, number: int) -> bool:
    """Whether a launch that cannot begin gives its slots back, while a learner waits in the scheduler's queue: as for
    other jobs, two that each hold half of what both need would wait forever."""
    waits = any(entry.role and not entry.joined and not entry.running_at for entry in entries)
    return waits and has_waited_enough(waited_s, name=name, number=number)


def fail(entry: LearnerEntry, why: str, now: float) -> float:
    """Notes a submission that came to nothing; returns after how many seconds there is another one."""
    wait_s = min(LAST_S, FIRST_S * 2.0**entry.failures)
    entry.role, entry.reason, entry.retry_at = "", why, now + wait_s
    entry.failures += 1
    return wait_s


def enter_joined(entry: LearnerEntry) -> None:
    entry.joined, entry.failures = True, 0


def enter_lost(entry: LearnerEntry, why: str, now: float) -> str:
    """Notes that a learner is gone; returns the role of its submission, which is to be cancelled. One that goes before
    it was ready may do so each time."""
    role = entry.role
    if not entry.joined:
        fail(entry, why, now)
    entry.role, entry.joined = "", False
    return role
