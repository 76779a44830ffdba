"""Records from tables of databases: SQL through SQLAlchemy, by ranges of a key; MaxCompute (ODPS) through pyodps.

    sqlite:///clicks.db?table=clicks&key=id            postgresql://user@host/shop?table=orders&key=number
    odps://PROJECT/TABLE?partition=day=20260131        with pyodps's environment variables for the account

The key of an SQL table is a column without nulls or repeats; records are numbered in its order. A unit is a range of
keys with `unit_records` rows when the table was listed. A range that has another number of rows later is an error, so
use a snapshot or a table that is not written while a job trains on it. Passwords are in no message. PostgreSQL is read
through psycopg 3 (extra `postgres`), unless the URL names another driver. MaxCompute is tested against a fake of
pyodps's `open_reader` only, which has a count and any slice of rows, not against the service.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import pyarrow as pa

from trueline.data.source import Unit, split_units
from trueline.errors import DataError, closest, join_names

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

SCHEMES = ("sqlite", "postgresql", "mysql", "mariadb", "oracle", "mssql")
UNIT_RECORDS = 4096
_DRIVERS = {"postgresql": "postgresql+psycopg"}
"""Where SQLAlchemy's default driver is no longer developed."""
_ODPS_TYPES = {
    "tinyint": "int8", "smallint": "int16", "int": "int32", "bigint": "int64", "float": "float32", "double": "float64",
    "boolean": "bool", "string": "string", "varchar": "string", "char": "string", "binary": "binary",
    "datetime": "timestamp[ms]", "timestamp": "timestamp[ns]", "date": "date32",
}  # fmt: skip


def is_sql(uri: str) -> bool:
    """
    >>> is_sql("postgresql+psycopg://host/shop?table=orders"), is_sql("s3://bucket/orders.parquet")
    (True, False)
    """
    scheme, separator, _ = uri.partition("://")
    return bool(separator) and scheme.partition("+")[0] in SCHEMES


class SqlRecords:
    """Rows of `table` in the order of `key`. `url` is SQLAlchemy's; both names may stand in its query instead."""

    ranged = forks = True

    def __init__(self, url: str, *, table: str = "", key: str = "", unit_records: int = UNIT_RECORDS) -> None:
        from sqlalchemy import create_engine, make_url
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError

        try:
            parsed = make_url(url)
            table, key = table or str(parsed.query.get("table", "")), key or str(parsed.query.get("key", ""))
            parsed = parsed.difference_update_query(["table", "key"])
            parsed = parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))
            self.where = parsed.render_as_string(hide_password=True)
            if not table:
                raise DataError(f"{self.where} names no table", hint="add ?table=NAME&key=COLUMN to the URL")
            self._engine = create_engine(parsed)
        except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
            raise DataError(f"cannot open a database: {type(error).__name__}: {error}") from error
        self.where += f"#{table}"
        self._table = self._reflect(table)
        self._key = self._table.columns[self._key_name(key)]
        self.schema = pa.schema([(column.name, _arrow_type(column.type)) for column in self._table.columns])
        self._bounds: list[Any] = []
        self.units = self._list_units(unit_records)

    def load(self, number: int, start: int, stop: int) -> pa.Table:
        from sqlalchemy import select

        query = select(self._table).where(self._key >= self._bounds[number]).order_by(self._key)
        if number + 1 < len(self._bounds):
            query = query.where(self._key < self._bounds[number + 1])
        unit = self.units[number]
        if (start, stop) != (0, unit.count):
            query = query.offset(start).limit(stop - start)
        with self._connect() as connection:
            rows = connection.execute(query).all()
        if len(rows) != stop - start:
            raise DataError(
                f"{unit.uri} has {len(rows)} rows where {stop - start} were listed: the table was written meanwhile",
                hint="train on a copy or a snapshot that is not written meanwhile",
            )
        columns = []
        for place, field in enumerate(self.schema):
            try:
                columns.append(pa.array([_plain(row[place], field.type) for row in rows], field.type))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise DataError(
                    f"{unit.uri}: column '{field.name}' does not hold {field.type}: {error}",
                    hint="correct the values, NULL where there is none, or read a view that casts the column",
                ) from error
        return pa.table(columns, schema=self.schema)

    def fingerprint(self) -> str:
        counts = [unit.count for unit in self.units]
        return hashlib.sha256(f"{self.where}|{self.schema}|{self._bounds}|{counts}".encode()).hexdigest()

    def _reflect(self, name: str) -> Table:
        from sqlalchemy import MetaData, Table, inspect
        from sqlalchemy.exc import NoSuchTableError

        with self._connect() as connection:
            try:
                return Table(name, MetaData(), autoload_with=connection)
            except NoSuchTableError as error:
                names = inspect(connection).get_table_names()
                near = closest(name, names)
                hint = f"did you mean '{near}'?" if near else ""
                raise DataError(f"{self.where} has no table '{name}' (has: {join_names(names)})", hint=hint) from error

    def _key_name(self, given: str) -> str:
        names = [column.name for column in self._table.columns]
        if given in names:
            return given
        primary = [column.name for column in self._table.primary_key.columns]
        if given or len(primary) != 1:
            missing = f"no column '{given}'" if given else "no primary key of one column"
            raise DataError(
                f"{self.where} has {missing} (has: {join_names(names)})",
                hint="name the column that orders and identifies its rows: &key=COLUMN",
            )
        return primary[0]

    def _list_units(self, unit_records: int) -> list[Unit]:
        """Finds bounds by a window function, so that only one key of each unit is transferred."""
        from sqlalchemy import func, select

        number = func.row_number().over(order_by=self._key).label("number")
        ranked = select(self._key.label("key"), number).subquery()
        bounds = select(ranked.c.key).where((ranked.c.number - 1) % unit_records == 0).order_by(ranked.c.key)
        counts = select(func.count(), func.count(self._key), func.count(self._key.distinct()))
        with self._connect() as connection:
            total, present, distinct = connection.execute(counts.select_from(self._table)).one()
            if total != distinct:
                what = f"{total - present} rows without one" if total != present else f"{total - distinct} repeats"
                raise DataError(f"{self.where}: '{self._key.name}' cannot number the rows: {what} in {total} rows")
            self._bounds = [row[0] for row in connection.execute(bounds)]
        return [
            Unit(uri=f"{self.where}#{bound!r}", offset=at, count=min(unit_records, total - at))
            for bound, at in zip(self._bounds, range(0, total, unit_records), strict=True)
        ]

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            with self._engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            why = (str(getattr(error, "orig", None) or error).splitlines() or [""])[0]
            raise DataError(f"cannot read {self.where}: {type(error).__name__}: {why}") from error
        finally:
            self._engine.dispose()  # no connection crosses a fork or stays open while a job computes


def _plain(value: Any, kind: Any) -> Any:
    """A driver's value for Arrow: decimals without a scale become floats, documents JSON."""
    if pa.types.is_floating(kind) and value is not None:
        return float(value)
    if pa.types.is_string(kind) and value is not None and not isinstance(value, str):
        return str(value) if isinstance(value, UUID) else json.dumps(value)
    return value


def _arrow_type(column_type: Any) -> Any:
    from sqlalchemy import types

    if isinstance(column_type, types.ARRAY):
        return pa.list_(_arrow_type(column_type.item_type))
    if isinstance(column_type, types.DateTime) and column_type.timezone:
        return pa.timestamp("us", "UTC")
    if isinstance(column_type, types.Numeric) and not isinstance(column_type, types.Float):
        return pa.decimal128(column_type.precision, column_type.scale or 0) if column_type.precision else pa.float64()
    for kind, arrow in (
        (types.Boolean, pa.bool_()), (types.Integer, pa.int64()), (types.Float, pa.float64()),
        (types.DateTime, pa.timestamp("us")), (types.Date, pa.date32()), (types.Time, pa.time64("us")),
        (types.LargeBinary, pa.binary()), ((types.String, types.Uuid, types.JSON), pa.string()),
    ):  # fmt: skip
        if isinstance(column_type, kind):
            return arrow
    raise DataError(f"a column of type {column_type} has no counterpart in Arrow", hint="cast it in a view")


class MaxComputeRecords:
    """`table` is pyodps's. `reopen` opens it for a fork of this process; without it a fork cannot read."""

    ranged = True

    def __init__(
        self,
        table: Any,
        *,
        partition: str | None = None,
        unit_records: int = UNIT_RECORDS,
        reopen: Callable[[], Any] | None = None,
    ) -> None:
        self._opened, self._reopen, self._partition = (os.getpid(), table), reopen, partition
        self.forks = reopen is not None
        self.where = f"odps table {table.name}" + (f" partition {partition}" if partition else "")
        self.schema = pa.schema([(column.name, self._type(column)) for column in table.table_schema.simple_columns])
        try:
            with table.open_reader(partition=partition) as reader:
                self._count = int(reader.count)
        except Exception as error:
            raise DataError(f"cannot read {self.where}: {type(error).__name__}: {error}") from error
        self.units = split_units(self.where, self._count, unit_records)

    @property
    def _table(self) -> Any:
        pid, table = self._opened
        if pid != os.getpid() and self._reopen is not None:
            self._opened = os.getpid(), (table := self._reopen())
        return table

    def load(self, number: int, start: int, stop: int) -> pa.Table:
        unit = self.units[number]
        try:
            with self._table.open_reader(partition=self._partition) as reader:
                if reader.count != self._count:
                    raise DataError(
                        f"{self.where} has {reader.count} rows, {self._count} when it was listed",
                        hint="train on a partition that is not written meanwhile",
                    )
                rows = [row.values for row in reader[unit.offset + start : unit.offset + stop]]
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"cannot read {unit.uri}: {type(error).__name__}: {error}") from error
        if len(rows) != stop - start:
            raise DataError(f"{unit.uri} gave {len(rows)} rows, expected {stop - start}")
        try:
            columns = [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(self.schema)]
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DataError(f"{unit.uri}: a value does not fit its column: {error}") from error
        return pa.table(columns, schema=self.schema)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.where}|{self.schema}|{self._count}".encode()).hexdigest()

    def _type(self, column: Any) -> Any:
        kind = str(column.type).lower().partition("(")[0]
        if kind not in _ODPS_TYPES:
            known = ", ".join(_ODPS_TYPES)
            raise DataError(f"{self.where}: column '{column.name}' is a {column.type}, expected one of {known}")
        return pa.type_for_alias(_ODPS_TYPES[kind])


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

    def open_table() -> Any:
        return odps.from_environments().get_table(name, project=parts.netloc)

    partition = parse_qs(parts.query).get("partition", [""])[0]
    return MaxComputeRecords(open_table(), partition=partition or None, reopen=open_table)
