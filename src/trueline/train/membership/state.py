"""The state of a job's membership, and what all decisions are made of: fill slots, form a view, settle.

A **view** is a numbered list of workers; its number is the **generation**, the index in it the rank. A **slot** is a
place for one worker; successive workers in it are its incarnations. The state changes in place: a copy for each
heartbeat of ten thousand members would be most of the master's work. No I/O, no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trueline.engine.contract import parse_ref
from trueline.train.membership.events import Action, Log, Publish, Start

Phase = Literal["gathering", "running", "finished", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipPolicy:
    workers: int  # how many workers the job begins with; a dead one is replaced
    min_workers: int = 1  # the job waits while it has fewer
    gather_s: float = 30.0  # how long the first view waits for the other workers once one is ready
    lease_s: float = 3.0
    """A worker that is silent for longer is given up; `health.lease` extends it on a starved machine."""
    start_s: float = 180.0  # a worker that is not ready this long after its start is given up
    leave_s: float = 60.0  # a worker that still runs this long after a view without it is killed
    stuck_s: float = 10.0
    """A worker that computes for longer (and for ten usual steps) while all others wait is given up."""
    tick_s: float = 0.25  # usual time between two ticks; after a much longer one the master was frozen
    refill_s: float = 0.25
    """How long replacements of the dead wait for the survivors' next step: starting takes cores from it. They do not
    wait where a step usually takes twice as long."""
    max_failures: int = 3
    """Deaths of one slot in a row, before a step of its own, that put it in quarantine; if the job has applied no step
    since the first of them, it fails."""
    spell_s: float = 600.0
    """Time in which twice as many failures of one slot, after steps of its own, put it into quarantine if all others
    together have less than half as many."""
    breaks: int = 10
    """Groups that break in a row, with no step and no death between them and for `broken_s` at least, end the job."""
    broken_s: float = 600.0  # longer than a network that recovers by itself usually takes
    newcomer_breaks: int = 3
    """Groups that break in a row before newcomers from other hosts are left out, and the others train on."""
    set_aside: int = 100  # records that may be set aside; one more ends the job
    still_s: float = 30.0  # a member that gets no byte of its state for longer is given up
    quarantine_s: float = 30.0  # of a slot for the first time; doubled each time, at most four times

    def pause_s(self, times: int) -> float:
        """How long a slot that is in quarantine for the `times`-th time in a row stays there.

        >>> [MembershipPolicy(workers=1).pause_s(n) for n in (1, 2, 3, 99)]
        [30.0, 60.0, 120.0, 480.0]
        """
        return self.quarantine_s * 2.0 ** min(times - 1, 4)

    def delay_s(self, failures: int) -> float:
        """How long a slot stays empty after `failures` deaths in a row before its first step.

        >>> [MembershipPolicy(workers=1).delay_s(n) for n in (0, 1, 2, 3, 99)]
        [0.0, 0.0, 0.5, 1.0, 30.0]
        """
        return 0.0 if failures < 2 else float(min(30.0, 0.25 * 2 ** min(failures - 1, 8)))


@dataclass(slots=True, kw_only=True)
class Member:
    ref: str
    slot: int
    store: str  # host:port of its rendezvous store; empty until it reconnects to a restarted master
    state: str = ""  # host:port where joiners fetch its state
    seen_at: float
    rank: int = -1  # -1: not in the view
    entered: int | None = None
    """Steps it had applied when it entered the current generation; None: it has not entered, -1: it has no state."""
    rate: float = 0.0
    leaving: bool = False
    joined: bool = False  # it is or was in a view
    left_at: float | None = None  # when all others had continued without it; it ends after its last step
    steps: int = -1
    base: int | None = None  # the job's steps when it first took part; it applied the later ones itself
    phase: str = ""
    phase_s: float = 0.0  # how long it was in `phase` at its last heartbeat
    moved: int = 0
    to_move: int = 0  # bytes of a state that it receives or sends; 0: none is on its way
    sending: bool = False
    moved_at: float = 0.0  # when `moved` last grew
    trying: int = -1  # the record that it tries alone; -1: none
    trying_where: str = ""

    @property
    def host(self) -> str:
        """The address where it listens, without the port."""
        return self.store.rpartition(":")[0]

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
    since_step: int  # steps that the job had applied at the first of them
    until: float  # when the slot may be filled again


@dataclass(frozen=True, slots=True)
class Breaks:
    """Groups of living members that broke in a row."""

    count: int
    since_step: int  # steps that the job had applied at the first of them
    since: float


@dataclass(slots=True, kw_only=True)
class State:
    workers: int  # slots to fill: 0 to workers - 1
    room: int | None = None  # workers that the engine has room for, those that run included; None: it sets no limit
    begun: bool = False  # this master knows which workers run
    phase: Phase = "gathering"
    generation: int = 0
    cut_below: int = 0
    rotation: int = 0
    turned: int = 0
    """The newest generation that was formed with another rotation, after a vote."""
    careful: bool = False
    view: tuple[str, ...] = ()
    released: bool = False
    finishing: bool = False  # a member has applied the last step
    halting: str = ""  # why the job ends with a checkpoint
    members: dict[str, Member] = field(default_factory=dict)
    pending: dict[str, float] = field(default_factory=dict)  # started, not ready yet: ref -> since when
    awaited: set[str] = field(default_factory=set)  # members of the view that have not entered it
    unfinished: set[str] = field(default_factory=set)  # members that have not applied the last step
    incarnations: dict[int, int] = field(default_factory=dict)  # next incarnation of each slot
    failures: dict[int, Failures] = field(default_factory=dict)
    crashes: dict[int, list[float]] = field(default_factory=dict)
    """Slot -> times of recent failures of its own workers, after steps of their own."""
    quarantined: dict[int, str] = field(default_factory=dict)  # slots that stay empty for a while, and why
    retry_at: dict[int, float] = field(default_factory=dict)  # when these are tried again
    relapses: dict[int, int] = field(default_factory=dict)
    """Slot -> times that it was put in quarantine since it last worked well."""
    suspects: dict[int, dict[str, str]] = field(default_factory=dict)  # votes: record -> worker -> why
    set_aside: dict[int, str] = field(default_factory=dict)  # records left out of training, and why
    reasons: dict[str, list[int]] = field(default_factory=dict)
    """Reason of records set aside, without their numbers -> the steps applied when each was."""
    places: dict[int, str] = field(default_factory=dict)  # where these records lie: part, file, record in it
    committed: int = 0  # steps known to be applied
    broken: Breaks | None = None  # since the last step and the last death of a member
    died_at: int = -1  # steps applied when a member last died in a group
    checkpoint: str = ""
    checkpoint_step: int = -1
    gathering_since: float | None = None
    fill_at: float = 0.0
    """When empty slots may be filled; earlier when the survivors of a death have applied a step."""
    ticked_at: float | None = None
    view_s: float = 0.0  # how long this master has waited for the members to enter the view, in ticks
    stepped_at: float | None = None
    usual_s: float = 0.0  # time between two steps, smoothed
    silence_s: float = 0.0  # longest recent silence of a living member; older ones count for less

    @property
    def target_workers(self) -> int:
        """Workers that the job can have: its slots without those in quarantine."""
        return self.workers - sum(slot < self.workers for slot in self.quarantined)

    def list_set_aside(self) -> list[dict[str, Any]]:
        """The records that are set aside, as in summary and status."""
        aside = sorted(self.set_aside.items())
        return [{"record": record, "where": self.places.get(record, ""), "why": why} for record, why in aside]

    def list_quarantined(self, now: float | None = None) -> list[dict[str, Any]]:
        """The slots in quarantine, as in summary and, with the seconds until they are tried again, status."""
        listed: list[dict[str, Any]] = [{"slot": slot, "why": why} for slot, why in sorted(self.quarantined.items())]
        if now is not None:
            for one in listed:
                one["retry_s"] = round(max(0.0, self.retry_at.get(one["slot"], now) - now), 1)
        return listed

    def lift_quarantines(self) -> None:
        self.quarantined, self.retry_at, self.relapses = {}, {}, {}

    def is_leaving(self, member: Member) -> bool:
        return member.leaving or member.slot >= self.workers


def fill(state: State, now: float) -> list[Action]:
    """Starts a worker in every slot that has none and does not have to wait, as far as the engine has room."""
    room = state.workers if state.room is None else state.room - len(state.members) - len(state.pending)
    taken = {member.slot for member in state.members.values()} | {parse_ref(ref)[1] for ref in state.pending}
    taken |= {slot for slot, failures in state.failures.items() if failures.until > now}
    rows: list[Action] = []
    starts: list[Action] = []
    for slot in range(state.workers):
        if slot in taken or slot in state.quarantined or len(starts) >= room:
            continue
        start = Start(slot, state.incarnations.get(slot, 0))
        rows.append(Log("START", {"ref": start.ref}))
        starts.append(start)
        state.pending[start.ref] = now
        state.incarnations[slot] = start.incarnation + 1
    return rows + starts


def form(state: State, reason: str, *, forced: bool, keep: Member | None = None) -> list[Action]:
    """Forms a view of all members that stay: survivors in their old order, then newcomers as they came.

    When no member that stays has the state, those that are leaving stay too (or only `keep` of them), and those that
    have left are called back while they are still there.
    """
    here = [member for member in state.members.values() if member.left_at is None]
    staying = [member for member in here if not member.left and not state.is_leaving(member)]
    if not any(member.steps >= 0 for member in staying):
        staying = here if keep is None else [*staying, keep]
    staying = sorted((m for m in staying if m.rank >= 0), key=lambda m: m.rank) + [m for m in staying if m.rank < 0]
    hosts = list(dict.fromkeys(member.host for member in staying))
    staying.sort(key=lambda member: hosts.index(member.host))  # ranks of one host lie together
    for member in state.members.values():
        member.entered, member.rank, member.trying = None, -1, -1
    for rank, member in enumerate(staying):
        member.rank, member.joined = rank, True
    state.generation += 1
    state.phase = "running" if staying else "gathering"
    state.cut_below = state.generation if forced else state.cut_below
    state.view = tuple(member.ref for member in staying)
    state.awaited, state.unfinished = set(state.view), set(state.view)
    state.released, state.finishing, state.gathering_since, state.view_s = False, False, None, 0.0
    state.careful = state.careful and state.committed <= state.died_at
    body = {"generation": state.generation, "members": list(state.view), "cut_below": state.cut_below,
            "rotation": state.rotation, "careful": state.careful, "reason": reason}  # fmt: skip
    return [Log("VIEW", body), Publish(reason)]


def settle(state: State, policy: MembershipPolicy) -> list[Action]:
    """Forms a planned view with the newcomers and without those that leave, as soon as one can take effect.

    While a view forms, newcomers wait for it, so that a thousand of them cost a few views; those that leave wait until
    a member that stays has the state. When all leave and none comes, one stays alone, so that the slots of the others
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
    parts = [f"{join_refs(refs)} {verb}{'s' if len(refs) == 1 else ''}" for refs, verb in moves]
    return form(state, " and ".join(parts), forced=False, keep=keep) if parts else []


def join_refs(refs: Sequence[str]) -> str:
    """Refs for a reason, at most four by name.

    >>> join_refs(["a", "b"]), join_refs(list("abcdef"))
    ('a and b', 'a, b, c and 3 more')
    """
    if len(refs) > 4:
        return f"{', '.join(refs[:3])} and {len(refs) - 3} more"
    return " and ".join(part for part in (", ".join(refs[:-1]), refs[-1]) if part)
