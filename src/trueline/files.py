"""Files that are whole or absent.

All files of Trueline are written beside their final name, fsynced and renamed, so that a reader (or a restart after
SIGKILL, or a full disk) sees the old content or the new, never a part. Digests are SHA-256 in lower-case hex. Source:
the rename(2) and fsync(2) pages; directories are fsynced too, because a rename changes an entry of its directory.
"""

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal, get_args

from trueline.errors import DiskFull, StorageError

PARTIAL = ".partial-"
"""Prefix of unfinished files and folders, which may be deleted when their writer is gone."""
_OLD = ".old-"
"""Prefix of a folder that is being replaced; with the folder's name behind it, by which `recover` puts it back."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM)
"""Errors of renameat2(2) on a file system or kernel that cannot exchange two names."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_BROKEN = "look at the disk or its connection (dmesg), or write to another one, and try again"
_TOO_MANY = "raise the limit of open files (ulimit -n), or have the code close those that it opens, and try again"
_NEXT_ACTS = {
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ETIMEDOUT), _BROKEN),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), _TOO_MANY),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG), "choose another folder"),
}
"""What to do about an error of the system."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of link(2) on a file system without hard links."""

TemporaryKind = Literal[
    "archive", "bundle", "download", "head", "host", "launch", "learner", "life", "pool", "state", "trial", "weights"
]  # fmt: skip
_TEMPORARY = "trueline-"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/trueline`, or `~/.cache/trueline`, for this user alone: everything in it can be made again."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trueline"
    with suppress(OSError):  # writing into it fails with the reason
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def hold_lock(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Excludes other processes that hold the lock `path`, a file of this user alone that is never written.

    A symbolic link in its place is not followed: another user of a shared folder may have put it there (CWE-59).
    Raises OSError; BlockingIOError when another process holds the lock and `wait` is false.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


class TemporaryFolder:
    """A folder of this user alone that belongs to a living process: `sweep_temporary` deletes it once that is dead.

    The process holds a lock on it (flock(2)), which the kernel drops however the process ends.
    """

    def __init__(self, kind: TemporaryKind, parent: Path | None = None) -> None:
        """Empty, below `parent` or $TMPDIR. Raises OSError."""
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{kind}-", dir=parent))
            self._lock = _open_dir(self.path)
            if self._lock >= 0:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if _same_file(self._lock, self.path):
                    return
                os.close(self._lock)  # it was swept before it was locked

    @classmethod
    def after_sweep(cls, kind: TemporaryKind) -> "TemporaryFolder":
        """A new one, once what killed processes have left is deleted. Raises OSError."""
        sweep_temporary()
        return cls(kind)

    def remove(self) -> None:
        """Harmless when repeated; what cannot be deleted now is left for `sweep_temporary`."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def is_held(folder: Path) -> bool:
    """Whether a living process holds the TemporaryFolder at this path, or may: it belongs to another user."""
    try:
        lock = os.open(folder, _FOLDER_FLAGS)
    except PermissionError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def sweep_temporary(parent: Path | None = None) -> int:
    """Deletes this user's TemporaryFolders of dead processes below `parent` or $TMPDIR; returns their number."""
    count = 0
    for kind in get_args(TemporaryKind):
        for folder in (parent or Path(tempfile.gettempdir())).glob(f"{_TEMPORARY}{kind}-*"):
            lock = _open_dir(folder)
            try:
                if lock >= 0 and os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                    count += 1
            except BlockingIOError:
                continue  # its process lives
            finally:
                if lock >= 0:
                    os.close(lock)
    return count


def _open_dir(folder: Path) -> int:
    """A descriptor; -1 for another user's folder, for none and for a link."""
    try:
        return os.open(folder, _FOLDER_FLAGS)
    except OSError:
        return -1


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def storage_error(error: OSError, path: Path) -> StorageError:
    """An error from writing `path` as a message: the path, the room left, what to do."""
    if error.errno in NO_ROOM:
        return DiskFull(
            f"no room left to write {path} ({free_space(path)} free); nothing was changed",
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
    hint = _NEXT_ACTS.get(error.errno or 0, "")
    return StorageError(f"writing {path} failed: {error.strerror or error}; nothing was changed", hint=hint)


def free_space(path: Path) -> str:
    """The room on the disk of `path`, for messages."""
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
        for path in (*(Path(root, name) for name in names), Path(root)):
            mode = path.lstat().st_mode
            if mode & stat.S_IWOTH and not stat.S_ISLNK(mode):  # under a umask of 0, any user could change it
                path.chmod(stat.S_IMODE(mode) & ~stat.S_IWOTH)
        for name in names:
            _fsync(Path(root, name))
        _fsync_dir(Path(root))


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, replace: bool = True, durable: bool = True) -> bool:
    """Writes `data` to `path` whole or not at all. Raises StorageError; the old content is then untouched.

    Without `replace` an existing `path` stays as it is, also when another process makes it at this moment. What is not
    `durable` outlives its writer and not the machine: the disk is not waited for. Returns whether `data` was written.
    """
    written = True

    def link(partial: Path, path: Path) -> None:
        nonlocal written
        written = _link(partial, path)

    with atomic_file(path, mode=mode, publish=os.replace if replace else link, durable=durable) as file:
        file.write(data)
    return written


@contextmanager
def atomic_file(
    path: Path, *, mode: int = 0o644, publish: Callable[[Path, Path], None] | None = None, durable: bool = True
) -> Iterator[BinaryIO]:
    """Yields a file that becomes `path` when the block succeeds, and vanishes when it fails: for data written piece by
    piece. Raises StorageError; the old content is then untouched. `publish` gives the file its name, else a rename.
    `durable`: as for `write_atomic`.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fchmod(file.fileno(), mode & ~_withheld())
                if durable:
                    os.fsync(file.fileno())
            (publish or os.replace)(Path(name), path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        if durable:
            _fsync_dir(path.parent)
    except OSError as error:
        raise storage_error(error, path) from error


def _withheld() -> int:
    """The rights of others that this process's umask takes; /proc shows it without changing it for other threads."""
    with suppress(OSError, StopIteration, ValueError), open("/proc/self/status", encoding="ascii") as status:
        return int(next(line for line in status if line.startswith("Umask:")).split()[1], 8) & 0o077
    return 0


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

    An existing `path` is an error unless `replace`, which exchanges the two in one step (renameat2(2)). Where the file
    system cannot, there are two renames: for a moment a reader may find nothing, never a mixture, and `recover` undoes
    a replacement whose process was killed between them. Raises StorageError.
    """
    path = Path(path)
    recover(path.parent)
    if path.exists() and not replace:
        raise StorageError(f"{path} exists already", hint="choose another name or ask to replace it")
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=path.parent))
        partial.chmod(0o755 & ~_withheld())
        yield partial
        _fsync_tree(partial)
        if not path.exists():
            os.rename(partial, path)
        elif not _exchange(partial, path):
            old = path.with_name(_OLD + path.name)
            os.rename(path, old)
            os.rename(partial, path)
            shutil.rmtree(old, ignore_errors=True)
        _fsync_dir(path.parent)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; False where the file system cannot. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in _NO_EXCHANGE:
        return False
    raise OSError(error, os.strerror(error), str(other))


def recover(folder: Path) -> None:
    """Puts folders back that were being replaced in `folder` when their process was killed; removes replaced ones."""
    for old in folder.glob(_OLD + "*"):
        path = old.with_name(old.name.removeprefix(_OLD))
        with suppress(OSError):  # another process recovers it, or replaces it at this moment
            if path.exists():
                shutil.rmtree(old)
            else:
                os.rename(old, path)


def sweep(folder: Path, *, folders: bool = True) -> int:
    """Removes the unfinished entries of dead writers in `folder`, after `recover`; returns their number. Call it only
    where no other writer can be active. `folders`: unfinished folders too."""
    recover(folder)
    entries = [entry for entry in folder.glob(PARTIAL + "*") if folders or not entry.is_dir()]
    for entry in entries:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with suppress(OSError):  # a read-only folder
                entry.unlink()
    return len(entries)
