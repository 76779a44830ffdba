"""Engines by role: some processes of a job go wherever a host has room, and others stay with the master."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from trueline.engine.contract import Engine, Kind, ProcessSpec, Seen, parse_ref


class RoleEngine:
    """The processes of another engine whose role is one that this one `takes`."""

    def __init__(self, inner: Engine, takes: Callable[[str], bool]) -> None:
        self._inner, self._takes = inner, takes

    async def add(self, specs: Sequence[ProcessSpec]) -> None:
        await self._inner.add(specs)

    async def kill(self, ref: str, *, grace_s: float = 0.0) -> None:
        await self._inner.kill(ref, grace_s=grace_s)

    async def list(self) -> list[Seen]:
        return [seen for seen in await self._inner.list() if self._takes(parse_ref(seen.ref)[0])]

    async def watch(self) -> AsyncIterator[Seen]:
        async for seen in self._inner.watch():
            if self._takes(parse_ref(seen.ref)[0]):
                yield seen

    async def capacity(self) -> int | None:
        return await self._inner.capacity()


class PinnedEngine:
    """Processes of the role `travels` are those of `fleet`, all others those of `here`."""

    def __init__(self, fleet: Engine, here: Engine, travels: str) -> None:
        self._fleet, self._travels = fleet, travels
        self._here = RoleEngine(here, lambda role: role != travels)
        self._watchers: set[asyncio.Queue[Seen | None]] = set()

    def _find(self, ref: str) -> Engine:
        return self._fleet if parse_ref(ref)[0] == self._travels else self._here

    async def add(self, specs: Sequence[ProcessSpec]) -> None:
        for engine in (self._here, self._fleet):
            if own := [spec for spec in specs if self._find(spec.ref) is engine]:
                await engine.add(own)

    async def kill(self, ref: str, *, grace_s: float = 0.0) -> None:
        engine = self._find(ref)
        await engine.kill(ref, grace_s=grace_s)
        if engine is self._fleet and all(seen.ref != ref for seen in await engine.list()):
            for watcher in self._watchers:  # it still waited for room
                watcher.put_nowait(Seen(ref=ref, kind=Kind.LOST, reason="no host had room for it"))

    async def list(self) -> list[Seen]:
        return [*await self._here.list(), *await self._fleet.list()]

    async def watch(self) -> AsyncIterator[Seen]:
        changes: asyncio.Queue[Seen | None] = asyncio.Queue()

        async def follow(engine: Engine) -> None:
            try:
                async for seen in engine.watch():
                    changes.put_nowait(seen)
            finally:
                changes.put_nowait(None)

        following = [asyncio.ensure_future(follow(engine)) for engine in (self._here, self._fleet)]
        self._watchers.add(changes)
        try:
            while (seen := await changes.get()) is not None:
                yield seen
        finally:
            self._watchers.discard(changes)
            for one in following:
                one.cancel()
            for one in following:
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await one

    async def capacity(self) -> int | None:
        return await self._fleet.capacity()
