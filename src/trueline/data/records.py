"""Records in units with counts, of which any range is loaded as an Arrow table.

`FileRecords` implements this over files and a `Format`, and guarantees for every format: all files have the same
columns, a file is the one that was listed, a range has the records it claims, and an error names file, unit and offset.
"""

import hashlib
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trueline import events
from trueline.data.source import Unit
from trueline.errors import DataError
from trueline.storage.blocks import StoredFile, prefetch_blocks, read_footers
from trueline.storage.location import File
from trueline.storage.object_store import map_concurrently, start_all

DAMAGE = (pa.ArrowException, OSError, ValueError, EOFError, struct.error, zlib.error, tarfile.TarError)
"""Errors of decoders for damaged bytes."""

OnBad = Literal["stop", "files", "quarantine"]
Range = tuple[int, int, int]
"""Number of a unit, and records [start, stop) of it."""


class Records(Protocol):
    schema: pa.Schema
    ranged: bool
    """Whether a few records of a unit are read much faster than all of it."""
    forks: bool
    """Whether a fork of this process may load, over connections of its own where it needs any."""

    @property
    def units(self) -> Sequence[Unit]: ...

    def load(self, number: int, start: int, stop: int) -> pa.Table:
        """Records [start, stop) of unit `number`. Raises DataError."""
        ...

    def fingerprint(self) -> str:
        """A digest that changes when the records do."""
        ...


TEXT_BECAUSE = "text_because"
"""Metadata of a column that is text: why, if it may be meant as numbers."""


@dataclass(frozen=True, slots=True)
class FileUnit:
    """A unit of a file: its records, and the bytes (or numbers) between which its format finds them."""

    count: int
    at: int
    end: int = 0


@dataclass(frozen=True, slots=True)
class FileListing:
    schema: pa.Schema
    parts: Sequence[FileUnit]


def split_evenly(count: int, unit_records: int) -> list[FileUnit]:
    """Units of `unit_records` each, the last of the rest; `at` is the number of the first record."""
    return [FileUnit(min(unit_records, count - at), at) for at in range(0, count, unit_records)]


def split_runs(starts: npt.NDArray[np.int64], max_records: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts records that begin at the bytes `starts`, the last of which is the end, into runs [first, stop) of at most
    `max_records` and `max_bytes`; a larger record is a run of its own."""
    first, count = 0, len(starts) - 1
    while first < count:
        fitting = int(np.searchsorted(starts, starts[first] + max_bytes, side="right")) - 1
        stop = min(max(fitting, first + 1), first + max_records, count)
        yield first, stop
        first = stop


class Format(Protocol):
    """A file format. Raises DataError or one of DAMAGE, which the caller translates."""

    name: str
    unit: str
    """The format's word for it, e.g. `row group`."""
    ranged: bool

    def list(self, file: File) -> FileListing: ...

    def load(self, file: File, part: FileUnit, start: int, stop: int) -> pa.Table: ...


@runtime_checkable
class StreamedFormat(Protocol):
    def stream(self, file: File, parts: Sequence[FileUnit], rows: int) -> Iterator[Iterator[pa.Table]]:
        """For each of `parts` its records, `rows` at a time. The caller exhausts one before it takes the next."""
        ...


@runtime_checkable
class CountingFormat(Protocol):
    def null_counts(self, file: File, part: FileUnit) -> dict[str, int]: ...


@runtime_checkable
class FooterFormat(Protocol):
    """A format whose listing is in a footer: `list(file) == parse_footer(file, footer(file))`."""

    def footer(self, file: File) -> bytes: ...

    def parse_footer(self, file: File, footer: bytes) -> FileListing: ...


@runtime_checkable
class PlacedFormat(Protocol):
    def span(self, file: File, part: FileUnit, start: int, stop: int) -> tuple[int, int]:
        """The bytes of the file that `load` needs for the same records."""
        ...


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A file or unit that was left out. `records` is 0 where the count is unknown."""

    file: str
    unit: str
    records: int
    why: str


class FileRecords:
    """Records of `files` in one format. `on_bad`: "stop" raises; "files" leaves out and reports files that cannot be
    listed; "quarantine" also units that cannot be read, for which it reads every unit once."""

    forks = True

    def __init__(self, format: Format, files: Sequence[File], *, on_bad: OnBad = "stop") -> None:
        self.format, self.ranged = format, format.ranged
        self.local = all(file.path is not None for file in files)
        self.quarantined: list[Quarantined] = []
        self._parts: list[tuple[File, int, FileUnit]] = []
        self._first: tuple[File, pa.Schema] | None = None
        self._empty: pa.Schema | None = None
        for file, listing in zip(files, self._listings(files), strict=True):
            try:
                self._add(file, listing)
            except DataError as error:
                if on_bad == "stop":
                    raise
                self._set_aside(file.uri, "file", 0, error)
        if on_bad == "quarantine":
            self._try_all()
        self.schema: pa.Schema = self._first[1] if self._first else self._empty or pa.schema([])
        offsets = accumulate((part.count for _, _, part in self._parts), initial=0)
        self.units: Sequence[Unit] = [
            Unit(uri=f"{file.uri}#{index}", offset=offset, count=part.count)
            for (file, index, part), offset in zip(self._parts, offsets, strict=False)
        ]

    def load(self, number: int, start: int, stop: int) -> pa.Table:
        file, index, part = self._parts[number]
        file.check()
        if not self.local:
            self.fetch([(number, start, stop)])
        table = self._decode(file, index, part, start, stop)
        file.check()  # what was decoded while it changed may be of both
        self._check_columns(file, table)
        return table

    def fetch(self, ranges: Iterable[Range]) -> None:
        """Fetches blocks of objects, which will be loaded next, into this machine's cache in parallel, as far as it has
        room. Raises DataError."""
        if self.local or not isinstance(self.format, PlacedFormat):
            return
        ranges, span = list(ranges), partial(self._span, self.format)
        one_file = len({self._parts[number][0].uri for number, _, _ in ranges}) < 2  # whose footer is here by now
        spans = map(span, ranges) if one_file else map_concurrently(span, ranges)
        prefetch_blocks([(file, *span) for file, span in spans if isinstance(file, StoredFile)])

    def _span(self, format: PlacedFormat, range: Range) -> tuple[File, tuple[int, int]]:
        file, index, part = self._parts[range[0]]
        with translate_damage(file, self.format.name, self._where(index, part)):
            return file, format.span(file, part, *range[1:])

    def _where(self, index: int, part: FileUnit) -> str:
        return f"{self.format.unit} {index} (at {part.at})"

    def null_counts(self, number: int) -> dict[str, int]:
        """The nulls of unit `number` by column, as far as the file's statistics count them."""
        file, _, part = self._parts[number]
        return self.format.null_counts(file, part) if isinstance(self.format, CountingFormat) else {}

    def stream(self, number: int, rows: int) -> Iterator[pa.Table] | None:
        """The records from unit `number` on, `rows` at a time and fewer where a unit ends, each table in memory of its
        own and without a whole unit in memory. None where the format cannot. Raises DataError."""
        format = self.format
        return self._stream(format, number, rows) if isinstance(format, StreamedFormat) else None

    def _stream(self, format: StreamedFormat, number: int, rows: int) -> Iterator[pa.Table]:
        numbered = enumerate(self._parts[number:], number)
        for file, units_of_file in groupby(numbered, key=lambda entry: entry[1][0]):
            parts = [(here, index, part) for here, (_, index, part) in units_of_file]
            file.check()
            units = format.stream(file, [part for _, _, part in parts], rows)
            for here, index, part in parts:
                self.fetch([(here, 0, part.count)])
                yield from self._stream_unit(file, index, part, units)

    def _stream_unit(
        self, file: File, index: int, part: FileUnit, units: Iterator[Iterator[pa.Table]]
    ) -> Iterator[pa.Table]:
        """The next of `units`, which is `part`."""
        where, count = self._where(index, part), 0
        with translate_damage(file, self.format.name, where):
            tables = next(units)
        while count < part.count:
            first, table = not count, None
            try:  # `translate_damage` costs as much as all of this
                table = next(tables, None)
                count += len(table or ())
                if table is not None and count == part.count:  # before the last is yielded, no more may follow
                    count += sum(map(len, tables))
            except DAMAGE as error:
                raise damage_error(file, self.format.name, where, error) from error
            file.check()
            if table is None or count > part.count:
                raise self._torn_error(file, index, part, count, part.count)
            if first:
                self._check_columns(file, table)
            yield table.replace_schema_metadata(None)

    def _check_columns(self, file: File, table: pa.Table) -> None:
        if not table.schema.equals(self.schema):
            raise DataError(f"{file.uri} has other columns than when it was listed: {describe_columns(table.schema)}")

    def fingerprint(self) -> str:
        """Over the schema, and the name, stamp and units of every file."""
        digest = hashlib.sha256(str(self.schema.remove_metadata()).encode())
        for file, index, part in self._parts:
            digest.update(f"{file.name}:{index}:{file.stamp}:{part.count};".encode())
        return digest.hexdigest()

    def _listings(self, files: Sequence[File]) -> Iterator[Callable[[], FileListing]]:
        """For each file, a function that lists it."""
        format = self.format
        if self.local:
            yield from (partial(format.list, file) for file in files)
            return
        stored = [file for file in files if isinstance(file, StoredFile)]
        if not isinstance(format, FooterFormat) or len(stored) < len(files):
            yield from start_all(format.list, files)
            return
        for file, footer in zip(files, read_footers(stored, format.footer), strict=True):
            yield lambda file=file, footer=footer: format.parse_footer(file, footer())  # type: ignore[misc]  # defaults

    def _add(self, file: File, listing: Callable[[], FileListing]) -> None:
        with translate_damage(file, self.format.name):
            listed = listing()
            names = listed.schema.names
            _read_names(listed.schema)
        if any(part.count < 0 for part in listed.parts):
            raise DataError(f"{file.uri} claims a {self.format.unit} of fewer than 0 records")
        if len(set(names)) != len(names):
            raise DataError(f"{file.uri} has two columns of one name: {', '.join(names)}")
        if not any(part.count for part in listed.parts):
            self._empty = self._empty or listed.schema.remove_metadata()
            return  # its columns matter only where no file has records
        first, schema = self._first = self._first or (file, listed.schema.remove_metadata())
        if not listed.schema.equals(schema):
            difference = f"{describe_columns(listed.schema)}, expected {describe_columns(schema)}"
            raise DataError(f"{file.uri} has other columns than {first.uri}: {difference}")
        self._parts += [(file, index, part) for index, part in enumerate(listed.parts) if part.count]

    def _decode(self, file: File, index: int, part: FileUnit, start: int, stop: int) -> pa.Table:
        if not 0 <= start <= stop <= part.count:
            raise DataError(f"{file.uri}#{index} has no records {start} to {stop} (it has {part.count})")
        with translate_damage(file, self.format.name, self._where(index, part)):
            table = self.format.load(file, part, start, stop)
        if len(table) != stop - start:
            raise self._torn_error(file, index, part, len(table), stop - start)
        return table.replace_schema_metadata(None)

    def _torn_error(self, file: File, index: int, part: FileUnit, count: int, expected: int) -> DataError:
        where = self._where(index, part)
        return DataError(f"{file.uri} is torn in {where}: {count} records where {expected} were announced")

    def _try_all(self) -> None:
        parts, self._parts = self._parts, []
        for file, index, part in parts:
            try:
                self._decode(file, index, part, 0, part.count)
                self._parts.append((file, index, part))
            except DataError as error:
                self._set_aside(file.uri, f"{self.format.unit} {index}", part.count, error)

    def _set_aside(self, file: str, unit: str, records: int, error: DataError) -> None:
        self.quarantined.append(Quarantined(file, unit, records, error.message))
        events.emit("records.quarantined", file=file, unit=unit, records=records, why=error.message)


@contextmanager
def translate_damage(file: File, kind: str, where: str = "") -> Iterator[None]:
    """Raises decoders' errors in the block as DataError that names the file and `where` in it."""
    try:
        yield
    except DAMAGE as error:
        raise damage_error(file, kind, where, error) from error


def torn_error(file: File, at: int, why: str, hint: str = "") -> DataError:
    return DataError(f"{file.uri} is torn at byte {at}: {why}", hint=hint)


def damage_error(file: File, kind: str, where: str, error: Exception) -> DataError:
    """For one of DAMAGE."""
    if isinstance(error, PermissionError | FileNotFoundError):
        return DataError(f"cannot read {file.uri}: {error.strerror or error}")
    place = f" in {where}" if where else f" or is not {kind}"
    return DataError(f"{file.uri} is torn{place}: {first_line(error)}")


def _read_names(fields: Iterable[pa.Field]) -> None:
    """Raises UnicodeDecodeError for a nested name that is not UTF-8, which no record could be shown with."""
    for field in fields:
        kind = field.type
        if field.name is not None and kind.num_fields:
            _read_names(kind.field(index) for index in range(kind.num_fields))


def describe_columns(schema: pa.Schema) -> str:
    """A schema for a message."""
    return ", ".join(f"{field.name} {field.type}" for field in schema) or "no columns"


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
