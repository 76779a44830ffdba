"""Records from Parquet files.

A unit is a row group. Windowed order decodes a group once an epoch; a full permutation over more data than the cache
holds does so for nearly every record, so write row groups of a few thousand rows. Sequential reads decode a few
megabytes at a time. Page checksums, where present, are verified when a group is first read. Files are not mapped, so
truncating one is an error and does not end the process.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trueline.data.records import FileListing, FileUnit, first_line
from trueline.errors import DataError
from trueline.storage.location import File, Stamp, read_range

_MAGIC = b"PAR1"
_END = struct.Struct("<I4s")
_BYTES = (pa.binary(), pa.large_binary())
_FOOTER_BYTES, _VERIFIED = 16 << 20, 65536
_BUFFER_BYTES, _STORE_BYTES = 64 << 10, 4 << 20
"""Read at a time, from a disk and from a store."""
_PIECE_BYTES = 4 << 20
"""Decoded at a time in sequential reads. Smaller pieces decode faster, but gain nothing in all."""


class ParquetFormat:
    name = "Parquet"
    unit = "row group"
    ranged = False

    def __init__(self) -> None:
        self._lock = Lock()
        self._footers: dict[tuple[str, Stamp], Any] = {}
        """Of the files read last: a footer of thousands of row groups takes longer to parse than a group."""
        self._footer_bytes = 0
        self._verified: set[tuple[str, Stamp, int]] = set()

    def list(self, file: File) -> FileListing:
        if file.path is not None:  # in a store this would take one more request for each file
            start = read_range(file, 0, len(_MAGIC))
            if start != _MAGIC:
                raise DataError(f"{file.uri} is not a Parquet file: it begins with {start!r}, expected {_MAGIC!r}")
        return self.parse_footer(file, self.footer(file))

    def footer(self, file: File) -> bytes:
        """The end of the file: metadata, its length, the magic number."""
        size = file.stamp.size
        with file.open(from_end=True) as opened:
            opened.seek(max(size - _END.size, 0))
            length, magic = _END.unpack(opened.read(_END.size).rjust(_END.size))
            if magic != _MAGIC or length + _END.size + len(_MAGIC) > size:
                torn = read_range(file, 0, len(_MAGIC)) == _MAGIC
                why = "is torn: its footer is missing or damaged" if torn else "is not a Parquet file"
                raise DataError(f"{file.uri} {why}")
            opened.seek(size - _END.size - length)
            return opened.read(length + _END.size)

    def parse_footer(self, file: File, footer: bytes) -> FileListing:
        try:
            with pq.ParquetFile(pa.BufferReader(_MAGIC + footer)) as opened:  # a whole file without row groups
                metadata, schema = opened.metadata, opened.schema_arrow
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file.uri} is torn: its footer is damaged: {first_line(error)}") from error
        with self._lock:
            before = self._footers.pop((file.uri, file.stamp), None)
            self._footer_bytes += metadata.serialized_size - (before.serialized_size if before is not None else 0)
            self._footers[file.uri, file.stamp] = metadata
            while self._footer_bytes > _FOOTER_BYTES and len(self._footers) > 1:
                self._footer_bytes -= self._footers.pop(next(iter(self._footers))).serialized_size
        counts = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        return FileListing(schema, [FileUnit(count, index) for index, count in enumerate(counts)])

    def span(self, file: File, part: FileUnit, start: int, stop: int) -> tuple[int, int]:
        """The columns of a row group are contiguous."""
        group = self._footer(file).row_group(part.at)
        columns = [group.column(index) for index in range(group.num_columns)]
        begins = [column.dictionary_page_offset or column.data_page_offset for column in columns]
        ends = [begin + column.total_compressed_size for begin, column in zip(begins, columns, strict=True)]
        return min(begins, default=0), max(ends, default=0)

    def null_counts(self, file: File, part: FileUnit) -> dict[str, int]:
        """The nulls that the footer counts, by column of plain values."""
        group = self._footer(file).row_group(part.at)
        columns = [group.column(index) for index in range(group.num_columns)]
        found = [(one.path_in_schema, one.statistics) for one in columns]
        return {name: facts.null_count for name, facts in found if facts is not None and facts.has_null_count}

    def load(self, file: File, part: FileUnit, start: int, stop: int) -> pa.Table:
        with self._open(file, [part]) as opened:
            table = opened.read_row_group(part.at, use_threads=False)
            if (file.uri, file.stamp, part.at) not in self._verified:
                _validate(table)
        self._remember(file, part)
        return table.slice(start, stop - start) if len(table) == part.count else table  # an error for the caller

    def stream(self, file: File, parts: Sequence[FileUnit], rows: int) -> Iterator[Iterator[pa.Table]]:
        with self._open(file, parts) as opened:
            for part in parts:
                yield self._pieces(opened, file, part, rows)

    def _pieces(self, opened: pq.ParquetFile, file: File, part: FileUnit, rows: int) -> Iterator[pa.Table]:
        """A call of the decoder costs as much as some hundred small records, so it decodes multiples of `rows`."""
        num_bytes = opened.metadata.row_group(part.at).total_byte_size
        if num_bytes <= _PIECE_BYTES:
            tables = iter([opened.read_row_group(part.at, use_threads=False)])
        else:
            many = rows * max(1, _PIECE_BYTES // (rows * max(num_bytes // part.count, 1)))
            batches = opened.iter_batches(many, row_groups=[part.at], use_threads=False)
            tables = (pa.Table.from_batches([batch]) for batch in batches)
        if (file.uri, file.stamp, part.at) in self._verified:
            yield from tables
            return
        for table in tables:
            _validate(table)
            yield table
        self._remember(file, part)

    @contextmanager
    def _open(self, file: File, parts: Sequence[FileUnit]) -> Iterator[pq.ParquetFile]:
        """Verifies checksums unless those of all `parts` were."""
        verify = any((file.uri, file.stamp, part.at) not in self._verified for part in parts)
        options = {"metadata": self._footer(file), "page_checksum_verification": verify}
        if file.path is not None:
            # pre_buffer would have other threads read all of a row group first.
            with pq.ParquetFile(file.path, buffer_size=_BUFFER_BYTES, pre_buffer=False, **options) as opened:
                yield opened
        else:
            with file.open() as stored, pq.ParquetFile(stored, buffer_size=_STORE_BYTES, **options) as opened:
                yield opened

    def _footer(self, file: File) -> Any:
        footer = self._footers.get((file.uri, file.stamp))
        if footer is None:
            self.parse_footer(file, self.footer(file))
            footer = self._footers[file.uri, file.stamp]
        return footer

    def _remember(self, file: File, part: FileUnit) -> None:
        if len(self._verified) >= _VERIFIED:
            self._verified.clear()  # verifying again costs less than remembering every group of a large store
        self._verified.add((file.uri, file.stamp, part.at))


def _validate(table: pa.Table) -> None:
    """Checks that texts are UTF-8, which the decoder does not. Raises ArrowInvalid."""
    for column in table.columns:
        if not pa.types.is_primitive(column.type) and column.type not in _BYTES:
            column.validate(full=True)
