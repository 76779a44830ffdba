"""The state of a job's membership, and the three moves that all decisions are made of: fill slots, form a view, let go.

A **view** is a numbered list of workers; its number is the **generation**, the index in it the rank. A **slot** is a
place for one worker; the workers that follow each other in it are its incarnations. The state changes in place: a copy
for each heartbeat of ten thousand members would be most of the master's work. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trueline.engine.contract import parse_ref
from trueline.train.membership.events import Action, Log, Publish, Start

Phase = Literal["gathering", "running", "finished", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipPolicy:
    workers: int
    """How many workers the job begins with; a dead one is replaced."""
    min_workers: int = 1
    """With fewer the job waits."""
    gather_s: float = 30.0
    """How long the first view waits for all workers once one is ready."""
    lease_s: float = 3.0
    """A worker that is silent for so long is given up; `health.lease` makes it longer on a starved machine."""
    start_s: float = 180.0
    """A worker that is not ready so long after its start is given up."""
    leave_s: float = 60.0
    """A worker that still runs so long after a view without it is killed."""
    stuck_s: float = 10.0
    """A worker that computes for so long (or ten usual steps, if they are longer) while all others wait is given up."""
    tick_s: float = 0.25
    """Usual time between two ticks; a tick that comes much later tells of a master that was frozen."""
    refill_s: float = 0.25
    """After a death the survivors apply a step before replacements start, but no later: starting costs them cores."""
    max_failures: int = 3
    """So many deaths of one slot in a row before a step of its own put it into quarantine, or end a job that stands."""
    spell_s: float = 600.0
    """Twice as many failures of one slot within so long, after steps of its own, do the same where the others have
    hardly any."""
    set_aside: int = 100
    """So many records may be set aside; one more ends the job."""

    def delay_s(self, failures: int) -> float:
        """How long a slot stays empty after so many deaths in a row before its first step.

        >>> [MembershipPolicy(workers=1).delay_s(n) for n in (0, 1, 2, 3, 99)]
        [0.0, 0.0, 0.5, 1.0, 30.0]
        """
        return 0.0 if failures < 2 else float(min(30.0, 0.25 * 2 ** min(failures - 1, 8)))


@dataclass(slots=True, kw_only=True)
class Member:
    ref: str
    slot: int
    store: str
    """host:port of its rendezvous store; empty while a restarted master waits for it to say hello again."""
    state: str = ""
    """host:port where joiners fetch its state."""
    seen_at: float
    rank: int = -1
    """-1: not in the view."""
    entered: int | None = None
    """Steps it had applied when it entered the current generation; None: it has not entered, -1: it has no state."""
    rate: float = 0.0
    leaving: bool = False
    joined: bool = False
    """It is or was in a view."""
    left_at: float | None = None
    """When all others had gone on without it; it ends by itself when it has completed its last step."""
    steps: int = -1
    base: int | None = None
    """Steps that the job had when it first took part: what is beyond them it applied itself."""
    phase: str = ""
    phase_s: float = 0.0
    """For how long it was in it when it was last heard."""
    trying: int = -1
    trying_where: str = ""
    """The record that it tries alone; -1: none."""

    @property
    def left(self) -> bool:
        return self.joined and self.rank < 0

    @property
    def stepped(self) -> bool:
        """Whether it has applied a step itself."""
        return self.base is not None and self.steps > self.base


@dataclass(frozen=True, slots=True)
class Failures:
    """Deaths of one slot in a row before its first step."""

    count: int
    since_step: int
    """Steps that the job had applied at the first of them."""
    until: float
    """When the slot may be filled again."""


@dataclass(slots=True, kw_only=True)
class State:
    workers: int
    """Slots to fill: 0 to workers - 1."""
    phase: Phase = "gathering"
    generation: int = 0
    cut_below: int = 0
    rotation: int = 0
    careful: bool = False
    view: tuple[str, ...] = ()
    released: bool = False
    finishing: bool = False
    """Somebody has applied the last step."""
    members: dict[str, Member] = field(default_factory=dict)
    pending: dict[str, float] = field(default_factory=dict)
    """Started and not ready yet: ref -> when it was started."""
    awaited: set[str] = field(default_factory=set)
    """Members of the view that have not entered it."""
    unfinished: set[str] = field(default_factory=set)
    """Members of the view that have not applied the last step."""
    incarnations: dict[int, int] = field(default_factory=dict)
    """Next incarnation of each slot."""
    failures: dict[int, Failures] = field(default_factory=dict)
    crashes: dict[int, list[float]] = field(default_factory=dict)
    """When the workers of a slot have failed by themselves, of late, after steps of their own."""
    quarantined: dict[int, str] = field(default_factory=dict)
    """Slots that stay empty, and why."""
    suspects: dict[int, dict[str, str]] = field(default_factory=dict)
    """Votes against records: record -> worker -> why."""
    set_aside: dict[int, str] = field(default_factory=dict)
    """Records that no step trains on any more, and why."""
    places: dict[int, str] = field(default_factory=dict)
    """Where those lie that are suspected or set aside: part, file and record in it."""
    committed: int = 0
    """Steps known to be applied."""
    died_at: int = -1
    """Steps applied when a member last died in a group."""
    checkpoint: str = ""
    checkpoint_step: int = -1
    gathering_since: float | None = None
    fill_at: float = 0.0
    """When empty slots may be filled; earlier when the survivors of a death have applied a step."""
    ticked_at: float | None = None
    stepped_at: float | None = None
    usual_s: float = 0.0
    """Time between two steps, smoothed."""
    silence_s: float = 0.0
    """The longest silence, of late, of a member that was alive all the same; what lies back counts for less."""

    @property
    def target_workers(self) -> int:
        """Workers that can be had: those wanted without the slots in quarantine."""
        return self.workers - sum(slot < self.workers for slot in self.quarantined)

    def list_set_aside(self) -> list[dict[str, Any]]:
        """What is set aside, for people."""
        aside = sorted(self.set_aside.items())
        return [{"record": record, "where": self.places.get(record, ""), "why": why} for record, why in aside]

    def is_leaving(self, member: Member) -> bool:
        return member.leaving or member.slot >= self.workers


def fill(state: State, now: float) -> list[Action]:
    """Starts a worker in every slot that has none and does not have to wait."""
    taken = {member.slot for member in state.members.values()} | {parse_ref(ref)[1] for ref in state.pending}
    taken |= {slot for slot, failures in state.failures.items() if failures.until > now}
    rows: list[Action] = []
    starts: list[Action] = []
    for slot in range(state.workers):
        if slot in taken or slot in state.quarantined:
            continue
        start = Start(slot, state.incarnations.get(slot, 0))
        rows.append(Log("START", {"ref": start.ref}))
        starts.append(start)
        state.pending[start.ref] = now
        state.incarnations[slot] = start.incarnation + 1
    return rows + starts


def form(state: State, reason: str, *, forced: bool, keep: Member | None = None) -> list[Action]:
    """A new view of all members that stay: survivors in their old order, then newcomers as they came.

    Those who are about to leave stay (or only `keep` of them) until somebody else has their state, and are called back
    while they are there.
    """
    here = [member for member in state.members.values() if member.left_at is None]
    staying = [member for member in here if not member.left and not state.is_leaving(member)]
    if not any(member.steps >= 0 for member in staying):
        staying = here if keep is None else [*staying, keep]
    staying = sorted((m for m in staying if m.rank >= 0), key=lambda m: m.rank) + [m for m in staying if m.rank < 0]
    for member in state.members.values():
        member.entered, member.rank, member.trying = None, -1, -1
    for rank, member in enumerate(staying):
        member.rank, member.joined = rank, True
    state.generation += 1
    state.phase = "running" if staying else "gathering"
    state.cut_below = state.generation if forced else state.cut_below
    state.view = tuple(member.ref for member in staying)
    state.awaited, state.unfinished = set(state.view), set(state.view)
    state.released, state.finishing, state.gathering_since = False, False, None
    state.careful = state.careful and state.committed <= state.died_at
    body = {"generation": state.generation, "members": list(state.view), "cut_below": state.cut_below,
            "rotation": state.rotation, "careful": state.careful, "reason": reason}  # fmt: skip
    return [Log("VIEW", body), Publish(reason)]


def settle(state: State, policy: MembershipPolicy) -> list[Action]:
    """A planned view with those who are ready and without those who go, as soon as one can take effect.

    While a view forms, newcomers wait for it, so that a thousand of them cost a few views; those who go wait until
    somebody who stays holds the state. When all go and nobody comes, one stays alone, so that the slots of the others
    can be filled again.
    """
    short = len(state.view) < policy.min_workers
    if state.phase != "running" or state.finishing or not (state.released or short):
        return []
    joining, going, holding, left = [], [], False, False
    for member in state.members.values():
        goes, left = state.is_leaving(member), left or member.left
        if member.rank < 0 and not member.left and not goes:
            joining.append(member.ref)
        elif member.rank >= 0 and goes:
            going.append(member)
        holding = holding or (member.rank >= 0 and not goes and member.steps >= 0)
    keep = None
    if len(going) == len(state.view) > 1 and not (left or joining or state.pending):
        keep = next((member for member in going if member.steps >= 0), None)
    if not state.released or not (holding or keep):
        going = []
    leaving = [member.ref for member in going if member is not keep]
    moves = ((refs, verb) for refs, verb in ((leaving, "leave"), (joining, "join")) if refs)
    said = [f"{join_refs(refs)} {verb}{'s' if len(refs) == 1 else ''}" for refs, verb in moves]
    return form(state, " and ".join(said), forced=False, keep=keep) if said else []


def join_refs(refs: Sequence[str]) -> str:
    """Names for a reason, not too many.

    >>> join_refs(["a", "b"]), join_refs(list("abcdef"))
    ('a and b', 'a, b, c and 3 more')
    """
    if len(refs) > 4:
        return f"{', '.join(refs[:3])} and {len(refs) - 3} more"
    return " and ".join(part for part in (", ".join(refs[:-1]), refs[-1]) if part)
