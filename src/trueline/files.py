"""Files that are whole or absent.

Everything that Trueline leaves on a disk is written beside its final name and renamed, after fsync, so that a
reader (or a restart after SIGKILL, or a full disk) sees the old content or the new, never a part. Digests are
SHA-256 in lower-case hex. Source of the recipe: the rename(2) and fsync(2) pages; directories are fsynced too,
because a rename is an entry of its directory.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trueline.errors import StorageError

PARTIAL = ".partial-"
"""Prefix of names under construction; anything with it may be deleted when its writer is gone."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What link(2) says on a file system that has no hard links."""


def user_cache() -> Path:
    """The folder of what can be had again: `$XDG_CACHE_HOME/trueline`, or `~/.cache/trueline`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trueline"


def sha256_bytes(data: bytes) -> str:
    """SHA-256 of `data` in hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of the file's content in hex, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def storage_error(error: OSError, path: Path) -> StorageError:
    """`error` from writing `path`, in words: which path, how much room there is, what to do."""
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
            f"cannot write {path}: {error.strerror}; nothing was changed",
            hint="choose a folder that you may write to",
        )
    return StorageError(f"writing {path} failed: {error.strerror or error}; nothing was changed")


def _free(path: Path) -> str:
    folder = path
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB"
    except OSError:
        return "an unknown amount"


def _fsync_dir(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fsync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            handle = os.open(os.path.join(root, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        _fsync_dir(Path(root))


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, replace: bool = True) -> bool:
    """Writes `data` to `path` whole or not at all. Raises StorageError; the old content is then untouched.

    Without `replace` a `path` that is there stays as it is, also when another process makes it at this moment.
    Returns whether `data` was written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            written = _named(Path(name), path, replace=replace)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        _fsync_dir(path.parent)
    except OSError as error:
        raise storage_error(error, path) from error
    return written


@contextmanager
def atomic_file(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Yields a file that becomes `path` when the block ends well, and vanishes when it does not: for what is written
    piece by piece. Raises StorageError; the old content is then untouched.
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
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        _fsync_dir(path.parent)
    except OSError as error:
        raise storage_error(error, path) from error


def _named(partial: Path, path: Path, *, replace: bool) -> bool:
    if replace:
        os.replace(partial, path)
        return True
    try:
        os.link(partial, path)  # unlike a rename, it fails where the name is taken
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            return False
        os.replace(partial, path)  # two writers at the same moment: the second one's stays
        return True
    finally:
        partial.unlink(missing_ok=True)
    return True


@contextmanager
def atomic_dir(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder that becomes `path` when the block ends well, and vanishes when it does not.

    An existing `path` is an error unless `replace`, in which case it is exchanged by two renames: a reader may
    for a moment find nothing, and never finds a mixture. Raises StorageError.
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
        _exchange(partial, path)
        _fsync_dir(path.parent)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)


def _exchange(partial: Path, path: Path) -> None:
    if not path.exists():
        os.rename(partial, path)
        return
    old = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=path.parent))
    os.rename(path, old / "old")
    os.rename(partial, path)
    shutil.rmtree(old, ignore_errors=True)


def sweep(folder: Path) -> int:
    """Removes what dead writers left under construction in `folder`; returns how many entries went.

    Call it only where no other writer can be at work.
    """
    count = 0
    for entry in folder.glob(PARTIAL + "*"):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
        count += 1
    return count
