"""Opens records by their URI; scheme, ending or the content of a folder decides which reader is used.

train.parquet  day-*.csv  s3://bucket/clicks/  photos/  saved_by_datasets/  sqlite:///clicks.db?table=clicks&key=id
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa

from trueline.columns import fit as fitting
from trueline.columns.declared import Declared
from trueline.columns.fitted import FittedColumns
from trueline.data.formats.arrow import ArrowFormat, hugging_face_files, is_hugging_face
from trueline.data.formats.image_folder import ImageRecords, is_image_folder
from trueline.data.loading.column_feed import ColumnFeed
from trueline.data.loading.tensors import LABELS, DefaultFeed
from trueline.data.missing import Missing, stream_tables
from trueline.data.records import FileRecords, OnBad, Records
from trueline.data.source import Countable, Mode, Source
from trueline.data.sources.databases import SqlRecords, is_sql, open_odps_table
from trueline.data.sources.map_style import DatasetSource
from trueline.data.sources.mixture import SampledDataset, SampledSource
from trueline.data.sources.table_source import CACHE_BYTES, TableSource
from trueline.errors import DataError, RecipeError, UsageError, closest, join_names
from trueline.storage.listing import is_visible, list_files, list_store
from trueline.storage.location import Uri, Uris, is_remote, local_path
from trueline.storage.object_store import redact_uri

FORMATS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "parquet": ((".parquet", ".pq"), "parquet", "ParquetFormat"),
    "arrow": ((".arrow", ".arrows", ".feather", ".ipc"), "arrow", "ArrowFormat"),
    "csv": ((".csv", ".tsv"), "text", "CsvFormat"),
    "jsonl": ((".jsonl", ".ndjson", ".jsonlines"), "text", "JsonLinesFormat"),
    "recordio": ((".recordio", ".rec"), "recordio", "RecordIoFormat"),
    "tar": ((".tar",), "tar", "TarFormat"),
    "arrayrecord": ((".array_record", ".arrayrecord"), "recordio", "ArrayRecordFormat"),
}
"""Name: endings, module in `formats` (imported when it is needed), class."""
_ENDINGS = [ending for endings, _, _ in FORMATS.values() for ending in endings]
Feed = Callable[..., Any]
Blank = Callable[[], Any] | None
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tgz")


def as_source(
    dataset: Any, *, mode: Mode, feed: Feed | None, recipe: str, tokenizer: Blank = None, missing: Missing | None = None
) -> Source:
    """A Source of what a recipe's `dataset(mode)` returned: a map-style Dataset, URIs of records, a SampledDataset of
    either, or a Source.

    `feed` makes tensors of records; without it `DefaultFeed` does, of texts by `tokenizer()`. Raises
    RecipeError for anything else, DataError for records that cannot be listed or whose columns make no tensors.
    """
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, SampledDataset):
        rules = Missing(missing.rules) if missing is not None else None  # a mean is over one part, and is refused
        open_part = partial(as_source, mode=mode, feed=feed, recipe=recipe, tokenizer=tokenizer, missing=rules)
        return SampledSource([open_part(part) for part in dataset.parts], dataset)
    parts = dataset if isinstance(dataset, list | tuple) else [dataset]
    if parts and all(isinstance(part, str | os.PathLike) for part in parts):
        if isinstance(feed, ColumnFeed):
            records = open_records(dataset, named=True)
            return TableSource(records, feed, mode=mode, where=describe_uris(as_list(dataset)))
        if feed is not None:
            return open_source(dataset, feed, mode=mode, missing=missing)
        default = DefaultFeed(tokenizer and tokenizer())
        source = open_source(dataset, default, mode=mode, missing=missing)
        default.check(source.records.schema, mode)
        return source
    inner = getattr(dataset, "dataset", dataset) if hasattr(dataset, "batch_sampler") else dataset  # of a DataLoader
    streams = any(one.__name__ == "IterableDataset" for one in type(inner).__mro__)
    indexed = hasattr(inner, "__getitem__") and hasattr(inner, "__len__") and not streams
    if indexed and not isinstance(dataset, tuple | dict):
        return DatasetSource(dataset, mode=mode)
    iterable = hasattr(dataset, "__iter__") and not isinstance(dataset, tuple | dict)
    why = ", which can be iterated but not indexed" if iterable else ""
    raise RecipeError(
        f"recipe {recipe}: dataset('{mode}') returned {type(dataset).__name__}{why}; "
        "expected a map-style Dataset (__len__ and __getitem__), or the URI of records",
        hint="elastic training reads any record by its index, so that none is lost or trained twice; write a stream "
        "to a file of records once, e.g. Parquet, and return its name",
    )


def open_source(
    uris: Uris,
    feed: Feed,
    *,
    mode: Mode,
    format: str = "",
    on_bad: OnBad = "stop",
    cache_bytes: int = CACHE_BYTES,
    missing: Missing | None = None,
) -> TableSource:
    """The records at `uris` as a Source; `feed(records, mode)` is called with a pyarrow.Table, in which `missing` has
    replaced missing values. Raises DataError."""
    uris, missing = as_list(uris), missing or Missing()
    records = open_records(uris, format=format, on_bad=on_bad)
    of = records
    if missing.needs_mean(records.schema, LABELS) and mode != "training":
        of = _open_training(missing)
    values = missing.values(records.schema, LABELS, of)
    return TableSource(
        records, feed, mode=mode, where=describe_uris(uris), cache_bytes=cache_bytes, missing=missing, fills=values
    )


def _open_training(missing: Missing) -> Records:
    """The training records, over which the means for other records are taken."""
    dataset = missing.training() if missing.training is not None else None
    parts = dataset if isinstance(dataset, list | tuple) else [dataset]
    uris = [part for part in parts if isinstance(part, str | os.PathLike)]
    if len(uris) < len(parts):
        raise DataError(
            "missing is 'mean', and the training records are not at URIs of one source",
            hint="give the number: missing = {column: number}",
        )
    return open_records(uris)


def beside(dataset: Any, folder: Path | None) -> Any:
    """`dataset` with its relative paths in `folder`, a recipe's, where there is such a file; else they stay relative to
    the current folder."""
    if folder is None:
        return dataset
    if isinstance(dataset, list | tuple):
        return type(dataset)([beside(one, folder) for one in dataset])
    if isinstance(dataset, SampledDataset):
        return replace(dataset, parts=tuple(beside(one, folder) for one in dataset.parts))
    if not isinstance(dataset, str | os.PathLike) or is_remote(dataset) or is_sql(os.fspath(dataset)):
        return dataset
    text = os.fspath(dataset)
    if not text or Path(text).is_absolute() or text.startswith("~") or "://" in text:
        return dataset
    there = (folder / text).exists() or (any(mark in text for mark in "*?[") and next(folder.glob(text), None))
    return str(folder / text) if there else dataset


def fit_columns(
    dataset: Any, declared: Mapping[str, Declared], *, report: Callable[[int, int], None] = lambda done, total: None
) -> FittedColumns:
    """Fits a recipe's columns to its training records, the URIs that `dataset` names. Raises DataError.

    Calls `report` with the number of records that were read, and of all.
    """
    parts = dataset.parts if isinstance(dataset, SampledDataset) else [dataset]
    opened = []
    for part in parts:
        uris = part if isinstance(part, list | tuple) else [part]
        if not all(isinstance(uri, str | os.PathLike) for uri in uris):
            raise DataError(
                f"columns are of records at URIs, and dataset('training') returned {type(part).__name__}",
                hint="return the path of a table: CSV, Parquet, a folder of images, a table of a database, ...",
            )
        opened.append(open_records(uris, named=True))
    total = sum(unit.count for records in opened for unit in records.units)

    def tables(names: Sequence[str]) -> Iterator[pa.Table]:
        for records in opened:
            for number, unit in enumerate(records.units):
                yield from (table.select(names) for table in stream_tables(records, number, unit.count))

    return fitting.fit(declared, tables, opened[0].schema, report=lambda done: report(done, total))


def open_records(uris: Uris, *, format: str = "", on_bad: OnBad = "stop", named: bool = False) -> Records:
    """The records at `uris`: paths, globs, folders, objects of a store, one table of a database, or a list of files.

    With `named`, the labels of a folder of images are the names of its folders, not numbers.

    `format` is needed only where the endings do not tell it. With `on_bad="quarantine"` every unit is read once, and
    what cannot be read is left out and reported in the result's `quarantined`; `"files"` does that only for files
    that cannot be listed. Raises DataError.
    """
    uris = as_list(uris)
    if len(uris) == 1 and not format:
        records = _open_database_or_folder(os.fspath(uris[0]), on_bad, named=named)
        if records is not None:
            return records
    format = format or _find_format(uris)
    if format not in FORMATS:
        raise DataError(f"'{format}' is no format of records (there are: {join_names(FORMATS)})")
    endings, module, class_name = FORMATS[format]
    files = list_files(uris, endings, complete=on_bad == "stop")
    return FileRecords(getattr(import_module(f"trueline.data.formats.{module}"), class_name)(), files, on_bad=on_bad)


def format_of_name(name: str) -> str:
    """The format of a file name's ending, or an empty text."""
    return next((format for format, (endings, _, _) in FORMATS.items() if name.endswith(endings)), "")


def describe_uris(uris: Sequence[Uri]) -> str:
    """The first of `uris`, for messages: without credentials."""
    return ", ".join(redact_uri(os.fspath(uri)) for uri in uris[:3]) + (", ..." if len(uris) > 3 else "")


def as_list(uris: Uris) -> list[Uri]:
    listed = [uris] if isinstance(uris, str | os.PathLike) else list(uris)
    if not listed:
        raise DataError("no records are named", hint="give at least one path or URI")
    return listed


def _open_database_or_folder(uri: str, on_bad: OnBad, *, named: bool = False) -> Records | None:
    """None for a URI of files in one format."""
    path = local_path(uri)
    records: Records
    if is_sql(uri):
        records = SqlRecords(uri)
    elif uri.startswith("odps://"):
        records = open_odps_table(uri)
    elif is_remote(uri) or not path.is_dir():
        return None
    elif is_hugging_face(path):
        return FileRecords(ArrowFormat(), hugging_face_files(path), on_bad=on_bad)
    elif is_image_folder(path) and not _formats_in(path):
        records = ImageRecords(path, named=named)
    else:
        return None
    if on_bad == "quarantine":
        raise DataError(f"{type(records).__name__} knows no quarantine: only files can be left out")
    return records


def _formats_in(path: Path) -> list[str]:
    names = (file.name for file in path.rglob("*") if is_visible(file.name) and file.is_file())
    return sorted({format_of_name(name) for name in names} - {""})


def _find_format(uris: Sequence[Uri]) -> str:
    """Raises DataError for several."""
    formats = dict.fromkeys(format for uri in uris for format in _formats_at(uri))
    if len(formats) > 1:
        raise DataError(
            f"{describe_uris(uris)} holds several formats: {join_names(formats)}",
            hint="name files of one format, or a pattern",
        )
    return next(iter(formats))


def _formats_at(uri: Uri) -> list[str]:
    text = os.fspath(uri)
    format = format_of_name(text)
    if format:
        return [format]
    if text.endswith(_COMPRESSED):
        raise DataError(
            f"{describe_uris([uri])} is compressed as a whole, so no record in it can be reached by its number",
            hint="decompress it, or convert it: a format that compresses in pieces is Parquet",
        )
    if is_remote(uri):
        return sorted({format_of_name(file.name) for file in list_store(text, _ENDINGS)} - {""})
    path = local_path(uri)
    if path.is_dir():
        formats = _formats_in(path)
        if formats:
            return formats
        raise DataError(f"no records at '{uri}': the folder has no {join_names(_ENDINGS)} files")
    if path.exists() or "." in path.name:
        near = closest(path.suffix or path.name, _ENDINGS)
        raise DataError(
            f"'{uri}' has an ending of no known format" + (f"; did you mean {near}?" if near else ""),
            hint=f"name the format: {join_names(FORMATS)}",
        )
    raise DataError(
        f"no records at '{uri}': the file does not exist",
        hint="paths are relative to the recipe's folder, or to the current one",
    )


def open_training(dataset: Any) -> Source:
    """The records of a loop's data set: a Source or a map-style Dataset. Raises UsageError if it has none."""
    source = dataset if isinstance(dataset, Source) else as_source(dataset, mode="training", feed=None, recipe="job")
    if source.num_records < 1:
        raise UsageError("the data set has no records", hint="check dataset('training')")
    if isinstance(source, Countable) and os.environ.get("TRUELINE_REF", "worker-0.0") == "worker-0.0":
        source.check_missing()  # once in a job, before its first step
    return source
