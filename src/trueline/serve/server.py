"""The server process: listens, loads, becomes ready, drains.

It has up to three HTTP ports: requests, management (TorchServe's 8081), metrics (its 8082). It reports that it lives at
once, and that it is ready after the golden records were reproduced. Loads and long runs happen in threads.
"""

import asyncio
import gc
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trueline import events
from trueline.bundle import schema
from trueline.bundle.read import open_bundle
from trueline.errors import RequestError, UsageError, join_names
from trueline.serve import host
from trueline.serve.assembly import Parts, assemble
from trueline.serve.handlers import archive, orphans
from trueline.serve.metrics import dashboard
from trueline.serve.models import desired_state, sources
from trueline.serve.models.controller import Fleet
from trueline.serve.models.example import write_body
from trueline.serve.models.loader import Refused, ResolvedSource
from trueline.serve.models.servable import RETRY_S
from trueline.serve.models.sources import Entry, Sources, Store, check_name, in_thread
from trueline.serve.models.watchers import AliasFollower, StateFollower, StoreFollower, every
from trueline.serve.process.listeners import Field, Ports
from trueline.serve.process.memory import LOOK_S, MemoryKeeper
from trueline.serve.process.signals import Stop
from trueline.serve.settings import ServeSettings
from trueline.web.access_log import AccessLog, AccessLogMiddleware
from trueline.web.cors import CorsMiddleware, CorsRule

FOLLOW_S = 0.5  # seconds between looks at the state file

Announce = Callable[[dict[str, Field]], None]


async def run(settings: ServeSettings, announce: Announce) -> None:
    """Serves until it is stopped; `announce` gets a record when the server is ready. Raises TruelineError."""
    if settings.processes > 1:
        from trueline.serve.process import multiprocess

        gc.enable()
        await multiprocess.run(settings, announce)
        return
    host.take_short_turns()
    loop, stop, parts = asyncio.get_running_loop(), Stop(), assemble(settings)
    cleaning = loop.run_in_executor(None, orphans.clean_up)
    fleet, companion = parts.core.fleet, parts.extension.companion
    log = None if settings.access_log is None else AccessLog(settings.access_log)
    stop.listen(loop, lifeline=settings.lifeline)
    ports = Ports(settings, loop)
    chores = [loop.create_task(ports.sweep())]
    fleet.models.locating = True
    try:
        if not settings.joins:
            await _listen(ports, parts, log)
        record = await stop.unless(_begin(parts))
        if record is not None:
            fleet.models.started = True
            if settings.joins:
                await _listen(ports, parts, log)
            announce({"event": "server.ready", **ports.places(), **record})
            chores += [loop.create_task(work) for work in _followers(parts, record)]
            await stop.asked.wait()
        parts.routes.dispatch.draining = True
        drained = loop.create_task(ports.drain(settings.drain_s))
        await stop.wait_unless_hurried(drained, settings.drain_s)
        events.emit("server.stopped", dropped=ports.num_connections)
        drained.cancel()
    finally:
        for chore in chores:
            chore.cancel()
        await asyncio.gather(*chores, cleaning, return_exceptions=True)  # ends the process that watches the registry
        if parts.tracer is not None:
            await loop.run_in_executor(None, parts.tracer.shutdown)
        parts.routes.close()
        await fleet.close()
        if companion is not None:
            await companion.close()
        await ports.close()
        if log is not None:
            log.close()


async def _listen(ports: Ports, parts: Parts, log: AccessLog | None) -> None:
    settings = parts.core.settings
    rule = CorsRule.of(settings.cors_origin, settings.cors_methods, settings.cors_headers)
    for what, (app, number) in parts.apps.items():
        if number is not None:
            shown = app if rule is None or what == "metrics" else CorsMiddleware(app, rule)
            await ports.open(what, shown if log is None else AccessLogMiddleware(shown, what, log), number)
    if settings.grpc_port is not None:
        await ports.open_grpc("grpc", parts.grpc_services("inference", log), settings.grpc_port)
    if settings.grpc_management_port is not None:
        services = parts.grpc_services("management", log)
        await ports.open_grpc("grpc_management", services, settings.grpc_management_port)


def _followers(parts: Parts, record: dict[str, Field]) -> Iterator[Coroutine[Any, Any, None]]:
    """Follow the state file, the store, the alias and the memory in use; sample counters for the charts."""
    core, settings, fleet = parts.core, parts.core.settings, parts.core.fleet
    yield every(dashboard.SAMPLE_S, partial(_sample, parts))
    yield every(LOOK_S, MemoryKeeper(fleet.models, partial(in_thread, asyncio.get_running_loop())).look)
    if core.state is not None:
        state = StateFollower(fleet, core.state, core.sources.find, core.keys, parts.extension.companion)
        yield every(FOLLOW_S, state.look)
        yield every(RETRY_S, state.retry)
    else:
        yield every(RETRY_S, partial(_retry, parts))
    if settings.watch and core.store is not None:
        yield every(settings.follow_s, StoreFollower(fleet, core.store, settings.load).look)
    if settings.source is not None and _is_alias(settings.source) and settings.follow_s > 0:
        alias = AliasFollower(fleet, settings.source, str(record["model"]), str(record["version"]))
        yield alias.run(settings.tracking_uri, settings.follow_s)


async def _sample(parts: Parts) -> None:
    parts.routes.history.record(parts.core.fleet.models, time.time())


async def _retry(parts: Parts) -> None:
    await parts.core.fleet.retry(parts.core.sources.find)


async def _begin(parts: Parts) -> dict[str, Field]:
    """Restores the desired state, then loads what the settings name; returns the fields of the announcement."""
    settings, fleet, store, sources = parts.core.settings, parts.core.fleet, parts.core.store, parts.core.sources
    models = fleet.models
    entries = await _expect(parts)
    if settings.state is not None:
        kept = desired_state.read(Path(settings.state))
        for missing in await fleet.restore(kept, sources.find):
            events.emit("version.missing", what=missing)
        for missing in [] if parts.extension.companion is None else await parts.extension.companion.restore(kept):
            events.emit("workflow.missing", what=missing)
    record: dict[str, Field] = {"model": "", "version": "", "digest": ""}
    if settings.source is not None and not settings.resumed:
        record = await _load_source(settings, settings.source, fleet, sources)
    models.locating = False
    if store is not None and not settings.resumed:
        await _load_entries(parts, entries)
        for name, own in fleet.how.usual.items():
            model, _, version = name.partition("/")
            if own.get("defaultVersion") is True and models.get(model, version) is not None:
                await _prefer(fleet, model, version)
    gc.freeze()
    gc.enable()  # `python -m trueline.serve` starts without
    return record | {"models": ",".join(models.names())}


async def _expect(parts: Parts) -> list[Entry]:
    """Shows what the state file lists and what is loaded from the store as loading; returns the entries of the store.

    Those that `--load all` finds are `optional`: one that cannot be served does not make the others unavailable.
    """
    settings, fleet, store = parts.core.settings, parts.core.fleet, parts.core.store
    if settings.state is not None:
        fleet.expect_all(desired_state.read(Path(settings.state)))
    if store is None or settings.resumed:
        return []
    found = await in_thread(asyncio.get_running_loop(), partial(_entries_to_load, settings.load, store))
    new = [one for one in found if fleet.models.get(one.model, one.version) is None]
    for entry in new:
        fleet.expect(entry.model, entry.version, entry.source, optional=settings.load == "all")
    return new


async def _load_entries(parts: Parts, entries: Sequence[Entry]) -> None:
    """Loads entries of the store. One that fails stays as failed, with the reason; raises the first error if nothing at
    all can be served and nothing will change that (without --watch).
    """
    settings, fleet = parts.core.settings, parts.core.fleet
    first: Exception | None = None
    for entry in entries:
        found = fleet.models.get(entry.model, entry.version)
        if found is not None and found.state == "ready":
            continue
        try:
            await fleet.load(ResolvedSource(path=entry.path), entry.model, entry.version, source=entry.source)
        except Exception as error:  # noqa: BLE001 - blind on purpose: one bundle fails, never the others
            first = first or error
            fleet.note_failure(entry.model, entry.version, error)
            continue
        await _prefer(fleet, entry.model, entry.version)  # the newest comes last
    if first is not None and not settings.watch and all(one.state == "failed" for one in fleet.models.all()):
        raise first


async def _prefer(fleet: Fleet, model: str, version: str) -> None:
    """Makes `version` the default if it can answer."""
    try:
        await fleet.make_default(model, version)
    except RequestError as error:
        events.emit("default.refused", model=model, version=version, why=error.message)


def _entries_to_load(load: str, store: Store) -> list[Entry]:
    """The entries of the store that are loaded at start. Raises UsageError for a name that it does not hold."""
    entries = store.entries()
    names = list(dict.fromkeys(entry.model for entry in entries))
    found: list[Entry] = []
    for wish in names if load == "all" else [one.strip() for one in load.split(",") if one.strip()]:
        alias, _, source = wish.rpartition("=")
        one = next((entry for entry in entries if entry.source == source), None)
        if one is not None:
            found.append(replace(one, model=check_name("model", alias)) if alias else one)
        elif wish in names:
            found += store.of(wish)
        else:
            raise UsageError(f"the model store has no '{wish}' (it has: {join_names(names)})")
    return found


def _is_alias(source: str) -> bool:
    return source.startswith("models:/") and "@" in source


def _whole(source: str) -> str:
    """`source` as in the state file, where a relative path is an entry of the store."""
    return source if source.startswith("models:/") or sources.is_url(source) else os.path.abspath(source)


def _identify(path: Path, name: str | None, version: str | None) -> tuple[str, str]:
    """Name and version of a source, read from its manifest where they are None. Raises BundleError."""
    if archive.is_archive(path):
        manifest = archive.peek(path)
        return name or manifest.model, version or manifest.version
    if name is None:
        manifest_file = path / schema.MANIFEST
        known = schema.decode(manifest_file.read_bytes(), str(path)) if manifest_file.is_file() else open_bundle(path)
        name = known.name
    return name, version or "1"


async def _load_source(settings: ServeSettings, source: str, fleet: Fleet, sources: Sources) -> dict[str, Field]:
    found = await sources.find(_whole(source))
    # An alias may move while the server is down: the state file names the version.
    kept = _whole(source) if found.version is None else f"models:/{found.name}/{found.version}"
    identify = partial(_identify, found.path, settings.name or found.name, settings.version or found.version)
    name, version = await in_thread(asyncio.get_running_loop(), identify)
    fleet.expect(name, version, kept, optional=False)
    fleet.models.locating = False
    try:
        made = await fleet.load(found, name, version, source=kept, replace_it=True)
    except Refused as error:
        raise error.__cause__ or error from error  # with paths, for the operator
    if _is_alias(source):
        await _moved_meanwhile(fleet, found, name, version)
    record: dict[str, Field] = {"model": name, "version": version, "digest": made.digest}
    served = fleet.models.find(name, version)
    if served.state == "ready" and served.handler is None:
        record["example"] = write_body(served.program.loaded.records or served.program.loaded.example)
    return record


async def _moved_meanwhile(fleet: Fleet, found: ResolvedSource, name: str, version: str) -> None:
    """Retires the version that the alias pointed to before the restart."""
    before = fleet.models.default(name)
    if before != version and fleet.models.find(name, before).source.startswith(f"models:/{found.name}/"):
        fleet.set_default(name, version)
        await fleet.retire(name, before)
