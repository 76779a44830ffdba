"""Looking at records: what there is, whether all of it can be read, and the same in another format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import pyarrow as pa

from trueline import files
from trueline.data.formats.parquet import ParquetFormat
from trueline.data.formats.recordio import RecordIoFormat
from trueline.data.loading.decoded_cache import TableCache
from trueline.data.open import describe_uris, open_records
from trueline.data.records import FileRecords, Quarantined, Records
from trueline.data.sources.sql import is_sql
from trueline.data.tools.writer import RANGE_RECORDS, RangeWriter, WritePlan, open_folder, read_commit
from trueline.errors import DataError
from trueline.storage.listing import COMMIT, PLAN, is_visible
from trueline.storage.location import Uri, is_remote, local_path

Progress = Callable[[int, int], None]
"""Told how many records are done, and of how many."""

_CACHE_BYTES = 256 << 20
_WITHOUT_CHECKSUMS = ("CSV", "JSON Lines", "Arrow IPC", "tar")


def no_news(done: int, of: int) -> None:
    """An `Advanced` that keeps it to itself."""


@dataclass(frozen=True, slots=True)
class InspectedRecords:
    records: int
    units: int
    largest_unit: int
    schema: pa.Schema
    samples: pa.Table
    fingerprint: str


def inspect(uris: Uri | Sequence[Uri], *, format: str = "", samples: int = 5) -> InspectedRecords:
    """Counts, columns and `samples` records spread over the source. Raises DataError."""
    found = open_records(uris, format=format)
    total = count_records(found)
    if not total:
        return InspectedRecords(0, 0, 0, found.schema, found.schema.empty_table(), found.fingerprint())
    some = min(samples, total)
    wanted = [total * number // some for number in range(some)]
    table = TableCache(found, _CACHE_BYTES).take(wanted) if wanted else found.schema.empty_table()
    largest = max(unit.count for unit in found.units)
    return InspectedRecords(total, len(found.units), largest, found.schema, table, found.fingerprint())


@dataclass(frozen=True, slots=True)
class VerifiedRecords:
    records: int
    """How many could be read, and in how many units."""
    units: int
    faults: tuple[Quarantined, ...]
    note: str
    """What this format cannot show."""


def verify(uris: Uri | Sequence[Uri], *, format: str = "", advanced: Progress = no_news) -> VerifiedRecords:
    """Reads every record once and goes on behind what cannot be read. Raises DataError where nothing can be listed."""
    found = open_records(uris, format=format, on_bad="files")
    faults = list(found.quarantined) if isinstance(found, FileRecords) else []
    records, units, total = 0, 0, count_records(found)
    for uri in [uris] if isinstance(uris, str | PathLike) else uris:
        faults += compare_with_commit(uri)
    for number, unit in enumerate(found.units):
        try:
            records += len(found.load(number, 0, unit.count))
            units += 1
        except DataError as error:
            faults.append(Quarantined(unit.uri.rpartition("#")[0], unit.uri, unit.count, error.message))
        advanced(unit.offset + unit.count, total)
    return VerifiedRecords(records, units, tuple(faults), _note(found))


def _note(found: Records) -> str:
    if not isinstance(found, FileRecords):
        return ""
    kind = found.format
    if isinstance(kind, ParquetFormat):
        return "Parquet has checksums where its writer wrote them: elsewhere a changed value would not show"
    without = kind.name if kind.name in _WITHOUT_CHECKSUMS else ""
    if isinstance(kind, RecordIoFormat) and not kind.checked:
        without = "MXNet's RecordIO"
    return f"{without} has no checksums: a changed value would not show" if without else ""


def compare_with_commit(where: Uri) -> list[Quarantined]:
    """The parts of the folder `where` that are not what its commit list says; none where nobody has planned any."""
    if not may_be_folder(where):
        return []
    folder, faults = open_folder(where), list[Quarantined]()
    facts = read_commit(where)
    if facts is None:
        unfinished = PLAN in folder.names()
        why = f"its writer has not finished it: it has {PLAN} and no {COMMIT}"
        return [Quarantined(fspath(where), "folder", 0, why)] if unfinished else []
    for part in facts["parts"]:
        data = folder.get(part["name"])
        if data is None:
            why = f"{COMMIT} lists it, and it is not there"
        elif files.sha256_bytes(data) != part["sha256"]:
            why = f"it is not what {COMMIT} says: {len(data)} bytes of another content, expected {part['bytes']}"
        else:
            continue
        faults.append(Quarantined(f"{where}/{part['name']}", "part", part["records"], why))
    strangers = {name for name in folder.names() if is_visible(name)} - {part["name"] for part in facts["parts"]}
    faults += [
        Quarantined(f"{where}/{name}", "part", 0, f"it is no part of what {COMMIT} lists") for name in sorted(strangers)
    ]
    return faults


def may_be_folder(where: Uri) -> bool:
    if is_remote(where):
        text = fspath(where)
        return not (is_sql(text) or text.startswith("odps://") or any(sign in text for sign in "*?["))
    return local_path(where).is_dir()


def convert(
    uris: Uri | Sequence[Uri],
    where: Uri,
    *,
    to: str = "parquet",
    format: str = "",
    range_records: int = RANGE_RECORDS,
    advanced: Progress = no_news,
) -> dict[str, Any]:
    """Writes all records of `uris` to the folder `where` as `to`, in their order; returns the commit list.

    What an earlier run has written stays. Raises DataError, also where the source changed since that run.
    """
    given = [uris] if isinstance(uris, str | PathLike) else list(uris)
    found = open_records(given, format=format)
    total = count_records(found)
    if not total:
        raise DataError(f"{describe_uris(given)} holds no records")
    plan = WritePlan(num_records=total, range_records=range_records, format=to, of=found.fingerprint())
    writer = RangeWriter(where, plan)
    done = read_commit(where)
    if done is not None and not writer.missing():
        return done
    tables = TableCache(found, _CACHE_BYTES)
    for start, stop in writer.missing():
        writer.write(start, stop, tables.run(start, stop))
        advanced(stop, total)
    return writer.commit()


def count_records(records: Records) -> int:
    return records.units[-1].offset + records.units[-1].count if records.units else 0
