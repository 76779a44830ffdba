"""Records that are bytes: RecordIO of ElasticDL (wangkuiyi/recordio) and of MXNet (dmlc-core), and ArrayRecord.

All have one column, `record` (binary). The first four bytes of a RecordIO file tell its kind. In ElasticDL's a unit is
a chunk, whose CRC-32 is verified at every read; write chunks of at most 1 MiB, since a chunk is decoded as a whole. In
MXNet's and ArrayRecord a unit is a run of 4096 records; MXNet's have no checksums, so only the framing is verified. A
torn file is an error when it is listed.

Sources: recordio's header.go, chunk.go; google/snappy's framing_format.txt; dmlc-core's recordio.h, recordio.cc.
"""

import gzip
import struct
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from importlib import import_module
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trueline.data.order.permutation import Ints
from trueline.data.records import FileListing, FileUnit, split_evenly, split_runs, torn_error
from trueline.errors import DataError
from trueline.storage.cache import load_index
from trueline.storage.location import File, Stamp, read_range

SCHEMA = pa.schema([pa.field("record", pa.binary())])
CHUNK_BYTES, UNIT_RECORDS, UNIT_BYTES = 1 << 20, 4096, 4 << 20
GROUP_RECORDS = 64  # of ArrayRecord
MAGIC = 0x01020304
DMLC_MAGIC, DMLC_EARLY = 0xCED7230A, 0x3ED7230A
HEADER = struct.Struct("<5I")
COMPRESSORS = {"none": 0, "snappy": 1, "gzip": 2}
MAX_CHUNK_BYTES = 256 * 2**20
"""After decompression. A megabyte of gzip could otherwise become a gigabyte (CWE-409)."""
_WHOLE, _FIRST, _MIDDLE, _LAST = 0, 1, 2, 3
_SNAPPY_IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
_SNAPPY_COMPRESSED, _SNAPPY_PLAIN, _SNAPPY_BYTES = 0x00, 0x01, 65536


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
        start = read_range(file, 0, 4)
        magic = int.from_bytes(start, "little")
        if magic == MAGIC:
            return FileListing(SCHEMA, list(_chunks(file)))
        if magic in (DMLC_MAGIC, DMLC_EARLY):
            starts = load_index(file, "dmlc", lambda: {"starts": find_dmlc_starts(file)})["starts"].astype(np.int64)
            self._starts[file.uri, file.stamp] = starts
            runs = split_runs(starts, UNIT_RECORDS, UNIT_BYTES)
            return FileListing(SCHEMA, [FileUnit(stop - first, int(starts[first]), first) for first, stop in runs])
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
        if starts is None:
            return _chunk_records(read_range(file, part.at, part.end), part, file).slice(start, stop - start)
        at, end = self.span(file, part, start, stop)
        return pa.table([pa.array(list(split_dmlc_records(read_range(file, at, end), at)), pa.binary())], schema=SCHEMA)


class ArrayRecordFormat:
    """Local files, through Google's `array_record` package (the extra `arrayrecord`). Write groups of about 64 records:
    a group is decompressed as a whole."""

    name = "ArrayRecord"
    unit = "run of records"
    ranged = True

    def list(self, file: File) -> FileListing:
        with _read_array_record(file) as reader:
            return FileListing(SCHEMA, split_evenly(int(reader.num_records()), UNIT_RECORDS))

    def load(self, file: File, part: FileUnit, start: int, stop: int) -> pa.Table:
        if start == stop:
            return SCHEMA.empty_table()
        with _read_array_record(file) as reader:
            records = reader.read(part.at + start, part.at + stop)
        return pa.table([pa.array(records, pa.binary())], schema=SCHEMA)


def array_record_package() -> Any:
    """The package's reader and writer. Raises DataError when it is not installed."""
    try:
        return import_module("array_record.python.array_record_module")
    except ImportError as error:
        raise DataError(
            f"ArrayRecord files need the package array_record: {error}", hint="pip install array_record"
        ) from error


@contextmanager
def _read_array_record(file: File) -> Iterator[Any]:
    package = array_record_package()
    if file.path is None:
        raise DataError(f"{file.uri}: ArrayRecord is read from local disks only", hint="copy it, or convert it")
    try:
        with closing(package.ArrayRecordReader(str(file.path), "readahead_buffer_size:0")) as reader:
            if not reader.ok():
                raise ValueError("the reader does not accept it")
            yield reader
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _chunks(file: File) -> Iterator[FileUnit]:
    """Reads the headers. Raises DataError for one that is damaged or reaches beyond the file."""
    at, size = 0, file.stamp.size
    with file.open() as opened:
        while at < size:
            opened.seek(at)
            header = opened.read(HEADER.size)
            if len(header) < HEADER.size:
                raise torn_error(file, at, f"{len(header)} bytes of a chunk's header are left")
            magic, _, compressor, length, count = HEADER.unpack(header)
            end = at + HEADER.size + length
            if magic != MAGIC or compressor not in COMPRESSORS.values():
                raise torn_error(file, at, f"magic {magic:#010x}, compressor {compressor} begin no chunk")
            if end > size:
                raise torn_error(file, at, f"its chunk ends {end - size} bytes after the file")
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
        raise torn_error(file, part.at, "the chunk does not match its CRC-32")
    payload: bytes | memoryview = stored
    if compressor:
        payload = (decompress_snappy if compressor == COMPRESSORS["snappy"] else decompress_gzip)(stored)
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
        claim = f"the chunk claims {part.count} records in {size} bytes"
        raise DataError(
            f"{file.uri} is damaged at byte {part.at}: {claim}, but {len(records)} records end at byte {at}"
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


def find_dmlc_starts(file: File) -> Ints:
    """The bytes at which MXNet's records begin, and the end of the file. Reads the heads of parts."""
    starts, at, size, inside = [], 0, file.stamp.size, False
    with file.open() as opened:
        while at < size:
            opened.seek(at)
            head = opened.read(8)
            magic, word = struct.unpack("<2I", head) if len(head) == 8 else (0, 0)
            if magic not in (DMLC_MAGIC, DMLC_EARLY):
                raise torn_error(file, at, f"{head!r} begins no part of a record")
            bits = 29 if magic == DMLC_MAGIC else 30
            flag, length = word >> bits, word & (1 << bits) - 1
            if inside == (flag in (_WHOLE, _FIRST)):
                raise torn_error(file, at, f"a part of kind {flag} is out of place")
            if not inside:
                starts.append(at)
            inside = flag not in (_WHOLE, _LAST)
            at += 8 + length + -length % 4
    if inside or at != size:
        raise DataError(f"{file.uri} is torn: its last record ends at byte {at} of {size}")
    return np.array([*starts, size], np.int64)


def split_dmlc_records(data: bytes, start: int) -> Iterator[bytes]:
    """The records of a run of parts, with the magic that the writer dropped between them. Raises ValueError that names
    the byte, counted from `start`."""
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
    stored = payload
    if compressor != "none":
        stored = compress_snappy(payload) if compressor == "snappy" else gzip.compress(payload, 6, mtime=0)
    return HEADER.pack(MAGIC, zlib.crc32(stored), COMPRESSORS[compressor], len(stored), len(records)) + stored


def encode_dmlc_record(record: bytes) -> bytes:
    """`record` in MXNet's format: cut at every magic that is aligned to four bytes."""
    magic = DMLC_MAGIC.to_bytes(4, "little")
    cuts, at = [], record.find(magic)
    while at >= 0:
        if at % 4 == 0:
            cuts.append(at)
        at = record.find(magic, at + 1)  # no two of them overlap
    begins, ends = [0, *(cut + 4 for cut in cuts)], [*cuts, len(record)]
    out = bytearray()
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        flag = _WHOLE if not cuts else _FIRST if number == 0 else _LAST if number == len(cuts) else _MIDDLE
        out += magic + (flag << 29 | end - begin).to_bytes(4, "little") + record[begin:end] + bytes((begin - end) % 4)
    return bytes(out)


def compress_snappy(data: bytes) -> bytes:
    """`data` in Snappy's framing: chunks of type (1 byte), length (3 bytes, little endian), masked CRC-32C, content."""
    codec, out = pa.Codec("snappy"), bytearray(_SNAPPY_IDENTIFIER)
    for at in range(0, len(data), _SNAPPY_BYTES):
        block = data[at : at + _SNAPPY_BYTES]
        packed: bytes = codec.compress(block, asbytes=True)
        kind, content = (_SNAPPY_COMPRESSED, packed) if len(packed) < len(block) else (_SNAPPY_PLAIN, block)
        out += bytes([kind]) + (len(content) + 4).to_bytes(3, "little")
        out += masked_crc32c(block).to_bytes(4, "little") + content
    return bytes(out)


def decompress_snappy(data: bytes | memoryview) -> bytes:
    """The content of a framed stream, whose CRC-32Cs are not compared: the chunk's CRC-32 covers it. Raises ValueError
    that names the byte at which the stream is damaged."""
    view = memoryview(data)
    if bytes(view[: len(_SNAPPY_IDENTIFIER)]) != _SNAPPY_IDENTIFIER:
        raise ValueError(f"snappy stream begins with {bytes(view[:10])!r}, expected its identifier")
    codec, pieces, at, size = pa.Codec("snappy"), [], 0, 0
    while at < len(view):
        kind, end = view[at], at + 4 + int.from_bytes(view[at + 1 : at + 4], "little")
        if at + 4 > len(view) or end > len(view):
            raise ValueError(f"snappy stream ends inside the chunk at byte {at}")
        content = view[at + 8 : end]
        if kind == _SNAPPY_PLAIN:
            pieces.append(bytes(content))
            size += len(content)
        elif kind == _SNAPPY_COMPRESSED:
            # A raw block begins with its length: seven bits a byte, the lowest first, up to a byte below 0x80.
            length = 0
            for place, byte in enumerate(content[:5]):
                length |= (byte & 0x7F) << 7 * place
                if byte < 0x80:
                    break
            if length > _SNAPPY_BYTES:
                raise ValueError(
                    f"snappy chunk at byte {at} claims {length} bytes, at most {_SNAPPY_BYTES} are allowed"
                )
            pieces.append(codec.decompress(content, decompressed_size=length, asbytes=True))
            size += length
        elif kind <= 0x7F:
            raise ValueError(f"snappy chunk at byte {at} has the unknown type {kind:#04x}")
        _check_size(size)
        at = end
    return b"".join(pieces)


def decompress_gzip(data: bytes | memoryview) -> bytes:
    """The content of a gzip stream. Raises ValueError beyond MAX_CHUNK_BYTES, EOFError, zlib.error."""
    pieces, size, left = list[bytes](), 0, data
    while left:
        reader = zlib.decompressobj(zlib.MAX_WBITS | 16)
        pieces.append(reader.decompress(left, MAX_CHUNK_BYTES + 1 - size))
        size += len(pieces[-1])
        _check_size(size)
        if not reader.eof:
            raise EOFError("the gzip stream does not end")
        left = reader.unused_data
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_CHUNK_BYTES:
        raise ValueError(
            f"the chunk decompresses to more than {MAX_CHUNK_BYTES} bytes; write chunks of at most 1 MiB, as "
            "`trueline data convert` does"
        )


def masked_crc32c(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of at most 64 KiB. It is linear over GF(2): a bit of it is the parity of those bits of the
    input that set it by themselves."""
    padded = np.frombuffer(data.rjust(_SNAPPY_BYTES, b"\0") + bytes(4), "u1").copy()
    padded[_SNAPPY_BYTES - len(data) :][:4] ^= 0xFF
    ones = np.bitwise_count(np.bitwise_xor.reduce(_bit_crcs() & padded.view("<u4"), axis=1))
    return int(np.packbits(ones & 1, bitorder="little").view("<u4")[0]) ^ 0xFFFFFFFF


@lru_cache(maxsize=1)
def _bit_crcs() -> npt.NDArray[np.uint32]:
    """[32, words]: for each bit of a CRC, which bits of the longest input set it."""
    steps = repeat(None, 8 * (_SNAPPY_BYTES + 4) - 1)
    crcs = accumulate(steps, lambda crc, _: crc >> 1 ^ (0x82F63B78 if crc & 1 else 0), initial=1 << 31)
    bits = np.unpackbits(np.fromiter(crcs, "<u4")[::-1, None].copy().view("u1"), axis=1, bitorder="little")
    return np.ascontiguousarray(np.packbits(bits.T, axis=1, bitorder="little")).view("<u4")
