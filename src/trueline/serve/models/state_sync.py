"""Brings a server to what the state file says, when somebody else wrote it: another process, or an operator by hand.

Model by model, and only where the file differs from what is served: what is wanted and not there is loaded (golden
examples and all), the default and the split are set, and what is no longer wanted ends with its last request. The file
is never written for a model that is being followed. What could not be followed is tried again when the file changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from trueline import events
from trueline.errors import TruelineError
from trueline.serve.models import desired_state
from trueline.serve.models.controller import Fleet
from trueline.serve.models.desired_state import Wanted, WantedModel, WantedVersion
from trueline.serve.models.loader import Found
from trueline.web.auth import Keys


class Companion(Protocol):
    """What an extension serves beside models, and keeps in the same state file."""

    @property
    def sick(self) -> bool:
        """Whether something of it that is wanted cannot answer, and will not by itself."""
        ...

    def names(self) -> Sequence[str]:
        """Those that are served."""
        ...

    async def restore(self, wanted: Wanted) -> list[str]:
        """Brings back what `wanted` names; returns what could not be had."""
        ...

    async def follow(self, wanted: Wanted) -> bool:
        """Serves what `wanted` says; False when that has to be tried again."""
        ...

    async def close(self) -> None: ...


class Follower:
    """One server's eye on the file, and on the key file beside it."""

    def __init__(
        self,
        fleet: Fleet,
        state: Path,
        find: Callable[[str], Awaitable[Found]],
        keys: Keys | None = None,
        companion: Companion | None = None,
    ) -> None:
        """`find` leads from a source in the file to its bundle; `companion` follows the file too."""
        self._companion = companion
        self._fleet = fleet
        self._state = state
        self._find = find
        self._keys = keys
        self._seen: bytes | None = None

    async def follow(self, every_s: float) -> None:
        """Looks every `every_s` until it is cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self.look()

    async def look(self) -> None:
        """Follows the file if it has changed since the last look. What goes wrong is an event."""
        try:
            if self._keys is not None:
                self._keys.refresh()
            bytes_now = self._state.read_bytes() if self._state.exists() else None
            if bytes_now is None or bytes_now == self._seen:
                return
            self._seen = bytes_now
            told = desired_state.read(self._state)
        except (TruelineError, OSError) as error:
            events.emit("state.not_followed", why=str(error))
            return
        for name in {**told.models, **self._fleet.wanted().models}:
            want, have = told.models.get(name), self._fleet.wanted().models.get(name)
            if self._fleet.busy(name):
                self._seen = None  # what is being done here may make the two equal: look again
            elif want != have:
                await self._bring(name, want, have)
        if self._companion is not None and not await self._companion.follow(told):
            self._seen = None

    async def _bring(self, name: str, want: WantedModel | None, have: WantedModel | None) -> None:
        with self._fleet.following(name):
            try:
                if want is None:
                    await self._fleet.retire(name)
                else:
                    await self._match(name, want, have.versions if have is not None else {})
            except TruelineError as error:
                events.emit("state.not_followed", model=name, why=error.message)
            else:
                events.emit("state.followed", model=name, versions=", ".join(want.versions) if want else "none")

    async def _match(self, name: str, want: WantedModel, have: dict[str, WantedVersion]) -> None:
        fleet = self._fleet
        for version in sorted(want.versions, key=lambda one: one != want.default):
            told, now = want.versions[version], have.get(version)
            if now is None or _program(now) != _program(told):
                await fleet.load(
                    await self._find(told.source),
                    name,
                    version,
                    source=told.source,
                    how=fleet.how_of(told),
                    replace_it=True,
                    digest=told.digest,
                )
            elif now.workers != told.workers:
                fleet.scale(name, version, told.workers)
        split = fleet.models.split(name)
        if fleet.models.default(name) != want.default or (split is not None and not want.split):
            fleet.set_default(name, want.default)
        if want.split and (split is None or dict(split.weights) != want.split):
            fleet.set_split(name, want.split)
        for version in fleet.models.versions(name):
            if version not in want.versions and version in fleet.wanted().models[name].versions:
                await fleet.retire(name, version)


def _program(one: WantedVersion) -> tuple[object, ...]:
    """What needs a new program when it differs."""
    return (one.source, one.digest, one.max_batch, one.max_delay_s)
