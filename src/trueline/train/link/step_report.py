"""An applied step as its worker notes it. It becomes a message when it is sent, which most never are: of all members
only one reports its steps, and the others forget theirs when the master has them.
"""

from __future__ import annotations

from typing import NamedTuple

from trueline.wire import train_pb2 as pb


class Stepped(NamedTuple):
    """The fields of `pb.Applied`, which says what they are."""

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

    def as_message(self) -> pb.Applied:
        return pb.Applied(**self._asdict())
