"""Encodes a table of records as the bytes of a whole file, in each format that can be written.

RecordIO and ArrayRecord hold bytes: those of a table of one binary or string column, otherwise one JSON object for each
record, with binary values in base64 as in JSON of protocol buffers (https://protobuf.dev/programming-guides/json).
"""

from __future__ import annotations

import base64
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from trueline.data.formats import recordio
from trueline.data.records import describe_columns, split_runs
from trueline.errors import DataError

GROUP_RECORDS = 8192
"""Records of a row group or record batch."""


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
