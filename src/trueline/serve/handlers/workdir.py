"""Where an archive is laid out, and where processes lay what they share: a folder of this server alone, gone with what
it is for.

The folder is locked for as long as its server lives; the kernel drops the lock of a server that is killed, and the next
one deletes what it left. Source: flock(2).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "trueline-archive-"
WEIGHTS = "trueline-weights-"
_YOUNG_S = 60.0
"""A folder of this age may be one whose lock is just being taken."""


class WorkDir:
    """An empty folder, held until `remove`."""

    def __init__(self, parent: Path | None = None, *, prefix: str = PREFIX) -> None:
        """Makes it, and deletes what dead servers of this user left beside it. Blocks. Raises OSError."""
        parent = parent or Path(tempfile.gettempdir())
        sweep(parent, now=time.time(), prefix=prefix)
        self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Deletes the folder. Harmless when repeated; what cannot be deleted is left to the next server."""
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path, *, now: float, prefix: str = PREFIX) -> int:
    """Deletes the folders under `parent` that this user made and no living server holds; returns how many."""
    count = 0
    for folder in parent.glob(f"{prefix}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another's, no folder, or gone already
        try:
            told = os.fstat(lock)
            if told.st_uid == os.getuid() and now - told.st_mtime > _YOUNG_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                count += 1
        except BlockingIOError:
            continue  # its server lives
        finally:
            os.close(lock)
    return count
