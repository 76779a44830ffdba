"""What connects a worker to its master: views come in, progress goes out, and the master may be away for a while.

`MasterLink` (`grpc_client.py`) connects to a master, `LocalLink` (`local_client.py`) stands in for one where a process
trains alone. Training needs the master only when the membership changes, so every call waits for one that is being
restarted. Each implementation passes `tests/conformance/link.py`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from trueline.errors import UsageError
from trueline.wire import train_pb2 as pb


class StepReport(NamedTuple):
    """A worker's record of one optimizer step; the fields are those of `pb.Applied`.

    It becomes a message when it is sent. Only rank 0 sends it to the master; other ranks drop theirs once the master
    has acknowledged the step.
    """

    step: int
    generation: int
    records: int
    digest: int
    loss: float
    workers: int
    gap_ms: float
    at_ns: int
    rates: tuple[float, ...]
    shares: tuple[int, ...]
    data_ms: float
    compute_ms: float
    wait_ms: float
    commit_ms: float
    redone: int
    learning_rate: float = 0.0
    gradient_norm: float = 0.0


class Membership(Protocol):
    """Enters the job, its views, and its end."""

    ref: str
    """This worker's name in the job, e.g. `worker-0.1`."""
    view: pb.View | None
    """The newest view; None before the first one."""

    def join(self, hello: pb.Hello) -> None:
        """Announces that this worker can train; views arrive from now on. `hello.ref` is filled in."""

    def wait_view(self, after: int, timeout_s: float, *, cuts: int = -1) -> pb.View | None:
        """Returns the newest view if its generation is above `after`, or None after `timeout_s`.

        With `cuts`, the view also has to cut that generation: its members cannot complete a step any more.
        """

    def enter(self, generation: int, step: int, rate: float) -> pb.Plan:
        """Enters a view with `step` applied steps (-1: no state), and reports everything that is not reported yet.

        Returns when all members of the view have entered, or with `superseded` when a newer view replaces it.
        """

    def finish(self, generation: int, step: int, certificates: Sequence[pb.Certificate]) -> pb.Plan:
        """Reports all certificates of the state again, since the worker that reported one may have died with it.

        Returns when all members have finished, or with `superseded` when a newer view has to be entered.
        """


class ProgressReporter(Protocol):
    ref: str
    leads: bool
    """Whether this worker reports every step at once. The others keep theirs until the master's log has them, and
    report those that are still missing after three seconds: the one that leads may be dead."""
    save_from: int
    """An operator wants a checkpoint of this step or a later one; 0: none is wanted."""

    halting: bool
    """No step is to follow the one of that checkpoint: the job ends when it is recorded."""

    def report_step(self, generation: int, step: int, report: StepReport, certificate: pb.Certificate | None) -> None:
        """Reports a step without waiting. `step`: steps applied; `certificate`: of the epoch that it ends."""

    def report_evaluation(self, evaluation: pb.Evaluation) -> None:
        """Reports an evaluation without waiting."""

    def report_checkpoint(self, step: int, path: str, digest: str, *, full: str = "", last: bool = False) -> None:
        """Reports a checkpoint; with `full` that it waits for room on the disk, and why. `last`: the job halts, and no
        step follows that of the checkpoint."""

    transfer: Callable[[], tuple[int, int, bool]]
    """Tells of a state on its way: bytes moved, all bytes (0: none is), whether this worker sends it."""

    def report_phase(self, phase: str) -> None:
        """Sets what this worker does from now on. The master sees it in the next heartbeat."""


class BlameReporter(Protocol):
    """Names what made this worker fail: a record, the group, or the whole job."""

    def suspect(self, step: int, record: int, why: str, where: str) -> None:
        """Casts one vote against `record`, which lies `where` (part, file and record in it)."""

    def announce_trial(self, step: int, record: int, where: str) -> None:
        """Waits until the master knows that `record` is about to be tried; -1: the trial is over."""

    def report_broken_group(self, generation: int, why: str) -> None:
        """Requests a new view: this worker cannot use the group of `generation`."""

    def fail(self, what: str, detail: str) -> None:
        """Ends the job for every worker. `what`: code and message as `code|message`; `detail`: a hint."""


class Link(Membership, ProgressReporter, BlameReporter, Protocol):
    def leave(self) -> None:
        """Announces a departure; it takes effect between two steps."""

    def close(self) -> None: ...


def expect_first_loop(*, began: bool) -> None:
    """Raises UsageError if a loop over the batches of a job began before in this process."""
    if began:
        raise UsageError(
            "a second loop over Elastic batches began in one process",
            hint="Elastic(epochs=N) gives the batches of all epochs to one `for batch in job:`; to train with other "
            "settings afterwards, begin another job from the first one's checkpoint",
        )
