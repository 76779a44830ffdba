"""What tells the records of a batch apart: numbers that show masks, lengths and labels without a name."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trueline.data.source import Batch, Readable
from trueline.errors import UsageError
from trueline.train.step.contribution import StepBatch
from trueline.train.step.plan import Ints

MOST_WATCHED, MOST_VALUES = 4096, 64
"""Elements of a record's tensor, and values of its label, up to which they are watched in each step."""
PIECE = 1 << 22
"""Elements of a gradient that are looked through at a time."""
APART = 1e-4
"""Difference of a number from itself in another batch, relative to the largest of its kind, that is no rounding."""
Column = tuple[int, str, list[float]]
"""The tensor of a batch, what is watched in it, and what that was in all records that were looked at."""
_KINDS: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    "zeros": lambda rows: (rows == 0).sum(axis=1),
    "nans": lambda rows: np.isnan(rows).sum(axis=1),
    "lowest": lambda rows: rows.min(axis=1).clip(max=0),
    "value": lambda rows: rows[:, 0],
}


def _rows(batch: Batch | StepBatch, count: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """[records, elements] of each small tensor of a batch, with its number."""
    parts = batch.inputs, batch.labels
    plain = isinstance(parts[0], torch.Tensor) and isinstance(parts[1], torch.Tensor)
    for number, leaf in enumerate(parts if plain else torch.utils._pytree.tree_leaves(parts)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == count and not leaf.is_complex():
            flat = leaf.detach().reshape(count, -1)
            if 0 < flat.shape[1] <= MOST_WATCHED:
                flat = flat.float() if flat.dtype == torch.bfloat16 else flat
                yield number, flat.cpu().numpy()


COUNTS = 13, 11, 7, 5, 3, 2, 1
"""Records of a trial: primes, so that no part of them has the same share of them and of something else."""
POOL, LOOK_S = 512, 0.25
"""Most records that are looked at, and for how long, to find some that differ."""


def choose_any(reader: Readable, num_records: int, most: int, chance: np.random.Generator) -> Ints:
    """Records at random, those with numbers that are not finite last."""
    count = next(count for count in COUNTS if count <= most)
    picked: Ints = chance.choice(num_records, min(4 * count, num_records), replace=False).astype(np.int64)
    try:
        rows = [np.isfinite(part).all(axis=1) for _, part in _rows(reader.read(picked, epoch=0), len(picked))]
    except Exception:  # noqa: BLE001  a damaged record may raise anything; its step finds it
        return picked[:count]
    finite = np.logical_and.reduce(rows) if rows else np.ones(len(picked), bool)
    return picked[np.argsort(~finite, kind="stable")][:count]


def choose_different(
    reader: Readable, num_records: int, most: int, chance: np.random.Generator, *, apart: bool
) -> tuple[Ints, list[Column]]:
    """Records whose labels differ, the most different first, and what all that were looked at have in common. Those
    that cannot be read are left to their step. `apart`: raises UsageError if reading mixes records."""
    count = next(count for count in COUNTS if count <= most)
    spread = np.linspace(0, num_records - 1, min(POOL, num_records)).astype(np.int64)
    pool = chance.permutation(spread)
    keys, rows = np.full(len(pool), np.nan), list[tuple[int, list[float]]]()
    looks, until = Looks(), time.monotonic() + LOOK_S
    for start in range(0, len(pool), count):
        ids = pool[start : start + count]
        try:
            batch = reader.read(ids, epoch=0)
            keys[start : start + count] = sum_labels(batch, len(ids))
            rows += zip(range(start, start + len(ids)), measure(batch, len(ids)), strict=True)
            looks.add(batch, len(ids))
            if apart and len(ids) > 3:
                expect_apart(batch, ids, lambda part: reader.read(part, epoch=0))
        except UsageError:
            raise
        except Exception:  # noqa: BLE001  a damaged record may raise anything; its step finds it
            pass
        if time.monotonic() > until:
            break
    readable = np.flatnonzero(~np.isnan(keys))
    if not len(readable):
        return pool[:count], looks.columns()
    _, first = np.unique(keys[readable], return_index=True)
    few = readable[first[np.unique(np.linspace(0, len(first) - 1, count).astype(int))]]
    few = np.concatenate([few[-1:], find_strange(rows)[: count // 3], few[:-1]])
    few = few[np.sort(np.unique(few, return_index=True)[1])]
    chosen: Ints = pool[np.concatenate([few, np.setdiff1d(readable, few, assume_unique=True)])[:count]]
    return chosen, looks.columns()


class Looks:
    """What all records that were looked at have in common: numbers of zeros and of NaN, negative numbers, labels."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], set[float]] = {}

    def add(self, batch: Batch, count: int) -> None:
        for number, rows in _rows(batch, count):
            for kind in ("zeros", "nans") if rows.dtype.kind == "f" else ("zeros", "lowest", "value"):
                if kind != "value" or rows.shape[1] == 1:
                    seen = self._seen.setdefault((number, kind), set())
                    if len(seen) <= MOST_VALUES:
                        seen.update(np.unique(_KINDS[kind](rows)).tolist())

    def columns(self) -> list[Column]:
        """A column that varies is not watched, except for labels of few values."""
        return [
            (number, kind, sorted(seen))
            for (number, kind), seen in self._seen.items()
            if len(seen) == 1 or (kind == "value" and len(seen) <= MOST_VALUES)
        ]


@dataclass(frozen=True, slots=True)
class News:
    """Records of a batch that are something new in a column: their places and values."""

    column: Column
    places: Ints
    values: list[float]


def _is_usual(rows: npt.NDArray[Any], kind: str, seen: list[float]) -> bool:
    """Whether nothing in `rows` is new, by one pass over them; most batches of most jobs end here. False: not known."""
    if kind == "value":
        return frozenset(seen).issuperset(rows[:, 0].tolist())
    if seen != [0]:
        return False
    if kind == "zeros":
        return bool(rows.all())
    least = rows.min()  # NaN if any number is
    return not np.isnan(least) if kind == "nans" else bool(least >= 0)


def find_new(columns: Sequence[Column], batch: Batch | StepBatch, count: int) -> News | None:
    """The first column in which some of the `count` records of `batch` are something new."""
    rows = dict(_rows(batch, count)) if columns else {}
    for column in columns:
        number, kind, seen = column
        if number in rows and not _is_usual(rows[number], kind, seen):
            values = _KINDS[kind](rows[number])
            new = values != seen[0] if len(seen) == 1 else ~np.isin(values, seen)
            if new.any():
                return News(column, np.flatnonzero(new), values[new].tolist())
    return None


def sum_labels(batch: Batch, count: int) -> list[float]:
    """A number for each record, which tells records with other labels apart."""
    flat = torch.utils._pytree.tree_leaves(batch.labels if batch.labels is not None else batch.inputs)
    tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == count]
    sums = [leaf.detach().cpu().double().reshape(count, -1).sum(dim=1) for leaf in tensors]
    total: list[float] = sum(sums, torch.zeros(count, dtype=torch.float64)).nan_to_num().tolist()
    return total


def measure(batch: Batch, count: int) -> list[list[float]]:
    """Of each record, sum and number of zeros in each of its tensors: masks and lengths are among the inputs too."""
    leaves = torch.utils._pytree.tree_leaves((batch.inputs, batch.labels))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == count]
    flat = [leaf.detach().cpu().reshape(count, -1) for leaf in tensors if not leaf.is_complex()]
    found = [part for leaf in flat for part in ((leaf == 0).sum(dim=1).double(), leaf.double().sum(dim=1).nan_to_num())]
    rows: list[list[float]] = torch.stack(found, dim=1).tolist() if found else [[] for _ in range(count)]
    return rows


def find_strange(rows: Sequence[tuple[int, list[float]]]) -> Ints:
    """Places of the records that differ most from the others in a feature, those in numbers of zeros first."""
    widths = {len(row) for _, row in rows}
    if len(widths) != 1 or widths == {0}:
        return np.empty(0, np.int64)
    places, table = np.array([place for place, _ in rows]), np.array([row for _, row in rows])
    away = np.abs(table - np.median(table, axis=0))
    columns = [
        column for column in (*range(0, table.shape[1], 2), *range(1, table.shape[1], 2)) if away[:, column].any()
    ]
    found: Ints = places[[int(away[:, column].argmax()) for column in columns]].astype(np.int64)
    return found


def expect_apart(whole: Batch, ids: Ints, read: Callable[[Ints], Batch]) -> None:
    """Raises UsageError if reading mixes records: one that was read with others is no record of the batch `whole`. The
    order in a batch, and how far its records are padded, may be any."""
    every = _table(whole, len(ids))
    for part in (ids[::2], ids[1::2]):
        rows = None if every is None else _table(read(part), len(part))
        if every is None or rows is None or rows.shape[1] != every.shape[1]:
            return
        off = np.abs(every[None] - rows[:, None]) / (np.abs(every).max(axis=0) + np.finfo(np.float64).tiny)
        away = off.max(axis=2, initial=0.0).min(axis=1)
        if not (away > APART).any():
            continue
        if (again := _table(read(ids), len(ids))) is None or not np.array_equal(every, again):
            return  # from a generator, or a counter, that no seed reaches
        raise UsageError(
            f"reading mixes records: what it makes of record {int(part[int(away.argmax())])} depends on the others in "
            "its batch, so training would depend on how a step is shared",
            hint="use numbers of all records (a mean that is measured once, the recipe's columns, missing = "
            '"mean"); or set reduction = "mean" and micro_batch = N, and shards of N records are read together',
        )


def _table(batch: Batch, count: int) -> npt.NDArray[np.float64] | None:
    """[records, elements] All numbers of a batch that is small and has no others."""
    rows = [part for _, part in _rows(batch, count)]
    if not rows or sum(part.shape[1] for part in rows) > MOST_WATCHED:
        return None
    return np.nan_to_num(np.concatenate(rows, axis=1).astype(np.float64), posinf=0.0, neginf=0.0)


def pick_largest(gradient: torch.Tensor | None, of: torch.Tensor, most: int) -> torch.Tensor:
    """Indices of the largest elements, a piece at a time: an embedding's gradient is as large as a model."""
    if gradient is None:
        return torch.arange(min(most, of.numel()), device=of.device)
    flat, found = gradient.to_dense().detach().flatten(), list[torch.Tensor]()
    for start in range(0, len(flat), PIECE):
        part = flat[start : start + PIECE]
        found.append(start + part.abs().topk(min(most, len(part)), sorted=False).indices)
    if not found:
        return torch.arange(0, device=of.device)
    indices = torch.cat(found)
    return indices if len(found) == 1 else indices[flat[indices].abs().topk(min(most, len(indices))).indices]


def take_elements(gradient: torch.Tensor | None, indices: torch.Tensor) -> torch.Tensor:
    """The elements at `indices`, in double precision on the host; zeros of no gradient."""
    if gradient is None:
        return torch.zeros(len(indices), dtype=torch.float64)
    part = gradient.to_dense().detach().flatten()[indices]
    return part.to("cpu", torch.complex128 if part.is_complex() else torch.float64)


def measure_gradient(gradient: torch.Tensor | None) -> list[float]:
    """Its norm and its largest element."""
    if gradient is None or not gradient.numel():
        return [0.0, 0.0]
    flat = gradient.coalesce().values() if gradient.is_sparse else gradient
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).flatten()
    largest = flat[flat.abs().argmax()] if len(flat) else flat.sum()
    return [float(torch.linalg.vector_norm(flat.float())), float(largest)]
