"""What has changed a server since its last snapshot, in order: `log-N` beside `snapshot-N`.

A frame is appended by one write before it is applied and acknowledged, so SIGKILL loses nothing that was acknowledged:
the kernel has it. Recovery reads the newest snapshot and the logs from its number on. A write that SIGKILL or a full
disk cut short is at the end of the last log, and was not acknowledged; what is torn elsewhere is a named error.

A log that a snapshot made superfluous is written over by the one after the next: memory that the kernel has for a file
already takes a third less time than new memory. So after the end of the last log may lie entries of an earlier one,
which have its mark.
"""

import contextlib
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from trueline import files
from trueline.errors import StorageError
from trueline.ps.server import snapshot
from trueline.ps.wire import Array, FrameError, ReceivedFrame, decode

ENTRY = struct.Struct("<QQII")  # bytes of the frame, its checksum, the log's mark, CRC-32 of these
_MARK_AT, _CRC_AT = 16, 20
SPARE = "log-spare"
MOST_SPARE = 512 << 20
"""Bytes of a log that is kept to be written over."""
LEAST_BYTES = 256 << 20
"""A snapshot is due when the log has more bytes than this and than the state,"""
WORK_S = 1.25
"""or when it would take longer to apply again than this, and than this for each GB of the state."""
_HINT = "move the server's folder away: this server then begins with the last checkpoint"


class PushLog:
    """The folder of one server. Raises StorageError; after DiskFull the same call may be repeated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.sweep(folder)
            self.number = max((*self._numbers("log"), *self._numbers("snapshot")), default=0)
            (folder / f"log-{self.number}").touch(mode=0o600)  # later there may be no room for it
        except OSError as error:
            raise files.storage_error(error, folder) from error
        self._handle = -1
        self.size = 0
        """Bytes since the last snapshot."""
        self.work_s = 0.0
        """CPU time that it took to apply them: add what `append`ed frames took."""
        self._end = 0
        self._covered = 0, 0.0
        self._due = LEAST_BYTES, WORK_S
        self._writing: snapshot.ForkedWrite | None = None

    def _numbers(self, kind: str) -> list[int]:
        names = (path.name.partition("-")[2] for path in self.folder.glob(f"{kind}-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def recover(
        self, load: Callable[[snapshot.Header, list[Array]], None], apply: Callable[[ReceivedFrame], None]
    ) -> None:
        """Gives the newest snapshot to `load`, and each frame after it to `apply`; then frames can be appended."""
        first = max(self._numbers("snapshot"), default=None)
        if first is not None:
            load(*snapshot.read(self.folder / f"snapshot-{first}"))
        logs = [number for number in self._numbers("log") if number >= (first or 0)]
        if logs and logs != list(range(first or 0, logs[-1] + 1)):
            raise StorageError(f"{self.folder} lacks a log between {first or 0} and {logs[-1]}", hint=_HINT)
        began = time.process_time()
        for number in logs:
            path = self.folder / f"log-{number}"
            end = 0
            for frame, after in read_log(path, last=number == logs[-1]):
                apply(frame)
                end = after
            self.size += end
            if number == logs[-1] and end < path.stat().st_size:
                os.truncate(path, end)
        self.work_s = time.process_time() - began
        self._open()
        self._end = os.fstat(self._handle).st_size

    def _open(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        path = self.folder / f"log-{self.number}"
        try:
            if not path.exists():
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.folder / SPARE, path)
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise files.storage_error(error, path) from error
        self._end = 0

    def append(self, data: memoryview) -> None:
        """Has the kernel keep the frame, whole or not at all."""
        start = struct.pack("<QQI", len(data), snapshot.sum_words(data), _mark(self.number))
        pieces, at = [memoryview(start + struct.pack("<I", zlib.crc32(start))), data], self._end
        try:
            while pieces:
                count = os.pwritev(self._handle, pieces, at)
                at += count
                while pieces and count >= len(pieces[0]):
                    count -= len(pieces.pop(0))
                if pieces:
                    pieces[0] = pieces[0][count:]
        except OSError as error:
            os.ftruncate(self._handle, self._end)
            if (self.folder / SPARE).exists():
                (self.folder / SPARE).unlink()
                self.append(data)
                return
            raise files.storage_error(error, self.folder / f"log-{self.number}") from error
        self._end += ENTRY.size + len(data)
        self.size += ENTRY.size + len(data)

    def take_back(self, size: int) -> None:
        """Removes the last frame, of `size` bytes, which could not be applied."""
        self._end -= ENTRY.size + size
        self.size -= ENTRY.size + size
        os.ftruncate(self._handle, self._end)

    def is_long(self, state: Callable[[], int]) -> bool:
        """Whether a snapshot of a state of that many bytes is due."""
        if self._writing is not None:
            return False
        if self.size > self._due[0] and self.size > state():
            return True
        return self.work_s > self._due[1] and self.work_s > WORK_S * state() / 1e9

    def begin_snapshot(self, dump: Callable[[], tuple[snapshot.Header, list[Array]]]) -> snapshot.ForkedWrite:
        """Starts the next log, and a child that writes the state up to it. Call `end_snapshot` when it has ended."""
        before = self._handle, self._end, self.number
        try:
            os.ftruncate(self._handle, self._end)  # what is not the last log has nothing after its end
            self._handle, self.number = -1, self.number + 1
            self._open()
            self._writing = snapshot.ForkedWrite(self.folder / f"snapshot-{self.number}", dump, durable=False)
        except (StorageError, OSError) as error:
            if self._handle not in (-1, before[0]):
                os.close(self._handle)
            self._handle, self._end, self.number = before
            path = self.folder / f"log-{before[2] + 1}"
            path.unlink(missing_ok=True)
            self._put_off()
            raise error if isinstance(error, StorageError) else files.storage_error(error, path) from error
        os.close(before[0])
        self._covered = self.size, self.work_s
        return self._writing

    def end_snapshot(self) -> None:
        """Removes what the new snapshot makes superfluous. Raises TruelineError when there is none; the logs stay."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        error = writing.finish()
        if error is not None:
            self._put_off()
            raise error
        self.size -= self._covered[0]
        self.work_s -= self._covered[1]
        self._due = LEAST_BYTES, WORK_S
        last = self.folder / f"log-{self.number - 1}"
        with contextlib.suppress(FileNotFoundError):
            if last.stat().st_size <= MOST_SPARE:
                os.rename(last, self.folder / SPARE)
        for kind in ("log", "snapshot"):
            for number in self._numbers(kind):
                if number < self.number:
                    (self.folder / f"{kind}-{number}").unlink(missing_ok=True)

    def _put_off(self) -> None:
        """A snapshot that failed is tried again after as much as a snapshot is worth."""
        self._due = self.size + LEAST_BYTES, self.work_s + WORK_S

    def close(self) -> None:
        if self._writing is not None:
            self._writing.end()
            self._writing = None
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def read_log(path: Path, *, last: bool) -> Iterator[tuple[ReceivedFrame, int]]:
    """Each frame and where it ends. A torn end of the `last` log is left out, and what an earlier log left after it."""
    if not path.stat().st_size:
        return
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    at, mark = 0, _mark(int(path.name.partition("-")[2]))
    while at < len(data):
        found = _read_entry(data, at, mark)
        if found is None:
            if last and _is_end(data, at, mark):
                return
            raise StorageError(f"{path} is torn at byte {at} of {len(data)}", hint=_HINT)
        at += ENTRY.size + len(found.data)
        yield found, at


def _mark(number: int) -> int:
    """Of the entries of log `number`: rare among the words of gradients and ids."""
    return (number * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF


def _read_entry(data: memoryview, at: int, mark: int) -> ReceivedFrame | None:
    size = _read_size(data, at, mark)
    start = at + ENTRY.size
    if size is None or start + size > len(data):
        return None
    frame = data[start : start + size]
    if snapshot.sum_words(frame) != ENTRY.unpack_from(data, at)[1]:
        return None
    try:
        return decode(frame)
    except FrameError:
        return None


def _read_size(data: memoryview, at: int, mark: int) -> int | None:
    """Bytes of the frame of the entry at `at`; None when its head is torn, or another log's."""
    if at + ENTRY.size > len(data):
        return None
    size, _, found, crc = ENTRY.unpack_from(data, at)
    return int(size) if found == mark and zlib.crc32(data[at : at + _CRC_AT]) == crc else None


def _is_end(data: memoryview, at: int, mark: int) -> bool:
    """Whether no entry of this log lies after `at`, where one is torn: then a write was cut short there."""
    words = np.frombuffer(data[at : len(data) & ~7], np.uint32)
    places = at + 4 * np.flatnonzero(words == mark) - _MARK_AT
    return not any(_read_size(data, place, mark) is not None for place in places.tolist() if place > at)
