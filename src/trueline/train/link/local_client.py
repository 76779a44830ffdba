"""The line of a process that trains alone (a notebook, a plain script): one view, one plan, nobody to tell."""

from __future__ import annotations

from collections.abc import Sequence

from trueline.train.link.step_report import Stepped
from trueline.wire import train_pb2 as pb

TRIES = 3
"""Groups in a row that may fail to form: torch's store misses a client of its first moments now and then."""


class Solo:
    """A world of one process and no master: one view, one plan, nobody to tell."""

    def __init__(self) -> None:
        self.ref = "worker-0.0"
        self.leads = True
        self.save_from = 0
        self._store = ""
        self._view: pb.View | None = None
        self._misses = 0
        self.steps: list[Stepped] = []
        self.evaluations: list[pb.Evaluation] = []

    def ready(
        self,
        store: str,
        *,
        state: str,
        num_records: int,
        total_steps: int,
        shard_records: int,
        blocks: Sequence[int] = (),
    ) -> None:
        self._store = store
        self._view = pb.View(generation=1, members=[self.ref], cut_below=1, reason="alone")

    def newest(self) -> pb.View | None:
        return self._view

    def wait_view(self, after: int, timeout_s: float, *, cuts: int = -1) -> pb.View | None:
        return self._view if self._view is not None and self._view.generation > after else None

    def enter(self, generation: int, step: int, rate: float) -> pb.Plan:
        return pb.Plan(source=0, steps=[step], rates=[rate], store=self._store)

    def finish(self, generation: int, step: int) -> pb.Plan:
        return pb.Plan(finished=True)

    def progress(self, generation: int, step: int, applied: Stepped, certificate: pb.Certificate | None) -> None:
        self._misses = 0
        self.steps.append(applied)

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        self.evaluations.append(evaluation)

    def doing(self, phase: str) -> None:
        return

    def suspect(self, step: int, record: int, why: str, where: str) -> None:
        """Alone there is nobody else to try: one vote decides."""
        generation = 1 if self._view is None else self._view.generation + 1
        aside = sorted({*(self._view.set_aside if self._view is not None else ()), record})
        self._view = pb.View(generation=generation, members=[self.ref], cut_below=generation, set_aside=aside)

    def trying(self, step: int, record: int, where: str) -> None:
        return

    def certify(self, certificates: list[pb.Certificate]) -> None:
        return

    def flush(self) -> None:
        return

    def saved(self, step: int, path: str, digest: str) -> None:
        return

    def leave(self) -> None:
        return

    def broken(self, generation: int, what: str) -> None:
        """The next view, in which the group is tried once more. Raises RuntimeError after `TRIES` in a row."""
        self._misses += 1
        if self._misses >= TRIES:
            raise RuntimeError(what)
        aside = () if self._view is None else self._view.set_aside
        self._view = pb.View(generation=generation + 1, members=[self.ref], cut_below=generation + 1, set_aside=aside)

    def fail(self, what: str, detail: str) -> None:
        return

    def close(self) -> None:
        return
