"""Triton's repository extension: load a model of the store, take one away. Only translates.

`load` brings the newest version of the store and sends the traffic to it; versions that were there before end with
their last request, so that a reload loses none. Source: Triton's page extension_model_repository.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from trueline.errors import NotFound, RequestError
from trueline.serve.models.controller import Fleet
from trueline.serve.models.loader import Found
from trueline.serve.models.model_store import Store, check_name
from trueline.web.messages import Response


class _Parameters(msgspec.Struct):
    parameters: dict[str, Any] = {}


class Repository:
    """Loads from one store."""

    def __init__(self, fleet: Fleet, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._fleet = fleet
        self._store = store
        self._loop = loop

    def load(self, model: str, given: Mapping[str, object]) -> asyncio.Future[Response]:
        """Raises RequestError for parameters that ask for what a sealed bundle does not allow, NotFound."""
        if given:
            raise RequestError(
                f"parameter '{next(iter(given))[:64]}' is not taken: what is served are sealed bundles of the store"
            )
        check_name("model", model)
        entries = self._store.of(model)
        if not entries:
            raise NotFound(f"failed to load '{model}', the model store has no such model")
        return self._act(self._load(model, entries[-1].version))

    async def _load(self, model: str, version: str) -> Response:
        entry = next(one for one in self._store.of(model) if one.version == version)
        found = Found(path=entry.path)
        others = self._others(model, version)
        await self._fleet.load(found, model, version, source=entry.source, replace_it=True)
        self._fleet.set_default(model, version)
        for other in others:
            await self._fleet.retire(model, other)
        return Response(200, b"")

    def _others(self, model: str, version: str) -> list[str]:
        known = self._fleet.models.versions(model) if model in self._fleet.models.names() else []
        return [one for one in known if one != version]

    def unload(self, model: str) -> asyncio.Future[Response]:
        """Raises NotFound."""
        self._fleet.models.find(model)
        return self._act(self._unload(model))

    async def _unload(self, model: str) -> Response:
        await self._fleet.retire(model)
        return Response(200, b"")

    def _act(self, work: Any) -> asyncio.Future[Response]:
        """A client that goes away does not undo what it asked for."""
        return asyncio.shield(self._loop.create_task(work))


def parameters(body: bytes | bytearray) -> dict[str, Any]:
    """The parameters in a request's body. Raises RequestError."""
    try:
        return msgspec.json.decode(body, type=_Parameters).parameters if body else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no repository request: {error}") from error
