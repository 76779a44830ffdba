"""Who writes checkpoints, and when: rank 0, at the ends of epochs or every so many steps, beside the training.

The state is copied between two steps, which is all that training waits for; a thread writes the copy. A disk or store
that fails costs a warning and keeps the older checkpoints; only the last checkpoint of a job has to succeed.

    due                            while the last one is still being written
    every so many steps, epoch     skipped: waiting would stall the step, and the next one is not far
    best so far, asked for         copied now, written after it; a third one waits
    the job's last                 waits
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import torch

from trueline import events
from trueline.checkpoint import checkpoint
from trueline.checkpoint.snapshot import Copied, StateCopy
from trueline.errors import StorageError, TruelineError
from trueline.storage.location import Location, parse_location
from trueline.train.faults import Faults
from trueline.train.job_dir import JobDir
from trueline.train.link.contract import ProgressReporter
from trueline.train.settings import Fault, JobSettings
from trueline.train.step.replica import Replica
from trueline.version import __version__

KEEP = 3
NICENESS = 10
"""Of the thread that writes: training goes first where cores are scarce."""


class Checkpointer:
    """Writes to `folder` (a path or a URL) and keeps the newest `keep` checkpoints beside the best one."""

    def __init__(
        self,
        folder: Location,
        facts: dict[str, Any],
        *,
        every: int = 0,
        keep: int = KEEP,
        faults: tuple[Fault, ...] = (),
    ) -> None:
        self._faults = faults
        self.folder, self.facts, self.every, self.keep = parse_location(folder), facts, every, keep
        self._copies = StateCopy()
        self._writers: list[threading.Thread] = []
        self._failure: TruelineError | None = None
        self._saved: object = None
        self._begun = 0
        """Steps of the newest state that was copied."""

    @classmethod
    def of(cls, settings: JobSettings, job_dir: Path, facts: dict[str, Any]) -> Checkpointer:
        """The checkpointer that a job's settings ask for; `facts` are about what it trains."""
        where = settings.checkpoints or str(JobDir(job_dir).checkpoints)
        job = {"name": settings.name, "seed": settings.seed, "global_batch": settings.global_batch,
               "epochs": settings.epochs}  # fmt: skip
        versions = {"trueline": __version__, "torch": str(torch.__version__)}
        return cls(
            where, {**versions, "job": job, **facts}, every=settings.checkpoint_every, keep=settings.keep,
            faults=settings.faults,
        )  # fmt: skip

    def after_step(
        self, replica: Replica, link: ProgressReporter, *, ends_epoch: bool, best: bool = False, due: bool = False
    ) -> None:
        """Writes a checkpoint when one is due after the step just applied.

        `best` says that an evaluation of this very state is the best so far, `due` that somebody asks for one, as the
        master may too (`link.save_from`); none of these is skipped.
        """
        steps = replica.ledger.steps
        due = due or self._begun < link.save_from <= steps
        busy = self._busy()
        if best or due:
            if busy > 1:
                self._join()
            self._begin(replica, link)
        elif steps % self.every == 0 if self.every else ends_epoch:
            if busy:
                events.emit("checkpoint.skipped", step=steps, why="the last one is still being written")
            else:
                self._begin(replica, link)

    def _busy(self) -> int:
        self._writers = [thread for thread in self._writers if thread.is_alive()]
        return len(self._writers)

    def _begin(self, replica: Replica, link: ProgressReporter) -> None:
        self._begun = replica.ledger.steps
        copied = self._copies.take(replica.state())
        before = self._writers[-1] if self._writers else None
        writer = threading.Thread(target=self._run, args=(before, copied, link), name="checkpoint")
        self._writers.append(writer)
        writer.start()

    def _run(self, before: threading.Thread | None, copied: Copied, link: ProgressReporter) -> None:
        if before is not None:
            before.join()
        with contextlib.suppress(OSError, AttributeError):  # where threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        ledger = copied.state["ledger"]
        try:
            self._write(copied.state, link)
            self._saved, self._failure = _mark(ledger), None
        except TruelineError as error:
            self._fail(ledger["steps"], error)
        except Exception as error:  # noqa: BLE001  the thread's end: whoever waits for it raises it
            self._fail(ledger["steps"], StorageError(f"no checkpoint was written: {type(error).__name__}: {error}"))
        finally:
            copied.release()

    def _fail(self, step: int, error: TruelineError) -> None:
        self._failure = error
        events.emit("checkpoint.failed", step=step, why=error.message)

    def _write(self, state: dict[str, Any], link: ProgressReporter) -> None:
        ledger = state["ledger"]
        step, evaluations = ledger["steps"], ledger.get("evaluations") or []
        facts = {**self.facts, "certificates": ledger["certificates"], "evaluations": evaluations}
        path = checkpoint.write(
            self.folder, step=step, state=state, facts=facts, sealing=lambda: self._sealing(step, link)
        )
        link.report_checkpoint(step, str(path), checkpoint.read_manifest(path)["digest"])
        try:
            checkpoint.prune(self.folder, newest=step, keep=self.keep, best=checkpoint.best_step(evaluations))
        except StorageError as error:  # the checkpoint is there; what is too many goes with the next one
            events.emit("checkpoint.not_pruned", step=step, why=error.message)

    def _sealing(self, step: int, link: ProgressReporter) -> None:
        if self._faults:
            Faults(self._faults, link.ref).at("saving", step)

    def _join(self) -> None:
        for writer in self._writers:
            writer.join()

    def complete(self, replica: Replica, link: ProgressReporter) -> None:
        """Returns when the state of the last step is on the disk, whoever was to write it and died.

        Raises StorageError.
        """
        self._join()
        if self._saved != _mark(replica.ledger.as_tree()):
            self._begin(replica, link)
            self._join()
        if self._failure is not None:
            raise self._failure


def _mark(ledger: dict[str, Any]) -> tuple[int, int]:
    """What tells a state from another of the same job: it may be evaluated after it was written."""
    return ledger["steps"], len(ledger.get("evaluations") or [])
