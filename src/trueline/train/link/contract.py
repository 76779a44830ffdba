"""A worker's line to the master: views come in, progress goes out, and the master may be away for a while.

The seam is `Link`: `MasterLink` speaks to a master over gRPC, `Solo` is the same for a process that trains alone.
Training needs the master only when the membership changes, so every call waits for one that is being restarted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from trueline.errors import TrainError
from trueline.train.link.grpc_client import MasterLink
from trueline.train.link.local_client import Solo
from trueline.train.link.step_report import Stepped
from trueline.wire import train_pb2 as pb


class Link(Protocol):
    ref: str
    leads: bool
    """Whether this worker reports every step at once. The others keep theirs until the log has them, and report
    those that it does not get within three seconds: the one that leads may be dead."""
    save_from: int
    """An operator asks for a checkpoint of so many steps or more; 0: nobody does."""

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
        """Says that this worker can train; views arrive from now on.

        `state`: where its state can be fetched; `shard_records`: of a shard into which it cuts steps, 0: it cuts none;
        `blocks`: how many of its records lie together, where the order is one of windows.
        """
        ...

    def newest(self) -> pb.View | None: ...

    def wait_view(self, after: int, timeout_s: float, *, cuts: int = -1) -> pb.View | None:
        """The newest view if its generation is above `after`, else None after `timeout_s`.

        It also has to cut generation `cuts`; -1, for those who need no cut, is cut by every view.
        """
        ...

    def enter(self, generation: int, step: int, rate: float) -> pb.Plan:
        """Enters a view, with everything that was not reported yet; answered when all its members have entered."""
        ...

    def finish(self, generation: int, step: int) -> pb.Plan: ...

    def progress(self, generation: int, step: int, applied: Stepped, certificate: pb.Certificate | None) -> None:
        """Reports a step without waiting."""
        ...

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        """Reports an evaluation without waiting."""
        ...

    def doing(self, phase: str) -> None:
        """What this worker is at from now on; the master sees it in the next heartbeat."""
        ...

    def suspect(self, step: int, record: int, why: str, where: str) -> None:
        """One vote against `record`, which lies `where` (part, file and record in it)."""
        ...

    def trying(self, step: int, record: int, where: str) -> None:
        """Waits until the master knows that `record` is about to be tried; -1: the trial is over."""
        ...

    def certify(self, certificates: list[pb.Certificate]) -> None:
        """Reports the certificates of the state at hand again: whoever reported them first may have died with it."""
        ...

    def flush(self) -> None:
        """Waits until everything reported so far is in the master's log."""
        ...

    def saved(self, step: int, path: str, digest: str) -> None: ...

    def leave(self) -> None: ...

    def broken(self, generation: int, what: str) -> None: ...

    def fail(self, what: str, detail: str) -> None: ...

    def close(self) -> None: ...


def connect(cut: Callable[[int], None]) -> Link:
    """The line to the master that started this process, or `Solo` when none did."""
    address = os.environ.get("TRUELINE_MASTER")
    if address is None:
        return Solo()
    try:
        return MasterLink(address, os.environ["TRUELINE_SECRET"], os.environ["TRUELINE_REF"], cut)
    except KeyError as error:
        raise TrainError(
            f"TRUELINE_MASTER is set but {error} is not", hint="start workers through an engine"
        ) from error
