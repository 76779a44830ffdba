"""Weights that several processes of one program have in memory once, mapped from a file.

    FOLDER/lock          locked while a process looks, writes or clears
    FOLDER/KEY/          the mapped files of a program; complete, because it is renamed into place
    FOLDER/KEY/users     locked, shared, by each process that maps them

The kernel releases the locks (flock(2)) of a process that dies, and the next process to look clears what is unused. The
folder belongs to the caller and its contents are trusted. `onnx` and `torch_weights` write the files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from trueline import files
from trueline.errors import StorageError

WORTH_BYTES = 2**20
"""Smaller weights are not shared: looking and locking would cost more."""
ROOM = 3
"""Free space needed, in sizes of the program: weights are stored as they are and packed for the processor."""
_LOCK = "lock"
_USERS = "users"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDir:
    """Where the shared files of one program are."""

    folder: Path
    key: str
    """Names the program's bytes and what was made of them: equal keys, equal files."""

    def part(self, name: str) -> SharedDir:
        """For a part of the program, or for what a runtime makes of it."""
        return replace(self, key=f"{self.key}.{name}")


class Hold:
    """Keeps the shared files until it is released."""

    def __init__(self, path: Path, users: int, folder: Path) -> None:
        self.path, self._users, self._folder = path, users, folder

    def release(self) -> None:
        """Releases the files. Unused ones are cleared, at once if no other process is looking."""
        users, self._users = self._users, -1
        if users < 0:
            return
        os.close(users)
        try:
            with files.hold_lock(self._folder / _LOCK, wait=False):
                _clear(self._folder, keep="")
        except OSError:  # another process looks, and clears; or the folder is gone with its owner
            return


def hold(place: SharedDir, make: Callable[[Path], None], *, program_bytes: int) -> Hold:
    """The files at `place`; where there are none, `make` writes them into the empty folder that it gets.

    Raises StorageError when there is no room, and what `make` raises; nothing is left behind then.
    """
    folder, path = place.folder, place.folder / place.key
    try:
        with files.hold_lock(folder / _LOCK):
            _clear(folder, keep=place.key)
            if not path.exists():
                _make(path, make, program_bytes)
            users = os.open(path / _USERS, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(users, fcntl.LOCK_SH)
    except OSError as error:
        raise files.storage_error(error, path) from error
    return Hold(path, users, folder)


def _make(path: Path, make: Callable[[Path], None], program_bytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < ROOM * program_bytes:  # a runtime may write less on a full disk, without an error
        raise StorageError(
            f"{path.parent} has {free / 2**20:.0f} MiB free, and weights that processes share may need "
            f"{ROOM * program_bytes / 2**20:.0f} MiB there",
            hint="set TMPDIR to a disk with room",
        )
    partial = Path(tempfile.mkdtemp(prefix=files.PARTIAL, dir=path.parent))
    try:
        make(partial)
        (partial / _USERS).touch(mode=0o600)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _clear(folder: Path, *, keep: str) -> None:
    """Removes unused files, and what processes that died while writing left. Call it within the lock."""
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != keep and not _is_held(entry):
            shutil.rmtree(entry, ignore_errors=True)


def _is_held(entry: Path) -> bool:
    if entry.name.startswith(files.PARTIAL):
        return False
    handle = os.open(entry / _USERS, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
