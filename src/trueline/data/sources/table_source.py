"""A Source over Records of any format: the recipe's `feed` makes tensors of them."""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from trueline.data import list_lengths, stray_text
from trueline.data.loading.column_feed import ColumnFeed
from trueline.data.loading.decoded_cache import TableCache, run_of
from trueline.data.loading.tensors import LABELS, DefaultFeed
from trueline.data.missing import Missing, count_missing, fill, refuse
from trueline.data.order.permutation import Indices
from trueline.data.records import Records
from trueline.data.source import Batch, Mode, check_indices
from trueline.data.sources.mixture import describe_record
from trueline.errors import DataError, name_type

CACHE_BYTES = 256 * 2**20
AHEAD = 2
"""Batches that are decoded ahead, at most."""


class TableSource:
    """`where` names the records in messages; `missing` has the rules for missing values, `fills` what replaces them.
    Raises DataError when there are no records."""

    def __init__(
        self,
        records: Records,
        feed: Callable[..., Any],
        *,
        mode: Mode,
        where: str,
        cache_bytes: int = CACHE_BYTES,
        missing: Missing | None = None,
        fills: Mapping[str, float | str] | None = None,
    ) -> None:
        if not records.units:
            raise DataError(f"{where} holds no records")
        self.records, self.units, self.forks = records, records.units, records.forks
        self._feed, self._mode, self._where = feed, mode, where
        self._missing, self.fills = missing or Missing(), dict(fills or {})
        self.num_records = records.units[-1].offset + records.units[-1].count
        self._what = f"feed(records, '{mode}')"
        self._inputs, self._labels = f"inputs of {self._what}", f"labels of {self._what}"
        self._tables = TableCache(records, cache_bytes)
        self._coming: dict[bytes, Future[pa.Table]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def read(self, indices: Indices) -> Batch:
        run = run_of(indices)
        if run is None or run[0] < 0 or run[1] > self.num_records:
            check_indices(indices, self.num_records, self._where)
        elif not self._coming:  # as in an evaluation
            return self._feed_table(self._tables.take_run(*run))
        return self._feed_table(self.table(indices))

    def table(self, indices: Indices) -> pa.Table:
        """The records `indices`, in that order, in memory of the caller's own. Raises DataError."""
        coming = self._coming.pop(indices.tobytes(), None) if self._coming else None
        if coming is not None:
            return coming.result()
        for other in self._coming.values():  # others were requested: the members changed
            other.cancel()
        self._coming.clear()
        return self._tables.take(indices)

    def prefetch(self, indices: Indices) -> None:
        """Decodes `indices` in a thread for a later `read` of exactly these, which calls `feed` and raises errors."""
        key = indices.tobytes()
        if len(self._coming) >= AHEAD or key in self._coming or not len(indices):
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._coming[key] = self._thread.submit(self._tables.take, indices)

    def fingerprint(self) -> str:
        return self.records.fingerprint()

    def check_missing(self) -> None:
        """Raises MissingValues for columns with missing values that have no rule, and for those with numbers that
        float32 cannot hold, by count and first record; UnequalLengths for lists that are longer in some records.

        A `feed` of the user's may handle them: it is tried on the first record that has one.
        """
        feed, used = self._feed, self.records.schema.names
        if isinstance(feed, ColumnFeed):
            return  # the fit of the columns has counted them
        if isinstance(feed, DefaultFeed):
            used = feed.columns(self.records.schema, self._mode)
        counted = [name for name in used if self._missing.rule(name)[0] != "keep"]
        count = count_missing(self.records, counted)
        gaps = [(key, gap) for key, gap in count.gaps.items() if gap.beyond or gap.column not in self.fills]
        tried = not isinstance(feed, DefaultFeed)
        count.gaps = {key: gap for key, gap in gaps if not (tried and self._can_feed(gap.first, finite=gap.beyond))}
        refuse(count, partial(describe_record, self), labels=LABELS)
        if tried:
            self._check_stray_text(counted)
        self._check_list_lengths(counted, tried=tried)

    def _check_stray_text(self, names: list[str]) -> None:
        """Raises MissingValues for text among numbers that the user's `feed` fails on, where it takes other records, or
        would take them if the columns were numbers, as they are without the text."""
        found, plain = stray_text.find_stray_text(self.records, names)
        if not found or plain < 0:
            return
        if not (why := self._explain_failure(plain)):
            found = [one for one in found if not self._can_feed(one.first, finite=False)]
        elif self._explain_failure(plain, {one.column for one in found}):
            return  # it fails on something else
        stray_text.refuse(found, partial(describe_record, self), why)

    def _check_list_lengths(self, names: list[str], *, tried: bool) -> None:
        """Raises UnequalLengths for lists that are longer in some records, if the user's `feed` takes two of one
        length and not two of different ones."""
        found, seen = list_lengths.find_unequal_lists(self.records, names)
        refused = [one for one in found if not tried or self._fails_mixed(one.example, one.first)]
        list_lengths.refuse(refused, seen, partial(describe_record, self))

    def _fails_mixed(self, one: int, other: int) -> bool:
        """Whether records can be read, but not in a batch of both."""
        fails = []
        for records in ([one, one], [other, other], [one, other]):
            try:
                self.read(np.array(records, np.int64))
                fails.append(False)
            except DataError:
                fails.append(True)
        return fails == [False, False, True]

    def _can_feed(self, record: int, *, finite: bool) -> bool:
        """Whether `feed` makes tensors without NaN of a record that lacks a value; `finite`: and without infinity."""
        import torch

        try:
            batch = self.read(np.array([record, record], np.int64))
        except DataError:
            return False
        tensors = [one for one in _leaves((batch.inputs, batch.labels)) if isinstance(one, torch.Tensor)]
        return not any(_lacks(one, finite=finite) for one in tensors)

    def _explain_failure(self, record: int, numbers: Collection[str] = ()) -> str:
        """Why `feed` fails on a record, of which the columns `numbers` are made numbers; empty: it does not."""
        try:
            self._feed_table(stray_text.cast(self.table(np.array([record, record], np.int64)), numbers))
        except DataError as error:
            return error.message
        return ""

    def _feed_table(self, table: pa.Table) -> Batch:
        table = fill(table, self.fills) if self.fills else table
        try:
            result = self._feed(table, self._mode)
        except DataError:
            raise
        except Exception as error:
            where = f"{len(table)} records with columns {', '.join(table.column_names)}"
            raise DataError(f"{self._what} fails on {where}: {type(error).__name__}: {error}") from error
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            count = f" of {len(result)}" if isinstance(result, tuple | list) else ""
            raise DataError(f"{self._what} returned {name_type(result)}{count}, expected (inputs, labels)")
        inputs, labels = result
        _check_count(inputs, table.num_rows, self._inputs)
        if labels is not None or self._mode != "prediction":
            _check_count(labels, table.num_rows, self._labels)
        return Batch(inputs, labels)


def _lacks(tensor: Any, *, finite: bool) -> bool:
    """Whether it has NaN, or what numpy's cast of NaN to a whole number is; `finite`: or infinity."""
    import torch

    if tensor.is_floating_point():
        return bool((~tensor.isfinite() if finite else tensor.isnan()).any())
    return tensor.dtype in (torch.int64, torch.int32) and bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list | tuple) else [value]


def _check_count(value: Any, count: int, what: str) -> None:
    import torch

    if type(value) is torch.Tensor or isinstance(value, torch.Tensor):  # the first is ten times as fast
        shape = value.shape
        if not shape or shape[0] != count:
            raise DataError(f"{what}: a tensor of shape {list(shape)}, expected {count} records first")
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_count(item, count, f"'{name}' in {what}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check_count(item, count, f"item {number} in {what}")
    else:
        raise DataError(
            f"{what}: found {name_type(value)}, expected tensors",
            hint="make them with trueline.data.loading.tensors.tensor(records['column'])",
        )
