"""Objects of a store as seekable files, in blocks that are fetched when they are wanted, or many at the same time.

    whole     | 0 ........ | 1 ........ | 2 .... |      4 MiB each, from the start: for who reads records
    little    | 3 ...... | 2 ..... | 1 .. | 0 . |       from the end, 64 KiB and four times as much each: for footers

Every block is compared with the stamp that the object was listed with after it came, so an object that is replaced is
an error and not a mixture; footers of many objects are compared together (`footers`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from trueline.errors import DataError
from trueline.storage.concurrent import all_together, asked_together
from trueline.storage.file import File, Stamp
from trueline.storage.object_store import REFUSED, Place, Store, found_below, info_of, stamp_of

_TAIL_BYTES, _GROWTH = 64 << 10, 4
_GROUP, _GROUPS = 1000, 8
"""Footers that are kept together, at least; groups at most: each is one more listing."""
_LENGTH = np.dtype("<u4")
_BLOCKS_AT_ONCE = 16
"""Of 4 MiB each, which are in memory two or three times on their way."""
_TOGETHER = 64
"""Blocks that are fetched before the first of them is looked at, at most: the cache keeps as many at hand."""
_PAGE = 1000
"""Objects that a store names in one answer."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An object. `key` is its name in the store."""

    uri: str
    key: str = field(repr=False)
    stamp: Stamp
    store: Store = field(repr=False)
    place: Place | None = field(default=None, repr=False)
    compared: bool = field(default=True, repr=False)
    """Whether what is read is compared with the stamp, and kept; if not, whoever reads does it."""

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def path(self) -> Path | None:
        return None

    def open(self, *, little: bool = False) -> AbstractContextManager[BinaryIO]:
        grid = Grid(self.stamp.size, self.store.block_bytes, little)
        return cast(BinaryIO, io.BufferedReader(_Ranged(self, grid), buffer_size=1 << 16))

    def check(self) -> None:
        """Blocks are checked as they are fetched; those that are here are of the listed content."""

    def block(self, grid: Grid, index: int) -> memoryview:
        fetch = partial(self._fetched, grid, index)
        if self.store.cache is None or not self.compared:
            return memoryview(fetch())
        return self.store.cache.get(self.block_key(grid), index, fetch)

    def block_key(self, grid: Grid) -> str:
        return f"{self.uri}|{self.stamp}|{grid.block_bytes}" + ("|end" if grid.little else "")

    def _fetched(self, grid: Grid, index: int) -> bytes:
        start, stop = grid.bounds(index)
        return self.store.patience.ask(partial(self._range, start, stop), f"{self.uri} at bytes {start} to {stop}")

    def _range(self, start: int, stop: int) -> bytes:
        try:
            data = bytes(self.store.fs.cat_file(self.key, start=start, end=stop))
        except REFUSED:
            raise
        except Exception:
            self.compare(info_of(self.store.fs, self.key))  # rclone answers for what was written again with an old sum
            raise
        if self.compared or len(data) != stop - start:
            self.compare(info_of(self.store.fs, self.key))
        if len(data) != stop - start:
            raise EOFError(f"{len(data)} bytes came of {start} to {stop}")
        return data

    def compare(self, info: dict[str, Any] | None) -> None:
        """Raises DataError when what the store says of the object now is not what it said when it was listed."""
        if info is None or stamp_of(info) != self.stamp:
            what = "has gone" if info is None else "was changed"
            raise DataError(
                f"{self.uri} {what} while it was in use", hint="write new records to a new object, then start again"
            )


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the blocks of `size` bytes lie."""

    size: int
    block_bytes: int
    little: bool = False

    def index(self, offset: int) -> int:
        """The block that holds the byte `offset`."""
        if not self.little:
            return offset // self.block_bytes
        index, start, length = 0, self.size, min(_TAIL_BYTES, self.block_bytes)
        while offset < start - length and length < self.block_bytes:
            index, start, length = index + 1, start - length, min(length * _GROWTH, self.block_bytes)
        return index + (start - 1 - offset) // length

    def bounds(self, index: int) -> tuple[int, int]:
        """The first byte of a block and the one behind its last.

        >>> [Grid(10 << 20, 4 << 20, little=True).bounds(index)[0] >> 10 for index in range(5)]
        [10176, 9920, 8896, 4800, 704]
        """
        if not self.little:
            start = index * self.block_bytes
            return start, min(start + self.block_bytes, self.size)
        stop, length = self.size, min(_TAIL_BYTES, self.block_bytes)
        while index and length < self.block_bytes:
            index, stop, length = index - 1, stop - length, min(length * _GROWTH, self.block_bytes)
        stop -= index * length
        return max(stop - length, 0), stop


class _Ranged(io.RawIOBase):
    """A seekable reader over the blocks of an object."""

    def __init__(self, file: StoredFile, grid: Grid) -> None:
        self._file, self._grid, self._at = file, grid, 0
        self._blocks: dict[int, memoryview] = {}
        """The one read last; of what no cache holds, all: a footer of several blocks is read from its first on."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._grid.size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        if not self._grid.little and len(target) > self._grid.block_bytes:
            fetch_together([(self._file, self._at, self._at + len(target))])
        done = 0
        while done < len(target) and self._at < self._grid.size:
            index = self._grid.index(self._at)
            skip = self._at - self._grid.bounds(index)[0]
            piece = self._whole(index)[skip : skip + len(target) - done]
            target[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return done

    def _whole(self, index: int) -> memoryview:
        found = self._blocks.get(index)
        if found is None:
            found = self._file.block(self._grid, index)
            if self._file.compared:
                self._blocks.clear()
            self._blocks[index] = found
        return found


def footers(files: Sequence[StoredFile], read: Callable[[File], bytes]) -> Iterator[Callable[[], bytes]]:
    """For each of `files` what gives the bytes that `read` makes of it by little reads, or raises what that raised.

    They are asked for together, kept together, and compared with the listing together, by listing once more: half as
    many requests as for each by itself. Who wants the same on this machine waits for who was first. Raises DataError
    for the first object that was changed meanwhile.
    """
    size = max(_GROUP, -(-len(files) // _GROUPS))
    for start in range(0, len(files), size):
        yield from _footers(files[start : start + size], read)


def _footers(files: Sequence[StoredFile], read: Callable[[File], bytes]) -> list[Callable[[], bytes]]:
    found: list[bytes | Exception] = []

    def fetch() -> bytes:
        found.extend(_answers(asked_together(read, [replace(file, compared=False) for file in files])))
        for place in {id(file.place): file.place for file in files}.values():
            _compare(place, [file for file in files if file.place is place])
        whole = [one for one in found if isinstance(one, bytes)]
        if len(whole) < len(found):
            raise _Incomplete
        return np.array([len(one) for one in whole], _LENGTH).tobytes() + b"".join(whole)

    cache = files[0].store.cache
    names = sha256("|".join(f"{file.uri}|{file.stamp}" for file in files).encode()).hexdigest()
    try:
        kept = cache.get(f"footers|{names}", 0, fetch) if cache is not None else memoryview(fetch())
    except _Incomplete:
        return [partial(_given, one) for one in found]
    lengths = np.frombuffer(kept, _LENGTH, len(files))
    ends = (np.cumsum(lengths, dtype=np.int64) + lengths.nbytes).tolist()
    starts = [lengths.nbytes, *ends[:-1]]
    return [partial(bytes, kept[start:end]) for start, end in zip(starts, ends, strict=True)]


class _Incomplete(Exception):
    """Some of a group cannot be read."""


def _answers(asked: Iterable[Callable[[], bytes]]) -> Iterator[bytes | Exception]:
    for answer in asked:
        try:
            yield answer()
        except Exception as error:  # noqa: BLE001  whoever wants this one is told
            yield error


def _given(answer: bytes | Exception) -> bytes:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _compare(place: Place | None, files: Sequence[StoredFile]) -> None:
    """By one listing, unless that would be more to ask for than each object by itself."""
    store = files[0].store
    if place is None or place.num_listed > len(files) * _PAGE:
        all_together(_compare_alone, files)
    else:
        found = store.patience.ask(partial(found_below, store.fs, place.top), place.uri)
        for file in files:
            file.compare(found.get(file.key))


def _compare_alone(file: StoredFile) -> None:
    file.compare(file.store.patience.ask(partial(info_of, file.store.fs, file.key), file.uri))


def fetch_together(spans: Iterable[tuple[StoredFile, int, int]]) -> None:
    """Gets bytes [start, stop) of objects into the cache, many blocks at the same time. Raises DataError."""
    missing: dict[tuple[str, int], tuple[StoredFile, Grid, int]] = {}
    for file, start, stop in spans:
        if len(missing) == _TOGETHER:
            break
        if stop <= start:
            continue
        cache = file.store.cache
        if cache is None or not cache.keeps:
            return  # nowhere to put them
        grid = Grid(file.stamp.size, file.store.block_bytes)
        for index in range(grid.index(max(start, 0)), grid.index(max(min(stop, grid.size) - 1, 0)) + 1):
            if len(missing) < _TOGETHER and cache.look(file.block_key(grid), index) is None:
                missing[file.uri, index] = file, grid, index
    if len(missing) < 2:
        return  # who reads it gets it
    all_together(lambda one: one[0].block(one[1], one[2]), missing.values(), at_once=_BLOCKS_AT_ONCE)
