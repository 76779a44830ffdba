"""Records from a MaxCompute (ODPS) table through pyodps's `open_reader`, which has a count and any slice of rows.

    records = MaxComputeRecords(odps.get_table("clicks"), partition="day=20260131")

Or `odps://PROJECT/TABLE?partition=day=20260131`, with pyodps's environment variables for the account. Tested against a
fake of the reader only, not against the service.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa

from trueline.data.source import split_units
from trueline.errors import DataError

UNIT_RECORDS = 4096
_TYPES = {
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "varchar": pa.string(),
    "char": pa.string(),
    "binary": pa.binary(),
    "datetime": pa.timestamp("ms"),
    "timestamp": pa.timestamp("ns"),
    "date": pa.date32(),
}


class Reader(Protocol):
    @property
    def count(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Any:
        """Rows with `values` in the order of the columns."""
        ...


class OdpsTable(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def table_schema(self) -> Any: ...

    def open_reader(self, partition: str | None = None) -> AbstractContextManager[Reader]: ...


class MaxComputeRecords:
    """`reopen` opens the table for a fork of this process; without it a fork cannot read."""

    ranged = True

    def __init__(
        self,
        table: OdpsTable,
        *,
        partition: str | None = None,
        unit_records: int = UNIT_RECORDS,
        reopen: Callable[[], OdpsTable] | None = None,
    ) -> None:
        self._opened, self._reopen, self._partition = (os.getpid(), table), reopen, partition
        self.where = f"odps table {table.name}" + (f" partition {partition}" if partition else "")
        self._schema = pa.schema([(one.name, self._type(one)) for one in table.table_schema.simple_columns])
        try:
            with table.open_reader(partition=partition) as reader:
                self._count = int(reader.count)
        except Exception as error:
            raise DataError(f"cannot read {self.where}: {type(error).__name__}: {error}") from error
        self.units = split_units(self.where, self._count, unit_records)

    @property
    def forks(self) -> bool:
        return self._reopen is not None

    @property
    def _table(self) -> OdpsTable:
        pid, table = self._opened
        if pid != os.getpid() and self._reopen is not None:
            self._opened = os.getpid(), (table := self._reopen())
        return table

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def load(self, number: int, start: int, stop: int) -> pa.Table:
        unit = self.units[number]
        try:
            with self._table.open_reader(partition=self._partition) as reader:
                if reader.count != self._count:
                    raise DataError(
                        f"{self.where} has {reader.count} rows, {self._count} when it was listed",
                        hint="train on a partition that nobody writes",
                    )
                rows = [row.values for row in reader[unit.offset + start : unit.offset + stop]]
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"cannot read {unit.uri}: {type(error).__name__}: {error}") from error
        if len(rows) != stop - start:
            raise DataError(f"{unit.uri} gave {len(rows)} rows, expected {stop - start}")
        try:
            columns = [pa.array([row[at] for row in rows], one.type) for at, one in enumerate(self._schema)]
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DataError(f"{unit.uri}: a value does not fit its column: {error}") from error
        return pa.table(columns, schema=self._schema)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.where}|{self._schema}|{self._count}".encode()).hexdigest()

    def _type(self, column: Any) -> Any:
        kind = str(column.type).lower().partition("(")[0]
        if kind not in _TYPES:
            raise DataError(
                f"{self.where}: column '{column.name}' is a {column.type}, expected one of {', '.join(_TYPES)}"
            )
        return _TYPES[kind]


def open_odps_table(uri: str) -> MaxComputeRecords:
    """`odps://PROJECT/TABLE?partition=...` with the account of the environment. Raises DataError."""
    parts = urlsplit(uri)
    name = parts.path.strip("/").removeprefix("tables/")
    if not parts.netloc or not name:
        raise DataError(f"'{uri}' names no table", hint="odps://PROJECT/TABLE?partition=day=20260131")
    try:
        odps = import_module("odps").ODPS
    except ImportError as error:
        raise DataError(f"MaxCompute tables need the package pyodps: {error}", hint="pip install pyodps") from error

    def open_table() -> OdpsTable:
        table: OdpsTable = odps.from_environments().get_table(name, project=parts.netloc)
        return table

    partition = parse_qs(parts.query).get("partition", [""])[0]
    return MaxComputeRecords(open_table(), partition=partition or None, reopen=open_table)
