"""Who is in the job, in which generation: decisions as a pure function of (state, event, now).

    state, event, now  ──decide──▶  state', actions, reason

A **view** is a numbered list of workers; its number is the **generation**. A planned view (a join, a departure that
was announced) takes effect between two steps and fails none. A forced view follows a death: the groups of older
generations cannot complete a step any more and are cut (`cut_below`). Members of a view *enter* it with the number
of steps they have applied; when all have, the one that is furthest ahead becomes the source and the others take its
state. Nothing here knows of gRPC, processes or files: `master.py` is the shell around it.

Sources: torchft's `quorum_compute` (decide with `now`, return the reason), DESIGN §3, the exactness protocol in
docs/concepts/generation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trueline.engine.contract import make_ref, parse_ref

Phase = Literal["gathering", "running", "finished", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    workers: int
    """How many workers the job is to have; a dead one is replaced."""
    min_workers: int = 1
    """With fewer the job waits."""
    gather_s: float = 30.0
    """How long the first view waits for all workers once one is ready."""
    lease_s: float = 30.0
    """A worker that is silent for so long is given up."""
    start_s: float = 180.0
    """A worker that is not ready so long after its start is given up."""
    max_failures: int = 3
    """So many deaths of one slot in a row, without one step of the job between them, end the job."""

    def delay_s(self, failures: int) -> float:
        """How long a slot stays empty after so many deaths in a row before its first step.

        >>> [Policy(workers=1).delay_s(n) for n in (0, 1, 2, 3, 99)]
        [0.0, 0.0, 0.5, 1.0, 30.0]
        """
        return 0.0 if failures < 2 else float(min(30.0, 0.25 * 2 ** min(failures - 1, 8)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    ref: str
    store: str
    """host:port of its rendezvous store; empty while a restarted master waits for it to say hello again."""
    seen_at: float
    entered: int | None = None
    """Steps it had applied when it entered the current generation; None: it has not entered, -1: it has no state."""
    done: bool = False
    leaving: bool = False
    steps: int = -1


@dataclass(frozen=True, slots=True)
class Failures:
    """Deaths of one slot in a row before its first step."""

    count: int
    since_step: int
    """Steps that the job had applied at the first of them."""
    until: float
    """When the slot may be filled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    phase: Phase = "gathering"
    generation: int = 0
    cut_below: int = 0
    view: tuple[str, ...] = ()
    released: bool = False
    members: Mapping[str, Member] = field(default_factory=dict)
    pending: Mapping[str, float] = field(default_factory=dict)
    """Started and not ready yet: ref -> when it was started."""
    incarnations: Mapping[int, int] = field(default_factory=dict)
    """Next incarnation of each slot."""
    failures: Mapping[int, Failures] = field(default_factory=dict)
    committed: int = 0
    """Steps known to be applied."""
    checkpoint: str = ""
    checkpoint_step: int = -1
    gathering_since: float | None = None


# What happens. -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """The job starts (or its master has come back): fill the slots that are empty."""


@dataclass(frozen=True, slots=True)
class Ready:
    ref: str
    store: str


@dataclass(frozen=True, slots=True)
class Gone:
    ref: str
    why: str


@dataclass(frozen=True, slots=True)
class Entered:
    ref: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Done:
    ref: str
    generation: int


@dataclass(frozen=True, slots=True)
class Heard:
    ref: str
    step: int


@dataclass(frozen=True, slots=True)
class Leaving:
    ref: str


@dataclass(frozen=True, slots=True)
class GroupBroken:
    ref: str
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Begin | Ready | Gone | Entered | Done | Heard | Leaving | GroupBroken | Tick


# What to do. ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    slot: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Kill:
    ref: str
    why: str


@dataclass(frozen=True, slots=True)
class Publish:
    """The state has a new view: write it to the journal, then tell every member."""

    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Every member has entered: they may form the group. `source` is the rank whose state counts."""

    source: int
    steps: tuple[int, ...]
    checkpoint: str = ""


@dataclass(frozen=True, slots=True)
class Truncate:
    """The surviving state has `steps` applied steps; the log is ahead of it and follows."""

    steps: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Every member has applied the last step."""


@dataclass(frozen=True, slots=True)
class FailJob:
    code: Literal["train", "state_lost"]
    why: str


@dataclass(frozen=True, slots=True)
class Fence:
    """The sender is not of this job any more."""

    ref: str


Action = Start | Kill | Publish | Release | Truncate | Finish | FailJob | Fence


@dataclass(frozen=True, slots=True)
class Decision:
    state: State
    actions: tuple[Action, ...] = ()


def decide(state: State, event: Event, now: float, policy: Policy) -> Decision:
    """What `event` at time `now` (seconds, monotonic) means for the job."""
    if state.phase in ("finished", "failed"):
        return Decision(state)
    match event:
        case Begin():
            return _fill(state, now, policy)
        case Tick():
            return _tick(state, now, policy)
        case Gone():
            return _gone(state, event, now, policy)
    if event.ref not in state.members and not (isinstance(event, Ready) and event.ref in state.pending):
        return Decision(state, (Fence(event.ref),))
    state = _heard(state, event.ref, now)
    match event:
        case Ready():
            return _ready(state, event, now, policy)
        case Entered():
            return _entered(state, event, policy)
        case Done():
            return _done(state, event)
        case Heard():
            return _progress(state, event)
        case Leaving():
            return _leaving(state, event)
        case GroupBroken():
            return _broken(state, event)


def _member(state: State, ref: str, **changes: object) -> State:
    changed = replace(state.members[ref], **changes)  # type: ignore[arg-type]
    return replace(state, members={**state.members, ref: changed})


def _heard(state: State, ref: str, now: float) -> State:
    return _member(state, ref, seen_at=now) if ref in state.members else state


def _fill(state: State, now: float, policy: Policy) -> Decision:
    """Starts a worker in every slot that has none and does not have to wait."""
    taken = {parse_ref(ref)[1] for ref in (*state.members, *state.pending)}
    taken |= {slot for slot, failures in state.failures.items() if failures.until > now}
    starts: list[Action] = []
    pending, incarnations = dict(state.pending), dict(state.incarnations)
    for slot in (slot for slot in range(policy.workers) if slot not in taken):
        incarnation = incarnations.get(slot, 0)
        starts.append(Start(slot, incarnation))
        pending[make_ref("worker", slot, incarnation)] = now
        incarnations[slot] = incarnation + 1
    return Decision(replace(state, pending=pending, incarnations=incarnations), tuple(starts))


def _form(state: State, reason: str, *, forced: bool) -> Decision:
    """A new view of all members that stay: survivors in their old order, then newcomers as they came.

    Those who are about to leave stay until somebody else has their state.
    """
    staying = [ref for ref, member in state.members.items() if not member.leaving]
    if not any(state.members[ref].steps >= 0 for ref in staying):
        staying = list(state.members)
    view = tuple(ref for ref in state.view if ref in staying) + tuple(ref for ref in staying if ref not in state.view)
    generation = state.generation + 1
    members = {ref: replace(member, entered=None, done=False) for ref, member in state.members.items()}
    state = replace(
        state,
        phase="running" if view else "gathering",
        generation=generation,
        cut_below=generation if forced else state.cut_below,
        view=view,
        released=False,
        members=members,
        gathering_since=None,
    )
    return Decision(state, (Publish(reason),))


def _ready(state: State, event: Ready, now: float, policy: Policy) -> Decision:
    if event.ref in state.members:
        return _release(_member(state, event.ref, store=event.store), policy)
    pending = {ref: at for ref, at in state.pending.items() if ref != event.ref}
    member = Member(ref=event.ref, store=event.store, seen_at=now)
    state = replace(state, pending=pending, members={**state.members, event.ref: member})
    if state.phase == "gathering":
        since = now if state.gathering_since is None else state.gathering_since
        return _gather(replace(state, gathering_since=since), now, policy)
    if any(other.done for other in state.members.values()):
        return Decision(state)  # the others are at the end: let them finish without a newcomer
    return _form(state, f"{event.ref} joins", forced=False)


def _gather(state: State, now: float, policy: Policy) -> Decision:
    ready = len(state.members)
    waited = state.gathering_since is not None and now - state.gathering_since >= policy.gather_s
    everyone = ready >= policy.workers
    if everyone or (waited and ready >= policy.min_workers):
        why = "all are ready" if everyone else f"{ready} of {policy.workers} are ready after {policy.gather_s:g} s"
        return _form(state, why, forced=True)
    return Decision(state)


def _gone(state: State, event: Gone, now: float, policy: Policy) -> Decision:
    ref = event.ref
    if ref not in state.members and ref not in state.pending:
        return Decision(state)
    slot = parse_ref(ref)[1]
    member = state.members.get(ref)
    progressed = member is not None and (member.steps > 0 or member.leaving)
    before = state.failures.get(slot, Failures(0, state.committed, now))
    count = 0 if progressed else before.count + 1
    since = before.since_step if count > 1 else state.committed
    failures = Failures(count, since, now + policy.delay_s(count))
    in_view = ref in state.view
    state = replace(
        state,
        members={other: m for other, m in state.members.items() if other != ref},
        pending={other: at for other, at in state.pending.items() if other != ref},
        failures={**state.failures, slot: failures},
    )
    if count >= policy.max_failures and since == state.committed:
        why = f"worker slot {slot} died {count} times in a row before its first step; last: {event.why}"
        return Decision(replace(state, phase="failed"), (FailJob("train", why),))
    actions: tuple[Action, ...] = ()
    if in_view:
        formed = _form(state, f"{ref} is gone: {event.why}", forced=True)
        state, actions = formed.state, formed.actions
    filled = _fill(state, now, policy)
    return Decision(filled.state, (*actions, *filled.actions))


def _entered(state: State, event: Entered, policy: Policy) -> Decision:
    if event.generation != state.generation or event.ref not in state.view:
        return Decision(state)  # superseded: the shell answers so
    state = _member(state, event.ref, entered=event.step, steps=max(event.step, state.members[event.ref].steps))
    return _release(replace(state, released=False), policy)


def _release(state: State, policy: Policy) -> Decision:
    """Lets the group form when every member of the view has entered and they are enough."""
    members = [state.members[ref] for ref in state.view]
    steps = [member.entered for member in members if member.entered is not None]
    ready = len(steps) == len(members) and len(members) >= policy.min_workers and bool(members) and members[0].store
    if state.released or not ready:
        return Decision(state)
    most = max(steps)
    if most < 0:
        return _first_state(state, tuple(steps))
    actions: tuple[Action, ...] = (Release(steps.index(most), tuple(steps)),)
    if most < state.committed:
        actions = (Truncate(most), *actions)
    return Decision(replace(state, released=True, committed=most), actions)


def _first_state(state: State, steps: tuple[int, ...]) -> Decision:
    """Nobody holds a state: it comes from a checkpoint, or from nothing when nothing was ever applied."""
    if state.checkpoint:
        restored = replace(state, released=True, committed=state.checkpoint_step)
        actions: tuple[Action, ...] = (Release(0, steps, state.checkpoint),)
        if state.checkpoint_step < state.committed:
            actions = (Truncate(state.checkpoint_step), *actions)
        return Decision(restored, actions)
    if state.committed == 0:
        return Decision(replace(state, released=True), (Release(0, steps),))
    why = f"every process that held the state of step {state.committed} is gone and there is no checkpoint"
    return Decision(replace(state, phase="failed"), (FailJob("state_lost", why),))


def _done(state: State, event: Done) -> Decision:
    if event.generation != state.generation or event.ref not in state.view:
        return Decision(state)
    state = _member(state, event.ref, done=True)
    if all(state.members[ref].done for ref in state.view):
        return Decision(replace(state, phase="finished"), (Finish(),))
    return Decision(state)


def _progress(state: State, event: Heard) -> Decision:
    state = _member(state, event.ref, steps=max(event.step, state.members[event.ref].steps))
    return _let_go(replace(state, committed=max(state.committed, event.step)))


def _leaving(state: State, event: Leaving) -> Decision:
    return _let_go(_member(state, event.ref, leaving=True))


def _let_go(state: State) -> Decision:
    """A planned view without those who leave, as soon as somebody who stays holds the state."""
    leaving = [ref for ref in state.view if state.members[ref].leaving]
    holders = [ref for ref in state.view if not state.members[ref].leaving and state.members[ref].steps >= 0]
    at_the_end = any(member.done for member in state.members.values())
    if not leaving or not holders or not state.released or at_the_end:
        return Decision(state)
    return _form(state, f"{' and '.join(leaving)} {'leaves' if len(leaving) == 1 else 'leave'}", forced=False)


def _broken(state: State, event: GroupBroken) -> Decision:
    if event.generation != state.generation or not state.released:
        return Decision(state)
    return _form(state, f"{event.ref} cannot use generation {event.generation}: {event.why}", forced=True)


def _tick(state: State, now: float, policy: Policy) -> Decision:
    actions: list[Action] = []
    silent = [(m.ref, f"silent for {now - m.seen_at:.1f} s") for m in state.members.values()
              if now - m.seen_at > policy.lease_s]  # fmt: skip
    slow = [(ref, f"not ready {now - at:.0f} s after its start") for ref, at in state.pending.items()
            if now - at > policy.start_s]  # fmt: skip
    for ref, why in (*silent, *slow):
        decision = _gone(state, Gone(ref, why), now, policy)
        state = decision.state
        actions += [Kill(ref, why), *decision.actions]
    if state.phase == "gathering" and state.members:
        decision = _gather(state, now, policy)
        state = decision.state
        actions += decision.actions
    if state.phase in ("gathering", "running") and state.incarnations:
        decision = _fill(state, now, policy)
        state = decision.state
        actions += decision.actions
    return Decision(state, tuple(actions))
