"""How ids, rows and dense values are divided among the servers of a routing, and joined again. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trueline.ps.messages import DensePart, Routing
from trueline.ps.partition import Ids, buckets_of, owners_of

Rows = npt.NDArray[np.float32]
_HALF_MAX = 65504.0


class IdSplit(NamedTuple):
    """`order[bounds[i] : bounds[i + 1]]` are the places of the ids of server i; no order: there is one server."""

    order: npt.NDArray[np.int64] | None
    bounds: list[int]

    def places(self, index: int) -> npt.NDArray[np.int64] | slice:
        if self.order is None:
            return slice(None)
        return self.order[self.bounds[index] : self.bounds[index + 1]]

    def count(self, index: int) -> int:
        return self.bounds[index + 1] - self.bounds[index]


def split_ids(routing: Routing, table: str, ids: Ids) -> IdSplit:
    count = len(routing.servers)
    if count == 1:
        return IdSplit(None, [0, len(ids)])
    owners = owners_of(routing)[buckets_of(ids, table)]
    bounds = np.concatenate(([0], np.cumsum(np.bincount(owners, minlength=count))))
    return IdSplit(np.argsort(owners, kind="stable"), bounds.tolist())


def parts_of(routing: Routing, index: int) -> list[DensePart]:
    """The dense parts of a server, in the order in which they travel."""
    return [part for part in routing.dense if part.server == index]


def name_part(part: DensePart) -> str:
    return f"{part.name}[{part.start}:{part.stop}]"


def slice_dense(parts: Sequence[DensePart], dense: Mapping[str, Rows]) -> list[Rows]:
    """Views of the parts of flat values. Raises KeyError for a name that `dense` lacks, ValueError for a wrong size."""
    found = []
    for part in parts:
        flat = dense[part.name]
        if flat.ndim != 1 or flat.size < part.stop:
            raise ValueError(f"dense value {part.name} has shape {flat.shape}, expected {part.stop} elements or more")
        found.append(flat[part.start : part.stop])
    return found


def empty_dense(routing: Routing) -> dict[str, Rows]:
    """Flat arrays for all dense values, to be filled part by part."""
    sizes: dict[str, int] = {}
    for part in routing.dense:
        sizes[part.name] = max(sizes.get(part.name, 0), part.stop)
    return {name: np.empty(size, np.float32) for name, size in sizes.items()}


def narrow(rows: Rows) -> npt.NDArray[np.float16]:
    """float16 rows. What is finite stays finite: a gradient beyond float16's range becomes its bound."""
    with np.errstate(over="ignore"):
        half = rows.astype(np.float16)
    if not np.isfinite(half).all():
        bounded = np.clip(rows, -_HALF_MAX, _HALF_MAX)
        half = np.where(np.isfinite(rows), bounded, rows).astype(np.float16)
    return half


def widen(rows: npt.NDArray[Any]) -> Rows:
    """float32 rows; those that are float32 are not copied."""
    return rows.astype(np.float32, copy=False)
