"""Follows a model store, an alias of the registry, and the state file.

    store    applies deltas, loads new and changed bundles among those that `--load` names, retires removed ones; the
             newest version is the default unless an operator set another
    alias    loads the version that it points to, makes it the default and retires the one before
    state    applies what another process or an operator changed in the state file, model by model; the file is not
             written for a model meanwhile, and what fails is tried again when the file changes

A bundle is loaded when two looks in a row find it unchanged, so that none is read while it is being copied. A refused
bundle is tried again when it changes; the version before stays.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from trueline import events
from trueline.bundle import schema
from trueline.errors import RegistryError, TruelineError, rebuild_error
from trueline.serve.faults import find_fault
from trueline.serve.models import desired_state
from trueline.serve.models.controller import Fleet
from trueline.serve.models.deltas import DeltaApplier
from trueline.serve.models.desired_state import DesiredModel, DesiredState, DesiredVersion
from trueline.serve.models.loader import ResolvedSource
from trueline.serve.models.sources import Entry, Store
from trueline.web.auth import Keys

Name = tuple[str, str]  # model and version
Stamp = tuple[int, int, int]
"""Time, size and inode of the file that seals a bundle: it changes whenever the bundle does."""
Looked = Mapping[Name, Stamp]
RESTART_S = 5.0


Act = tuple[Literal["load", "retire"], Name]


@dataclass(slots=True)
class StoreHistory:
    """Bundles that were loaded, refused, and seen at the last look."""

    loaded: dict[Name, Stamp] = field(default_factory=dict)
    refused: dict[Name, Stamp] = field(default_factory=dict)
    before: dict[Name, Stamp] = field(default_factory=dict)

    def look(self, now: Looked) -> list[Act]:
        """What has to be done now; record outcomes in `loaded` and `refused`."""
        loads: list[Act] = [
            ("load", name)
            for name, stamp in now.items()
            if self.before.get(name) == stamp and stamp not in (self.loaded.get(name), self.refused.get(name))
        ]
        gone: list[Act] = [("retire", name) for name in self.loaded if name not in now and name not in self.before]
        self.before = dict(now)
        return [*loads, *gone]

    def note_loaded(self, name: Name, stamp: Stamp) -> None:
        self.loaded[name] = stamp
        self.refused.pop(name, None)


def stamp(path: Path) -> Stamp | None:
    """None when the bundle is gone."""
    sealed = path / schema.MANIFEST if path.is_dir() else path
    try:
        found = sealed.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class StoreFollower:
    def __init__(self, fleet: Fleet, store: Store, load: str) -> None:
        self._fleet, self._store, self._load = fleet, store, load
        self._deltas = DeltaApplier(store.folder)
        self._history = StoreHistory()
        self._shown: dict[str, str] = {}
        self._entries: dict[Name, Entry] = {}
        self._expected: set[Name] = set()  # shown, and not served yet
        for entry in self._followed_entries():
            found = stamp(entry.path)
            served = self._fleet.models.get(entry.model, entry.version)
            if found is not None and served is not None and served.state == "ready":
                self._history.note_loaded((entry.model, entry.version), found)
                self._shown[entry.model] = fleet.models.default(entry.model)

    def _followed_entries(self) -> list[Entry]:
        names = self._load.split(",")
        return [entry for entry in self._store.entries() if self._load == "all" or entry.model in names]

    async def look(self) -> None:
        """Looks at the store once and follows it. Failures are events, and tried again at the next look."""
        models = self._fleet.models
        used = [(name, models.default(name)) for name in models.names()]
        await asyncio.to_thread(self._deltas.apply_due, used)
        entries = await asyncio.to_thread(self._followed_entries)
        self._entries = {(entry.model, entry.version): entry for entry in entries}
        now = {name: found for name, entry in self._entries.items() if (found := stamp(entry.path)) is not None}
        acts = self._history.look(now)
        for name, entry in self._entries.items():  # until it is loaded, its requests are 503 instead of 404
            if name not in self._history.loaded and name not in self._history.refused:
                self._fleet.expect(*name, entry.source, optional=True)
                self._expected.add(name)
        for name in [one for one in self._expected if one not in now]:
            self._forget(name)
        for act, name in acts:
            if act == "load":
                await self._load_entry(self._entries[name], now[name])
            else:
                await self._retire(*name)

    def _forget(self, name: Name) -> None:
        """Removes a bundle that left the store before it could be served."""
        self._expected.discard(name)
        self._history.refused.pop(name, None)
        found = self._fleet.models.get(*name)
        if found is not None and found.state in ("loading", "failed"):
            self._fleet.models.remove(*name)

    async def _load_entry(self, entry: Entry, found: Stamp) -> None:
        name = (entry.model, entry.version)
        try:
            await self._fleet.load(ResolvedSource(path=entry.path), *name, source=entry.source, replace_it=True)
        except Exception as error:  # noqa: BLE001 - blind on purpose: one bundle fails, never the others
            if find_fault(error) is None:  # else the bundle may be fine: it is tried again at the next look
                self._history.refused[name] = found
            why = self._fleet.note_failure(*name, error)
            events.emit("follow.refused", model=entry.model, version=entry.version, why=why)
            return
        self._history.note_loaded(name, found)
        self._expected.discard(name)
        await self._show_newest(entry.model)

    async def _show_newest(self, model: str) -> None:
        """Makes the newest version the default, unless an operator has set another."""
        models = self._fleet.models
        chosen = self._shown.get(model)
        if chosen is not None and models.default(model) != chosen:
            return
        able = [one.version for one in models.of(model) if not one.obstacle]
        served = [one.version for one in self._store.of(model) if one.version in able]
        if served:
            if models.default(model) != served[-1]:
                try:
                    await self._fleet.make_default(model, served[-1])
                except TruelineError as error:
                    events.emit("follow.refused", model=model, version=served[-1], why=error.message)
                    return
            self._shown[model] = served[-1]

    async def _retire(self, model: str, version: str) -> None:
        self._history.loaded.pop((model, version), None)
        if self._fleet.models.get(model, version) is None:
            return  # an operator has retired it
        try:
            if self._fleet.models.default(model) == version:
                self._shown.pop(model, None)
                await self._show_newest(model)
            others = len(self._fleet.models.versions(model)) > 1
            await self._fleet.retire(model, version if others else None)
        except TruelineError as error:
            events.emit("follow.refused", model=model, version=version, why=error.message)


async def every(interval_s: float, act: Callable[[], Awaitable[None]]) -> None:
    """Calls `act` without end, `interval_s` after the last call. Failures are events."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await act()
        except Exception as error:  # noqa: BLE001 - blind on purpose: the next call may succeed
            events.emit("follow.failed", why=f"{type(error).__name__}: {error}")


class AliasFollower:
    def __init__(self, fleet: Fleet, source: str, model: str, version: str) -> None:
        self._fleet, self._source, self._model, self._version = fleet, source, model, version

    async def move_to(self, found: ResolvedSource) -> None:
        """Serves `found`, to which the alias points now. If that fails, it is an event and the version before stays."""
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
        """Reads from a process that watches the registry, and restarts it when it dies, until cancelled."""
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
        # It ends when its standard input ends, with this process.
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                await self._handle(json.loads(line))
            raise RegistryError(f"the watch of {self._source} ended with exit code {await process.wait()}")
        except ValueError as error:
            raise RegistryError(f"the watch of {self._source} wrote a line that is not understood: {error}") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _handle(self, reply: Mapping[str, Any]) -> None:
        if "error" in reply:
            events.emit("follow.failed", why=rebuild_error(reply["error"], reply).message)
            return
        await self.move_to(ResolvedSource.from_registry(reply))


class Companion(Protocol):
    """What an extension serves beside models and keeps in the state file: workflows."""

    @property
    def obstacle(self) -> str:
        """Why one of them would not answer now; empty if all would."""

    @property
    def sick(self) -> bool: ...

    def names(self) -> Sequence[str]: ...

    async def restore(self, state: DesiredState) -> list[str]:
        """Loads what `state` names; returns messages for what could not be loaded."""

    async def follow(self, state: DesiredState) -> bool:
        """Serves what `state` says, and tries again what failed for a reason that may pass; False: call it again."""

    async def close(self) -> None: ...


class StateFollower:
    """Follows the state file and the key file."""

    def __init__(
        self,
        fleet: Fleet,
        state: Path,
        find: Callable[[str], Awaitable[ResolvedSource]],
        keys: Keys | None = None,
        companion: Companion | None = None,
    ) -> None:
        self._companion, self._fleet, self._state, self._find = companion, fleet, state, find
        self._keys = keys
        self._seen: bytes | None = None
        self._failing = False

    async def retry(self) -> None:
        """Loads again what failed for a reason that may pass. Call it every RETRY_S."""
        changed = await self._fleet.retry(self._find)
        waits = self._companion is not None and bool(self._companion.obstacle)
        if changed or waits or self._failing:
            self._seen = None

    async def look(self) -> None:
        """Applies the file if it has changed since the last look. Failures are events."""
        try:
            if self._keys is not None:
                self._keys.refresh()
            bytes_now = self._state.read_bytes() if self._state.exists() else None
            if bytes_now is None or bytes_now == self._seen:
                return
            self._seen, self._failing = bytes_now, False
            state = desired_state.read(self._state)
        except (TruelineError, OSError) as error:
            events.emit("state.not_followed", why=str(error))
            return
        for name in {**state.models, **self._fleet.desired_state().models}:
            want, have = state.models.get(name), self._fleet.desired_state().models.get(name)
            if self._fleet.busy(name):
                self._seen = None  # the operation under way may make the two equal: look again
            elif want != have:
                await self._bring(name, want, have)
        if self._companion is not None and not await self._companion.follow(state):
            self._seen = None

    async def _bring(self, name: str, want: DesiredModel | None, have: DesiredModel | None) -> None:
        with self._fleet.following(name):
            try:
                if want is None:
                    await self._fleet.retire(name)
                else:
                    await self._match(name, want, have.versions if have is not None else {})
            except Exception as error:  # noqa: BLE001 - blind on purpose: one model fails, never the others
                events.emit("state.not_followed", model=name, why=str(error))
                self._failing = self._failing or find_fault(error) is not None
            else:
                events.emit("state.followed", model=name, versions=", ".join(want.versions) if want else "none")

    async def _match(self, name: str, want: DesiredModel, have: dict[str, DesiredVersion]) -> None:
        fleet = self._fleet
        for version in sorted(want.versions, key=lambda one: one != want.default):
            wish, now = want.versions[version], have.get(version)
            if now is None or _program(now) != _program(wish):
                await fleet.load(
                    await self._find(wish.source),
                    name,
                    version,
                    source=wish.source,
                    how=fleet.how_of(wish),
                    replace_it=True,
                    digest=wish.digest,
                )
            elif now.workers < wish.workers:
                fleet.scale(name, version, wish.workers)
        split = fleet.models.split(name)
        if fleet.models.default(name) != want.default or (split is not None and not want.split):
            await fleet.make_default(name, want.default)
        if want.split and (split is None or dict(split.weights) != want.split):
            for version in want.split:
                await fleet.wait_able(name, version)
            fleet.set_split(name, want.split)
        for version, wish in want.versions.items():  # after the traffic has moved
            if version in have and have[version].workers > wish.workers:
                fleet.scale(name, version, wish.workers)
        for version in fleet.models.versions(name):
            if version not in want.versions and version in fleet.desired_state().models[name].versions:
                await fleet.retire(name, version)


def _program(one: DesiredVersion) -> tuple[object, ...]:
    """Fields whose change needs another program."""
    return (one.source, one.digest, one.max_batch, one.max_delay_s)
