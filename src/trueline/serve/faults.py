"""Which errors are the server's own fault: a full disk, a limit of the system, a store that is away. Pure.

A client that reads 4xx changes its request, so an error of the server's machine must not be one, whatever class a
library wrapped it in. 507 is for lack of room (RFC 4918, section 11.5; TorchServe answers it to lack of memory), 503
for the rest. The message names no path of the server; the log has the whole error.
"""

import errno
import os

from trueline import events
from trueline.errors import BundleError, RegistryError, RequestError, ServerFault, StorageError

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_OF_CONTENT = frozenset(
    {
        errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.EINVAL,
        errno.ELOOP, errno.EILSEQ,
    }
)  # fmt: skip
"""Errors that the content of an archive or a bundle causes: a missing file, a name that no file system takes."""
_HINTS = {
    errno.EMFILE: "raise the limit of open files for the server (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.EAGAIN: "raise the limit of processes for the server (ulimit -u, pids.max of its container)",
    errno.EACCES: "give the server's user the permission; the server's log has the path",
    errno.EPERM: "give the server's user the permission; the server's log has the path",
    errno.EROFS: "let the server write there, or set TMPDIR to a folder that it may write; its log has the path",
}
_FREE = "free some room on the server (its temporary folder, its state file, its memory), then send the request again"
_LOGGED = "the server's log says why; send the request again when that is mended"


def find_fault(error: BaseException) -> ServerFault | None:
    """`error` as the server's fault; None: it is the request's fault, or a bug.

    >>> found = find_fault(OSError(errno.ENOSPC, "No space left on device", "/srv/store"))
    >>> found.status, found.message
    (507, 'the server failed on its own side: No space left on device')
    """
    if isinstance(error, ServerFault):
        return error
    if isinstance(error, RequestError) and error.status >= 500:
        return None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return _describe(errno.ENOMEM, error)
        if isinstance(cause, OSError) and cause.errno is not None and not _comes_from_content(error, cause.errno):
            return _describe(cause.errno, error)
        cause = cause.__cause__
    return _describe(0, error) if isinstance(error, StorageError | RegistryError) else None


def _comes_from_content(error: BaseException, number: int) -> bool:
    return isinstance(error, BundleError | RequestError) and number in _OF_CONTENT


def _describe(number: int, error: BaseException) -> ServerFault:
    events.emit("server.fault", code=errno.errorcode.get(number, ""), why=f"{type(error).__name__}: {error}")
    room = number in _NO_ROOM
    what = os.strerror(number) if number else "a store that it needs is not available"
    hint = _FREE if room else _HINTS.get(number, _LOGGED)
    return ServerFault(f"the server failed on its own side: {what}", hint=hint, status=507 if room else 503)
