"""Records from RecordIO files: ElasticDL's chunks (wangkuiyi/recordio) and MXNet's parts (dmlc-core).

Both have one column, `record` (binary); the first four bytes of a file tell them apart. In ElasticDL's format a unit is
a chunk, whose CRC-32 is verified at every read; write chunks of at most 1 MiB, since a chunk is decoded as a whole. In
MXNet's a unit is a run of 4096 records, without checksums: only the framing is verified. A torn file is an error when
it is listed. Source: recordio's header.go, chunk.go; dmlc-core's recordio.h, recordio.cc.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trueline.data.formats import snappy
from trueline.data.records import FileListing, FileUnit
from trueline.errors import DataError
from trueline.storage.file import File, Stamp
from trueline.storage.offset_index import load_index

SCHEMA = pa.schema([pa.field("record", pa.binary())])
CHUNK_BYTES = 1 << 20
MAGIC = 0x01020304
DMLC_MAGIC, DMLC_EARLY = 0xCED7230A, 0x3ED7230A
HEADER = struct.Struct("<5I")
COMPRESSORS = {"none": 0, "snappy": 1, "gzip": 2}
_UNIT_RECORDS = 4096
_UNIT_BYTES = 4 << 20
_WHOLE, _FIRST, _LAST = 0, 1, 3

Ints = npt.NDArray[np.signedinteger[Any]]


class RecordIoFormat:
    name = "RecordIO"
    unit = "chunk"
    ranged = False

    def __init__(self) -> None:
        self._starts: dict[tuple[str, Stamp], Ints] = {}

    @property
    def checked(self) -> bool:
        """Whether all listed files have checksums; MXNet's have none."""
        return not self._starts

    def list(self, file: File) -> FileListing:
        if file.stamp.size == 0:
            return FileListing(SCHEMA, [])
        with file.open() as opened:
            start = opened.read(4)
        magic = int.from_bytes(start, "little")
        if magic == MAGIC:
            return FileListing(SCHEMA, list(_chunks(file)))
        if magic in (DMLC_MAGIC, DMLC_EARLY):
            starts = load_index(file, "dmlc", lambda: {"starts": find_dmlc_starts(file)})["starts"].astype(np.int64)
            self._starts[file.uri, file.stamp] = starts
            return FileListing(SCHEMA, list(_runs(starts)))
        raise DataError(
            f"{file.uri} is not RecordIO: it begins with {start!r}, "
            f"expected {MAGIC.to_bytes(4, 'little')!r} or {DMLC_MAGIC.to_bytes(4, 'little')!r}"
        )

    def span(self, file: File, part: FileUnit, start: int, stop: int) -> tuple[int, int]:
        starts = self._starts.get((file.uri, file.stamp))
        if starts is None:
            return part.at, part.end
        return int(starts[part.end + start]), int(starts[part.end + stop])

    def load(self, file: File, part: FileUnit, start: int, stop: int) -> pa.Table:
        starts = self._starts.get((file.uri, file.stamp))
        with file.open() as opened:
            if starts is None:
                opened.seek(part.at)
                return _chunk_records(opened.read(part.end - part.at), part, file).slice(start, stop - start)
            at, end = int(starts[part.end + start]), int(starts[part.end + stop])
            opened.seek(at)
            data = opened.read(end - at)
        return pa.table([pa.array(list(split_dmlc_records(data, at)), pa.binary())], schema=SCHEMA)


def _chunks(file: File) -> Iterator[FileUnit]:
    """Reads the headers. Raises DataError for one that is damaged or reaches beyond the file."""
    at, size = 0, file.stamp.size
    with file.open() as opened:
        while at < size:
            opened.seek(at)
            header = opened.read(HEADER.size)
            if len(header) < HEADER.size:
                raise DataError(f"{file.uri} is torn at byte {at}: {len(header)} bytes of a chunk's header are left")
            magic, _, compressor, length, count = HEADER.unpack(header)
            end = at + HEADER.size + length
            if magic != MAGIC or compressor not in COMPRESSORS.values():
                raise DataError(
                    f"{file.uri} is torn at byte {at}: magic {magic:#010x}, compressor {compressor} begin no chunk"
                )
            if end > size:
                raise DataError(f"{file.uri} is torn at byte {at}: its chunk ends {end - size} bytes after the file")
            part = FileUnit(count, at, end)
            if not count and length:
                _chunk_records(header + opened.read(length), part, file)  # it is not read later
            yield part
            at = end


def _chunk_records(data: bytes, part: FileUnit, file: File) -> pa.Table:
    """All records of a chunk, header included in `data`."""
    _, checksum, compressor, length, _ = HEADER.unpack_from(data)
    stored = memoryview(data)[HEADER.size :]
    if len(stored) != length or zlib.crc32(stored) != checksum:
        raise DataError(f"{file.uri} is torn at byte {part.at}: the chunk does not match its CRC-32")
    if compressor == COMPRESSORS["snappy"]:
        payload: bytes | memoryview = snappy.decompress(stored)
    elif compressor == COMPRESSORS["gzip"]:
        payload = gzip.decompress(stored)
    else:
        payload = stored
    return pa.table([_unpack(payload, part, file)], schema=SCHEMA)


def _unpack(payload: bytes | memoryview, part: FileUnit, file: File) -> pa.Array:
    """One Arrow array of a payload of (length, bytes) pairs, copied once."""
    rows = _of_one_length(payload, part.count)
    if rows is not None:
        count, length = rows.shape
        return _binary(np.arange(count + 1, dtype=np.int64) * length, pa.py_buffer(np.ascontiguousarray(rows)))
    records: list[bytes] = []
    at, size = 0, len(payload)
    unpack, whole = struct.Struct("<I").unpack_from, bytes(payload)
    while at + 4 <= size and len(records) < part.count:
        (length,) = unpack(whole, at)
        begin, at = at + 4, at + 4 + length
        records.append(whole[begin:at])
    if at != size or len(records) != part.count:
        raise DataError(
            f"{file.uri} is damaged at byte {part.at}: the chunk claims {part.count} records in {size} bytes, "
            f"but {len(records)} records end at byte {at}"
        )
    return _binary(np.cumsum([0, *map(len, records)], dtype=np.int64), pa.py_buffer(b"".join(records)))


def _of_one_length(payload: bytes | memoryview, count: int) -> npt.NDArray[np.uint8] | None:
    """The contents [count, length] of records of one length, proven by equal heads at equal distances; else None."""
    if not count or len(payload) % count or len(payload) < 4 * count:
        return None
    table = np.frombuffer(payload, np.uint8).reshape(count, -1)
    heads = table[:, :4].copy().view("<u4")
    return table[:, 4:] if bool((heads == table.shape[1] - 4).all()) else None


def _binary(offsets: Ints, values: pa.Buffer) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), values]
    return pa.BinaryArray.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _runs(starts: Ints) -> Iterator[FileUnit]:
    """Units of at most 4096 records and 4 MiB; a larger record is a unit of its own."""
    first, count = 0, len(starts) - 1
    while first < count:
        fitting = int(np.searchsorted(starts, starts[first] + _UNIT_BYTES, side="right")) - 1
        stop = min(max(fitting, first + 1), first + _UNIT_RECORDS, count)
        yield FileUnit(stop - first, int(starts[first]), first)
        first = stop


def find_dmlc_starts(file: File) -> Ints:
    """The bytes at which MXNet's records begin, and the end of the file. Reads the heads of parts."""
    starts, at, size, inside = [], 0, file.stamp.size, False
    with file.open() as opened:
        while at < size:
            opened.seek(at)
            flag, length = _part_head(opened, at, file.uri)
            if inside == (flag in (_WHOLE, _FIRST)):
                raise DataError(f"{file.uri} is torn at byte {at}: a part of kind {flag} is out of place")
            if not inside:
                starts.append(at)
            inside = flag not in (_WHOLE, _LAST)
            at += 8 + length + -length % 4
    if inside or at != size:
        raise DataError(f"{file.uri} is torn: its last record ends at byte {at} of {size}")
    return np.array([*starts, size], np.int64)


def _part_head(opened: BinaryIO, at: int, uri: str) -> tuple[int, int]:
    head = opened.read(8)
    if len(head) == 8:
        magic, word = struct.unpack("<2I", head)
        if magic == DMLC_MAGIC:
            return word >> 29, word & (1 << 29) - 1
        if magic == DMLC_EARLY:
            return word >> 30, word & (1 << 30) - 1
    raise DataError(f"{uri} is torn at byte {at}: {head!r} begins no part of a record")


def split_dmlc_records(data: bytes, start: int) -> Iterator[bytes]:
    """The records of a run of parts, with the magic that the writer dropped between them put back.

    Raises ValueError that names the byte, counted from `start`.
    """
    at, parts = 0, list[bytes]()
    while at < len(data):
        magic, word = struct.unpack_from("<2I", data, at)
        if magic not in (DMLC_MAGIC, DMLC_EARLY):
            raise ValueError(f"no part of a record begins at byte {start + at}")
        bits = 29 if magic == DMLC_MAGIC else 30
        flag, length = word >> bits, word & (1 << bits) - 1
        part = data[at + 8 : at + 8 + length]
        if len(part) != length:
            raise ValueError(f"the part at byte {start + at} is {len(part)} bytes long, expected {length}")
        parts.append(part)
        if flag in (_WHOLE, _LAST):
            yield data[at : at + 4].join(parts) if len(parts) > 1 else part
            parts = []
        at += 8 + length + -length % 4


def encode_chunk(records: list[bytes], *, compressor: str = "snappy") -> bytes:
    """`records` as a chunk of ElasticDL's format."""
    payload = b"".join(len(record).to_bytes(4, "little") + record for record in records)
    compress: dict[str, Callable[[bytes], bytes]] = {
        "none": bytes,
        "snappy": snappy.compress,
        "gzip": partial(gzip.compress, compresslevel=6, mtime=0),
    }
    stored = compress[compressor](payload)
    return HEADER.pack(MAGIC, zlib.crc32(stored), COMPRESSORS[compressor], len(stored), len(records)) + stored


def encode_dmlc_record(record: bytes) -> bytes:
    """`record` in MXNet's format: cut at every magic that is aligned to four bytes."""
    magic = DMLC_MAGIC.to_bytes(4, "little")
    cuts, at = [], record.find(magic)
    while at >= 0:
        if at % 4 == 0:
            cuts.append(at)
            at = record.find(magic, at + 4)
        else:
            at = record.find(magic, at + 1)
    begins, ends = [0, *(cut + 4 for cut in cuts)], [*cuts, len(record)]
    out = bytearray()
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        flag = _WHOLE if not cuts else _FIRST if number == 0 else _LAST if number == len(cuts) else 2
        out += magic + (flag << 29 | end - begin).to_bytes(4, "little") + record[begin:end] + bytes((begin - end) % 4)
    return bytes(out)
