"""A version that a handler answers is a Servable. Its workers have no processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.servable import *  # noqa: F403 - the shared tests
from conformance.servable import ServableWorld, turns
from trueline.serve.handlers.archive import Archive, Manifest
from trueline.serve.handlers.version import HandlerVersion, StartOptions
from trueline.serve.models.servable import HandlerRequest, Servable
from worlds.servables import FakeWorker, fake_workers


class HandlerWorld:
    """Versions of a handler with one worker."""

    def __init__(self, workers: list[FakeWorker]) -> None:
        self.workers = workers

    def fresh(self) -> HandlerVersion:
        return HandlerVersion(model="noop", version="1.0")

    async def load(self) -> HandlerVersion:
        made = self.fresh()
        manifest = Manifest(model="noop", version="1.0", handler="noop.py")
        found = Archive(folder=Path(), manifest=manifest, config={}, digest="ab")
        await made.begin_in(found, StartOptions(given={"default_workers": "1"}), asyncio.get_running_loop())
        return made

    def request(self, servable: Servable) -> Awaitable[Any]:
        handler = servable.handler
        if handler is None:
            servable.check_ready()
        assert handler is not None
        return handler.handle(HandlerRequest(request_id=str(time.monotonic_ns()), parts=[], headers={}))

    async def release(self, servable: Servable) -> None:
        for _ in range(4):
            await turns()
            if self.workers[0].busy:
                self.workers[0].answer()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServableWorld]:
    with fake_workers(monkeypatch) as workers:
        yield HandlerWorld(workers)
