"""Caches on a local disk, shared by all processes of a machine: blocks of remote files, and indexes of records.

    <folder>/<two letters>/<key>-<block>      content, then its CRC-32 and length (12 bytes)
    <folder>/locks/<000..3ff>                 held while a block is fetched; SIGKILL releases it too

A block is written under a temporary name and renamed. Leftovers of killed writers are swept after an hour. Each process
verifies a block when it first maps it and fetches a damaged one again, which is cheaper than an fsync for each. A full
or read-only disk costs speed, not the job: the last blocks are then kept in memory. Keys hold the file's stamp, so new
content has new blocks and a new index.
"""

import contextlib
import fcntl
import hashlib
import io
import mmap
import os
import struct
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from trueline import events, files
from trueline.errors import StorageError
from trueline.storage.location import File

Arrays = dict[str, npt.NDArray[np.generic]]

CACHE = "TRUELINE_CACHE"
_TRAILER = struct.Struct("<IQ")
_LOCKS = 1024
_MAX_MAPPED, _MAX_IN_MEMORY = 64, 16
"""Blocks that a process keeps at hand: mapped files, and memory where there is no file."""
_ABANDONED_S = 3600.0
_SWEPT_TO = 0.9
"""Of the bound: above it, the least recently used blocks are removed down to this."""
_INDEX_VERSION = 1
_MIN_FILE_BYTES = 1 << 20
"""The index of a smaller file is not stored."""


class BlockCache:
    """Holds `max_bytes` on disk; `now` is the wall clock in seconds, as file times are."""

    def __init__(self, folder: Path, max_bytes: int, *, now: Callable[[], float] = time.time) -> None:
        self._folder, self._max_bytes, self._now = folder, max_bytes, now
        self._mapped: dict[Path, memoryview] = {}
        self._in_memory: dict[Path, memoryview] = {}
        self._lock = Lock()
        self._until_swept = 0
        self.has_room = True
        """Whether the last block could be written."""

    def get(self, key: str, block: int, fetch: Callable[[], bytes]) -> memoryview:
        """The block from the disk, else from `fetch`, whose result is stored. Raises what `fetch` raises."""
        path = self._path(key, block)
        content = self._lookup(path)
        if content is not None:
            return content
        with self._lock_block(f"{(int(path.name[:8], 16) + block) % _LOCKS:03x}"):
            content = self._lookup(path)
            if content is None:
                content = memoryview(fetch())
                self._store(path, content)
        return content

    def peek(self, key: str, block: int) -> memoryview | None:
        return self._lookup(self._path(key, block))

    def _path(self, key: str, block: int) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        return self._folder / name[:2] / f"{name}-{block}"

    def _lookup(self, path: Path) -> memoryview | None:
        with self._lock:
            mapped, in_memory = self._mapped.pop(path, None), self._in_memory.get(path)
        if mapped is None and in_memory is None:
            mapped = self._read(path)
        if mapped is None:
            return in_memory
        with self._lock:
            _remember(self._mapped, path, mapped, _MAX_MAPPED)
        return mapped

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
            with contextlib.suppress(OSError):  # it is replaced when the block is stored
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # another user's block is read and keeps its time
            os.utime(path, (self._now(), self._now()))
        return content

    def _store(self, path: Path, data: memoryview) -> None:
        """On the disk, else among the last ones in memory: a reader needs a block many times."""
        try:
            self._write(path, data)
            self.has_room = True
        except OSError as error:
            self.has_room = False
            events.emit("cache.not_kept", path=str(path), why=files.storage_error(error, path).message)
            with self._lock:
                _remember(self._in_memory, path, data, _MAX_IN_MEMORY)

    def _write(self, path: Path, data: memoryview) -> None:
        if self._until_swept <= 0:
            self._sweep()
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=files.PARTIAL, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.write(_TRAILER.pack(zlib.crc32(data), len(data)))
                os.fchmod(handle, 0o600)
            os.utime(name, (self._now(), self._now()))
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._until_swept -= len(data)

    def _sweep(self) -> None:
        """Makes room. Each process sweeps for itself, after it wrote a sixty-fourth of the bound."""
        self._until_swept = max(self._max_bytes // 64, 1)
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        bound = self._max_bytes * (_SWEPT_TO if total + self._until_swept > self._max_bytes else 1)
        for used_at, size, path in entries:
            partial = path.name.startswith(files.PARTIAL)
            if used_at < self._now() - _ABANDONED_S if partial else total > bound:
                path.unlink(missing_ok=True)
                total -= size

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        for path in self._folder.glob("??/*") if self._folder.is_dir() else ():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another process made room
            yield status.st_mtime, status.st_size, path

    @contextmanager
    def _lock_block(self, name: str) -> Iterator[None]:
        """Without a lock, on a read-only disk, two processes may fetch the same block."""
        handle = -1
        with contextlib.suppress(OSError):
            (self._folder / "locks").mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(self._folder / "locks" / name, flags, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if handle >= 0:
                os.close(handle)


def _remember(blocks: dict[Path, memoryview], path: Path, view: memoryview, max_blocks: int) -> None:
    blocks[path] = view
    while len(blocks) > max_blocks:
        blocks.pop(next(iter(blocks)))


def cache_folder() -> Path:
    """`$TRUELINE_CACHE`, or `trueline` in the user's cache folder."""
    folder = os.environ.get(CACHE)
    return Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trueline"


def load_index(file: File, kind: str, build: Callable[[], Arrays]) -> Arrays:
    """`build()`, from the cache when it was stored there for this file and `kind` of index."""
    if file.stamp.size < _MIN_FILE_BYTES:
        return build()
    location = os.path.realpath(file.path) if file.path else file.uri
    key = hashlib.sha256(f"{_INDEX_VERSION}|{kind}|{location}|{file.stamp}".encode()).hexdigest()[:40]
    path = cache_folder() / "index" / f"{key}.npz"
    try:
        with path.open("rb") as stored, np.load(stored, allow_pickle=False) as index:
            return {name: index[name] for name in index.files}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        events.emit("index.unreadable", path=str(path), why=str(error))
    arrays, buffer = build(), io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # its stub takes names of arrays for its own option
    try:
        files.write_atomic(path, buffer.getvalue())
    except StorageError as error:
        events.emit("index.not_kept", path=str(path), why=error.message)
    return arrays
