"""The files that an ONNX program reads its weights from: each is beside the program, in the bundle.

A tensor of an ONNX file may name a file, an offset and a length. Older ONNX Runtimes open any path and take an address
in memory for a name; with a bundle of a stranger, answers then told what is in the server's files. Only the few fields
on the way to these names are parsed, at every depth; weights are skipped. Sources: onnx.proto; the protobuf encoding;
CVE-2022-25882 and CVE-2024-27318 (the same in onnx); microsoft/onnxruntime#26776 and #28709.
"""

import mmap
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trueline.errors import BundleError

_MAX_DEPTH = 64
_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
"""By message: the fields that lead to external data, and what they hold. Source: onnx.proto."""
_KEY, _VALUE = 1, 2
_GRAPH, _INITIALIZER = 7, 5
_DIMS, _DATA_TYPE, _NAME, _RAW_DATA, _EXTERNAL = 1, 2, 8, 9, 13
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


INT64 = 7
"""The type of a tensor of int64. Source: onnx.proto."""


class StoredTensor(NamedTuple):
    """Where the numbers of a weight lie. `file`: beside the program; empty: in the program's own file."""

    name: str
    datatype: int
    dims: tuple[int, ...]
    file: str
    start: int
    size: int


def find_tensors(path: Path) -> list[StoredTensor]:
    """The weights of the ONNX program at `path` whose numbers lie in one piece. Raises BundleError for a torn one."""
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                graphs = [(at, end) for field, at, end in _fields(data, 0, len(data)) if field == _GRAPH]
                places = [place for graph in graphs for place in _fields(data, *graph)]
                found = [_read_tensor(data, at, end) for field, at, end in places if field == _INITIALIZER]
        except (ValueError, IndexError) as error:
            raise BundleError(f"{path} is no ONNX program: {error}") from error
    return [one for one in found if one is not None]


def _read_tensor(data: mmap.mmap, start: int, stop: int) -> StoredTensor | None:
    name, entries, place, dims, datatype = "", dict[str, str](), (0, 0), list[int](), 0
    for field, at, end in _fields(data, start, stop, numbers=True):
        if field == _DIMS:
            while at < end:
                size, at = _varint(data, at)
                dims.append(size)
        elif field == _DATA_TYPE:
            datatype = _varint(data, at)[0]
        elif field == _NAME:
            name = data[at:end].decode("utf-8", "backslashreplace")
        elif field == _RAW_DATA:
            place = at, end - at
        elif field == _EXTERNAL:
            texts = {key: data[first:last].decode() for key, first, last in _fields(data, at, end)}
            entries[texts.get(_KEY, "")] = texts.get(_VALUE, "")
    if "location" in entries:
        place = int(entries.get("offset", 0)), int(entries.get("length", 0))
    return StoredTensor(name, datatype, tuple(dims), entries.get("location", ""), *place) if place[1] else None


def check(path: Path) -> None:
    """Raises BundleError if the ONNX program at `path` is torn, or reads a file that is not a plain one beside it."""
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                names = set(_locations(data, 0, len(data), "model", 0))
        except (ValueError, IndexError) as error:  # ValueError also for an empty file
            raise BundleError(f"{path} is no ONNX program: {error}") from error
    for name in sorted(names):
        if not _is_beside(path, name):
            raise BundleError(
                f"{path} reads its weights from {name[:128]!r}, which is no file beside it",
                hint="do not use this program: it would read a file that does not belong to it",
            )


def _is_beside(path: Path, name: str) -> bool:
    plain = name not in ("", ".", "..") and name.isprintable() and not set(name) & set("/\\:*")
    try:
        return plain and stat.S_ISREG(path.with_name(name).lstat().st_mode)
    except OSError:
        return False


def _locations(data: mmap.mmap, start: int, stop: int, message: str, depth: int) -> Iterator[str]:
    """The values of `location` below the message in bytes `start` to `stop`."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"it nests more than {_MAX_DEPTH} messages")
    inner = _FIELDS[message]
    for field, begin, end in _fields(data, start, stop):
        kind = inner.get(field)
        if kind == "entry":
            texts = {key: data[at:until] for key, at, until in _fields(data, begin, end)}  # the last counts
            if texts.get(_KEY) == b"location":
                yield texts.get(_VALUE, b"").decode("utf-8", "backslashreplace")
        elif kind is not None:
            yield from _locations(data, begin, end, kind, depth + 1)


def _fields(data: mmap.mmap, start: int, stop: int, *, numbers: bool = False) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each field with a length, and with `numbers` of each whole number; others are skipped.
    Raises ValueError for a torn message."""
    at = start
    while at < stop:
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _BYTES:
            size, at = _varint(data, at)
            if size > stop - at:
                raise ValueError(f"a field at byte {at} ends beyond its message")
            yield tag >> 3, at, at + size
            at += size
        elif kind == _VARINT:
            begin = at
            _, at = _varint(data, at)
            if numbers:
                yield tag >> 3, begin, at
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"a field at byte {at} has a type that protobuf does not have")
    if at != stop:
        raise ValueError(f"a message ends at byte {at}, not {stop}")


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """A number and the place after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number at byte {at} does not end")
