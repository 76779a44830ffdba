"""The server follows what it serves: a folder of bundles that changes, an alias of the registry that moves.

    store    what `--load` names is served as the store has it: new bundles come, changed ones take over, removed ones
             leave; the newest version of a name is its default, unless somebody chose another
    alias    the version that it points to is made ready, takes over, and the one before leaves

A bundle has to look the same twice before it is taken: somebody may still be copying. One that is refused is not tried
again until it changes, and what was there goes on serving. What to do is decided by a pure function of two looks.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trueline import events
from trueline.bundle import schema
from trueline.errors import RegistryError, TruelineError
from trueline.serve.child_process import revived
from trueline.serve.models.controller import Fleet
from trueline.serve.models.loader import Found
from trueline.serve.models.model_store import Entry, Store

Name = tuple[str, str]
"""Model and version."""
Stamp = tuple[int, int, int]
"""Time, size and inode of the file that seals a bundle: it changes whenever the bundle does."""
Looked = Mapping[Name, Stamp]
RESTART_S = 5.0


@dataclass(frozen=True, slots=True)
class Act:
    """What is to be done about one bundle."""

    what: Literal["load", "retire"]
    name: Name


@dataclass(slots=True)
class Ledger:
    """What was seen, taken and refused so far."""

    taken: dict[Name, Stamp] = field(default_factory=dict)
    refused: dict[Name, Stamp] = field(default_factory=dict)
    before: dict[Name, Stamp] = field(default_factory=dict)

    def look(self, now: Looked) -> list[Act]:
        """What the store asks for now. Calls whose outcome is known are told by `took`, `refuse` and `left`."""
        loads = [
            Act("load", name)
            for name, stamp in now.items()
            if self.before.get(name) == stamp and stamp not in (self.taken.get(name), self.refused.get(name))
        ]
        gone = [Act("retire", name) for name in self.taken if name not in now and name not in self.before]
        self.before = dict(now)
        return [*loads, *gone]

    def took(self, name: Name, stamp: Stamp) -> None:
        self.taken[name] = stamp
        self.refused.pop(name, None)

    def refuse(self, name: Name, stamp: Stamp) -> None:
        self.refused[name] = stamp

    def left(self, name: Name) -> None:
        self.taken.pop(name, None)


def stamp(path: Path) -> Stamp | None:
    """Of the bundle at `path`; None when it is gone by now."""
    sealed = path / schema.MANIFEST if path.is_dir() else path
    try:
        found = sealed.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class StoreFollower:
    """Serves what the store has under some names, or all."""

    def __init__(self, fleet: Fleet, store: Store, load: str) -> None:
        self._fleet = fleet
        self._store = store
        self._load = load
        self._ledger = Ledger()
        self._shown: dict[str, str] = {}
        self._entries: dict[Name, Entry] = {}
        for entry in self._named():
            found = stamp(entry.path)
            if found is not None and self._served(entry.model, entry.version):
                self._ledger.took((entry.model, entry.version), found)
                self._shown[entry.model] = fleet.models.default(entry.model)

    def _named(self) -> list[Entry]:
        asked = self._load.split(",")
        return [entry for entry in self._store.entries() if self._load == "all" or entry.model in asked]

    def _served(self, model: str, version: str) -> bool:
        models = self._fleet.models
        return model in models.names() and version in models.versions(model)

    async def look(self) -> None:
        """One look at the store, and what follows from it. Whatever goes wrong is an event, and tried at the next."""
        entries = await asyncio.to_thread(self._named)
        self._entries = {(entry.model, entry.version): entry for entry in entries}
        now = {name: found for name, entry in self._entries.items() if (found := stamp(entry.path)) is not None}
        for act in self._ledger.look(now):
            if act.what == "load":
                await self._take(self._entries[act.name], now[act.name])
            else:
                await self._leave(*act.name)

    async def _take(self, entry: Entry, found: Stamp) -> None:
        name = (entry.model, entry.version)
        try:
            await self._fleet.load(Found(path=entry.path), *name, source=entry.source, replace_it=True)
        except TruelineError as error:
            self._ledger.refuse(name, found)
            events.emit("follow.refused", model=entry.model, version=entry.version, why=error.message)
            return
        self._ledger.took(name, found)
        self._show_newest(entry.model)

    def _show_newest(self, model: str) -> None:
        """Makes the newest version the default, unless somebody chose another than was shown here."""
        models = self._fleet.models
        chosen = self._shown.get(model)
        if chosen is not None and models.default(model) != chosen:
            return
        served = [one.version for one in self._store.of(model) if self._served(model, one.version)]
        if served:
            if models.default(model) != served[-1]:
                self._fleet.set_default(model, served[-1])
            self._shown[model] = served[-1]

    async def _leave(self, model: str, version: str) -> None:
        self._ledger.left((model, version))
        if not self._served(model, version):
            return  # somebody took it away already
        try:
            if self._fleet.models.default(model) == version:
                self._shown.pop(model, None)
                self._show_newest(model)
            others = len(self._fleet.models.versions(model)) > 1
            await self._fleet.retire(model, version if others else None)
        except TruelineError as error:
            events.emit("follow.refused", model=model, version=version, why=error.message)


async def every(interval_s: float, act: Callable[[], Awaitable[None]]) -> None:
    """Calls `act` again and again, `interval_s` after it ended. A failure is an event, and no end."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await act()
        except (TruelineError, OSError) as error:
            events.emit("follow.failed", why=str(error))


class AliasFollower:
    """Serves the version that an alias points to."""

    def __init__(self, fleet: Fleet, source: str, model: str, version: str) -> None:
        self._fleet = fleet
        self._source = source
        self._model = model
        self._version = version

    async def moved(self, found: Found) -> None:
        """The alias points to `found` now. What cannot be served is an event; the version before goes on."""
        version = found.version or "1"
        if version == self._version:
            return
        before, self._version = self._version, version
        models = self._fleet.models
        try:
            if version not in models.versions(self._model):
                source = f"models:/{found.name}/{version}"
                await self._fleet.load(found, self._model, version, source=source)
            self._fleet.set_default(self._model, version)
            if before in models.versions(self._model):
                await self._fleet.retire(self._model, before)
        except TruelineError as error:
            self._version = before if before == models.default(self._model) else version
            events.emit("follow.refused", model=self._model, version=version, why=error.message)
            return
        events.emit("alias.moved", alias=self._source, before=before, version=version)

    async def run(self, tracking_uri: str | None, interval_s: float) -> None:
        """Listens to a process that watches the registry; starts another when it dies. Ends when it is cancelled."""
        while True:
            try:
                await self._listen(tracking_uri, interval_s)
            except (OSError, RegistryError) as error:
                events.emit("follow.failed", why=str(error))
            await asyncio.sleep(RESTART_S)

    async def _listen(self, tracking_uri: str | None, interval_s: float) -> None:
        command = [sys.executable, "-P", "-m", "trueline.registry", "watch", self._source, f"--every={interval_s}"]
        if tracking_uri is not None:
            command.append(f"--tracking-uri={tracking_uri}")
        pipe = asyncio.subprocess.PIPE
        # Its standard input is its lifeline: it ends when this process does.
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                await self._told(json.loads(line))
            raise RegistryError(f"the watch of {self._source} ended with exit code {await process.wait()}")
        except ValueError as error:
            raise RegistryError(f"the watch of {self._source} said what is not understood: {error}") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _told(self, reply: Mapping[str, Any]) -> None:
        if "error" in reply:
            events.emit("follow.failed", why=revived(reply["error"], reply).message)
            return
        found = Found(
            path=Path(reply["path"]),
            name=reply["name"],
            version=str(reply["version"]),
            digest=reply["digest"],
            signature=reply.get("signature"),
        )
        await self.moved(found)
