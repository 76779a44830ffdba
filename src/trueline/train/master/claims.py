"""Which master leads a job that several hosts could lead: each view is a file in the job's store, made once.

    STORE/.views-<launch>/00000007     the view of generation 7, and the master that published it

A file that exists is not made again (link(2), or a PUT with `If-None-Match: *`), so of two masters that a partition has
parted only one publishes generation 7. The other one ends: its workers cannot form a group. A group of generation 6
that is still whole is one group, whoever its workers report to. No clock and no lease decides.
"""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import msgspec

from trueline import files
from trueline.storage.location import Location, join_location, parse_location

SUPERSEDED = 75
"""Exit code of a master that does not lead any more."""
_PREFIX = ".views-"


class Leader(msgspec.Struct, frozen=True, kw_only=True):
    """A master as hosts and users know it. `id` is random, one for each launch and takeover."""

    id: str
    host: str
    address: str
    """HOST:PORT, for hosts that join."""
    token: str
    """Path of the token file on that host."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A published view: the body of its VIEW row in the journal, and who published it."""

    leader: Leader
    view: dict[str, Any]

    @property
    def generation(self) -> int:
        return int(self.view["generation"])


class ViewClaims:
    """The views of one launch in the store of its checkpoints. Its methods raise StorageError."""

    def __init__(self, store: Location, launch: str) -> None:
        where = join_location(store, f"{_PREFIX}{launch}")
        self._folder: Any = where
        if not isinstance(where, Path):
            from trueline.data.tools.writer import open_folder  # pyarrow, which a master on one machine never needs

            self._folder = open_folder(where)

    def claim(self, view: dict[str, Any], leader: Leader) -> Leader:
        """Publishes `view` for `leader`, unless its generation is published; returns who has published it."""
        name, data = f"{view['generation']:08d}", msgspec.json.encode(Claim(leader=leader, view=view))
        if isinstance(self._folder, Path):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = files.write_atomic(self._folder / name, data, mode=0o600, replace=False)
        else:
            made = self._folder.write(name, data)
        return leader if made else self._read(name).leader

    def newest(self) -> Claim | None:
        """The last published view; None before the first."""
        names = self._names()
        return self._read(max(names)) if names else None

    def _names(self) -> list[str]:
        if isinstance(self._folder, Path):
            found = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        else:
            found = list(self._folder.names())
        return [name for name in found if name.isdecimal()]

    def _read(self, name: str) -> Claim:
        data = (self._folder / name).read_bytes() if isinstance(self._folder, Path) else self._folder.get(name)
        return msgspec.json.decode(data, type=Claim)


def sweep_claims(store: Location) -> None:
    """Removes the views of earlier launches from a local store; those in an object store are a few bytes each."""
    where = parse_location(store)
    if isinstance(where, Path):
        for old in where.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                shutil.rmtree(old)
