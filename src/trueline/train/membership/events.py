"""What can happen to a job's membership, and what is then to be done: plain values between `decide` and its shell.

The shell (`master/master.py`) makes events out of calls, exits and time, and carries out the actions in their order.
"""

from typing import Any, Literal

from msgspec import Struct

from trueline.engine.contract import make_ref

WORKER = "worker"  # the role of the processes that a view consists of: the only one so far


class Begin(Struct, frozen=True):
    """The job starts or is resumed, or its master has come back. `alive`: the workers that the engine runs."""

    alive: frozenset[str] = frozenset()
    launch: bool = True
    """Whether a launcher starts or resumes the job: with the number of workers in its settings."""


class Ready(Struct, frozen=True):
    ref: str
    store: str
    state: str = ""  # host:port where joiners fetch its state


class Death(Struct, frozen=True):
    ref: str
    why: str
    clean: bool = False  # it has ended by itself, with exit code 0
    failed: bool = False  # it has ended by itself, with another exit code or a crash; it was not killed
    blameless: bool = False  # its host is gone, or takes its cores back: it says nothing about the slot


class Deaths(Struct, frozen=True):
    """Deaths that were noticed together: they cost one view."""

    deaths: tuple[Death, ...]


class Entered(Struct, frozen=True):
    ref: str
    generation: int
    step: int
    rate: float = 0.0


class Finished(Struct, frozen=True):
    ref: str
    generation: int


class Heartbeat(Struct, frozen=True):
    ref: str
    step: int
    phase: str = ""
    phase_s: float = 0.0
    moved: int = 0
    to_move: int = 0  # bytes of a state that it receives, or sends; 0: none is on its way
    sending: bool = False


class Leaving(Struct, frozen=True):
    ref: str


class GroupBroken(Struct, frozen=True):
    ref: str
    generation: int
    why: str


class Saved(Struct, frozen=True):
    ref: str
    step: int
    path: str
    digest: str = ""


class Suspect(Struct, frozen=True):
    """These records made the worker fail: one vote against each."""

    ref: str
    records: tuple[int, ...]
    why: str
    where: str = ""


class Trial(Struct, frozen=True):
    """The worker is about to try `record` alone; -1: it has tried all."""

    ref: str
    record: int
    where: str = ""


class Scale(Struct, frozen=True):
    """The job gets another number of workers."""

    workers: int
    why: str


class Halt(Struct, frozen=True):
    """The job ends with a checkpoint of what is applied, which fewer members than its minimum may write."""

    why: str


class EngineRoom(Struct, frozen=True):
    """The engine has room for this number of workers, those that run included."""

    workers: int


class Tick(Struct, frozen=True):
    """Time has passed."""


WorkerEvent = Ready | Entered | Finished | Heartbeat | Leaving | GroupBroken | Saved | Suspect | Trial
"""What a worker reports itself: it has to be of this job."""
Event = WorkerEvent | Begin | Death | Deaths | Scale | Halt | EngineRoom | Tick


class Log(Struct, frozen=True):
    """A row of the journal. All rows of a decision are on the disk before anything else of it is done."""

    kind: str
    body: dict[str, Any]


class Start(Struct, frozen=True):
    slot: int
    incarnation: int
    role: str = WORKER

    @property
    def ref(self) -> str:
        return make_ref(self.role, self.slot, self.incarnation)


class Kill(Struct, frozen=True):
    ref: str
    why: str


class AvoidHost(Struct, frozen=True):
    """No group forms with this newcomer: for a while nothing is to start on its host."""

    ref: str
    why: str


class Publish(Struct, frozen=True):
    """Publish the new view of the state to every member."""

    reason: str


class Release(Struct, frozen=True):
    """Every member has entered: they may form the group. `source` is the rank whose state counts."""

    source: int
    steps: tuple[int, ...]
    checkpoint: str = ""
    store: str = ""
    states: tuple[str, ...] = ()  # by rank, as the rates
    rates: tuple[float, ...] = ()


class Truncate(Struct, frozen=True):
    """The surviving state has `steps` applied steps; the log is ahead of it and follows."""

    steps: int


class Finish(Struct, frozen=True):
    """Every member has applied the last step."""


class FailJob(Struct, frozen=True):
    code: Literal["train", "state_lost", "poison"]
    why: str


class Fence(Struct, frozen=True):
    """The sender is not of this job any more."""

    ref: str


Action = Log | Start | Kill | AvoidHost | Publish | Release | Truncate | Finish | FailJob | Fence
