"""Inspects, verifies and converts records."""

from collections.abc import Callable
from dataclasses import dataclass
from os import fspath
from typing import Any

import pyarrow as pa

from trueline import files
from trueline.data.formats.parquet import ParquetFormat
from trueline.data.formats.recordio import RecordIoFormat
from trueline.data.loading.decoded_cache import TableCache
from trueline.data.open import as_list, describe_uris, open_records
from trueline.data.records import FileRecords, Quarantined, Records
from trueline.data.sources.databases import is_sql
from trueline.data.tools.writer import RANGE_RECORDS, RangeWriter, WritePlan, read_commit
from trueline.errors import DataError
from trueline.storage.folder import open_folder
from trueline.storage.listing import COMMIT, PLAN, is_visible
from trueline.storage.location import Uri, Uris, is_remote, local_path

Progress = Callable[[int, int], object]
"""Called with the number of records done, and of all."""

_CACHE_BYTES = 256 << 20
_WITHOUT_CHECKSUMS = ("CSV", "JSON Lines", "Arrow IPC", "tar")


@dataclass(frozen=True, slots=True)
class InspectedRecords:
    records: int
    units: int
    largest_unit: int
    schema: pa.Schema
    samples: pa.Table
    fingerprint: str


def inspect(uris: Uris, *, format: str = "", samples: int = 5) -> InspectedRecords:
    """Counts, columns and `samples` records spread over the source. Raises DataError."""
    records = open_records(uris, format=format)
    total = count_records(records)
    indices = [total * number // samples for number in range(samples)] if samples < total else list(range(total))
    table = TableCache(records, _CACHE_BYTES).take(indices) if indices else records.schema.empty_table()
    largest = max((unit.count for unit in records.units), default=0)
    return InspectedRecords(total, len(records.units), largest, records.schema, table, records.fingerprint())


@dataclass(frozen=True, slots=True)
class VerifiedRecords:
    records: int
    """Readable ones, as `units` are."""
    units: int
    faults: tuple[Quarantined, ...]
    note: str
    """What this format cannot detect."""


def verify(uris: Uris, *, format: str = "", progress: Progress = lambda done, total: None) -> VerifiedRecords:
    """Reads every record once and skips units that cannot be read. Raises DataError where nothing can be listed."""
    source = open_records(uris, format=format, on_bad="files")
    faults = list(source.quarantined) if isinstance(source, FileRecords) else []
    records, units, total = 0, 0, count_records(source)
    for uri in as_list(uris):
        faults += compare_with_commit(uri)
    for number, unit in enumerate(source.units):
        try:
            records += len(source.load(number, 0, unit.count))
            units += 1
        except DataError as error:
            faults.append(Quarantined(unit.uri.rpartition("#")[0], unit.uri, unit.count, error.message))
        progress(unit.offset + unit.count, total)
    return VerifiedRecords(records, units, tuple(faults), _note(source))


def _note(records: Records) -> str:
    if not isinstance(records, FileRecords):
        return ""
    format = records.format
    if isinstance(format, ParquetFormat):
        return "Parquet has checksums where its writer wrote them: elsewhere a changed value is not detected"
    without = format.name if format.name in _WITHOUT_CHECKSUMS else ""
    if isinstance(format, RecordIoFormat) and not format.checked:
        without = "MXNet's RecordIO"
    return f"{without} has no checksums: a changed value is not detected" if without else ""


def compare_with_commit(where: Uri) -> list[Quarantined]:
    """The parts of the folder `where` that differ from its commit list; none for a folder without a plan."""
    text = fspath(where)
    if is_remote(where):
        if is_sql(text) or text.startswith("odps://") or any(sign in text for sign in "*?["):
            return []
    elif not local_path(where).is_dir():
        return []
    folder, facts, faults = open_folder(where), read_commit(where), list[Quarantined]()
    if facts is None:
        why = f"its writer has not finished it: it has {PLAN} and no {COMMIT}"
        return [Quarantined(text, "folder", 0, why)] if PLAN in folder.names() else []
    for part in facts["parts"]:
        data = folder.get(part["name"])
        if data is None:
            why = f"{COMMIT} lists it, and it is missing"
        elif files.sha256_bytes(data) != part["sha256"]:
            why = f"it differs from {COMMIT}: {len(data)} bytes of another content, expected {part['bytes']}"
        else:
            continue
        faults.append(Quarantined(f"{where}/{part['name']}", "part", part["records"], why))
    strangers = {name for name in folder.names() if is_visible(name)} - {part["name"] for part in facts["parts"]}
    faults += [Quarantined(f"{where}/{name}", "part", 0, f"{COMMIT} does not list it") for name in sorted(strangers)]
    return faults


def convert(
    uris: Uris,
    where: Uri,
    *,
    to: str = "parquet",
    format: str = "",
    range_records: int = RANGE_RECORDS,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Writes all records of `uris` to the folder `where` in the format `to`, or continues an earlier run; returns the
    commit list. Raises DataError, also when the source has changed since that run."""
    given = as_list(uris)
    records = open_records(given, format=format)
    total = count_records(records)
    if not total:
        raise DataError(f"{describe_uris(given)} holds no records")
    plan = WritePlan(num_records=total, range_records=range_records, format=to, of=records.fingerprint())
    writer = RangeWriter(where, plan)
    done = read_commit(where)
    if done is not None and not writer.missing():
        return done
    tables = TableCache(records, _CACHE_BYTES)
    for start, stop in writer.missing():
        writer.write(start, stop, tables.run(start, stop))
        progress(stop, total)
    return writer.commit()


def count_records(records: Records) -> int:
    return records.units[-1].offset + records.units[-1].count if records.units else 0
