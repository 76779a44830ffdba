"""A local engine whose processes are names."""

from __future__ import annotations

import asyncio

from trueline.engine.contract import Kind, Seen


class ListingEngine:
    """Knows what it was told to start."""

    def __init__(self):
        self.started = []

    async def add(self, specs):
        self.started += [spec.ref for spec in specs]

    async def kill(self, ref, *, grace_s=0.0):
        self.started = [one for one in self.started if one != ref]

    async def list(self):
        return [Seen(ref=ref, kind=Kind.STARTED, pid=7) for ref in self.started]

    async def capacity(self):
        return 0

    async def watch(self):
        for seen in await self.list():
            yield seen
        await asyncio.Event().wait()
