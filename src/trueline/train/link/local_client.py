"""The link of a process that trains alone (a notebook, a plain script): it has no master."""

from collections.abc import Callable, Sequence

from trueline.train.link.contract import StepReport, expect_first_loop
from trueline.wire import train_pb2 as pb

TRIES = 3
"""Groups in a row that may fail to form: torch's store misses a client of its first moments now and then."""


class LocalLink:
    """Stands in for a master of one worker. Reports are kept in `steps` and `evaluations`."""

    def __init__(self) -> None:
        self.ref = "worker-0.0"
        self.leads = True
        self.save_from = self._misses = 0
        self.halting = False
        self._store = ""
        self.transfer: Callable[[], tuple[int, int, bool]] = lambda: (0, 0, False)
        self.view: pb.View | None = None
        self.steps: list[StepReport] = []
        self.evaluations: list[pb.Evaluation] = []

    def join(self, hello: pb.Hello) -> None:
        expect_first_loop(began=self.view is not None)
        self._store = hello.store
        self.view = pb.View(generation=1, members=[self.ref], cut_below=1, reason="alone")

    def wait_view(self, after: int, timeout_s: float, *, cuts: int = -1) -> pb.View | None:
        return self.view if self.view is not None and self.view.generation > after else None

    def enter(self, generation: int, step: int, rate: float) -> pb.Plan:
        return pb.Plan(source=0, steps=[step], rates=[rate], store=self._store)

    def finish(self, generation: int, step: int, certificates: Sequence[pb.Certificate]) -> pb.Plan:
        return pb.Plan(finished=True)

    def report_step(self, generation: int, step: int, report: StepReport, certificate: pb.Certificate | None) -> None:
        self._misses = 0
        self.steps.append(report)

    def report_evaluation(self, evaluation: pb.Evaluation) -> None:
        self.evaluations.append(evaluation)

    def suspect(self, step: int, record: int, why: str, where: str) -> None:
        """One vote decides, since no other worker can try the record."""
        generation = 1 if self.view is None else self.view.generation + 1
        aside = sorted({*(self.view.set_aside if self.view is not None else ()), record})
        self.view = pb.View(generation=generation, members=[self.ref], cut_below=generation, set_aside=aside)

    def report_broken_group(self, generation: int, why: str) -> None:
        """The next view, in which the group is tried once more. Raises RuntimeError after `TRIES` in a row."""
        self._misses += 1
        if self._misses >= TRIES:
            raise RuntimeError(why)
        aside = () if self.view is None else self.view.set_aside
        self.view = pb.View(generation=generation + 1, members=[self.ref], cut_below=generation + 1, set_aside=aside)

    def _ignore(self, *_: object, **__: object) -> None:
        """There is no master to notify."""

    report_phase = announce_trial = report_checkpoint = leave = fail = close = _ignore
