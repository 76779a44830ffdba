"""Temporary folders of one server, for unpacked archives and shared weights.

The server holds a lock on the folder; the kernel drops the lock of a killed server, and the next server deletes the
folder. Source: flock(2).
"""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "trueline-archive-"
WEIGHTS = "trueline-weights-"
STATE = "trueline-state-"
_YOUNG_S = 60.0  # the lock of a younger folder may not be taken yet


class WorkDir:
    """An empty folder, held until `remove`."""

    def __init__(self, parent: Path | None = None, *, prefix: str = PREFIX) -> None:
        """Deletes folders of dead servers, too. Blocks. Raises OSError."""
        parent = parent or Path(tempfile.gettempdir())
        sweep(parent, now=time.time(), prefix=prefix)
        self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Harmless when repeated; the next server deletes what cannot be deleted now."""
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path, *, now: float, prefix: str = PREFIX) -> int:
    """Deletes this user's folders below `parent` that no living server holds; returns their number."""
    count = 0
    for folder in parent.glob(f"{prefix}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, no folder, or gone
        try:
            status = os.fstat(lock)
            if status.st_uid == os.getuid() and now - status.st_mtime > _YOUNG_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                count += 1
        except BlockingIOError:
            continue  # its server lives
        finally:
            os.close(lock)
    return count
