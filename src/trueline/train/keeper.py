"""Who writes checkpoints, and when: rank 0, at the ends of epochs or every so many steps, beside the training.

The state is copied between two steps (milliseconds) and written by a thread; the next one waits for the last. A disk
that is full costs a warning and keeps the older checkpoints; only the last checkpoint of a job has to succeed.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

from trueline import events
from trueline.errors import TruelineError
from trueline.state import checkpoint
from trueline.train.link import Link
from trueline.train.replica import Replica

KEEP = 3
"""Older checkpoints than the newest three are removed."""


class Keeper:
    def __init__(self, folder: Path, facts: dict[str, Any], *, every: int = 0) -> None:
        self.folder, self.facts, self.every = folder, facts, every
        self._thread: threading.Thread | None = None
        self._failure: TruelineError | None = None
        self._saved = -1

    def after_step(self, replica: Replica, link: Link, *, ends_epoch: bool) -> None:
        """Writes a checkpoint when one is due after the step just applied."""
        steps = replica.ledger.steps
        if steps % self.every == 0 if self.every else ends_epoch:
            self._begin(replica, link)

    def _begin(self, replica: Replica, link: Link) -> None:
        self._join()
        state = replica.snapshot()
        self._thread = threading.Thread(target=self._write, args=(replica.ledger.steps, state, link), name="checkpoint")
        self._thread.start()

    def _write(self, steps: int, state: dict[str, Any], link: Link) -> None:
        try:
            facts = {**self.facts, "certificates": state["ledger"]["certificates"]}
            path = checkpoint.write(self.folder, step=steps, state=state, facts=facts)
            link.saved(steps, str(path), checkpoint.read_manifest(path)["digest"])
            self._saved, self._failure = steps, None
            self._prune()
        except TruelineError as error:
            self._failure = error
            events.emit("checkpoint.failed", step=steps, why=error.message)

    def _prune(self) -> None:
        for path in sorted(self.folder.glob("step-*"))[:-KEEP]:
            shutil.rmtree(path, ignore_errors=True)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def complete(self, replica: Replica, link: Link) -> None:
        """Returns when the state of the last step is on the disk, whoever was to write it and died.

        Raises StorageError.
        """
        self._join()
        if self._saved != replica.ledger.steps:
            self._begin(replica, link)
            self._join()
        if self._failure is not None:
            raise self._failure
