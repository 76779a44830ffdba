"""Records from CSV and JSON Lines, read by ranges with an index of where each begins.

A unit is a run of at most 4096 lines; single lines can be read too. In CSV a line break ends a record when an even
number of quotes precedes it (RFC 4180). Blank lines hold no record. Columns and types are inferred from the first
mebibyte; a later value that does not fit, or a new JSON field, is an error that names the record.
"""

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from trueline.data.order.permutation import Ints
from trueline.data.records import TEXT_BECAUSE, FileListing, FileUnit, first_line, split_evenly
from trueline.errors import DataError
from trueline.storage.cache import load_index
from trueline.storage.location import File, Stamp, read_range

UNIT_RECORDS = 4096
_PIECE = 16 << 20
_SAMPLE = 1 << 20
_NEWLINE, _QUOTE, _RETURN = 0x0A, 0x22, 0x0D


class _Lines:
    """The index of CSV and JSON Lines, and reading between two of its marks."""

    name = ""
    unit = "run of lines"
    ranged = True
    quoted = False

    def __init__(self) -> None:
        self._known: dict[tuple[str, Stamp], tuple[Ints, pa.Schema]] = {}

    def list(self, file: File) -> FileListing:
        kind, header = f"lines quoted={self.quoted}", int(self.quoted)  # CSV's first line has the names of the columns
        index = load_index(file, kind, lambda: {"marks": find_marks(file, quoted=self.quoted)})
        marks = index["marks"].astype(np.int64)
        if len(marks) < 2 and header:
            raise DataError(f"{file.uri} is empty: a CSV file begins with the names of its columns")
        if len(marks) < 2:
            return FileListing(pa.schema([]), [])
        count = min(max(int(np.searchsorted(marks, int(marks[0]) + _SAMPLE)), 1), len(marks) - 1)
        first = self._parse(file, read_range(file, int(marks[0]), int(marks[count])), None)
        schema = pa.schema(
            [
                pa.field(field.name, self._column_type(field.type), metadata=_explain(first.column(number)))
                for number, field in enumerate(first.schema)
            ]
        )
        self._known[file.uri, file.stamp] = marks[header:], schema
        return FileListing(schema, split_evenly(len(marks) - 1 - header, UNIT_RECORDS))

    def load(self, file: File, part: FileUnit, start: int, stop: int) -> pa.Table:
        _, schema = self._known[file.uri, file.stamp]
        if start == stop:
            return schema.empty_table()
        data = read_range(file, *self.span(file, part, start, stop))
        try:
            return self._parse(file, data, schema)
        except pa.ArrowException as error:
            raise self._locate_error(file, part.at + start, part.at + stop, error) from error

    def span(self, file: File, part: FileUnit, start: int, stop: int) -> tuple[int, int]:
        marks, _ = self._known[file.uri, file.stamp]
        return int(marks[part.at + start]), int(marks[part.at + stop])

    def _parse(self, file: File, data: bytes, schema: pa.Schema | None) -> pa.Table:
        raise NotImplementedError

    def _column_type(self, kind: Any) -> Any:
        """The type of a column that pyarrow infers as `kind`."""
        raise NotImplementedError

    def _locate_error(self, file: File, start: int, stop: int, error: Exception) -> DataError:
        """Names the first record that does not parse by itself."""
        marks, schema = self._known[file.uri, file.stamp]
        where = f"records {start} to {stop}"
        for record in range(start, stop):
            try:
                self._parse(file, read_range(file, int(marks[record]), int(marks[record + 1])), schema)
            except pa.ArrowException as alone:
                error, where = alone, f"record {record} (byte {int(marks[record])})"
                break
        return DataError(
            f"{file.uri} cannot be read at {where}: {first_line(error)}",
            hint="every record has the columns and types of the first mebibyte",
        )


class CsvFormat(_Lines):
    """With a header line. `.tsv` has tabs instead of commas."""

    name = "CSV"
    quoted = True

    def _column_type(self, kind: Any) -> Any:
        return pa.string() if pa.types.is_null(kind) else kind

    def _parse(self, file: File, data: bytes, schema: pa.Schema | None) -> pa.Table:
        delimiter = "\t" if file.name.endswith(".tsv") else ","
        names = None if schema is None else schema.names
        read = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names)
        parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        nulls = {"strings_can_be_null": True, "quoted_strings_can_be_null": False}
        return pyarrow.csv.read_csv(
            pa.BufferReader(data), read, parse, pyarrow.csv.ConvertOptions(column_types=schema, **nulls)
        )


class JsonLinesFormat(_Lines):
    """One object a line, which may be nested. Dates stay strings."""

    name = "JSON Lines"

    def _column_type(self, kind: Any) -> Any:
        """A timestamp that pyarrow infers becomes a string again, and nulls too, since strings may follow."""
        if pa.types.is_timestamp(kind) or pa.types.is_null(kind):
            return pa.string()
        if pa.types.is_list(kind):
            return pa.list_(self._column_type(kind.value_type))
        if pa.types.is_struct(kind):
            return pa.struct([pa.field(field.name, self._column_type(field.type)) for field in kind])
        return kind

    def _parse(self, file: File, data: bytes, schema: pa.Schema | None) -> pa.Table:
        unexpected = "infer" if schema is None else "error"
        read = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
        parse = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
        table = pyarrow.json.read_json(pa.BufferReader(data), read, parse)
        table.validate(full=True)  # of UTF-8, which the parser does not check
        return table if schema is None else table.select(schema.names)


def _explain(column: pa.ChunkedArray) -> dict[str, str] | None:
    """Why a column is text that may be meant as numbers: it is empty, or one in ten of its values or fewer is none."""
    if pa.types.is_null(column.type):
        return {TEXT_BECAUSE: f"its first {len(column)} values are empty"}
    if not pa.types.is_string(column.type):
        return None
    values = [(record, value) for record, value in enumerate(column.to_pylist()) if value is not None]
    odd = list(itertools.islice((pair for pair in values if not _is_number(pair[1])), len(values) // 10 + 1))
    if not odd or len(odd) > len(values) // 10:
        return None
    (record, value), right = odd[0], len(values) - len(odd)
    return {TEXT_BECAUSE: f"'{value[:64]}' in record {record} is no number, and {right} of {len(values)} values are"}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def find_marks(file: File, *, quoted: bool) -> Ints:
    """The bytes at which records begin, and the end of the last. Raises DataError for an open quote."""
    begins: list[Ints] = []
    quotes = at = quote_at = line_at = before = 0
    with file.open() as opened:
        while piece := opened.read(_PIECE):
            data = np.frombuffer(piece, np.uint8)
            breaks = np.flatnonzero(data == _NEWLINE)
            if quoted:
                where = np.flatnonzero(data == _QUOTE)
                breaks = breaks[(quotes + np.searchsorted(where, breaks)) % 2 == 0]
                quote_at = at + int(where[-1]) if len(where) else quote_at
                quotes += len(where)
            if len(breaks):
                ends = breaks + (at + 1)
                starts = np.concatenate([[line_at], ends[:-1]])
                last = np.where(breaks > 0, data[breaks - 1], before)
                lengths = ends - starts
                begins.append(starts[(lengths > 2) | ((lengths == 2) & (last != _RETURN))])
                line_at = int(ends[-1])
            at, before = at + len(piece), int(data[-1])
    if quotes % 2:
        raise DataError(
            f"{file.uri} has a quote at byte {quote_at} that is never closed",
            hint='inside a quoted field a quote is written twice: "say ""yes"""',
        )
    if at > line_at:
        begins.append(np.array([line_at], np.int64))
    return np.concatenate([*begins, np.array([at])]).astype(np.int64)
