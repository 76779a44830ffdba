"""Records from WebDataset tars: successive files with the same basename are one sample.

    00017.jpg 00017.cls 00018.jpg ...      ->      __key__ '00017', columns 'cls' and 'jpg' (binary)

The key ends at the first dot of the file's name and includes folders. A sample without a file of some extension has a
null there. One pass over the headers builds an index, so single samples can be read. A damaged header, at which
Python's reader would silently stop, and a missing end mark are errors. Contents have no checksums.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from trueline.data.order.permutation import Ints
from trueline.data.records import FileListing, FileUnit, split_runs, torn_error
from trueline.errors import DataError
from trueline.storage.cache import Arrays, load_index
from trueline.storage.location import File, Stamp

KEY = "__key__"
_UNIT_BYTES = 4 << 20
_UNIT_RECORDS = 1024
_BLOCK = 512


@dataclass(slots=True)
class _Index:
    """Sample i is `keys[i]`; its file of extension j is at byte `at[i, j]`, `size[i, j]` long; -1: none."""

    keys: list[str]
    extensions: list[str]
    at: Ints
    size: Ints


def _as_index(arrays: Arrays) -> _Index:
    at = arrays["at"].astype(np.int64)
    keys = arrays["keys"].tobytes().decode("utf-8", "surrogateescape").split("\0") if len(at) else []
    return _Index(keys, arrays["extensions"].tobytes().decode().split("\0"), at, arrays["size"].astype(np.int64))


@dataclass(slots=True)
class TarFormat:
    name = "tar"
    unit = "run of samples"
    ranged = True
    _known: dict[tuple[str, Stamp], _Index] = field(default_factory=dict)

    def list(self, file: File) -> FileListing:
        index = _as_index(load_index(file, "webdataset", lambda: _build_index(file)))
        self._known[file.uri, file.stamp] = index
        if not index.keys:
            return FileListing(pa.schema([]), [])
        columns = [(name, pa.binary()) for name in sorted(index.extensions)]
        starts = np.cumsum([0, *np.maximum(index.size, 0).sum(axis=1)])
        units = [FileUnit(stop - first, first) for first, stop in split_runs(starts, _UNIT_RECORDS, _UNIT_BYTES)]
        return FileListing(pa.schema([(KEY, pa.string()), *columns]), units)

    def span(self, file: File, part: FileUnit, start: int, stop: int) -> tuple[int, int]:
        index, samples = self._known[file.uri, file.stamp], slice(part.at + start, part.at + stop)
        at, size = index.at[samples], index.size[samples]
        present = at >= 0
        return (int(at[present].min()), int((at + size)[present].max())) if present.any() else (0, 0)

    def load(self, file: File, part: FileUnit, start: int, stop: int) -> pa.Table:
        index, samples = self._known[file.uri, file.stamp], slice(part.at + start, part.at + stop)
        columns = {KEY: pa.array(index.keys[samples], pa.string())}
        with file.open() as opened:
            for extension, number in sorted(zip(index.extensions, range(len(index.extensions)), strict=True)):
                places = zip(index.at[samples, number].tolist(), index.size[samples, number].tolist(), strict=True)
                columns[extension] = pa.array([_read(opened, at, size) for at, size in places], pa.binary())
        return pa.table(columns)


def _read(opened: BinaryIO, at: int, size: int) -> bytes | None:
    if at < 0:
        return None
    opened.seek(at)
    data = opened.read(size)
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes are left at byte {at}, expected {size}")
    return data


def _build_index(file: File) -> Arrays:
    keys: list[str] = []
    seen: set[str] = set()
    extensions: dict[str, int] = {}
    places: list[tuple[int, int, int, int]] = []
    for name, at, size in _members(file):
        key, extension = _split_name(name)
        if not keys or key != keys[-1]:
            if key in seen:
                raise DataError(
                    f"{file.uri} has files of sample '{key}' in two places (again at byte {at})",
                    hint="files of one sample stand next to each other in a WebDataset tar; sort it by name",
                )
            keys.append(key)
            seen.add(key)
        number = extensions.setdefault(extension, len(extensions))
        places.append((len(keys) - 1, number, at, size))
    at_ij = np.full((len(keys), len(extensions)), -1, np.int64)
    size_ij = np.full_like(at_ij, -1)
    for sample, number, at, size in places:
        if at_ij[sample, number] >= 0:
            name = f"{keys[sample]}.{list(extensions)[number]}"
            raise DataError(f"{file.uri} has two files '{name}' (again at byte {at})")
        at_ij[sample, number], size_ij[sample, number] = at, size
    names, kinds = "\0".join(keys).encode("utf-8", "surrogateescape"), "\0".join(extensions).encode()
    texts = {"keys": np.frombuffer(names, np.uint8), "extensions": np.frombuffer(kinds, np.uint8)}
    return {"at": at_ij, "size": size_ij, **texts}


def _members(file: File) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each regular file. Raises DataError for a tar that is not whole."""
    with file.open() as opened, tarfile.open(fileobj=opened, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every member otherwise
            if member.isreg() and not member.name.rpartition("/")[2].startswith("."):
                yield member.name, member.offset_data, member.size
        at = tar.offset  # where reading stopped
        opened.seek(at)
        block = opened.read(_BLOCK)
        if block != bytes(_BLOCK):
            why = "it ends without its end mark" if len(block) < _BLOCK else "a header is damaged"
            raise torn_error(file, at, why)


def _split_name(name: str) -> tuple[str, str]:
    """
    >>> _split_name("train/00017.seg.png")
    ('train/00017', 'seg.png')
    """
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension or "data"
