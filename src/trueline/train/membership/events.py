"""What can happen to a job's membership and what is then to be done: plain values between the core and its shell.

`members.decide` takes one of the events and returns actions; the shell (`master.py`) makes the events out of calls,
exits and time, and carries the actions out in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trueline.engine.contract import make_ref

WORKER = "worker"
"""The role of the processes that a view consists of: the only one so far."""

# What happens. -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """The job starts, is resumed, or its master has come back; `alive` are the workers that run, as the engine says."""

    alive: frozenset[str] = frozenset()
    launch: bool = True
    """Whether a launcher starts or resumes the job: with the number of workers that its settings say."""


@dataclass(frozen=True, slots=True)
class Ready:
    ref: str
    store: str
    state: str = ""
    """host:port where joiners fetch its state."""


@dataclass(frozen=True, slots=True)
class Death:
    ref: str
    why: str
    clean: bool = False
    """It has ended by itself, with exit code 0."""
    failed: bool = False
    """It has ended by itself, with another exit code or a crash: nobody has killed it."""


@dataclass(frozen=True, slots=True)
class Deaths:
    """Deaths that were noticed together: they cost one view."""

    deaths: tuple[Death, ...]


@dataclass(frozen=True, slots=True)
class Entered:
    ref: str
    generation: int
    step: int
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    ref: str
    generation: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    ref: str
    step: int
    phase: str = ""
    phase_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Leaving:
    ref: str


@dataclass(frozen=True, slots=True)
class GroupBroken:
    ref: str
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class Saved:
    ref: str
    step: int
    path: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Suspect:
    """These records made the worker fail: one vote against each."""

    ref: str
    records: tuple[int, ...]
    why: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """The worker is about to try `record` alone; -1: it has tried all."""

    ref: str
    record: int
    where: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """Another number of workers, from now on."""

    workers: int
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


WorkerEvent = Ready | Entered | Finished | Heartbeat | Leaving | GroupBroken | Saved | Suspect | Trial
"""What a worker says itself: it has to be of this job."""
Event = WorkerEvent | Begin | Death | Deaths | Scale | Tick


# What to do. ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Log:
    """A row of the journal. All rows of a decision are on the disk before anything else of it is done."""

    kind: str
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Start:
    slot: int
    incarnation: int
    role: str = WORKER

    @property
    def ref(self) -> str:
        return make_ref(self.role, self.slot, self.incarnation)


@dataclass(frozen=True, slots=True)
class Kill:
    ref: str
    why: str


@dataclass(frozen=True, slots=True)
class Publish:
    """The state has a new view: tell every member."""

    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Every member has entered: they may form the group. `source` is the rank whose state counts."""

    source: int
    steps: tuple[int, ...]
    checkpoint: str = ""
    store: str = ""
    state: str = ""
    rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Truncate:
    """The surviving state has `steps` applied steps; the log is ahead of it and follows."""

    steps: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Every member has applied the last step."""


@dataclass(frozen=True, slots=True)
class FailJob:
    code: Literal["train", "state_lost", "poison"]
    why: str


@dataclass(frozen=True, slots=True)
class Fence:
    """The sender is not of this job any more."""

    ref: str


Action = Log | Start | Kill | Publish | Release | Truncate | Finish | FailJob | Fence
