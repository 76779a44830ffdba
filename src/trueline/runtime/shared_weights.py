"""What several processes that run one program have in memory once: its weights, mapped from a file of all of them.

    FOLDER/lock          hold by who looks, makes or clears away
    FOLDER/KEY/          what a program was made into; whole, for it is renamed into place
    FOLDER/KEY/users     locked, shared, by each that has it mapped

Locks are flock(2)'s: the kernel lets go of those of a process that dies, so nothing is left that nobody has, and
whoever looks next clears it away. The folder is the caller's own: what lies there is trusted as this process is. Knows
no runtime; `onnx` and `torch_weights` say what is laid there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trueline import files
from trueline.errors import StorageError

WORTH_BYTES = 2**20
"""Weights of less than this are each process's own: looking and locking costs more than they do."""
ROOM = 3
"""So many times the program's own bytes have to be free: weights lie there as they are and packed for the processor."""
_LOCK = "lock"
_USERS = "users"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDir:
    """Where what belongs to one program is to lie."""

    folder: Path
    key: str
    """Names the program's bytes and what was made of them: who has the same key has the same."""

    def part(self, name: str) -> SharedDir:
        """The place of a part of the program, or of what a runtime makes of it."""
        return replace(self, key=f"{self.key}.{name}")


class Hold:
    """What lies at a place, for as long as this is hold."""

    def __init__(self, path: Path, users: int, folder: Path) -> None:
        self.path = path
        self._users = users
        self._folder = folder

    def release(self) -> None:
        """Lets go. What nobody holds any more is cleared away, at once if nobody else is looking."""
        users, self._users = self._users, -1
        if users < 0:
            return
        os.close(users)
        try:
            with _alone(self._folder, wait=False):
                _clear(self._folder, keep="")
        except OSError:  # another looks, and clears; or the folder is gone with its owner
            return


def hold(place: SharedDir, make: Callable[[Path], None], *, program_bytes: int) -> Hold:
    """What lies at `place`; if there is nothing, what `make` writes into the empty folder that it is given.

    Raises StorageError when there is no room, and what `make` raises; nothing is then left.
    """
    folder, path = place.folder, place.folder / place.key
    try:
        with _alone(folder, wait=True):
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
    if free < ROOM * program_bytes:  # a runtime that runs into a full disk may write less and say nothing
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


@contextmanager
def _alone(folder: Path, *, wait: bool) -> Iterator[None]:
    """While no other process looks, makes or clears. Raises BlockingIOError when one does and this is not to wait."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


def _clear(folder: Path, *, keep: str) -> None:
    """Removes what nobody holds, and what makers that died left. Call it alone."""
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
