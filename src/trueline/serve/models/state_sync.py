"""Applies changes that another process or an operator made to the state file, model by model.

Missing versions are loaded and proven, default and split set, others retired. The file is not written for a model that
is being changed. What fails is tried again when the file changes.
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
from trueline.serve.models.desired_state import DesiredModel, DesiredState, DesiredVersion
from trueline.serve.models.loader import ResolvedSource
from trueline.web.auth import Keys


class Companion(Protocol):
    """What an extension serves beside models and keeps in the state file: workflows."""

    @property
    def sick(self) -> bool:
        """Whether some of it cannot answer and will not recover by itself."""

    def names(self) -> Sequence[str]:
        """Those that are served."""

    async def restore(self, wanted: DesiredState) -> list[str]:
        """Loads what `wanted` names; returns messages for what could not be loaded."""

    async def follow(self, wanted: DesiredState) -> bool:
        """Serves what `wanted` says; False: try again."""

    async def close(self) -> None: ...


class Follower:
    """Follows the state file and the key file."""

    def __init__(
        self,
        fleet: Fleet,
        state: Path,
        find: Callable[[str], Awaitable[ResolvedSource]],
        keys: Keys | None = None,
        companion: Companion | None = None,
    ) -> None:
        self._companion = companion
        self._fleet = fleet
        self._state = state
        self._find = find
        self._keys = keys
        self._seen: bytes | None = None

    async def follow(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self.look()

    async def look(self) -> None:
        """Applies the file if it has changed since the last look. Failures are events."""
        try:
            if self._keys is not None:
                self._keys.refresh()
            bytes_now = self._state.read_bytes() if self._state.exists() else None
            if bytes_now is None or bytes_now == self._seen:
                return
            self._seen = bytes_now
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
            except TruelineError as error:
                events.emit("state.not_followed", model=name, why=error.message)
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
            elif now.workers != wish.workers:
                fleet.scale(name, version, wish.workers)
        split = fleet.models.split(name)
        if fleet.models.default(name) != want.default or (split is not None and not want.split):
            fleet.set_default(name, want.default)
        if want.split and (split is None or dict(split.weights) != want.split):
            fleet.set_split(name, want.split)
        for version in fleet.models.versions(name):
            if version not in want.versions and version in fleet.desired_state().models[name].versions:
                await fleet.retire(name, version)


def _program(one: DesiredVersion) -> tuple[object, ...]:
    """Fields whose change needs another program."""
    return (one.source, one.digest, one.max_batch, one.max_delay_s)
