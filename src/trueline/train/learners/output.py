"""The log of a learner: in its own files at once, and in the store some moments later."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from trueline.errors import StorageError, TruelineError
from trueline.storage.location import is_remote
from trueline.train.cluster.store import JobStore

FLUSH_S, REMOTE_S = 0.25, 2.0
"""Time between two writes to a store: to an object store each is an object."""
MOST_PENDING = 16 << 20
"""Bytes that wait for a store that is away; what comes then is lost there, and stays in the files."""


class StoredLog:
    """A log of the store that one process writes; whole lines, until `close`."""

    def __init__(self, store: JobStore, name: str, copies: Sequence[Path] = ()) -> None:
        self._store, self._name, self._pending = store, f"logs/{name}.log", b""
        self._copies = list(copies)
        self._dropped = 0
        self.every_s = REMOTE_S if is_remote(str(store.where)) else FLUSH_S
        for path in self._copies:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, data: bytes) -> None:
        for path in self._copies:
            with contextlib.suppress(OSError), path.open("ab") as file:  # a full disk ends no training
                file.write(data)
        room = MOST_PENDING - len(self._pending)
        self._pending += data[:room]
        self._dropped += max(0, len(data) - room)

    def flush(self, *, whole: bool = False) -> None:
        """Appends what has come to the store; `whole`: a last line without an end too. A store that is away is tried
        again later."""
        end = len(self._pending) if whole else self._pending.rfind(b"\n") + 1
        if not end:
            return
        data = self._pending[:end]
        if self._dropped:
            data += b"trueline: %d bytes are missing here: the store was away\n" % self._dropped
        if whole and not data.endswith(b"\n"):
            data += b"\n"
        with contextlib.suppress(TruelineError, StorageError, OSError):
            self._store.append(self._name, data)
            self._pending, self._dropped = self._pending[end:], 0
