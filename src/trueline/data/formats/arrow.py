"""Records from Arrow IPC files, IPC streams and folders written by Hugging Face's `save_to_disk`.

A unit is a record batch, mapped into memory and not copied. Arrow has no checksums, so a flipped bit inside a value is
not detected. Broken structure, offsets outside a batch and texts that are not UTF-8, which could crash the process, are
detected when a batch is first read. A stream without its end mark is refused, since it may be incomplete.
Source: the Arrow columnar format's IPC page (arrow.apache.org/docs/format/Columnar.html).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from trueline.data.records import FileListing, FileUnit, torn_error
from trueline.errors import DataError, join_names, name_type
from trueline.storage.location import File, LocalFile, Stamp, read_range

_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_END = _CONTINUATION + bytes(4)


class ArrowFormat:
    name = "Arrow IPC"
    unit = "record batch"
    ranged = False

    def __init__(self) -> None:
        self._valid: set[tuple[str, Stamp, int]] = set()

    def list(self, file: File) -> FileListing:
        start = read_range(file, 0, len(_MAGIC))
        if start == _MAGIC:
            return self._list_file(file)
        if start[:4] == _CONTINUATION:
            return self._list_stream(file)
        raise DataError(f"{file.uri} is not an Arrow IPC file or stream: it begins with {start!r}")

    def _list_file(self, file: File) -> FileListing:
        """`FileUnit.at` is the batch's number; only its first column is read."""
        with _map(file) as source, pa.ipc.open_file(source) as reader:
            schema, count = reader.schema, reader.num_record_batches
        options = pa.ipc.IpcReadOptions(included_fields=[0]) if len(schema) else None
        with _map(file) as source, pa.ipc.open_file(source, options=options) as reader:
            return FileListing(schema, [FileUnit(reader.get_batch(index).num_rows, index) for index in range(count)])

    def _list_stream(self, file: File) -> FileListing:
        """`FileUnit.at` and `end` are the first byte of the batch's message and the one after its last."""
        parts: list[FileUnit] = []
        with _map(file) as source:
            reader = pa.ipc.open_stream(source)
            schema = reader.schema
            names = [field.name for field in schema if pa.types.is_dictionary(field.type)]
            if names:
                raise DataError(
                    f"{file.uri} is an Arrow stream with dictionary columns ({join_names(names)})",
                    hint="they have no ranges; write an Arrow IPC file (pyarrow.ipc.new_file), or Parquet",
                )
            while True:
                at = source.tell()
                if source.read(len(_END)) == _END:
                    return FileListing(schema, parts)
                source.seek(at)
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    why = f"no end mark follows {len(parts)} record batches"
                    hint = "close the writer that makes it, or write it again as an IPC file"
                    raise torn_error(file, at, why, hint) from None
                parts.append(FileUnit(batch.num_rows, at, source.tell()))

    def load(self, file: File, part: FileUnit, start: int, stop: int) -> pa.Table:
        with _map(file) as source:
            if part.end:
                schema = pa.ipc.open_stream(source).schema
                source.seek(part.at)
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)
            else:
                batch = pa.ipc.open_file(source).get_batch(part.at)
        if (file.uri, file.stamp, part.at) not in self._valid:
            batch.validate(full=True)
            self._valid.add((file.uri, file.stamp, part.at))
        if batch.num_rows == part.count:
            batch = batch.slice(start, stop - start)
        return pa.Table.from_batches([batch])


@contextmanager
def _map(file: File) -> Iterator[Any]:
    """The buffers that are read keep the mapping alive after the block."""
    if file.path is not None:
        with pa.memory_map(str(file.path)) as source:
            yield source
    else:
        with file.open() as opened, pa.PythonFile(opened) as source:
            yield source


def is_hugging_face(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def hugging_face_files(folder: Path) -> list[File]:
    """The files of a saved Dataset, in order. Raises DataError for a folder of several splits."""
    if not (folder / "state.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits", [])
        raise DataError(
            f"{folder} holds a DatasetDict of {len(splits)} splits: {join_names(map(str, splits))}",
            hint=f"name one of them: {folder / str(splits[0]) if splits else folder}",
        )
    state = _json(folder / "state.json")
    try:
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / 'state.json'} names no files (expected _data_files with filename)") from error
    if any("/" in name or name.startswith("..") for name in names):
        raise DataError(f"{folder / 'state.json'} names files outside of its folder: {join_names(names)}")
    return [LocalFile.at(folder / name) for name in names]


def _json(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not isinstance(facts, dict):
        raise DataError(f"{path} is {name_type(facts)}, expected an object")
    return facts
