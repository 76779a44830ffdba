"""Writes checkpoints beside the training: rank 0, at the end of each epoch or every `every` steps.

A thread writes a snapshot of the state; training waits only while the next step copies what is not written by then. A
full disk is waited for. Another failure is a warning and the older checkpoints stay; only the job's last checkpoint has
to succeed. While one is still being written, a regular one is skipped (waiting would stall the step), the best so far
or a requested one is taken now and written afterwards (a third one waits), and the job's last one waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any, Self

import msgspec
import torch

from trueline import events, files
from trueline.checkpoint import checkpoint, model_files
from trueline.checkpoint.snapshot import Snapshot
from trueline.data.source import Source
from trueline.engine.hosts.messages import ScriptValues
from trueline.errors import DiskFull, StorageError, TruelineError
from trueline.full_disk import PATIENCE_S
from trueline.storage.location import Location, join_location, parse_location
from trueline.train import records
from trueline.train import settings as job_settings
from trueline.train.faults import Faults
from trueline.train.job_dir import JobDir
from trueline.train.link.contract import ProgressReporter
from trueline.train.link.grpc_client import agree_on_script
from trueline.train.settings import Fault, JobSettings
from trueline.train.step.ledger import read_list
from trueline.train.step.plan import JobPlan
from trueline.train.step.replica import Replica
from trueline.version import __version__

SHELF_BYTES = 96 << 20
ROOM_S, TRY_S = 0.2, 10.0
"""How often a full disk is looked at, and how often a checkpoint is tried whatever that says."""
LAST_TRIES, LAST_S = 3, 1.0
"""How often the job's last checkpoint is tried while the store fails, and how long apart."""


class Checkpointer:
    """Writes to `folder` (a path or a URL), and keeps the newest `keep` checkpoints and the best one."""

    def __init__(
        self, folder: Location, facts: dict[str, Any], *, every: int = 0, keep: int = 3, faults: tuple[Fault, ...] = ()
    ) -> None:
        self._faults = faults
        self.folder, self.facts, self.every, self.keep = parse_location(folder), facts, every, keep
        self._writers: list[threading.Thread] = []
        self._shelf = torch.empty(0, dtype=torch.uint8)
        """Memory for snapshots. The first touch of new memory takes a step five times as long as the copy."""
        self._failure: TruelineError | None = None
        self._saved: object = None
        self._told = False  # the master knows that a checkpoint waits for room
        self._last = False  # training is over and waits
        self._begun = 0  # steps of the newest state that was copied
        self._halts_at = -1  # steps of the state after which this worker applies none, as the job halts
        self.wants_best = False  # the job's result is the checkpoint of its best evaluation

    @classmethod
    def of(cls, settings: JobSettings, job_dir: Path, facts: dict[str, Any]) -> Self:
        """The checkpointer of a job; `facts` describe what it trains."""
        where = settings.checkpoints or str(JobDir(job_dir).checkpoints)
        job = {name: getattr(settings, name) for name in ("name", "seed", "global_batch", "epochs")}
        facts = {"trueline": __version__, "torch": str(torch.__version__), "job": job, **facts}
        made = cls(where, facts, every=settings.checkpoint_every, keep=settings.keep, faults=settings.faults)
        made.wants_best = settings.wants_best
        return made

    @classmethod
    def of_script(cls, plan: JobPlan, source: Source) -> tuple[Checkpointer | None, tuple[Fault, ...]]:
        """Checkpointer and faults for an `Elastic` created in a user's script; none outside a job. Raises UsageError.

        The first worker's Elastic decides epochs, global batch and seed; another one with other values is refused, on
        whichever host it is.
        """
        job_dir = os.environ.get("TRUELINE_JOB")
        if job_dir is None:
            return None, ()
        wanted = ScriptValues(epochs=plan.epochs, global_batch=plan.global_batch, seed=plan.seed)
        if "TRUELINE_CA" in os.environ:  # a joined host, which has a copy of the job's settings
            agree_on_script(wanted)
        job = job_settings.settle(Path(job_dir), **msgspec.structs.asdict(wanted))
        name = Path(job.script[0] if job.script else job.recipe).stem
        records.expect_same_files(data := source.fingerprint())
        facts = {"recipe": {"name": name, "digest": job.recipe_digest}, "data": data}
        return cls.of(job, Path(job_dir), facts), job.faults

    def after_step(
        self, replica: Replica, link: ProgressReporter, *, ends_epoch: bool, best: bool = False, due: bool = False
    ) -> None:
        """Writes a checkpoint if one is due after the step just applied.

        `best`: an evaluation of this state is the best so far. `due`: one was requested, as the master may too
        (`link.save_from`). Neither is skipped.
        """
        steps = replica.ledger.steps
        halting = link.halting and bool(link.save_from) and link.save_from <= steps
        due = due or halting or self._begun < link.save_from <= steps
        self._writers = [thread for thread in self._writers if thread.is_alive()]
        busy = len(self._writers)
        due = due or (isinstance(self._failure, DiskFull) and not busy)
        if best or due:
            if busy > 1:
                self._join()
            self._halts_at = steps if halting else -1
            self._begin(replica, link)
            if halting:
                self._wait_for_end(replica, link)
        elif steps % self.every == 0 if self.every else ends_epoch:
            if busy:
                events.emit("checkpoint.skipped", step=steps, why="the last one is still being written")
            else:
                self._begin(replica, link)

    def _wait_for_end(self, replica: Replica, link: ProgressReporter) -> None:
        """Applies no further step, and no other worker can, until the master has ended the job, or does not want to."""
        self._join()
        while link.halting and isinstance(self._failure, DiskFull):
            self._begin(replica, link)
            self._join()
        while link.halting and self._failure is None:
            time.sleep(0.02)  # this process is killed
        self._halts_at = -1

    def _begin(self, replica: Replica, link: ProgressReporter) -> None:
        self._begun = replica.ledger.steps
        spill = self.folder if isinstance(self.folder, Path) else None
        snapshot, ledger = replica.snapshot(spill=spill), replica.ledger.as_tree()
        before = self._writers[-1] if self._writers else None
        if before is None:
            snapshot.shelf = self._shelf
        writer = threading.Thread(target=self._run, args=(before, snapshot, ledger, link), name="checkpoint")
        self._writers.append(writer)
        writer.start()

    def _run(
        self, before: threading.Thread | None, snapshot: Snapshot, ledger: dict[str, Any], link: ProgressReporter
    ) -> None:
        """Has the priority of its process. A lower one would stall the steps beside other load: a thread that requests
        the interpreter's lock after 5 ms makes the training thread wait until it has had it, and with the priority 19
        it gets a seventieth of a busy processor. Source: `drop_gil` in CPython's Python/ceval_gil."""
        if before is not None:
            before.join()
        try:
            self._await_room(snapshot, ledger["steps"], link)
            self._write(snapshot, ledger, link)
            self._told = False
            self._saved, self._failure = _identify(ledger), None
        except DiskFull as error:  # what was read of the snapshot is gone: the next step takes another one
            self._failure = error
            self._tell(ledger["steps"], error, link)
            self._wait_for_room(snapshot.total)
        except TruelineError as error:
            self._fail(ledger["steps"], error)
        except Exception as error:  # noqa: BLE001  the thread's end: `complete` raises it
            self._fail(ledger["steps"], StorageError(f"no checkpoint was written: {type(error).__name__}: {error}"))
        finally:
            snapshot.close()
            if not len(self._shelf) and not self._last:  # not before: it takes time that a reader needs
                self._shelf = torch.empty(choose_shelf_bytes(snapshot.live_bytes), dtype=torch.uint8).zero_()

    def _await_room(self, snapshot: Snapshot, step: int, link: ProgressReporter) -> None:
        """Waits while the disk has too little room for `snapshot`, which can be read only once."""
        if isinstance(self.folder, Path) and _free(self.folder) < snapshot.total:
            self._tell(step, files.storage_error(OSError(errno.ENOSPC, "full"), self.folder), link)
            self._wait_for_room(snapshot.total)

    def _tell(self, step: int, error: TruelineError, link: ProgressReporter) -> None:
        """Tells the master, once, that a checkpoint waits for room."""
        if not self._told:
            self._told = True
            events.emit("checkpoint.waiting", step=step, why=error.message)
            path = join_location(self.folder, checkpoint.folder_name(step))
            link.report_checkpoint(step, str(path), "", full=error.message)

    def _wait_for_room(self, needed: int) -> None:
        """Until the disk has `needed` bytes, or TRY_S seconds: a quota does not show there."""
        until = time.monotonic() + TRY_S
        time.sleep(ROOM_S)
        while isinstance(self.folder, Path) and time.monotonic() < until and _free(self.folder) < needed:
            time.sleep(ROOM_S)  # no system tells of room

    def _fail(self, step: int, error: TruelineError) -> None:
        self._failure = error
        events.emit("checkpoint.failed", step=step, why=error.message)

    def _write(self, snapshot: Snapshot | dict[str, Any], ledger: dict[str, Any], link: ProgressReporter) -> None:
        step, evaluations = ledger["steps"], read_list(ledger, "evaluations")
        facts = {**self.facts, "certificates": read_list(ledger, "certificates"), "evaluations": evaluations}
        if ledger.get("loss"):
            facts["loss"] = ledger["loss"]

        def strike() -> None:
            if self._faults:
                Faults(self._faults, link.ref).at("saving", step)

        path = checkpoint.write(self.folder, step=step, state=snapshot, facts=facts, sealing=strike)
        digest = checkpoint.read_manifest(path)["digest"]
        link.report_checkpoint(step, str(path), digest, last=step == self._halts_at)
        try:
            checkpoint.prune(self.folder, newest=step, keep=self.keep, best=checkpoint.best_step(evaluations))
        except StorageError as error:  # the checkpoint is complete; the next one prunes again
            events.emit("checkpoint.not_pruned", step=step, why=error.message)

    def _join(self) -> None:
        for writer in self._writers:
            writer.join()

    def complete(self, replica: Replica, link: ProgressReporter) -> None:
        """Returns when the last step's state is stored, even if its first writer has died. Raises StorageError."""
        self._join()
        self._last, left = True, LAST_TRIES
        while self._saved != _identify(replica.ledger.as_tree()) and left:
            self._begin(replica, link)
            self._join()
            if self._failure is not None and not isinstance(self._failure, DiskFull):
                left -= 1
                time.sleep(LAST_S if left else 0.0)
        if self._failure is not None:
            raise self._failure
        until = time.monotonic() + PATIENCE_S
        while isinstance(fault := self._write_model(replica), DiskFull) and time.monotonic() < until:
            time.sleep(ROOM_S)  # no system tells of room
        if fault is not None:
            events.emit("model.not_written", why=fault.message)

    def _write_model(self, replica: Replica) -> TruelineError | None:
        """Writes the job's result with the model's own names, for other tools. A failure does not fail the job: its
        checkpoint is stored."""
        try:
            best = checkpoint.best(self.folder) if self.wants_best else None
            state = replica.state() if best is None else checkpoint.read(best).state
            path = model_files.write_model(self.folder, replica.model, {**state["model"], **(state.get("ema") or {})})
            events.emit("model.written", path=str(path))
        except TruelineError as error:
            return error
        return None


def choose_shelf_bytes(live_bytes: int) -> int:
    """How much memory a worker keeps for snapshots of which so much is read where it is.

    Plain training with N parameters and two moments takes 16 N bytes and what torch takes, about 350 MB. A quarter of
    the 12 N bytes of the state and SHELF_BYTES more are less than a fifth of that.
    """
    return min(live_bytes, live_bytes // 4 + SHELF_BYTES)


def _identify(ledger: dict[str, Any]) -> tuple[int, int]:
    """Tells states of a job apart: a state may be evaluated after it was written."""
    return ledger["steps"], len(read_list(ledger, "evaluations"))


def _free(folder: Path) -> int:
    """Bytes of room on the disk of `folder`; plenty where the system does not say."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free
    return 1 << 62
