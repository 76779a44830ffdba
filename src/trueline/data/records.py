"""Records in units: the seam between where records lie and what is done with them.

`Records` is what training, conversion and inspection read from: units with counts, and any range of one as an Arrow
table. `FileRecords` makes one of files and a `Format`, and keeps the promises that hold for every format: columns are
the same in all files, a file is the one that was listed, a range has the records it claims, and whatever goes wrong is
an error that names file, unit and offset.
"""

from __future__ import annotations

import hashlib
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Literal, Protocol, runtime_checkable

import pyarrow as pa

from trueline import events
from trueline.data.source import Unit
from trueline.errors import DataError
from trueline.storage.concurrent import map_concurrently, start_all
from trueline.storage.file import File

DAMAGE = (pa.ArrowException, OSError, ValueError, EOFError, struct.error, zlib.error, tarfile.TarError)
"""What decoders raise for bytes that are not what they should be."""


OnBad = Literal["stop", "files", "quarantine"]


Range = tuple[int, int, int]
"""Number of a unit, and records [start, stop) of it."""


class Records(Protocol):
    @property
    def units(self) -> Sequence[Unit]: ...

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def ranged(self) -> bool:
        """Whether a few records of a unit cost much less than all of it."""
        ...

    @property
    def forks(self) -> bool:
        """Whether a fork of the process that opened them may load, over connections of its own if it needs any."""
        ...

    def load(self, number: int, start: int, stop: int) -> pa.Table:
        """Records [start, stop) of the unit `number`, both counted from 0. Raises DataError."""
        ...

    def fingerprint(self) -> str:
        """A digest that changes when the records do."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """Records that can be decoded in passing, without a whole unit in memory."""

    def stream(self, number: int, rows: int) -> Iterator[pa.Table] | None:
        """The records of unit `number` and of those behind it, `rows` at a time and fewer where a unit ends; the memory
        of each table is its own. None where they do not lie so. Raises DataError."""
        ...


@runtime_checkable
class Fetching(Protocol):
    """Records that lie far away, where many things are got at the same time as fast as one."""

    def fetch(self, ranges: Iterable[Range]) -> None:
        """Gets ranges nearer that will be loaded next. Raises DataError."""
        ...


@dataclass(frozen=True, slots=True)
class FileUnit:
    """A unit inside a file: how many records, and between which bytes (or numbers) its format finds them."""

    count: int
    at: int
    end: int = 0


@dataclass(frozen=True, slots=True)
class FileListing:
    schema: pa.Schema
    parts: Sequence[FileUnit]


class Format(Protocol):
    """One way to lay records in a file. Raises DataError or any of DAMAGE, which its caller puts into words."""

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str:
        """What a part is called, e.g. `row group`."""
        ...

    @property
    def ranged(self) -> bool: ...

    def list(self, file: File) -> FileListing: ...

    def load(self, file: File, part: FileUnit, start: int, stop: int) -> pa.Table: ...


@runtime_checkable
class StreamedFormat(Protocol):
    def stream(self, file: File, parts: Sequence[FileUnit], rows: int) -> Iterator[Iterator[pa.Table]]:
        """For each of `parts` its records, `rows` at a time; it is asked for the next part when one is used up."""
        ...


@runtime_checkable
class FooterFormat(Protocol):
    """Its `list` looks at little of a file: `list(file) == listed(file, footer(file))`."""

    def footer(self, file: File) -> bytes: ...

    def parse_footer(self, file: File, footer: bytes) -> FileListing: ...


@runtime_checkable
class PlacedFormat(Protocol):
    def span(self, file: File, part: FileUnit, start: int, stop: int) -> tuple[int, int]:
        """Between which bytes of the file those lie that `load` needs for the same."""
        ...


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What was left out, and why. `records` is 0 where nobody can say how many there were."""

    file: str
    unit: str
    records: int
    why: str


class FileRecords:
    """Records of `files` in one format. `on_bad`: "stop" raises; "files" leaves out files that cannot be listed and
    reports them; "quarantine" does so with units that cannot be read too, and reads every unit once, here."""

    forks = True
    """No connection stays open between two reads of files here, and a `Store` is reached by each process for itself."""

    def __init__(self, format: Format, files: Sequence[File], *, on_bad: OnBad = "stop") -> None:
        self.format = format
        self.quarantined: list[Quarantined] = []
        self._parts: list[tuple[File, int, FileUnit]] = []
        self._units: list[Unit] = []
        self._schema: pa.Schema | None = None
        self._empty: pa.Schema | None = None
        self._first: File | None = None
        self.local = all(file.path is not None for file in files)
        """Whether all of them are files of this machine."""
        for file, listing in zip(files, self._listings(files), strict=True):
            try:
                self._add(file, listing)
            except DataError as error:
                if on_bad == "stop":
                    raise
                self._set_aside(file.uri, "file", 0, error)
        if on_bad == "quarantine":
            self._try_all()
        self._number()

    @property
    def units(self) -> Sequence[Unit]:
        return self._units

    @property
    def schema(self) -> pa.Schema:
        found = self._schema if self._schema is not None else self._empty
        return found if found is not None else pa.schema([])

    @property
    def ranged(self) -> bool:
        return self.format.ranged

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
        """Gets blocks of objects into the cache of this machine, all at the same time, as far as it has room."""
        if self.local or not isinstance(self.format, PlacedFormat):
            return
        from trueline.storage.blocks import StoredFile, prefetch_blocks

        wanted, span = list(ranges), partial(self._span, self.format)
        few = len({self._parts[number][0].uri for number, _, _ in wanted}) < 2  # one footer, which is here by now
        spans = map(span, wanted) if few else map_concurrently(span, wanted)
        prefetch_blocks([(file, *span) for file, span in spans if isinstance(file, StoredFile)])

    def _span(self, format: PlacedFormat, wanted: Range) -> tuple[File, tuple[int, int]]:
        file, index, part = self._parts[wanted[0]]
        with translate_damage(file, self.format.name, f"{self.format.unit} {index} (at {part.at})"):
            return file, format.span(file, part, *wanted[1:])

    def stream(self, number: int, rows: int) -> Iterator[pa.Table] | None:
        format = self.format
        return self._stream(format, number, rows) if isinstance(format, StreamedFormat) else None

    def _stream(self, format: StreamedFormat, number: int, rows: int) -> Iterator[pa.Table]:
        behind = enumerate(self._parts[number:], number)
        for file, found in groupby(behind, key=lambda one: one[1][0]):
            parts = [(here, index, part) for here, (_, index, part) in found]
            file.check()
            units = format.stream(file, [part for _, _, part in parts], rows)
            for here, index, part in parts:
                self.fetch([(here, 0, part.count)])
                yield from self._unit(file, index, part, units)

    def _unit(self, file: File, index: int, part: FileUnit, units: Iterator[Iterator[pa.Table]]) -> Iterator[pa.Table]:
        """The next of `units`, which is `part`. The file is compared with what it was before a table is given out."""
        where, found = f"{self.format.unit} {index} (at {part.at})", 0
        with translate_damage(file, self.format.name, where):
            tables = next(units)
        while found < part.count:
            first, table = not found, None
            try:  # not `damaged`, which costs as much as all of this
                table = next(tables, None)
                found += len(table or ())
                if table is not None and found == part.count:  # there must be no more, before the last is given out
                    found += sum(map(len, tables))
            except DAMAGE as error:
                raise damage_error(file, self.format.name, where, error) from error
            file.check()
            if table is None or found > part.count:
                raise self._torn_error(file, index, part, found)
            if first:
                self._check_columns(file, table)
            yield table.replace_schema_metadata(None)

    def _check_columns(self, file: File, table: pa.Table) -> None:
        if not table.schema.equals(self.schema):
            raise DataError(f"{file.uri} has other columns than when it was listed: {describe_columns(table.schema)}")

    def fingerprint(self) -> str:
        """Over schema, and name, stamp and units of every file."""
        digest = hashlib.sha256(str(self.schema.remove_metadata()).encode())
        for file, index, part in self._parts:
            digest.update(f"{file.name}:{index}:{file.stamp}:{part.count};".encode())
        return digest.hexdigest()

    def _listings(self, files: Sequence[File]) -> Iterator[Callable[[], FileListing]]:
        """What gives the listing of each file, or raises."""
        format = self.format
        if self.local:
            yield from (partial(format.list, file) for file in files)
            return
        from trueline.storage.blocks import StoredFile, read_footers

        stored = [file for file in files if isinstance(file, StoredFile)]
        if not isinstance(format, FooterFormat) or len(stored) < len(files):
            yield from start_all(format.list, files)
            return
        for file, footer in zip(files, read_footers(stored, format.footer), strict=True):
            yield lambda file=file, footer=footer: format.parse_footer(file, footer())  # type: ignore[misc]  # defaults

    def _add(self, file: File, listing: Callable[[], FileListing]) -> None:
        with translate_damage(file, self.format.name):
            found = listing()
            names = found.schema.names
            _read_names(found.schema)
        if any(part.count < 0 for part in found.parts):
            raise DataError(f"{file.uri} claims a {self.format.unit} of fewer than 0 records")
        if len(set(names)) != len(names):
            raise DataError(f"{file.uri} has two columns of one name: {', '.join(names)}")
        if not any(part.count for part in found.parts):
            self._empty = self._empty or found.schema.remove_metadata()
            return  # its columns matter only where no file has records
        if self._schema is None:
            self._schema = found.schema.remove_metadata()
            self._first = file
        elif self._first is not None and not found.schema.equals(self._schema):
            ours = f"{describe_columns(found.schema)}, expected {describe_columns(self._schema)}"
            raise DataError(f"{file.uri} has other columns than {self._first.uri}: {ours}")
        self._parts += [(file, index, part) for index, part in enumerate(found.parts) if part.count]

    def _number(self) -> None:
        offset, self._units = 0, []
        for file, index, part in self._parts:
            self._units.append(Unit(uri=f"{file.uri}#{index}", offset=offset, count=part.count))
            offset += part.count

    def _decode(self, file: File, index: int, part: FileUnit, start: int, stop: int) -> pa.Table:
        if not 0 <= start <= stop <= part.count:
            raise DataError(f"{file.uri}#{index} has no records {start} to {stop} (it has {part.count})")
        with translate_damage(file, self.format.name, f"{self.format.unit} {index} (at {part.at})"):
            table = self.format.load(file, part, start, stop)
        if len(table) != stop - start:
            raise self._torn_error(file, index, part, len(table), stop - start)
        return table.replace_schema_metadata(None)

    def _torn_error(self, file: File, index: int, part: FileUnit, found: int, announced: int = -1) -> DataError:
        announced = part.count if announced < 0 else announced
        return DataError(
            f"{file.uri} is torn in {self.format.unit} {index} (at {part.at}): "
            f"{found} records where {announced} were announced"
        )

    def _try_all(self) -> None:
        readable = []
        for file, index, part in self._parts:
            try:
                self._decode(file, index, part, 0, part.count)
                readable.append((file, index, part))
            except DataError as error:
                self._set_aside(file.uri, f"{self.format.unit} {index}", part.count, error)
        self._parts = readable

    def _set_aside(self, file: str, unit: str, records: int, error: DataError) -> None:
        self.quarantined.append(Quarantined(file, unit, records, error.message))
        events.emit("records.quarantined", file=file, unit=unit, records=records, why=error.message)


@contextmanager
def translate_damage(file: File, kind: str, where: str = "") -> Iterator[None]:
    """Errors of decoders within the block become a DataError that names the file and `where` in it."""
    try:
        yield
    except DAMAGE as error:
        raise damage_error(file, kind, where, error) from error


def damage_error(file: File, kind: str, where: str, error: Exception) -> DataError:
    """One of DAMAGE in words: the file, and `where` in it."""
    if isinstance(error, PermissionError | FileNotFoundError):
        return DataError(f"cannot read {file.uri}: {error.strerror or error}")
    place = f" in {where}" if where else f" or is not {kind}"
    return DataError(f"{file.uri} is torn{place}: {first_line(error)}")


def _read_names(fields: Iterable[pa.Field]) -> None:
    """Raises UnicodeDecodeError for a nested name that is no text: nobody could look at a record."""
    for field in fields:
        kind = field.type
        if field.name is not None and kind.num_fields:
            _read_names(kind.field(index) for index in range(kind.num_fields))


def describe_columns(schema: pa.Schema) -> str:
    """A schema for a message."""
    return ", ".join(f"{field.name} {field.type}" for field in schema) or "no columns"


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
