"""Objects of a store as seekable files, read in blocks: one when it is needed, or many at the same time.

    from the start  | 0 ........ | 1 ........ | 2 .... |      4 MiB each: for records
    from the end    | 3 ...... | 2 ..... | 1 .. | 0 . |       64 KiB and four times as much each: for footers

After a block arrives, the object's stamp is compared with the listed one: an object that is replaced is an error.
"""

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
from trueline.storage import object_store
from trueline.storage.location import File, Stamp
from trueline.storage.object_store import ListedPrefix, ObjectStore, map_concurrently, start_all

_TAIL_BYTES, _GROWTH = 64 << 10, 4
_MIN_GROUP, _MAX_GROUPS = 1000, 8
"""Footers that are cached together; each group costs one more listing."""
_LENGTH = np.dtype("<u4")
_BLOCKS_AT_ONCE = 16
"""Of 4 MiB each, which are in memory two or three times on their way."""
_MAX_PREFETCHED = 64
"""The cache keeps as many blocks mapped."""
_PAGE = 1000
"""Objects in one response to a listing."""


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """The blocks of an object of `size` bytes."""

    size: int
    block_bytes: int
    from_end: bool = False

    def index(self, offset: int) -> int:
        """The number of the block that holds the byte `offset`."""
        if not self.from_end:
            return offset // self.block_bytes
        index, start, length = 0, self.size, min(_TAIL_BYTES, self.block_bytes)
        while offset < start - length and length < self.block_bytes:
            index, start, length = index + 1, start - length, min(length * _GROWTH, self.block_bytes)
        return index + (start - 1 - offset) // length

    def bounds(self, index: int) -> tuple[int, int]:
        """A block's first byte, and the one after its last.

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


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An object; `key` is its name in the store."""

    uri: str
    key: str = field(repr=False)
    stamp: Stamp
    store: ObjectStore = field(repr=False)
    prefix: ListedPrefix | None = field(default=None, repr=False)
    checked: bool = field(default=True, repr=False)
    """Whether what is read is compared with the stamp and cached; otherwise the reader has to do it."""

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
        """Nothing: every block is checked when it is fetched."""

    def block(self, grid: BlockGrid, index: int) -> memoryview:
        start, stop = grid.bounds(index)
        read, where = partial(self._read_range, start, stop), f"{self.uri} at bytes {start} to {stop}"
        fetch = partial(self.store.retry.call, read, where)
        if self.store.cache is None or not self.checked:
            return memoryview(fetch())
        return self.store.cache.get(self.block_key(grid), index, fetch)

    def block_key(self, grid: BlockGrid) -> str:
        return f"{self.uri}|{self.stamp}|{grid.block_bytes}" + ("|end" if grid.from_end else "")

    def _read_range(self, start: int, stop: int) -> bytes:
        try:
            data = bytes(self.store.fs.cat_file(self.key, start=start, end=stop))
        except object_store.REFUSED:
            raise
        except Exception:
            self.check_unchanged(
                object_store.get_info(self.store.fs, self.key)
            )  # rclone fails on the old sum of a new object
            raise
        if self.checked or len(data) != stop - start:
            self.check_unchanged(object_store.get_info(self.store.fs, self.key))
        if len(data) != stop - start:
            raise EOFError(f"{len(data)} bytes came of {start} to {stop}")
        return data

    def check_unchanged(self, info: dict[str, Any] | None) -> None:
        """Raises DataError when `info`, the store's facts on the object now, differs from the listing."""
        if info is None or object_store.stamp_of(info) != self.stamp:
            what = "has gone" if info is None else "was changed"
            raise DataError(
                f"{self.uri} {what} while it was in use", hint="write new records to a new object, then start again"
            )


class _BlockReader(io.RawIOBase):
    """A seekable reader over the blocks of an object."""

    def __init__(self, file: StoredFile, grid: BlockGrid) -> None:
        self._file, self._grid, self._at = file, grid, 0
        self._blocks: dict[int, memoryview] = {}
        """The block read last; all blocks where no cache holds them: a footer may span several."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

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
        block = self._blocks.get(index)
        if block is None:
            block = self._file.block(self._grid, index)
            if self._file.checked:
                self._blocks.clear()
            self._blocks[index] = block
        return block


def read_footers(files: Sequence[StoredFile], read: Callable[[File], bytes]) -> Iterator[Callable[[], bytes]]:
    """For each of `files`, a function that returns `read(file)` or raises its error. Footers are read and checked
    together, which takes half as many requests as one by one; other processes of this machine that need the same wait
    for the first. Raises DataError for the first object that was changed."""
    size = max(_MIN_GROUP, -(-len(files) // _MAX_GROUPS))
    for start in range(0, len(files), size):
        yield from _read_group(files[start : start + size], read)


def _read_group(files: Sequence[StoredFile], read: Callable[[File], bytes]) -> list[Callable[[], bytes]]:
    results: list[Callable[[], bytes]] = []

    def fetch() -> bytes:
        results.extend(start_all(read, [replace(file, checked=False) for file in files]))
        for prefix in {id(file.prefix): file.prefix for file in files}.values():
            _check_all_unchanged(prefix, [file for file in files if file.prefix is prefix])
        try:
            footers = [result() for result in results]
        except Exception as error:
            raise _Incomplete from error
        return np.array([len(footer) for footer in footers], _LENGTH).tobytes() + b"".join(footers)

    cache = files[0].store.cache
    names = sha256("|".join(f"{file.uri}|{file.stamp}" for file in files).encode()).hexdigest()
    try:
        group = cache.get(f"footers|{names}", 0, fetch) if cache is not None else memoryview(fetch())
    except _Incomplete:
        return results
    lengths = np.frombuffer(group, _LENGTH, len(files))
    ends = (np.cumsum(lengths, dtype=np.int64) + lengths.nbytes).tolist()
    starts = [lengths.nbytes, *ends[:-1]]
    return [partial(bytes, group[start:end]) for start, end in zip(starts, ends, strict=True)]


class _Incomplete(Exception):
    """Some footers of a group cannot be read, so it is not cached."""


def _check_all_unchanged(prefix: ListedPrefix | None, files: Sequence[StoredFile]) -> None:
    """By one listing, unless it would take more requests than the objects one by one."""
    fs, retry = files[0].store.fs, files[0].store.retry
    infos: Sequence[dict[str, Any] | None]
    if prefix is None or prefix.num_listed > len(files) * _PAGE:
        infos = map_concurrently(lambda file: retry.call(partial(object_store.get_info, fs, file.key), file.uri), files)
    else:
        listed = retry.call(partial(object_store.find_objects, fs, prefix.top), prefix.uri)
        infos = [listed.get(file.key) for file in files]
    for file, info in zip(files, infos, strict=True):
        file.check_unchanged(info)


def prefetch_blocks(spans: Iterable[tuple[StoredFile, int, int]]) -> None:
    """Fetches bytes [start, stop) of objects into the cache, many blocks at the same time. Raises DataError."""
    missing: dict[tuple[str, int], tuple[StoredFile, BlockGrid, int]] = {}
    for file, start, stop in spans:
        if len(missing) == _MAX_PREFETCHED:
            break
        if stop <= start:
            continue
        cache = file.store.cache
        if cache is None or not cache.has_room:
            return
        grid = BlockGrid(file.stamp.size, file.store.block_bytes)
        for index in range(grid.index(max(start, 0)), grid.index(max(min(stop, grid.size) - 1, 0)) + 1):
            if len(missing) < _MAX_PREFETCHED and cache.peek(file.block_key(grid), index) is None:
                missing[file.uri, index] = file, grid, index
    if len(missing) > 1:  # one block is fetched by its reader
        map_concurrently(lambda block: block[0].block(*block[1:]), missing.values(), at_once=_BLOCKS_AT_ONCE)
