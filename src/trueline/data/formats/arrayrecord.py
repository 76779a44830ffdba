"""Records from local ArrayRecord files, through Google's `array_record` package (the extra `arrayrecord`).

One column, `record` (binary). A unit is a run of 4096 records, and single records can be read; write with a group size
of about 64, since a group is decompressed as a whole.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pyarrow as pa

from trueline.data.formats.recordio import SCHEMA
from trueline.data.records import FileListing, FileUnit
from trueline.errors import DataError
from trueline.storage.file import File

_UNIT_RECORDS = 4096
GROUP_RECORDS = 64


class ArrayRecordFormat:
    name = "ArrayRecord"
    unit = "run of records"
    ranged = True

    def list(self, file: File) -> FileListing:
        reader = _reader(file)
        try:
            count = int(reader.num_records())
        finally:
            reader.close()
        return FileListing(
            SCHEMA, [FileUnit(min(_UNIT_RECORDS, count - at), at) for at in range(0, count, _UNIT_RECORDS)]
        )

    def load(self, file: File, part: FileUnit, start: int, stop: int) -> pa.Table:
        if start == stop:
            return SCHEMA.empty_table()
        reader = _reader(file)
        try:
            records = reader.read(part.at + start, part.at + stop)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        finally:
            reader.close()
        return pa.table([pa.array(records, pa.binary())], schema=SCHEMA)


def library() -> Any:
    """The package's reader and writer. Raises DataError when it is not installed."""
    try:
        return import_module("array_record.python.array_record_module")
    except ImportError as error:
        raise DataError(
            f"ArrayRecord files need the package array_record: {error}", hint="pip install array_record"
        ) from error


def _reader(file: File) -> Any:
    module = library()
    if file.path is None:
        raise DataError(f"{file.uri}: ArrayRecord is read from local disks only", hint="copy it, or convert it")
    try:
        reader = module.ArrayRecordReader(str(file.path), "readahead_buffer_size:0")
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if not reader.ok():
        raise ValueError("the reader does not accept it")
    return reader
