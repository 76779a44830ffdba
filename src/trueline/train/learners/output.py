"""The log of a learner: in its own files at once, and in the store some moments later."""

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

from trueline.errors import TruelineError
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
        self._changing, self._flushing = threading.Lock(), threading.Lock()
        self.every_s = REMOTE_S if is_remote(str(store.where)) else FLUSH_S
        for path in self._copies:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, data: bytes) -> None:
        for path in self._copies:
            with contextlib.suppress(OSError), path.open("ab") as file:  # a full disk ends no training
                file.write(data)
        with self._changing:
            room = max(0, MOST_PENDING - len(self._pending))
            self._pending += data[:room]
            self._dropped += max(0, len(data) - room)

    def flush(self, *, whole: bool = False) -> None:
        """Appends what has come to the store; `whole`: a last line without an end too. A store that is away is tried
        again later. For any thread."""
        with self._flushing:
            with self._changing:
                end = len(self._pending) if whole else self._pending.rfind(b"\n") + 1
                data, self._pending = self._pending[:end], self._pending[end:]
                dropped, self._dropped = self._dropped, 0
            if not data:
                return
            shown = data if data.endswith(b"\n") else data + b"\n"
            if dropped:
                shown += b"trueline: %d bytes are missing here: the store was away\n" % dropped
            try:
                self._store.append(self._name, shown)
            except (TruelineError, OSError):
                with self._changing:
                    self._pending, self._dropped = data + self._pending, self._dropped + dropped
