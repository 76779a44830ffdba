"""Blocks of remote files on a local disk: shared by all processes of a machine, bounded, and whole or absent.

    <folder>/<two letters>/<key>-<block>      content, then its CRC-32 and length (12 bytes)
    <folder>/locks/<000..3ff>                 who fetches; a lock goes with its holder, also after SIGKILL

A block is written beside its name and renamed, so a writer that is killed leaves a part that nobody reads and that is
swept an hour later. Each process verifies a block when it first maps it; a damaged one, such as a machine that lost its
power leaves behind, is fetched again: what can be had again is not worth an fsync. The key holds the object's stamp:
another content has other blocks. A disk that is full or read-only costs speed, not the job: the last blocks are then
held in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from trueline import events, files

_TRAILER = struct.Struct("<IQ")
_LOCKS = 1024
_MAPPED, _HELD = 64, 16
"""Blocks that a process keeps at hand: files that are mapped, and memory where there is no file."""
_ABANDONED_S = 3600.0
_FULL, _ROOM = 1.0, 0.9
"""Over the bound, the blocks that were used longest ago go until nine tenths are taken."""


class BlockCache:
    """`now` is the wall clock in seconds, as file times are."""

    def __init__(self, folder: Path, max_bytes: int, *, now: Callable[[], float] = time.time) -> None:
        self._folder, self._max_bytes, self._now = folder, max_bytes, now
        self._mapped: dict[Path, memoryview] = {}
        self._held: dict[Path, memoryview] = {}
        self._lock = Lock()
        self._until_swept = 0
        self.has_room = True
        """Whether the last block that came found room on the disk."""

    def get(self, key: str, block: int, fetch: Callable[[], bytes]) -> memoryview:
        """The block, from the disk if it is there, else from `fetch` and kept. Raises what `fetch` raises."""
        path = self._path(key, block)
        found = self._lookup(path)
        if found is not None:
            return found
        with self._lock_block(f"{(int(path.name[:8], 16) + block) % _LOCKS:03x}"):
            found = self._lookup(path)
            if found is None:
                found = memoryview(fetch())
                self._store(path, found)
        return found

    def peek(self, key: str, block: int) -> memoryview | None:
        """The block if it is on the disk."""
        return self._lookup(self._path(key, block))

    def num_bytes(self) -> int:
        """What the cache takes on the disk now."""
        return sum(size for _, size, _ in self._entries())

    def _path(self, key: str, block: int) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        return self._folder / name[:2] / f"{name}-{block}"

    def _lookup(self, path: Path) -> memoryview | None:
        with self._lock:
            found = self._mapped.pop(path, None)
            held = self._held.get(path)
        if found is None and held is None:
            found = self._read(path)
        if found is not None:
            with self._lock:
                _remember(self._mapped, path, found, _MAPPED)
        return held if found is None else found

    def _read(self, path: Path) -> memoryview | None:
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < _TRAILER.size:
                    raise ValueError("it is too short")
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            checksum, length = _TRAILER.unpack(view[-_TRAILER.size :])
            content = view[: -_TRAILER.size]
            if len(content) != length or zlib.crc32(content) != checksum:
                raise ValueError("it does not match its checksum")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            events.emit("cache.damaged", path=str(path), why=str(error))
            with contextlib.suppress(OSError):  # what cannot be removed is replaced when the block is kept
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # a block of another user is read, and seems older than it is
            os.utime(path, (self._now(), self._now()))
        return content

    def _store(self, path: Path, data: memoryview) -> None:
        """On the disk if it can be, else among the last ones in memory: a reader asks for a block many times."""
        try:
            self._write(path, data)
            self.has_room = True
        except OSError as error:
            self.has_room = False
            events.emit("cache.not_kept", path=str(path), why=files.storage_error(error, path).message)
            with self._lock:
                _remember(self._held, path, data, _HELD)

    def _write(self, path: Path, data: memoryview) -> None:
        if self._until_swept <= 0:
            self._sweep()
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=files.PARTIAL, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.write(_TRAILER.pack(zlib.crc32(data), len(data)))
                os.fchmod(handle, 0o644)
            os.utime(name, (self._now(), self._now()))
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._until_swept -= len(data)

    def _sweep(self) -> None:
        """Makes room. It is done after a sixty-fourth of the bound was written, and by each process for itself."""
        self._until_swept = max(self._max_bytes // 64, 1)
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        room = self._max_bytes * (_ROOM if total + self._until_swept > self._max_bytes * _FULL else _FULL)
        for used_at, size, path in entries:
            abandoned = path.name.startswith(files.PARTIAL) and used_at < self._now() - _ABANDONED_S
            if total > room and not path.name.startswith(files.PARTIAL):
                abandoned = True
            if abandoned:
                path.unlink(missing_ok=True)
                total -= size

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        for path in self._folder.glob("??/*") if self._folder.is_dir() else ():
            try:
                found = path.stat()
            except FileNotFoundError:
                continue  # another process made room
            yield found.st_mtime, found.st_size, path

    @contextmanager
    def _lock_block(self, name: str) -> Iterator[None]:
        """Where no lock can be had, two may fetch the same."""
        handle = -1
        with contextlib.suppress(OSError):
            (self._folder / "locks").mkdir(parents=True, exist_ok=True)
            handle = os.open(self._folder / "locks" / name, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if handle >= 0:
                os.close(handle)


def _remember(kept: dict[Path, memoryview], path: Path, view: memoryview, most: int) -> None:
    kept[path] = view
    while len(kept) > most:
        kept.pop(next(iter(kept)))
