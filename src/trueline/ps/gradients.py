"""What a worker gets from the servers for a minibatch, and what it gives them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from trueline.ps.partition import Ids
from trueline.ps.split import Rows

Key = tuple[int, int]


class Pulled(NamedTuple):
    """`rows`: by table, in the order of the ids; `dense`: flat, by name; `steps`: of each server."""

    rows: dict[str, Rows]
    dense: dict[str, Rows]
    steps: dict[str, int]


@dataclass
class Gradients:
    """What a minibatch tells the servers. `tables`: unique int64 ids and summed float32 rows; `dense`: flat gradients,
    and the values of buffers; `lrs`: by parameter group; `pulled`: the steps of the pull. The arrays may not change
    until the push is acknowledged."""

    epoch: int
    minibatch: int
    weight: float
    lrs: tuple[float, ...]
    tables: Mapping[str, tuple[Ids, Rows]]
    dense: Mapping[str, Rows]
    pulled: Mapping[str, int] = field(default_factory=dict)
    part: int = 0
    parts: int = 1
    attempt: int = 0
    scale: float = 0.0
    """Above 0: the last part of an attempt, without rows; the gradients of the others are multiplied by it."""

    @property
    def key(self) -> Key:
        return self.epoch, self.minibatch
