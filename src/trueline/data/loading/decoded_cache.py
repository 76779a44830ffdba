"""Decoded records, bounded in bytes: a cache of units for reads in any order, and streaming for sequential ones.

A batch of a shuffle window has a few records of each of a dozen units. Taking them unit by unit costs a dozen calls for
each column, so units that are used together are joined into one table, and a batch is one `take`. Joining copies, so it
is done only after enough records were taken unit by unit to pay for it. Sequential reads (evaluations, conversions)
decode pieces of some megabytes, so a unit may be larger than the memory.
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterator
from threading import Lock

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trueline.data.order.permutation import Ints
from trueline.data.records import FileRecords, Range, Records
from trueline.errors import DataError

_PAID = 64
"""Copying this many records in a row costs about as much as taking one record of a unit."""
_PARTIAL = 8
"""A ranged unit is read in part for fewer than one record in this many."""


class TableCache:
    """Any of `records` by number, and runs of them. Thread-safe."""

    def __init__(self, records: Records, cache_bytes: int) -> None:
        self._records = records
        self._starts = np.array([unit.offset for unit in records.units], np.int64)
        self._offsets = self._starts.tolist()
        self._resident = UnitCache(records, cache_bytes)
        self._passing = StreamReader(records, cache_bytes // 2)
        self._lock = Lock()

    def take(self, indices: npt.ArrayLike) -> pa.Table:
        """The records `indices`, in that order, in memory of the caller's own. Raises DataError."""
        records = np.asarray(indices, np.int64)
        if (run := run_of(records)) is not None:
            return self.take_run(*run)
        with self._lock:
            self._passing.forget()
            numbers = np.searchsorted(self._starts, records, side="right") - 1
            return self._resident.take(numbers, records - self._starts[numbers])

    def take_run(self, start: int, stop: int) -> pa.Table:
        """Records [start, stop), in memory of the caller's own. Raises DataError."""
        with self._lock:
            ready = self._passing.ready(start, stop)
            parts = [(table, True) for table in ready] if ready is not None else self._parts(start, stop)
        table, own = parts[0]
        if len(parts) > 1:
            return pa.concat_tables([table for table, _ in parts]).combine_chunks()
        if own:
            return table
        copies = [pa.concat_arrays(column.chunks) for column in table.columns]
        return pa.Table.from_arrays(copies, schema=table.schema)

    def run(self, start: int, stop: int) -> pa.Table:
        """Records [start, stop) in one piece, read-only: other callers may get the same memory. Raises DataError."""
        with self._lock:
            parts = [table for table, _ in self._parts(start, stop)]
        if len(parts) == 1:
            return parts[0]
        return pa.concat_tables(parts) if parts else self._records.schema.empty_table()

    def _parts(self, start: int, stop: int) -> list[tuple[pa.Table, bool]]:
        """Records [start, stop) in pieces, each with whether its memory is the caller's own."""
        parts: list[tuple[pa.Table, bool]] = []
        passing = self._passing
        if start != passing.at:
            passing.forget()
        follows = start in (0, passing.stopped)  # it continues the last read, or begins with the first record
        units = self._records.units
        for number in range(max(bisect_right(self._offsets, start) - 1, 0), len(units)):
            unit = units[number]
            if unit.offset >= stop:
                break
            begin, end = max(start - unit.offset, 0), min(stop - unit.offset, unit.count)
            passed = passing.at == unit.offset + begin
            if not passed and follows and not begin and number not in self._resident.tables:
                passed = passing.begin(number, stop - start)
            if passed:
                parts += [(table, True) for table in passing.pull(end - begin)]
            else:
                parts.append(self._resident.slice(number, begin, end))
        passing.stopped = stop
        return parts


def run_of(indices: Ints) -> tuple[int, int] | None:
    """The first of `indices` (int64) and the one after the last, if each is one more than the one before.

    >>> run_of(np.array([4, 5, 6])), run_of(np.array([4, 6, 5]))
    ((4, 7), None)
    """
    if not len(indices):
        return None
    start, stop = int(indices[0]), int(indices[-1]) + 1
    successive = stop - start == len(indices) and indices.tobytes() == np.arange(start, stop, dtype=np.int64).tobytes()
    return (start, stop) if successive else None


class UnitCache:
    """Half of `max_bytes` is for decoded units, evicted least recently used first, the other half for the joined table.
    The units of the current batch stay, whatever their size."""

    def __init__(self, records: Records, max_bytes: int) -> None:
        self._records = records
        self._max_bytes = max_bytes // 2
        self._num_bytes = 0
        self.tables: OrderedDict[int, pa.Table] = OrderedDict()
        self._recent: deque[Ints] = deque(maxlen=8)
        self._joined: pa.Table = None
        self._base = np.full(len(records.units), -1, np.int64)
        self._slow = 0

    def take(self, numbers: Ints, rows: Ints) -> pa.Table:
        """Record `rows[i]` of unit `numbers[i]`, for each i, copied. Raises DataError."""
        base = self._base[numbers]
        if base.min() < 0:  # not all are joined
            units = np.unique(numbers)
            self._recent.append(units)
            cached = len(units) > 1 and all(int(unit) in self.tables for unit in units)
            if not (cached and self._join()):
                return self._by_unit(numbers, rows)
            base = self._base[numbers]
        return self._joined.take(pa.array(base + rows))

    def slice(self, unit: int, start: int, stop: int) -> tuple[pa.Table, bool]:
        """Records [start, stop) of `unit`, and whether their memory is the caller's own. Raises DataError."""
        if self._records.ranged and unit not in self.tables:
            return self._records.load(unit, start, stop).combine_chunks(), True
        table = self._whole(unit)
        if stop == len(table) and table.nbytes * len(self._records.units) > self._max_bytes:
            # A sequential reader is past this unit, and would find it evicted on the next pass.
            self._num_bytes -= self.tables.pop(unit).nbytes
        return table.slice(start, stop - start), False

    def _join(self) -> bool:
        """Joins the units of the last reads, as far as they are cached and have room."""
        joined: list[int] = []
        num_bytes = num_rows = 0
        for units in reversed(self._recent):
            for unit in units.tolist():
                table = self.tables.get(unit)
                if table is None or unit in joined:
                    continue
                if num_bytes + table.nbytes > self._max_bytes and len(joined) >= len(self._recent[-1]):
                    break
                joined.append(unit)
                num_bytes, num_rows = num_bytes + table.nbytes, num_rows + len(table)
        if num_bytes > self._max_bytes or num_rows > self._slow * _PAID:
            return False
        self._base.fill(-1)
        start = 0
        for unit in joined:
            self._base[unit] = start
            start += len(self.tables[unit])
        self._joined = pa.concat_tables([self.tables[unit] for unit in joined]).combine_chunks()
        self._slow = 0
        return True

    def _by_unit(self, numbers: Ints, rows: Ints) -> pa.Table:
        self._slow += len(rows)
        order = np.argsort(numbers, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
        taken = [(int(numbers[group[0]]), rows[group]) for group in groups]
        self._fetch(taken)
        parts = [self._some(unit, rows_of_unit) for unit, rows_of_unit in taken]
        if len(parts) == 1:
            return parts[0].combine_chunks()
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return pa.concat_tables(parts).take(pa.array(back)).combine_chunks()

    def _fetch(self, groups: list[tuple[int, Ints]]) -> None:
        """Prefetches what `_some` will load of `groups`, from a store."""
        records = self._records
        if not isinstance(records, FileRecords) or records.local:
            return
        ranges: list[Range] = []
        for unit, rows in groups:
            if self._is_partial(unit, rows):
                ranges += [(unit, *run) for run in _runs(np.unique(rows))]
            elif unit not in self.tables:
                ranges.append((unit, 0, records.units[unit].count))
        if ranges:
            records.fetch(ranges)

    def _some(self, unit: int, rows: Ints) -> pa.Table:
        if not self._is_partial(unit, rows):
            return self._whole(unit).take(pa.array(rows))
        distinct, back = np.unique(rows, return_inverse=True)
        tables = [self._records.load(unit, start, stop) for start, stop in _runs(distinct)]
        return pa.concat_tables(tables).take(pa.array(back))

    def _is_partial(self, unit: int, rows: Ints) -> bool:
        few = len(rows) * _PARTIAL < self._records.units[unit].count
        return few and self._records.ranged and unit not in self.tables

    def _whole(self, unit: int) -> pa.Table:
        table = self.tables.pop(unit, None)
        if table is None:
            table = self._records.load(unit, 0, self._records.units[unit].count)
            self._num_bytes += table.nbytes
        self.tables[unit] = table
        while len(self.tables) > 1 and self._num_bytes > self._max_bytes:
            self._num_bytes -= self.tables.popitem(last=False)[1].nbytes
        return table


def _runs(rows: Ints) -> list[tuple[int, int]]:
    """Runs without a gap among ascending `rows`: the first of each, and the one after its last.

    >>> _runs(np.array([2, 3, 7]))
    [(2, 4), (7, 8)]
    """
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


class StreamReader:
    """A position in `records`. Records that all fit in `max_bytes` are streamed once."""

    def __init__(self, records: Records, max_bytes: int) -> None:
        self._records, self._max_bytes = records, max_bytes
        self._tables: Iterator[pa.Table] = iter(())
        self._piece: pa.Table | None = None
        self._used = 0
        self.at, self.stopped = -1, 0
        """The next record of the stream (-1: there is none), and the end of the last read."""
        last = records.units[-1] if records.units else None
        self._total = last.offset + last.count if last is not None else 0
        self._num_records = self._num_bytes = self._measured = 0
        """Of the records that were streamed, and of those of them that were measured."""

    def begin(self, number: int, rows: int) -> bool:
        """Whether `pull` can return the records from unit `number` on; `rows`: how many are read at a time."""
        # Records that were all streamed, and would have fitted, are better cached.
        fit = self._num_records >= self._total and self._num_bytes * self._total <= self._max_bytes * self._measured
        if not isinstance(self._records, FileRecords) or fit:
            return False
        tables = self._records.stream(number, rows)
        if tables is None:
            return False
        self._tables, self._piece, self.at = tables, None, self._records.units[number].offset
        return True

    def ready(self, start: int, stop: int) -> list[pa.Table] | None:
        """Records [start, stop) if they are the next ones, which is the usual case."""
        if start != self.at or stop > self._total:
            return None
        piece, used = self._piece, self._used
        if piece is None or stop - start > piece.num_rows - used:
            del piece  # frees its memory for the next one
            tables = self.pull(stop - start)
        else:
            self.at, self._used = stop, used + stop - start
            tables = [piece.slice(used, stop - start)]
        self.stopped = stop
        return tables

    def pull(self, count: int) -> list[pa.Table]:
        """The next `count` records, in memory of the caller's own. Raises DataError."""
        tables: list[pa.Table] = []
        at, self.at = self.at, -1  # after an error there is no position
        left = count
        while left:
            if self._piece is None or self._used == self._piece.num_rows:
                self._piece = None  # frees its memory for the next one
                self._piece, self._used = next(self._tables, None), 0
                if self._piece is None:
                    raise DataError("records ended before the last of them was read")
                if self._num_records >= 2 * self._measured:  # measuring takes as long as slicing
                    self._num_bytes += self._piece.nbytes
                    self._measured += len(self._piece)
                self._num_records += len(self._piece)
            tables.append(self._piece.slice(self._used, left))
            self._used += tables[-1].num_rows
            left -= tables[-1].num_rows
        self.at = at + count
        return tables

    def forget(self) -> None:
        self._tables, self._piece, self.at = iter(()), None, -1
