"""Records from Parquet files, read where they lie: no conversion, no copy.

A unit is a row group, the smallest thing that Parquet decodes. A batch decodes each row group that it touches
once; decoded groups are kept while they fit in `cache_bytes`. A shuffled epoch over more data than that
decodes a group for nearly every record, so write row groups of a few thousand rows. Local paths, globs,
folders and `file://`. Torn, foreign or exchanged files are errors that name the file. Listing needs no torch;
`feed` makes the tensors.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trueline.data.source import Batch, Unit, check_indices
from trueline.errors import DataError

if TYPE_CHECKING:
    from trueline.data.source import Indices, Mode

_MAGIC = b"PAR1"


@dataclass(frozen=True, slots=True)
class _Group:
    """One row group. `stamp` is the file's size and time at listing: another stamp later is another file."""

    path: Path
    index: int
    stamp: tuple[int, int]


class ParquetSource:
    """A Source over the row groups of `uris`, in the order given (folders and globs in order of name)."""

    def __init__(
        self,
        uris: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        feed: Callable[..., Any],
        *,
        mode: Mode,
        cache_bytes: int = 256 * 2**20,
    ) -> None:
        given = [uris] if isinstance(uris, str | os.PathLike) else list(uris)
        self._feed = feed
        self._mode = mode
        self._where = ", ".join(os.fspath(uri) for uri in given[:3]) + (", ..." if len(given) > 3 else "")
        paths = [path for uri in given for path in _files(os.fspath(uri))]
        self._groups, self._units, self._schema = _list(paths)
        if not self._units:
            raise DataError(f"{self._where} holds no records")
        self._starts = np.array([unit.offset for unit in self._units], np.int64)
        self._decoded = _Decoded(cache_bytes, self._schema)

    @property
    def num_records(self) -> int:
        return self._units[-1].offset + self._units[-1].count

    @property
    def units(self) -> Sequence[Unit]:
        return self._units

    def read(self, indices: Indices) -> Batch:
        check_indices(indices, self.num_records, self._where)
        return self._fed(self.table(indices))

    def table(self, indices: Indices) -> pa.Table:
        """The records `indices` as they lie in the files, in that order. Raises DataError."""
        wanted = np.asarray(indices, np.int64)
        unit = np.searchsorted(self._starts, wanted, side="right") - 1
        by_unit = np.argsort(unit, kind="stable")
        parts = []
        for number in np.unique(unit):
            rows = wanted[unit == number] - self._starts[number]
            parts.append(self._decoded.get(self._groups[number]).take(pa.array(rows)))
        back = np.empty_like(by_unit)
        back[by_unit] = np.arange(len(by_unit))
        return pa.concat_tables(parts).take(pa.array(back)).combine_chunks()

    def fingerprint(self) -> str:
        """Over schema, and name, size, time and row groups of every file."""
        digest = hashlib.sha256(str(self._schema.remove_metadata()).encode())
        for group, unit in zip(self._groups, self._units, strict=True):
            digest.update(f"{group.path.name}:{group.index}:{group.stamp}:{unit.count};".encode())
        return digest.hexdigest()

    def _fed(self, table: pa.Table) -> Batch:
        what = f"feed(records, '{self._mode}')"
        try:
            found = self._feed(table, self._mode)
        except Exception as error:
            raise DataError(
                f"{what} fails on {len(table)} records with columns {', '.join(table.column_names)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(found, tuple | list) or len(found) != 2:
            count = f" of {len(found)}" if isinstance(found, tuple | list) else ""
            raise DataError(f"{what} returned a {type(found).__name__}{count}, expected (inputs, labels)")
        _check_count(found[0], len(table), f"inputs of {what}")
        if found[1] is not None or self._mode != "prediction":
            _check_count(found[1], len(table), f"labels of {what}")
        return Batch(found[0], found[1])


class _Decoded:
    """Row groups in memory, least recently used first out; the one in use stays whatever its size."""

    def __init__(self, max_bytes: int, schema: pa.Schema) -> None:
        self._max_bytes = max_bytes
        self._schema = schema
        self._num_bytes = 0
        self._tables: OrderedDict[_Group, pa.Table] = OrderedDict()
        self._lock = Lock()

    def get(self, group: _Group) -> pa.Table:
        with self._lock:
            table = self._tables.pop(group, None)
            if table is None:
                table = _decode(group)
                if not table.schema.equals(self._schema):
                    raise DataError(f"{group.path} has other columns than when it was listed")
                self._num_bytes += table.nbytes
            self._tables[group] = table
            while len(self._tables) > 1 and self._num_bytes > self._max_bytes:
                self._num_bytes -= self._tables.popitem(last=False)[1].nbytes
            return table


def _files(uri: str) -> Iterator[Path]:
    parts = urlsplit(uri)
    if parts.scheme and parts.scheme != "file" and "://" in uri:
        raise DataError(
            f"cannot read '{uri}': records are read from local paths and file:// so far",
            hint="copy the files to a disk that every worker sees",
        )
    path = Path(unquote(parts.path)) if "://" in uri else Path(uri)
    if path.is_dir():
        found = sorted(child for child in path.rglob("*.parquet") if not child.name.startswith((".", "_")))
    elif path.exists():
        found = [path]
    else:
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    if not found:
        kind = "folder has no .parquet files" if path.is_dir() else "file does not exist"
        raise DataError(f"no records at '{uri}': the {kind}", hint="paths are relative to the current folder")
    yield from found


def _list(paths: Sequence[Path]) -> tuple[list[_Group], list[Unit], pa.Schema]:
    groups: list[_Group] = []
    units: list[Unit] = []
    schema: pa.Schema | None = None
    offset = 0
    for path in paths:
        stamp = _stamp(path)
        metadata, found = _metadata(path)
        if schema is not None and not found.equals(schema):
            columns = f"{_names(found)}, expected {_names(schema)}"
            raise DataError(f"{path} has other columns than {paths[0]}: {columns}")
        schema = found
        for index in range(metadata.num_row_groups):
            count = metadata.row_group(index).num_rows
            if count:
                groups.append(_Group(path, index, stamp))
                units.append(Unit(uri=f"{path}#{index}", offset=offset, count=count))
                offset += count
    return groups, units, schema if schema is not None else pa.schema([])


def _names(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns


def _metadata(path: Path) -> tuple[pq.FileMetaData, pa.Schema]:
    try:
        with pq.ParquetFile(path) as file:
            return file.metadata, file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} {_complaint(path)}: {_first_line(error)}") from error


def _complaint(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
    except OSError:
        return "cannot be read"
    return "is torn: its footer is missing or damaged" if start == _MAGIC else "is not a Parquet file"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _decode(group: _Group) -> pa.Table:
    if _stamp(group.path) != group.stamp:
        raise DataError(
            f"{group.path} was changed while it was in use",
            hint="write new records to a new file, then start again",
        )
    try:
        with pq.ParquetFile(group.path, memory_map=True, page_checksum_verification=True) as file:
            return file.read_row_group(group.index)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{group.path} is torn in row group {group.index}: {_first_line(error)}") from error


def _check_count(value: Any, count: int, what: str) -> None:
    if isinstance(value, dict):
        for name, one in value.items():
            _check_count(one, count, f"'{name}' in {what}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            _check_count(one, count, f"item {number} in {what}")
    else:
        _check_tensor(value, count, what)


def _check_tensor(value: Any, count: int, what: str) -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        raise DataError(
            f"{what}: found a {type(value).__name__}, expected tensors",
            hint="make them with torch.from_numpy(records['column'].to_numpy())",
        )
    if value.ndim == 0 or len(value) != count:
        raise DataError(f"{what}: a tensor of shape {list(value.shape)}, expected {count} records first")
