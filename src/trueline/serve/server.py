"""The server process: listens, loads, becomes ready, drains.

It has up to three HTTP ports: requests, management (TorchServe's 8081), metrics (its 8082). It reports that it lives at
once, and that it is ready after the golden records were reproduced. Loads and long runs happen in threads.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trueline import events
from trueline.bundle import schema
from trueline.bundle.read import open_bundle
from trueline.errors import UsageError, join_names
from trueline.serve.assembly import Parts, assemble
from trueline.serve.handlers import archive
from trueline.serve.models import desired_state, sources
from trueline.serve.models.controller import Fleet
from trueline.serve.models.loader import Refused, ResolvedSource
from trueline.serve.models.model_store import Entry, Store, check_name
from trueline.serve.models.sources import Sources, in_thread
from trueline.serve.models.watchers import AliasFollower, StateFollower, StoreFollower, every
from trueline.serve.process.listeners import Field, Ports
from trueline.serve.process.signals import Stop
from trueline.serve.settings import ServeSettings
from trueline.web.access_log import AccessLog, AccessLogMiddleware
from trueline.web.cors import CorsMiddleware, CorsRule

FOLLOW_S = 0.5
"""Seconds between looks at the state file."""

Announce = Callable[[dict[str, Field]], None]


async def run(settings: ServeSettings, announce: Announce) -> None:
    """Serves until it is stopped; `announce` gets a record when the server is ready. Raises TruelineError."""
    if settings.processes > 1:
        from trueline.serve.process import multiprocess

        await multiprocess.run(settings, announce)
        return
    loop = asyncio.get_running_loop()
    parts = assemble(settings)
    fleet, state = parts.core.fleet, parts.core.state
    rule = CorsRule.of(settings.cors_origin, settings.cors_methods, settings.cors_headers)
    log = None if settings.access_log is None else AccessLog(settings.access_log)
    stop = Stop()
    stop.listen(loop, lifeline=settings.lifeline)
    ports = Ports(settings, loop)
    chores = [loop.create_task(ports.sweep())]

    async def listen() -> None:
        for what, (app, number) in parts.apps.items():
            if number is not None:
                shown = app if rule is None or what == "metrics" else CorsMiddleware(app, rule)
                await ports.open(what, shown if log is None else AccessLogMiddleware(shown, what, log), number)
        if settings.grpc_port is not None:
            await ports.open_grpc("grpc", parts.grpc_services("inference", log), settings.grpc_port)
        if settings.grpc_management_port is not None:
            services = parts.grpc_services("management", log)
            await ports.open_grpc("grpc_management", services, settings.grpc_management_port)

    try:
        if not settings.joins:
            await listen()
        record = await _until(stop, loop.create_task(_begin(parts)))
        if record is not None:
            fleet.models.started = True
            if settings.joins:
                await listen()
            if state is not None:
                follower = StateFollower(
                    fleet, state, parts.core.sources.find, parts.core.keys, parts.extension.companion
                )
                chores.append(loop.create_task(follower.follow(FOLLOW_S)))
            announce({"event": "server.ready", **ports.places(), **record})
            chores += _following(settings, fleet, parts.core.store, record)
            await stop.asked.wait()
        parts.routes.dispatch.draining = True
        await _drain(ports, stop, settings.drain_s)
    finally:
        for chore in chores:
            chore.cancel()
        await asyncio.gather(*chores, return_exceptions=True)  # ends the process that watches the registry
        if parts.tracer is not None:
            await loop.run_in_executor(None, parts.tracer.shutdown)
        await fleet.close()
        if parts.extension.companion is not None:
            await parts.extension.companion.close()
        await ports.close()
        if log is not None:
            log.close()


def _following(
    settings: ServeSettings, fleet: Fleet, store: Store | None, record: dict[str, Field]
) -> list[asyncio.Task[None]]:
    """Tasks that follow the store or the alias."""
    loop = asyncio.get_running_loop()
    found = []
    if settings.watch and store is not None:
        bundles = StoreFollower(fleet, store, settings.load)
        found.append(loop.create_task(every(settings.follow_s, bundles.look)))
    if settings.source is not None and _is_alias(settings.source) and settings.follow_s > 0:
        alias = AliasFollower(fleet, settings.source, str(record["model"]), str(record["version"]))
        found.append(loop.create_task(alias.run(settings.tracking_uri, settings.follow_s)))
    return found


async def _until(stop: Stop, work: asyncio.Future[dict[str, Field]]) -> dict[str, Field] | None:
    asked = asyncio.ensure_future(stop.asked.wait())
    both: set[asyncio.Future[Any]] = {work, asked}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if work.done():
        return work.result()
    work.cancel()
    return None


async def _begin(parts: Parts) -> dict[str, Field]:
    """Restores the desired state, then loads what the settings name; returns the fields of the announcement."""
    settings, fleet, store, sources = parts.core.settings, parts.core.fleet, parts.core.store, parts.core.sources
    models = fleet.models
    if settings.state is not None:
        kept = desired_state.read(Path(settings.state))
        for missing in await fleet.restore(kept, sources.find):
            events.emit("version.missing", what=missing)
        for missing in [] if parts.extension.companion is None else await parts.extension.companion.restore(kept):
            events.emit("workflow.missing", what=missing)
    record: dict[str, Field] = {"model": "", "version": "", "digest": ""}
    if settings.source is not None and not settings.resumed:
        record = await _load_source(settings, settings.source, fleet, sources)
    if store is not None and not settings.resumed:
        for entry in _entries_to_load(settings.load, store):
            if entry.model in models.names() and entry.version in models.versions(entry.model):
                continue
            await fleet.load(ResolvedSource(path=entry.path), entry.model, entry.version, source=entry.source)
            fleet.set_default(entry.model, entry.version)  # the newest comes last
        for name, own in fleet.how.usual.items():
            model, _, version = name.partition("/")
            if own.get("defaultVersion") is True and model in models.names() and version in models.versions(model):
                fleet.set_default(model, version)
    gc.collect()
    gc.freeze()
    return record | {"models": ",".join(models.names())}


def _entries_to_load(load: str, store: Store) -> list[Entry]:
    """The entries of the store that are loaded at start. Raises UsageError for a name that it does not hold."""
    entries = store.entries()
    names = list(dict.fromkeys(entry.model for entry in entries))
    found: list[Entry] = []
    for asked in names if load == "all" else [one.strip() for one in load.split(",") if one.strip()]:
        alias, _, source = asked.rpartition("=")
        one = next((entry for entry in entries if entry.source == source), None)
        if one is not None:
            found.append(replace(one, model=check_name("model", alias)) if alias else one)
        elif asked in names:
            found += store.of(asked)
        else:
            raise UsageError(f"the model store has no '{asked}' (it has: {join_names(names)})")
    return found


def _is_alias(source: str) -> bool:
    return source.startswith("models:/") and "@" in source


def _whole(source: str) -> str:
    """`source` as in the state file, where a relative path is an entry of the store."""
    return source if source.startswith("models:/") or sources.is_url(source) else os.path.abspath(source)


def _bundle_name(path: Path) -> str:
    """Raises BundleError."""
    if archive.is_archive(path):
        return archive.peek(path).model
    if path.is_dir() and (path / schema.MANIFEST).is_file():
        return schema.decode((path / schema.MANIFEST).read_bytes(), str(path)).name
    return open_bundle(path).name


def _version_of(path: Path) -> str:
    """Of a source outside the registry. Raises BundleError."""
    return archive.peek(path).version if archive.is_archive(path) else "1"


async def _load_source(settings: ServeSettings, source: str, fleet: Fleet, sources: Sources) -> dict[str, Field]:
    found = await sources.find(_whole(source))
    # An alias may move while the server is down: the state file names the version.
    kept = _whole(source) if found.version is None else f"models:/{found.name}/{found.version}"
    loop = asyncio.get_running_loop()
    name = settings.name or found.name
    if name is None:
        name = await in_thread(loop, lambda: _bundle_name(found.path))
    version = settings.version or found.version
    if version is None:
        version = await in_thread(loop, lambda: _version_of(found.path))
    try:
        made = await fleet.load(found, name, version, source=kept, replace_it=True)
    except Refused as error:
        raise error.__cause__ or error from error  # with paths, for the operator
    if _is_alias(source):
        await _moved_meanwhile(fleet, found, name, version)
    return {"model": name, "version": version, "digest": made.digest}


async def _moved_meanwhile(fleet: Fleet, found: ResolvedSource, name: str, version: str) -> None:
    """Retires the version that the alias pointed to before the restart."""
    before = fleet.models.default(name)
    if before == version or not fleet.models.find(name, before).source.startswith(f"models:/{found.name}/"):
        return
    fleet.set_default(name, version)
    await fleet.retire(name, before)


async def _drain(ports: Ports, stop: Stop, drain_s: float) -> None:
    drained = asyncio.ensure_future(ports.drain(drain_s))
    hurried = asyncio.ensure_future(stop.hurried.wait())
    both: set[asyncio.Future[Any]] = {drained, hurried}
    await asyncio.wait(both, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    events.emit("server.stopped", dropped=ports.num_connections)
    drained.cancel()
    hurried.cancel()
