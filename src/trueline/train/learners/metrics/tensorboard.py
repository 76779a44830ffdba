"""Scalars in TensorBoard's event files, as they grow. Reads what `registry/event_file.py` writes, and other writers'.

Sources: TensorFlow's record_writer.cc (framing), event.proto, summary.proto and tensor.proto. Checksums are not
compared: a record counts once all of its bytes are there.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOST_RECORD = 16 << 20
"""Bytes; a larger one, as of an image, is skipped."""
_FLOAT, _DOUBLE = 1, 2
"""DataType of tensor.proto."""


class Scalar(NamedTuple):
    tag: str
    step: int
    value: float


def walk(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and content of the fields of a message of protobuf. Raises ValueError for a torn one."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind, content = key & 7, b""
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind, -1)
        if size < 0 or at + size > len(data):
            raise ValueError("a torn message")
        content, at = data[at : at + size], at + size
        yield key >> 3, content


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a torn number")
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not data[at - 1] & 0x80:
            return value, at


def parse_event(data: bytes) -> Iterator[Scalar]:
    """The scalars of an Event."""
    step, summary = 0, b""
    for number, content in walk(data):
        if number == 2 and isinstance(content, int):
            step = content if content < 1 << 63 else content - (1 << 64)
        elif number == 5 and isinstance(content, bytes):
            summary = content
    for number, content in walk(summary):
        if number == 1 and isinstance(content, bytes):
            fields = dict(walk(content))
            tag, simple, tensor = fields.get(1, b""), fields.get(2), fields.get(8)
            value = None
            if isinstance(simple, bytes) and len(simple) == 4:
                value = struct.unpack("<f", simple)[0]
            elif isinstance(tensor, bytes):
                value = _read_tensor(tensor)
            if isinstance(tag, bytes) and value is not None:
                yield Scalar(tag.decode("utf-8", "replace"), step, value)


def _read_tensor(data: bytes) -> float | None:
    """The number in a tensor of one; None: it is another tensor."""
    fields = dict(walk(data))
    kind, content = fields.get(1), fields.get(4)
    form = {_FLOAT: "<f", _DOUBLE: "<d"}.get(kind) if isinstance(kind, int) else None
    if form is None:
        return None
    if not isinstance(content, bytes):
        content = fields.get({_FLOAT: 5, _DOUBLE: 6}[kind])  # type: ignore[index]  # it is one of the two
    if isinstance(content, bytes) and len(content) == struct.calcsize(form):
        return float(struct.unpack(form, content)[0])
    return None


class EventFolder:
    """The event files below a folder; `read` returns the scalars since the last time, with the run they are of."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at: dict[Path, int] = {}

    def read(self) -> Iterator[tuple[str, Scalar]]:
        for path in sorted(self._folder.rglob("*tfevents*")) if self._folder.is_dir() else ():
            if path.is_file():
                run = path.parent.relative_to(self._folder).as_posix()
                for record in self._read_records(path):
                    try:
                        for scalar in parse_event(record):
                            yield "" if run == "." else run, scalar
                    except ValueError:
                        continue

    def _read_records(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(self._at.get(path, 0))
            while len(head := file.read(12)) == 12:
                (length,) = struct.unpack("<Q", head[:8])
                if length > MOST_RECORD:
                    file.seek(length + 4, 1)
                    self._at[path] = file.tell()
                    continue
                data = file.read(length + 4)
                if len(data) < length + 4:
                    return  # it is being written
                self._at[path] = file.tell()
                yield data[:length]
