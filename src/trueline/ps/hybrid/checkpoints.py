"""Checkpoints of a hybrid job: the worker's state of a step, and the tables of the same step in it.

Rank 0 has the servers fork at its step. None of them can continue without its part of the next step, so what they write
is of that step as well.
"""

from pathlib import Path
from typing import Any

import torch

from trueline import events
from trueline.checkpoint import checkpoint, model_files, tree
from trueline.checkpoint.snapshot import Snapshot
from trueline.errors import DiskFull, TruelineError
from trueline.ps.hybrid.calls import HybridLink
from trueline.ps.hybrid.rows import HybridTables
from trueline.ps.saver import join_parts
from trueline.train.link.contract import ProgressReporter
from trueline.train.step.checkpointer import Checkpointer
from trueline.train.step.replica import Replica


class TableCheckpointer(Checkpointer):
    tables: HybridTables
    link: HybridLink

    def _begin(self, replica: Replica, link: ProgressReporter) -> None:
        step = replica.ledger.steps
        try:
            self._folders = {**getattr(self, "_folders", {}), step: self.link.save(step)}
        except DiskFull as error:  # as where the state is written: it is tried again after the next step
            self._failure = error
            self._tell(step, error, link)
            self._wait_for_room(0)
            return
        super()._begin(replica, link)

    def _write(self, snapshot: Snapshot | dict[str, Any], ledger: dict[str, Any], link: ProgressReporter) -> None:
        assert isinstance(snapshot, Snapshot)
        folder = self.link.wait_saved(ledger["steps"], self._folders.pop(ledger["steps"]))
        joined, state = join_parts(sorted(Path(folder).glob("*.part"))), _read(snapshot)
        for kind, rows in (("model", joined.tables), ("ema", joined.averages)):
            if state.get(kind) is not None:
                for name in self.tables.list_names():
                    state[kind].pop(name, None)
                state[kind].update(self.tables.state(rows))
        super()._write(state, ledger, link)

    def _write_model(self, replica: Replica) -> TruelineError | None:
        try:
            newest = checkpoint.latest(self.folder)
            assert newest is not None
            path = model_files.write_model(
                self.folder, replica.model, {**newest.state["model"], **(newest.state.get("ema") or {})}
            )
            events.emit("model.written", path=str(path))
        except TruelineError as error:
            return error
        return None


def _read(snapshot: Snapshot) -> Any:
    """The state of a snapshot, in memory of its own."""
    tensors = []
    for index, like in enumerate(snapshot.layout):
        data = bytearray().join(snapshot.pieces(index))
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        tensors.append(flat.view(like.dtype).view(like.shape))
    return tree.decode(snapshot.skeleton, tensors)
