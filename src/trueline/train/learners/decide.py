"""What the master of a group of learners does: start all, stop all, begin again, end. Pure: time is an argument.

    GATHERING ──all are here──▶ RUNNING ──learner 1 is done──▶ DRAINING ──▶ STOPPING ──▶ OVER
        ▲                          └──a learner died, or failed, or the job is halted──▶ STOPPING
        └────────────────────────────── begin again: a learner died ────────────────────────┘

A process group of torch does not survive the death of a member, so the death of a learner (a signal, a lost host) has
all of them begin again. A learner whose command fails by itself (exit code 1) would fail again: the job fails.
Survivors of a death fail too, by an exception some moments later, so the cause is looked for after `SETTLE_S`. Learner
1 alone decides when the job is done, as in FfDL, whose examples let all others sleep forever at their end.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

SETTLE_S = 2.0
DRAIN_S = 3.0
"""What other learners have for their own end once learner 1 is done."""
HALT_S = 15.0
"""Between SIGTERM and SIGKILL in a halt: a script may write a checkpoint."""
RESTART_S = 1.0
"""The same for the survivors of a death: their group is broken."""
MOST_RESTARTS, WITHIN_S = 5, 600.0
"""More deaths than that in this time fail the job."""
FIRST_S, LAST_S = 1.0, 60.0
"""How long the next start waits after a second death in a row, and at most."""
_SIGNALLED = range(129, 160)
"""Exit codes of a shell whose command was killed: 128 + the signal."""


class Phase(StrEnum):
    GATHERING = "gathering"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class LearnerFault:
    """Why a learner did not do its work. `died`: by a signal or with its host, so that it may do better next time."""

    at: float
    why: str
    died: bool
    code: int = 0


@dataclass(slots=True)
class Learner:
    """A learner as the master sees it. `ended`: its command has ended in this generation."""

    number: int
    connected: bool = False
    running: bool = False
    ended: bool = False
    fault: LearnerFault | None = None


@dataclass(frozen=True, slots=True)
class StartGroup:
    generation: int


@dataclass(frozen=True, slots=True)
class StopGroup:
    grace_s: float
    why: str
    ending: bool
    """The learners are not started again."""


@dataclass(frozen=True, slots=True)
class EndJob:
    outcome: Literal["finished", "failed", "stopped"]
    why: str
    code: int = 0


GroupAction = StartGroup | StopGroup | EndJob


@dataclass(slots=True)
class Group:
    learners: dict[int, Learner]
    generation: int = 0
    phase: Phase = Phase.GATHERING
    halting: str = ""
    """Why the job is to end early."""
    retry_at: float = 0.0
    end: EndJob | None = None
    """What follows the stop; None: another start."""
    deaths: list[float] = field(default_factory=list)
    drained_at: float = 0.0


def describe_code(code: int) -> tuple[str, bool]:
    """An exit code in words, and whether a signal is behind it.

    >>> describe_code(1), describe_code(137)
    (('exit code 1', False), ('signal 9', True))
    """
    return (f"signal {code - 128}", True) if code in _SIGNALLED else (f"exit code {code}", False)


def enter_end(group: Group, number: int, generation: int, code: int, now: float) -> None:
    """Notes that the command of a learner has ended."""
    one = group.learners[number]
    if generation != group.generation:
        return
    one.running, one.ended = False, True
    if code:
        why, died = describe_code(code)
        enter_fault(group, number, generation, LearnerFault(now, why, died, code))


def enter_fault(group: Group, number: int, generation: int, fault: LearnerFault) -> None:
    one = group.learners[number]
    if generation == group.generation and (one.fault is None or (fault.died and not one.fault.died)):
        one.fault = fault


def enter_loss(group: Group, number: int, why: str, now: float) -> None:
    """Notes that a learner's host is gone, with what ran there."""
    one = group.learners[number]
    if one.running:
        enter_fault(group, number, group.generation, LearnerFault(now, why, died=True))
    one.connected = one.running = False
    one.ended = True


def decide(group: Group, now: float) -> list[GroupAction]:
    match group.phase:
        case Phase.GATHERING:
            return _gather(group, now)
        case Phase.RUNNING:
            return _follow(group, now)
        case Phase.DRAINING:
            others = [one for one in group.learners.values() if one.running]
            if others and now < group.drained_at + DRAIN_S and not group.halting:
                return []
            return _stop(group, RESTART_S, "learner 1 is done", EndJob("finished", ""))
        case Phase.STOPPING:
            return _settle(group, now)
        case Phase.OVER:
            return []


def _gather(group: Group, now: float) -> list[GroupAction]:
    if group.halting:
        group.phase = Phase.OVER
        return [EndJob("stopped", group.halting)]
    if now < group.retry_at or not all(one.connected for one in group.learners.values()):
        return []
    group.phase, group.end = Phase.RUNNING, None
    group.generation += 1
    for one in group.learners.values():
        one.running, one.ended, one.fault = True, False, None
    return [StartGroup(group.generation)]


def _follow(group: Group, now: float) -> list[GroupAction]:
    if group.halting:
        return _stop(group, HALT_S, group.halting, EndJob("stopped", group.halting))
    first = group.learners[1]
    if first.ended and first.fault is None:
        group.phase, group.drained_at = Phase.DRAINING, now
        return decide(group, now)
    faults = [(one.number, one.fault) for one in group.learners.values() if one.fault is not None]
    if not faults or now < min(fault.at for _, fault in faults) + SETTLE_S:
        return []
    number, cause = min(faults, key=lambda entry: (not entry[1].died, entry[1].at))
    why = f"learner {number}: {cause.why}"
    if not cause.died:
        return _stop(group, RESTART_S, why, EndJob("failed", why, cause.code))
    group.deaths = [*(at for at in group.deaths if now - at < WITHIN_S), now]
    if len(group.deaths) > MOST_RESTARTS:
        told = f"{why}; that is death {len(group.deaths)} within {WITHIN_S / 60:.0f} minutes"
        return _stop(group, RESTART_S, told, EndJob("failed", told, cause.code))
    if len(group.deaths) > 1:
        group.retry_at = now + min(LAST_S, FIRST_S * 2.0 ** (len(group.deaths) - 2))
    return _stop(group, RESTART_S, why, None)


def _stop(group: Group, grace_s: float, why: str, end: EndJob | None) -> list[GroupAction]:
    group.phase, group.end = Phase.STOPPING, end
    return [StopGroup(grace_s, why, ending=end is not None)]


def _settle(group: Group, now: float) -> list[GroupAction]:
    if any(one.running for one in group.learners.values()):
        return []
    if group.end is None:
        group.phase = Phase.GATHERING
        return decide(group, now)
    group.phase = Phase.OVER
    return [group.end]
