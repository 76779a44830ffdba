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
from trueline.storage.concurrent import map_concurrently, start_all
from trueline.storage.file import File, Stamp
from trueline.storage.object_store import REFUSED, ListedPrefix, ObjectStore, find_objects, get_info, stamp_of

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
    store: ObjectStore = field(repr=False)
    prefix: ListedPrefix | None = field(default=None, repr=False)
    checked: bool = field(default=True, repr=False)
    """Whether what is read is compared with the stamp, and kept; if not, whoever reads does it."""

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def path(self) -> Path | None:
        return None

    def open(self, *, from_end: bool = False) -> AbstractContextManager[BinaryIO]:
        grid = BlockGrid(self.stamp.size, self.store.block_bytes, from_end)
        return cast(BinaryIO, io.BufferedReader(_BlockReader(self, grid), buffer_size=1 << 16))

    def check(self) -> None:
        """Blocks are checked as they are fetched; those that are here are of the listed content."""

    def block(self, grid: BlockGrid, index: int) -> memoryview:
        fetch = partial(self._fetch, grid, index)
        if self.store.cache is None or not self.checked:
            return memoryview(fetch())
        return self.store.cache.get(self.block_key(grid), index, fetch)

    def block_key(self, grid: BlockGrid) -> str:
        return f"{self.uri}|{self.stamp}|{grid.block_bytes}" + ("|end" if grid.from_end else "")

    def _fetch(self, grid: BlockGrid, index: int) -> bytes:
        start, stop = grid.bounds(index)
        return self.store.retry.call(partial(self._read_range, start, stop), f"{self.uri} at bytes {start} to {stop}")

    def _read_range(self, start: int, stop: int) -> bytes:
        try:
            data = bytes(self.store.fs.cat_file(self.key, start=start, end=stop))
        except REFUSED:
            raise
        except Exception:
            self.check_unchanged(
                get_info(self.store.fs, self.key)
            )  # rclone answers for what was written again with an old sum
            raise
        if self.checked or len(data) != stop - start:
            self.check_unchanged(get_info(self.store.fs, self.key))
        if len(data) != stop - start:
            raise EOFError(f"{len(data)} bytes came of {start} to {stop}")
        return data

    def check_unchanged(self, info: dict[str, Any] | None) -> None:
        """Raises DataError when what the store says of the object now is not what it said when it was listed."""
        if info is None or stamp_of(info) != self.stamp:
            what = "has gone" if info is None else "was changed"
            raise DataError(
                f"{self.uri} {what} while it was in use", hint="write new records to a new object, then start again"
            )


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """Where the blocks of `size` bytes lie."""

    size: int
    block_bytes: int
    from_end: bool = False

    def index(self, offset: int) -> int:
        """The block that holds the byte `offset`."""
        if not self.from_end:
            return offset // self.block_bytes
        index, start, length = 0, self.size, min(_TAIL_BYTES, self.block_bytes)
        while offset < start - length and length < self.block_bytes:
            index, start, length = index + 1, start - length, min(length * _GROWTH, self.block_bytes)
        return index + (start - 1 - offset) // length

    def bounds(self, index: int) -> tuple[int, int]:
        """The first byte of a block and the one behind its last.

        >>> [BlockGrid(10 << 20, 4 << 20, from_end=True).bounds(index)[0] >> 10 for index in range(5)]
        [10176, 9920, 8896, 4800, 704]
        """
        if not self.from_end:
            start = index * self.block_bytes
            return start, min(start + self.block_bytes, self.size)
        stop, length = self.size, min(_TAIL_BYTES, self.block_bytes)
        while index and length < self.block_bytes:
            index, stop, length = index - 1, stop - length, min(length * _GROWTH, self.block_bytes)
        stop -= index * length
        return max(stop - length, 0), stop


class _BlockReader(io.RawIOBase):
    """A seekable reader over the blocks of an object."""

    def __init__(self, file: StoredFile, grid: BlockGrid) -> None:
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
        if not self._grid.from_end and len(target) > self._grid.block_bytes:
            prefetch_blocks([(self._file, self._at, self._at + len(target))])
        done = 0
        while done < len(target) and self._at < self._grid.size:
            index = self._grid.index(self._at)
            skip = self._at - self._grid.bounds(index)[0]
            piece = self._block(index)[skip : skip + len(target) - done]
            target[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return done

    def _block(self, index: int) -> memoryview:
        found = self._blocks.get(index)
        if found is None:
            found = self._file.block(self._grid, index)
            if self._file.checked:
                self._blocks.clear()
            self._blocks[index] = found
        return found


def read_footers(files: Sequence[StoredFile], read: Callable[[File], bytes]) -> Iterator[Callable[[], bytes]]:
    """For each of `files` what gives the bytes that `read` makes of it by little reads, or raises what that raised.

    They are asked for together, kept together, and compared with the listing together, by listing once more: half as
    many requests as for each by itself. Who wants the same on this machine waits for who was first. Raises DataError
    for the first object that was changed meanwhile.
    """
    size = max(_GROUP, -(-len(files) // _GROUPS))
    for start in range(0, len(files), size):
        yield from _read_group(files[start : start + size], read)


def _read_group(files: Sequence[StoredFile], read: Callable[[File], bytes]) -> list[Callable[[], bytes]]:
    found: list[bytes | Exception] = []

    def fetch() -> bytes:
        found.extend(_results(start_all(read, [replace(file, checked=False) for file in files])))
        for place in {id(file.prefix): file.prefix for file in files}.values():
            _check_all_unchanged(place, [file for file in files if file.prefix is place])
        whole = [one for one in found if isinstance(one, bytes)]
        if len(whole) < len(found):
            raise _Incomplete
        return np.array([len(one) for one in whole], _LENGTH).tobytes() + b"".join(whole)

    cache = files[0].store.cache
    names = sha256("|".join(f"{file.uri}|{file.stamp}" for file in files).encode()).hexdigest()
    try:
        kept = cache.get(f"footers|{names}", 0, fetch) if cache is not None else memoryview(fetch())
    except _Incomplete:
        return [partial(_value_or_raise, one) for one in found]
    lengths = np.frombuffer(kept, _LENGTH, len(files))
    ends = (np.cumsum(lengths, dtype=np.int64) + lengths.nbytes).tolist()
    starts = [lengths.nbytes, *ends[:-1]]
    return [partial(bytes, kept[start:end]) for start, end in zip(starts, ends, strict=True)]


class _Incomplete(Exception):
    """Some of a group cannot be read."""


def _results(asked: Iterable[Callable[[], bytes]]) -> Iterator[bytes | Exception]:
    for answer in asked:
        try:
            yield answer()
        except Exception as error:  # noqa: BLE001  whoever wants this one is told
            yield error


def _value_or_raise(answer: bytes | Exception) -> bytes:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _check_all_unchanged(place: ListedPrefix | None, files: Sequence[StoredFile]) -> None:
    """By one listing, unless that would be more to ask for than each object by itself."""
    store = files[0].store
    if place is None or place.num_listed > len(files) * _PAGE:
        map_concurrently(_check_one_unchanged, files)
    else:
        found = store.retry.call(partial(find_objects, store.fs, place.top), place.uri)
        for file in files:
            file.check_unchanged(found.get(file.key))


def _check_one_unchanged(file: StoredFile) -> None:
    file.check_unchanged(file.store.retry.call(partial(get_info, file.store.fs, file.key), file.uri))


def prefetch_blocks(spans: Iterable[tuple[StoredFile, int, int]]) -> None:
    """Gets bytes [start, stop) of objects into the cache, many blocks at the same time. Raises DataError."""
    missing: dict[tuple[str, int], tuple[StoredFile, BlockGrid, int]] = {}
    for file, start, stop in spans:
        if len(missing) == _TOGETHER:
            break
        if stop <= start:
            continue
        cache = file.store.cache
        if cache is None or not cache.has_room:
            return  # nowhere to put them
        grid = BlockGrid(file.stamp.size, file.store.block_bytes)
        for index in range(grid.index(max(start, 0)), grid.index(max(min(stop, grid.size) - 1, 0)) + 1):
            if len(missing) < _TOGETHER and cache.peek(file.block_key(grid), index) is None:
                missing[file.uri, index] = file, grid, index
    if len(missing) < 2:
        return  # who reads it gets it
    map_concurrently(lambda one: one[0].block(one[1], one[2]), missing.values(), at_once=_BLOCKS_AT_ONCE)
