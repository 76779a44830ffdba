"""Sequential reading, as in evaluations and conversions: pieces of some megabytes are decoded and handed out in slices.

No unit is held whole, so one may be larger than the memory. Records that fit the cache are cached on the second pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from trueline.data.records import Records, Streaming
from trueline.errors import DataError


class StreamReader:
    """A position in `records`. Records that all fit in `max_bytes` are streamed once."""

    def __init__(self, records: Records, max_bytes: int) -> None:
        self._records, self._max_bytes = records, max_bytes
        self._tables: Iterator[pa.Table] = iter(())
        self._piece: pa.Table | None = None
        self._used = 0
        self._at = -1
        self._stopped = 0
        last = records.units[-1] if records.units else None
        self._total = last.offset + last.count if last is not None else 0
        self._num_records = self._num_bytes = self._measured = 0
        """Of the records that were streamed, and of those of them that were measured."""

    def follows(self, start: int) -> bool:
        """Whether a read from record `start` continues the last one, or begins with the first record."""
        if start != self._at:
            self.forget()
        return start in (0, self._stopped)

    def left_at(self, stop: int) -> None:
        self._stopped = stop

    def stands_at(self, record: int) -> bool:
        return record == self._at

    def begin(self, number: int, rows: int) -> bool:
        """Whether `pull` can return the records from unit `number` on; `rows`: how many are read at a time."""
        if not isinstance(self._records, Streaming) or self._better_kept():
            return False
        tables = self._records.stream(number, rows)
        if tables is None:
            return False
        self._tables, self._piece, self._at = tables, None, self._records.units[number].offset
        return True

    def ready(self, start: int, stop: int) -> list[pa.Table] | None:
        """Records [start, stop) if they are the next ones, which is the usual case."""
        if start != self._at or stop > self._total:
            return None
        piece, used = self._piece, self._used
        if piece is None or stop - start > piece.num_rows - used:
            del piece  # frees its memory for the next one
            tables = self.pull(stop - start)
        else:
            self._at, self._used = stop, used + stop - start
            tables = [piece.slice(used, stop - start)]
        self._stopped = stop
        return tables

    def pull(self, count: int) -> list[pa.Table]:
        """The next `count` records, in memory of the caller's own. Raises DataError."""
        tables: list[pa.Table] = []
        at, self._at = self._at, -1  # after an error there is no position
        left = count
        while left:
            if self._piece is None or self._used == self._piece.num_rows:
                self._piece = None  # frees its memory for the next one
                self._piece, self._used = self._next(), 0
            tables.append(self._piece.slice(self._used, left))
            self._used += tables[-1].num_rows
            left -= tables[-1].num_rows
        self._at = at + count
        return tables

    def forget(self) -> None:
        self._tables, self._piece, self._at = iter(()), None, -1

    def _next(self) -> pa.Table:
        table = next(self._tables, None)
        if table is None:
            raise DataError("records ended before the last of them was read")
        count = len(table)
        if self._num_records >= 2 * self._measured:  # measuring takes as long as slicing
            self._num_bytes += table.nbytes
            self._measured += count
        self._num_records += count
        return table

    def _better_kept(self) -> bool:
        """Whether all records were streamed, and would have fitted."""
        return self._num_records >= self._total and self._num_bytes * self._total <= self._max_bytes * self._measured
