"""Writes records by range, each range exactly once, in a local folder or a store of fsspec.

    <where>/_plan.json                              number of records, size of the ranges, digest of the source
    <where>/part-000000000000-000000065536.parquet  a range, whole or absent: a rename, or one PUT of an object
    <where>/_commit.json                            every part with records and digest; written last

Several processes may write one folder. When two of them write a range, the part of the first stays
(`storage/folder.py`). A restarted writer writes what is missing. Readers refuse an incomplete folder
(`storage/listing.py`).

RecordIO and ArrayRecord hold bytes: those of a table of one binary or string column, otherwise one JSON object for each
record, with binary values in base64 as in JSON of protocol buffers (https://protobuf.dev/programming-guides/json).
"""

import base64
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from trueline import events, files
from trueline.data.formats import recordio
from trueline.data.records import describe_columns, split_runs
from trueline.errors import DataError, StorageError, join_names
from trueline.storage.folder import TWICE, open_folder
from trueline.storage.listing import COMMIT, PLAN
from trueline.storage.location import Uri

RANGE_RECORDS = 65536
GROUP_RECORDS = 8192
"""Records of a row group or record batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """The content of a folder. `of` is a digest of the records' source."""

    num_records: int
    range_records: int = RANGE_RECORDS
    format: str = "parquet"
    of: str = ""

    def ranges(self) -> list[tuple[int, int]]:
        step, count = self.range_records, self.num_records
        return [(start, min(start + step, count)) for start in range(0, count, step)]

    def name(self, start: int, stop: int) -> str:
        return f"part-{start:012d}-{stop:012d}{ENCODERS[self.format][0]}"


class RangeWriter:
    """Writes the ranges of `plan` to a folder. Raises DataError for a plan that is not the folder's."""

    def __init__(self, where: Uri, plan: WritePlan) -> None:
        if plan.format not in ENCODERS:
            raise DataError(f"'{plan.format}' cannot be written (there are: {join_names(ENCODERS)})")
        if plan.num_records < 1 or plan.range_records < 1:
            raise DataError(f"{plan.num_records} records in ranges of {plan.range_records}; expected 1 or more")
        self.plan, self._where, self._folder = plan, where, open_folder(where)
        mine = _json(asdict(plan))
        theirs = self._folder.get(PLAN)
        if theirs is None:
            strangers = sorted(name for name in self._folder.names() if not name.startswith(".") and name != TWICE)
            if strangers:
                raise DataError(f"{where} is not empty (it has {join_names(strangers[:3])})", hint="name a new folder")
            self._folder.write(PLAN, mine)
            theirs = self._folder.get(PLAN)  # of two simultaneous writers the first decides
        if theirs != mine:
            raise DataError(
                f"{where} was written with another plan: {(theirs or b'').decode(errors='replace').strip()}, "
                f"now {mine.decode()}",
                hint="name a new folder, or give the arguments of the first run",
            )

    def missing(self) -> list[tuple[int, int]]:
        """The ranges without a part, in order."""
        names = self._folder.names()
        return [(start, stop) for start, stop in self.plan.ranges() if self.plan.name(start, stop) not in names]

    def write(self, start: int, stop: int, table: pa.Table) -> None:
        """Writes one of the plan's ranges; an existing part stays. Raises DataError, StorageError."""
        if (start, stop) not in self.plan.ranges()[start // self.plan.range_records :][:1]:
            raise DataError(f"[{start}, {stop}) is no range of the plan (they are of {self.plan.range_records})")
        if len(table) != stop - start:
            raise DataError(f"range [{start}, {stop}) was given {len(table)} records")
        name, data = self.plan.name(start, stop), encode_table(table, self.plan.format)
        if self._folder.write(name, data):
            return
        existing = self._folder.get(name)
        if existing is None:
            raise StorageError(f"{name} of {self._where} has disappeared", hint="start again: it is missing now")
        if existing != data:  # otherwise it may be this writer's, whose store's package sent it twice
            events.emit("part.kept", name=name, why="another writer was first, and wrote other content")

    def commit(self) -> dict[str, Any]:
        """Writes and returns the commit list. Raises DataError that names a missing range."""
        lost = self.missing()
        if lost:
            raise DataError(f"{self._where} lacks {len(lost)} of {len(self.plan.ranges())} ranges, first {lost[0]}")
        parts = []
        for start, stop in self.plan.ranges():
            name = self.plan.name(start, stop)
            data = self._folder.get(name)
            if data is None:
                raise DataError(f"{name} disappeared from {self._where} during the commit")
            facts = {"name": name, "records": stop - start, "bytes": len(data), "sha256": files.sha256_bytes(data)}
            parts.append(facts)
        commit = {**asdict(self.plan), "parts": parts}
        self._folder.write(COMMIT, _json(commit), replace=True)
        return commit


def read_commit(where: Uri) -> dict[str, Any] | None:
    data = open_folder(where).get(COMMIT)
    facts: dict[str, Any] | None = None if data is None else json.loads(data)
    return facts


def _json(facts: dict[str, Any]) -> bytes:
    return (json.dumps(facts, sort_keys=True) + "\n").encode()


def encode_table(table: pa.Table, format: str) -> bytes:
    """`table` as a file of `format` (one of ENCODERS). Raises DataError that names columns which it cannot hold."""
    return ENCODERS[format][1](table)


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=GROUP_RECORDS, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())


def _arrow(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=GROUP_RECORDS)
    return bytes(sink.getvalue())


def _csv(table: pa.Table) -> bytes:
    wrong = [field for field in table.schema if pa.types.is_nested(field.type) or _is_bytes(field.type)]
    if wrong:
        raise DataError(
            f"CSV cannot hold {describe_columns(pa.schema(wrong))}", hint="write Parquet, Arrow or JSON Lines"
        )
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, sink)
    return bytes(sink.getvalue())


def _recordio(table: pa.Table) -> bytes:
    """Snappy chunks of at most 1 MiB of records; a larger record is a chunk of its own."""
    records = list(_values(table))
    starts = np.cumsum([0, *map(len, records)])
    runs = split_runs(starts, len(records), recordio.CHUNK_BYTES)
    return b"".join(recordio.encode_chunk(records[first:stop]) for first, stop in runs)


def _array_record(table: pa.Table) -> bytes:
    with tempfile.TemporaryDirectory() as folder:  # the package writes to paths only
        path = Path(folder) / "part.array_record"
        writer = recordio.array_record_package().ArrayRecordWriter(str(path), f"group_size:{recordio.GROUP_RECORDS}")
        for record in _values(table):
            writer.write(record)
        writer.close()
        return path.read_bytes()


ENCODERS: dict[str, tuple[str, Callable[[pa.Table], bytes]]] = {
    "parquet": (".parquet", _parquet),
    "arrow": (".arrow", _arrow),
    "csv": (".csv", _csv),
    "jsonl": (".jsonl", lambda table: b"".join(line + b"\n" for line in _json_lines(table))),
    "recordio": (".recordio", _recordio),
    "mxnet": (".rec", lambda table: b"".join(map(recordio.encode_dmlc_record, _values(table)))),
    "arrayrecord": (".array_record", _array_record),
}
"""Name: ending, encoder."""


def _values(table: pa.Table) -> Iterator[bytes]:
    kind = table.schema.field(0).type if table.num_columns == 1 else pa.null()
    if not (_is_bytes(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        yield from _json_lines(table, base64_bytes=True)
        return
    name = table.column_names[0]
    for number, value in enumerate(table[name].to_pylist()):
        if value is None:
            raise DataError(f"record {number} has no '{name}': a format of bytes has no nulls")
        yield value.encode() if isinstance(value, str) else value


def _json_lines(table: pa.Table, *, base64_bytes: bool = False) -> Iterator[bytes]:
    def plain(value: Any) -> str:
        if isinstance(value, datetime | date | time):
            return value.isoformat()
        if isinstance(value, Decimal):
            return str(value)
        if base64_bytes and isinstance(value, bytes):
            return base64.b64encode(value).decode()
        raise TypeError(f"a {type(value).__name__} has no form in JSON")

    for number, row in enumerate(table.to_pylist()):
        try:
            yield json.dumps(row, ensure_ascii=False, allow_nan=False, default=plain).encode()
        except (TypeError, ValueError) as error:
            wrong = [name for name, value in row.items() if _has_no_json(value, () if base64_bytes else bytes)]
            where = f"'{wrong[0]}' of record {number}" if wrong else f"record {number}"
            raise DataError(f"JSON cannot hold {where}: {error}", hint="write Parquet or Arrow") from error


def _has_no_json(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether `value` contains a number that is not finite, or a value of one of `kinds`."""
    if isinstance(value, dict | list):
        return any(_has_no_json(item, kinds) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, kinds) or (isinstance(value, float) and not math.isfinite(value))


def _is_bytes(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))
