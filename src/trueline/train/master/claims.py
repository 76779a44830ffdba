"""Which master leads a job that several hosts could lead: each view is a file in the job's store, made once.

    STORE/.views-<launch>/00000007     the view of generation 7, and the master that published it

A file that exists is not made again (link(2), or a PUT with `If-None-Match: *`), so of two masters that a partition has
parted only one publishes generation 7. The other one ends: its workers cannot form a group. A group of generation 6
that is still whole is one group, whichever master its workers report to. No clock and no lease decides.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trueline import files
from trueline.errors import TruelineError
from trueline.storage.folder import open_folder
from trueline.storage.location import Location, join_location, parse_location

SUPERSEDED = 75
"""Exit code of a master that does not lead any more."""
PAUSE_S = 0.25
_PREFIX = ".views-"


class Leader(msgspec.Struct, frozen=True, kw_only=True):
    """A master as hosts and users know it. `id` is random, one for each launch and takeover."""

    id: str
    host: str
    address: str
    """HOST:PORT, for hosts that join."""
    token: str
    """Path of the token file on that host."""


class PublishedView(msgspec.Struct, frozen=True, kw_only=True):
    """A published view: the body of its VIEW row in the journal, and who published it."""

    leader: Leader
    view: dict[str, Any]

    @property
    def generation(self) -> int:
        return int(self.view["generation"])


class ViewClaims:
    """The views of one launch in the store of its checkpoints. Its methods raise StorageError."""

    def __init__(self, store: Location, launch: str) -> None:
        self.where = str(store)
        where = join_location(store, f"{_PREFIX}{launch}")
        self._folder: Any = where
        if not isinstance(where, Path):
            self._folder = open_folder(where)

    def claim(self, view: dict[str, Any], leader: Leader) -> Leader:
        """Publishes `view` for `leader`, unless its generation is published; returns who has published it."""
        name, data = f"{view['generation']:08d}", msgspec.json.encode(PublishedView(leader=leader, view=view))
        if isinstance(self._folder, Path):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = files.write_atomic(self._folder / name, data, mode=0o600, replace=False)
        else:
            made = self._folder.write(name, data)
        return leader if made else self._read(name).leader

    def newest(self) -> PublishedView | None:
        """The last published view; None before the first."""
        names = self._names()
        return self._read(max(names)) if names else None

    def _names(self) -> list[str]:
        if isinstance(self._folder, Path):
            found = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        else:
            found = list(self._folder.names())
        return [name for name in found if name.isdecimal()]

    def _read(self, name: str) -> PublishedView:
        data = (self._folder / name).read_bytes() if isinstance(self._folder, Path) else self._folder.get(name)
        return msgspec.json.decode(data, type=PublishedView)


class Leadership:
    """Publishes a master's views before it carries them out. `published`: the newest generation that is."""

    def __init__(self, claims: ViewClaims, leader: Leader, published: int, emit: Callable[..., None]) -> None:
        self._claims, self._leader, self._published, self._emit = claims, leader, published, emit
        self.busy = self.lost = False
        """A view is being published; another master leads."""

    def begin(self, rows: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        """The views in rows of the journal that `publish` has to publish first."""
        views = [body for kind, body in rows if kind == "VIEW" and body["generation"] > self._published]
        self.busy = bool(views)
        return views

    async def publish(self, views: Sequence[dict[str, Any]]) -> bool:
        """Publishes views, and waits for a store that does not answer; False: another master leads."""
        for view in views:
            leader = await self._claim(view)
            if leader.id != self._leader.id:
                self.lost = True
                self._emit("job.superseded", host=leader.host, address=leader.address, token=leader.token)
                return False
            self._published = view["generation"]
        self.busy = False
        return True

    async def _claim(self, view: dict[str, Any]) -> Leader:
        away = False
        while True:
            try:
                leader = await asyncio.to_thread(self._claims.claim, view, self._leader)
            except (TruelineError, OSError) as error:
                if not away:
                    effect = "no group is formed until it answers"
                    self._emit("store.away", where=self._claims.where, why=str(error), effect=effect)
                away = True
                await asyncio.sleep(PAUSE_S)  # no system tells when a store is back
                continue
            if away:
                self._emit("store.back", where=self._claims.where)
            return leader


def sweep_claims(store: Location) -> None:
    """Removes the views of earlier launches from a local store; those in an object store are a few bytes each."""
    where = parse_location(store)
    if isinstance(where, Path):
        for old in where.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                shutil.rmtree(old)
