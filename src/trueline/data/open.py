"""Any place that holds records, by its URI: which reader it needs is seen from scheme, ending or content of the folder.

train.parquet  day-*.csv  s3://bucket/clicks/  photos/  saved_by_datasets/  sqlite:///clicks.db?table=clicks&key=id
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from trueline.data.loading.default_feed import DefaultFeed
from trueline.data.records import FileRecords, Format, OnBad, Records
from trueline.data.source import Mode, Source
from trueline.data.sources.map_style import DatasetSource
from trueline.data.sources.mixture import SampledDataset, SampledSource
from trueline.data.sources.table_source import CACHE_BYTES, TableSource
from trueline.errors import DataError, RecipeError, closest, join_names
from trueline.storage.listing import is_visible, list_files, list_store
from trueline.storage.location import Uri, is_remote, local_path
from trueline.storage.object_store import redact_uri

FORMATS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "parquet": ((".parquet", ".pq"), "parquet", "ParquetFormat"),
    "arrow": ((".arrow", ".arrows", ".feather", ".ipc"), "arrow", "ArrowFormat"),
    "csv": ((".csv", ".tsv"), "text", "CsvFormat"),
    "jsonl": ((".jsonl", ".ndjson", ".jsonlines"), "text", "JsonLinesFormat"),
    "recordio": ((".recordio", ".rec"), "recordio", "RecordIoFormat"),
    "tar": ((".tar",), "tar", "TarFormat"),
    "arrayrecord": ((".array_record", ".arrayrecord"), "arrayrecord", "ArrayRecordFormat"),
}
"""Name: endings, module of `formats`, class. A module is imported when it is needed."""

_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tgz")


def as_source(
    found: Any,
    *,
    mode: Mode,
    feed: Callable[..., Any] | None,
    recipe: str,
    vocabulary: Callable[[], Any] | None = None,
    tokenizer: Callable[[], Any] | None = None,
) -> Source:
    """Makes a Source of what a recipe's `dataset(mode)` returned: a map-style Dataset, the URI of records, or what is
    `drawn` from several of them.

    These become tensors by `feed`, or, without it, by their columns (`feeds`), texts by `vocabulary()` or
    `tokenizer()`. A Source is taken as it is. Raises RecipeError for anything else, DataError for records that cannot
    be listed, or whose columns make no tensors.
    """
    if isinstance(found, Source):
        return found
    if isinstance(found, SampledDataset):
        how: dict[str, Any] = {"mode": mode, "feed": feed, "recipe": recipe}
        how |= {"vocabulary": vocabulary, "tokenizer": tokenizer}
        return SampledSource([as_source(part, **how) for part in found.parts], found)
    uris = _uris(found)
    if uris:
        if feed is not None:
            return open_source(uris, feed, mode=mode)
        usual = DefaultFeed(vocabulary and vocabulary(), tokenizer and tokenizer())
        source = open_source(uris, usual, mode=mode)
        usual.check(source.records.schema, mode)
        return source
    indexed = hasattr(found, "__getitem__") and hasattr(found, "__len__")
    if indexed and not isinstance(found, tuple | dict):
        return DatasetSource(found, mode=mode)
    iterable = hasattr(found, "__iter__") and not isinstance(found, tuple | dict)
    why = ", which can be iterated but not indexed" if iterable else ""
    raise RecipeError(
        f"recipe {recipe}: dataset('{mode}') returned {type(found).__name__}{why}; "
        "expected a map-style Dataset (__len__ and __getitem__), or the URI of records",
        hint="elastic training reads any record by its index, so that none is lost or trained twice",
    )


def open_source(
    uris: Uri | Sequence[Uri],
    feed: Callable[..., Any],
    *,
    mode: Mode,
    format: str = "",
    on_bad: OnBad = "stop",
    cache_bytes: int = CACHE_BYTES,
) -> TableSource:
    """The records at `uris` as a Source; `feed(records, mode)` gets a pyarrow.Table of them. Raises DataError."""
    given = _as_list(uris)
    records = open_records(given, format=format, on_bad=on_bad)
    return TableSource(records, feed, mode=mode, where=describe_uris(given), cache_bytes=cache_bytes)


def open_records(uris: Uri | Sequence[Uri], *, format: str = "", on_bad: OnBad = "stop") -> Records:
    """The records at `uris`: paths, globs, folders, objects of a store, one table of a database, or a list of files.

    `format` is asked for only where the endings do not say it. With `on_bad="quarantine"` every unit is read once,
    and what cannot be read is left out and reported in the result's `quarantined`; `"files"` does that only for files
    that cannot be listed. Raises DataError.
    """
    given = _as_list(uris)
    if len(given) == 1 and not format:
        from trueline.data.sources.sql import SqlRecords, is_sql

        only = os.fspath(given[0])
        if is_sql(only):
            return _refuse_quarantine(SqlRecords(only), on_bad)
        if only.startswith("odps://"):
            from trueline.data.sources.maxcompute import open_odps_table

            return _refuse_quarantine(open_odps_table(only), on_bad)
        path = local_path(only)
        if not is_remote(only) and path.is_dir():
            found = _open_folder(path, on_bad)
            if found is not None:
                return found
    chosen = format or _format_of(given)
    if chosen not in FORMATS:
        raise DataError(f"'{chosen}' is no format of records (there are: {join_names(FORMATS)})")
    suffixes = FORMATS[chosen][0]
    return FileRecords(make_format(chosen), list_files(given, suffixes, complete=on_bad == "stop"), on_bad=on_bad)


def make_format(name: str) -> Format:
    _, module, kind = FORMATS[name]
    made: Format = getattr(import_module(f"trueline.data.formats.{module}"), kind)()
    return made


def format_of_name(name: str) -> str:
    """The format that an ending stands for, or an empty text."""
    return next((kind for kind, (suffixes, _, _) in FORMATS.items() if name.endswith(suffixes)), "")


def describe_uris(uris: Sequence[Uri]) -> str:
    """The first of `uris`, for messages: without credentials."""
    return ", ".join(redact_uri(os.fspath(uri)) for uri in uris[:3]) + (", ..." if len(uris) > 3 else "")


def _uris(found: Any) -> list[str]:
    if isinstance(found, str | os.PathLike):
        return [os.fspath(found)]
    if isinstance(found, list | tuple) and all(isinstance(one, str | os.PathLike) for one in found):
        return [os.fspath(one) for one in found]
    return []


def _as_list(uris: Uri | Sequence[Uri]) -> list[Uri]:
    given = [uris] if isinstance(uris, str | os.PathLike) else list(uris)
    if not given:
        raise DataError("no records are named", hint="give at least one path or URI")
    return given


def _refuse_quarantine(records: Records, on_bad: OnBad) -> Records:
    if on_bad == "quarantine":
        raise DataError(f"{type(records).__name__} knows no quarantine: only files can be left out")
    return records


def _open_folder(path: Path, on_bad: OnBad) -> Records | None:
    """Folders that are more than files of one ending."""
    from trueline.data.formats.arrow import ArrowFormat, hugging_face_files, is_hugging_face
    from trueline.data.formats.image_folder import ImageRecords, is_image_folder

    if is_hugging_face(path):
        return FileRecords(ArrowFormat(), hugging_face_files(path), on_bad=on_bad)
    if is_image_folder(path) and not _formats_in(path):
        return _refuse_quarantine(ImageRecords(path), on_bad)
    return None


def _formats_in(path: Path) -> list[str]:
    names = (one.name for one in path.rglob("*") if is_visible(one.name) and one.is_file())
    return sorted({format_of_name(name) for name in names} - {""})


def _format_of(uris: Sequence[Uri]) -> str:
    found: dict[str, str] = {}
    for uri in uris:
        for kind in _formats_at(uri):
            found.setdefault(kind, os.fspath(uri))
    if len(found) > 1:
        raise DataError(
            f"{describe_uris(uris)} holds several formats: {join_names(found)}",
            hint="name files of one format, or a pattern",
        )
    return next(iter(found))


def _formats_at(uri: Uri) -> list[str]:
    text = os.fspath(uri)
    kind = format_of_name(text)
    if kind:
        return [kind]
    if text.endswith(_PACKED):
        raise DataError(
            f"{describe_uris([uri])} is compressed as a whole, so no record in it can be reached by its number",
            hint="decompress it, or convert it: a format that compresses in pieces is Parquet",
        )
    if is_remote(uri):
        every = tuple(suffix for suffixes, _, _ in FORMATS.values() for suffix in suffixes)
        return sorted({format_of_name(file.name) for file in list_store(text, every)} - {""})
    path = local_path(uri)
    if path.is_dir():
        kinds = _formats_in(path)
        if kinds:
            return kinds
        every_suffix = join_names(suffix for suffixes, _, _ in FORMATS.values() for suffix in suffixes)
        raise DataError(f"no records at '{uri}': the folder has no {every_suffix} files")
    if path.exists() or "." in path.name:
        ending = path.suffix or path.name
        near = closest(ending, [suffix for suffixes, _, _ in FORMATS.values() for suffix in suffixes])
        raise DataError(
            f"'{uri}' has an ending that says no format" + (f"; did you mean {near}?" if near else ""),
            hint=f"name the format: {join_names(FORMATS)}",
        )
    raise DataError(f"no records at '{uri}': the file does not exist", hint="paths are relative to the current folder")
