"""Files that are whole or absent.

All files of Trueline are written beside their final name, fsynced and renamed, so that a reader (or a restart after
SIGKILL, or a full disk) sees the old content or the new, never a part. Digests are SHA-256 in lower-case hex. Source:
the rename(2) and fsync(2) pages; directories are fsynced too, because a rename changes an entry of its directory.
"""

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trueline.errors import StorageError

PARTIAL = ".partial-"
"""Prefix of unfinished files and folders, which may be deleted when their writer is gone."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of link(2) on a file system without hard links."""


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/trueline`, or `~/.cache/trueline`: everything in it can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trueline"


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def storage_error(error: OSError, path: Path) -> StorageError:
    """An error from writing `path` as a message: the path, the room left, what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"no room left to write {path} ({_free(path)} free); nothing was changed",
            hint="free some space, or write to another disk, and try again",
        )
    if error.errno == errno.EFBIG:
        return StorageError(
            f"cannot write {path}: a file in it is longer than this process may write; nothing was changed",
            hint="raise the limit (ulimit -f), or write to a file system that takes longer files",
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StorageError(
            f"cannot write {path}: {error.strerror}; nothing was changed", hint="choose a folder that you may write to"
        )
    return StorageError(f"writing {path} failed: {error.strerror or error}; nothing was changed")


def _free(path: Path) -> str:
    folder = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB"
    except OSError:
        return "an unknown amount"


def _fsync(path: Path, flags: int = os.O_RDONLY) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fsync_dir(folder: Path) -> None:
    _fsync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _fsync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            _fsync(Path(root, name))
        _fsync_dir(Path(root))


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, replace: bool = True) -> bool:
    """Writes `data` to `path` whole or not at all. Raises StorageError; the old content is then untouched.

    Without `replace` an existing `path` stays as it is, also when another process makes it at this moment.
    Returns whether `data` was written.
    """
    written = True

    def link(partial: Path, path: Path) -> None:
        nonlocal written
        written = _link(partial, path)

    with atomic_file(path, mode=mode, publish=os.replace if replace else link) as file:
        file.write(data)
    return written


@contextmanager
def atomic_file(
    path: Path, *, mode: int = 0o644, publish: Callable[[Path, Path], None] | None = None
) -> Iterator[BinaryIO]:
    """Yields a file that becomes `path` when the block succeeds, and vanishes when it fails: for data written piece by
    piece. Raises StorageError; the old content is then untouched. `publish` gives the file its name, else a rename.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            (publish or os.replace)(Path(name), path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        _fsync_dir(path.parent)
    except OSError as error:
        raise storage_error(error, path) from error


def _link(partial: Path, path: Path) -> bool:
    """Gives the file the name `path` and returns True, if the name is free."""
    try:
        os.link(partial, path)  # unlike a rename, it fails where the name is taken
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            return False
        os.replace(partial, path)  # of two writers at the same moment the second wins
    finally:
        partial.unlink(missing_ok=True)
    return True


@contextmanager
def atomic_dir(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder that becomes `path` when the block succeeds, and vanishes when it fails.

    An existing `path` is an error unless `replace`, which exchanges it by two renames: for a moment a reader may find
    nothing, but never a mixture. Raises StorageError.
    """
    path = Path(path)
    if path.exists() and not replace:
        raise StorageError(f"{path} exists already", hint="choose another name or ask to replace it")
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=path.parent))
        partial.chmod(0o755)
        yield partial
        _fsync_tree(partial)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=path.parent))
            os.rename(path, old / "old")
            os.rename(partial, path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(partial, path)
        _fsync_dir(path.parent)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)


def sweep(folder: Path) -> int:
    """Removes the unfinished entries of dead writers in `folder`; returns their number. Call it only where no other
    writer can be active."""
    entries = list(folder.glob(PARTIAL + "*"))
    for entry in entries:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    return len(entries)
