"""The folder of a search: one process works in it at a time.

The lock is on the folder itself (flock(2)), so that nothing has to lie in it and the kernel drops it however its holder
ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trueline import files
from trueline.errors import UsageError


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Makes `folder` and excludes other searches from it; one that is left empty is removed. Raises UsageError where
    another process works in it, StorageError."""
    try:
        handle = _lock(folder)
    except OSError as error:
        raise files.storage_error(error, folder) from error
    try:
        yield
    finally:
        with suppress(OSError):  # something was begun
            folder.rmdir()
        os.close(handle)


def _lock(folder: Path) -> int:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise UsageError(
                f"another search is at work in {folder}",
                hint="wait until it has ended, or name another bundle to write (--out)",
            ) from error
        except OSError:  # a file system without locks for folders
            return handle
        with suppress(FileNotFoundError):  # its last holder removed it at this moment
            if os.path.samestat(os.fstat(handle), folder.stat()):
                return handle
        os.close(handle)


def clear_folder(folder: Path) -> None:
    """Removes what is in `folder`, which its holder keeps. Raises OSError."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
