"""The server process: listen, load, be ready, drain, leave.

Up to three ports: the data plane, the management of versions (TorchServe's 8081), metrics alone (its 8082). It answers
whether it lives from the first moment, and whether it is ready only after the golden examples were replayed. Loading
and long runs happen in threads; the event loop never waits for them.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from trueline import events
from trueline.bundle import schema
from trueline.bundle.read import open_bundle
from trueline.bundle.signing import Trusted
from trueline.errors import RequestError, UsageError, join_names
from trueline.serve.handlers import archive
from trueline.serve.handlers.worker import Limits as HandlerLimits
from trueline.serve.models import desired_state, download
from trueline.serve.models.catalog import Models
from trueline.serve.models.controller import Fleet, Found, How, Refused
from trueline.serve.models.loader import Way
from trueline.serve.models.model_store import Entry, Store, check_name
from trueline.serve.models.sources import Sources, in_thread
from trueline.serve.models.state_sync import Follower
from trueline.serve.models.watchers import AliasFollower, StoreFollower, every
from trueline.serve.process.listeners import Field, Ports
from trueline.serve.process.signals import Stop
from trueline.serve.protocols.errors import face_of
from trueline.serve.protocols.oip.repository import Repository
from trueline.serve.protocols.router import Routes
from trueline.serve.settings import Settings
from trueline.torchserve import responses
from trueline.torchserve.management import Management
from trueline.torchserve.workflows.registry import Workflows
from trueline.web import tokens, tracing
from trueline.web.access_log import AccessLog, AccessLogMiddleware
from trueline.web.auth import AuthMiddleware
from trueline.web.cors import CorsMiddleware, CorsRule
from trueline.web.messages import App, Request, Response
from trueline.web.tokens import Keys, TokenKind

FOLLOW_S = 0.5
"""How often the state file is looked at for what others wrote."""

Announce = Callable[[dict[str, Field]], None]


async def run(settings: Settings, announce: Announce) -> None:
    """Serves until told to stop. `announce` gets one record when the server is ready. Raises TruelineError."""
    if settings.processes > 1:
        from trueline.serve.process import multiprocess

        await multiprocess.run(settings, announce)
        return
    loop = asyncio.get_running_loop()
    store = _store(settings)
    models = Models()
    how = How(
        way=Way(
            program=settings.program,
            threads=settings.threads,
            device=settings.device,
            precision=settings.precision,
            native=settings.allow_code,
            most_threads=settings.most_threads,
            shared=None if settings.shared_weights is None else Path(settings.shared_weights),
        ),
        max_batch=settings.max_batch,
        max_delay_s=settings.max_delay_s,
        max_queue=settings.max_queue,
        shared=settings.shared,
        trusted=None if settings.trusted_keys is None else Trusted.read(Path(settings.trusted_keys)),
        usual=_usual(settings),
    )
    state = Path(settings.state) if settings.state is not None else None
    fleet = Fleet(
        models, loop, lambda work: in_thread(loop, work), how=how, state=state, handlers=handlers_of(settings)
    )
    sources = Sources(settings, store, loop)
    workflows = Workflows(
        fleet,
        loop,
        lambda work: in_thread(loop, work),
        sources.allowed,
        store=_workflow_store(settings, store),
        state=state,
        handlers=handlers_of(settings),
    )
    repository = Repository(fleet, store, loop) if store is not None else None
    routes = Routes(
        models,
        loop,
        body_bytes=settings.max_body_bytes,
        loader=repository,
        workflows=workflows,
        strict=settings.torchserve_strict,
    )
    strict = settings.torchserve_strict
    keys = tokens.load_keys(Path(settings.key_file)) if settings.key_file is not None else None
    management = Management(fleet, store, sources.allowed, loop, keys, workflows, strict=strict)
    tracer = None if settings.traces is None else tracing.make_tracer_provider(settings.traces)
    faced: App = routes if tracer is None else tracing.TracingMiddleware(routes, tracer.get_tracer("trueline"))
    apps: dict[Literal["data", "management", "metrics"], tuple[App, int | None]] = {
        "data": (_guarded(faced, keys, "inference", strict=strict), settings.port),
        "management": (_guarded(management, keys, "management", strict=strict), settings.management_port),
        "metrics": (_guarded(_MetricsOnly(routes), keys, "inference", strict=strict), settings.metrics_port),
    }
    rule = CorsRule.of(settings.cors_origin, settings.cors_methods, settings.cors_headers)
    log = None if settings.access_log is None else AccessLog(settings.access_log)
    stop = Stop()
    stop.listen(loop, lifeline=settings.lifeline)
    ports = Ports(settings, loop)
    chores = [loop.create_task(ports.sweep())]

    async def listen() -> None:
        for what, (app, number) in apps.items():
            if number is not None:
                shown = app if rule is None or what == "metrics" else CorsMiddleware(app, rule)
                await ports.open(what, shown if log is None else AccessLogMiddleware(shown, what, log), number)
        await _open_grpc(ports, settings, routes, management, keys, log)

    try:
        if not settings.joins:
            await listen()
        record = await _until(stop, loop.create_task(_begin(settings, fleet, workflows, store, sources)))
        if record is not None:
            models.started = True
            if settings.joins:
                await listen()
            if state is not None:
                follower = Follower(fleet, state, sources.operator, keys, workflows)
                chores.append(loop.create_task(follower.follow(FOLLOW_S)))
            announce({"event": "server.ready", **ports.places(), **record})
            chores += _following(settings, fleet, store, record)
            await stop.asked.wait()
        routes.asking.draining = True
        await _drain(ports, stop, settings.drain_s)
    finally:
        for chore in chores:
            chore.cancel()
        await asyncio.gather(*chores, return_exceptions=True)  # a watch of the registry ends its process
        if tracer is not None:
            await loop.run_in_executor(None, tracer.shutdown)
        await fleet.close()
        await workflows.close()
        await ports.close()
        if log is not None:
            log.close()


async def _open_grpc(
    ports: Ports,
    settings: Settings,
    routes: Routes,
    management: Management,
    keys: Keys | None,
    log: AccessLog | None,
) -> None:
    """The services that are asked for. Raises PortInUse, UsageError."""
    if settings.grpc_port is None and settings.grpc_management_port is None:
        return
    from trueline.serve.protocols.oip import grpc as grpc_face  # grpc takes time and memory: only who asks for it pays
    from trueline.torchserve import grpc as torchserve_calls

    strict = settings.torchserve_strict
    if settings.grpc_port is not None:
        asked = torchserve_calls.Inference(routes, keys, log, strict=strict)
        await ports.open_grpc(
            "grpc", [grpc_face.Face(routes, keys, log).handler(), asked.handler()], settings.grpc_port
        )
    if settings.grpc_management_port is not None:
        managed = torchserve_calls.Managed(management, keys, log, strict=strict)
        await ports.open_grpc("grpc_management", [managed.handler()], settings.grpc_management_port)


def _following(
    settings: Settings, fleet: Fleet, store: Store | None, record: dict[str, Field]
) -> list[asyncio.Task[None]]:
    """What goes on looking for news once the server is ready."""
    loop = asyncio.get_running_loop()
    found = []
    if settings.watch and store is not None:
        bundles = StoreFollower(fleet, store, settings.load)
        found.append(loop.create_task(every(settings.follow_s, bundles.look)))
    if settings.source is not None and _is_alias(settings.source) and settings.follow_s > 0:
        alias = AliasFollower(fleet, settings.source, str(record["model"]), str(record["version"]))
        found.append(loop.create_task(alias.run(settings.tracking_uri, settings.follow_s)))
    return found


def handlers_of(settings: Settings) -> HandlerLimits | None:
    """What the processes of archives' handlers may take; None when there are to be none."""
    if not settings.allow_code:
        return None
    return HandlerLimits(address_space=settings.handler_memory_bytes, max_bytes=4 * settings.max_body_bytes)


def _guarded(app: App, keys: Keys | None, kind: TokenKind, *, strict: bool) -> App:
    if keys is None:
        return app

    def render(path: str, error: RequestError) -> Response:
        torchserves = kind == "management" or face_of(path) == "torchserve"
        hint = f"; {error.hint}" if error.hint else ""
        refusal = app.refuse(path, 400 if torchserves and strict else error.status, error.message + hint)
        return responses.error(error, strict=strict) if torchserves else refusal

    return AuthMiddleware(app, keys, kind, render)


def _store(settings: Settings) -> Store | None:
    if settings.model_store is None:
        if settings.source is None and settings.state is None and settings.workflow_store is None:
            raise UsageError("there is nothing to serve", hint="name a bundle, or a --model-store")
        if settings.load:
            raise UsageError(f"--load {settings.load} names models of a store, and there is no --model-store")
        if settings.watch:
            raise UsageError("--watch looks for changes of a store, and there is no --model-store")
        return None
    if settings.watch and not (settings.load and settings.follow_s > 0):
        raise UsageError(
            "--watch keeps what --load names as the store has it, looking every --follow seconds",
            hint="add --load all, or the names with commas between; --follow 10",
        )
    if not Path(settings.model_store).is_dir():
        raise UsageError(f"the model store {settings.model_store} is no folder")
    return Store(Path(settings.model_store))


def _workflow_store(settings: Settings, store: Store | None) -> Store | None:
    """Where workflows lie: the store of models, unless another is named. Raises UsageError."""
    if settings.workflow_store is None:
        return store
    if not Path(settings.workflow_store).is_dir():
        raise UsageError(f"the workflow store {settings.workflow_store} is no folder")
    return Store(Path(settings.workflow_store))


class _MetricsOnly:
    """The metrics page and nothing else."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    def answer(self, request: Request) -> Response | asyncio.Future[Response]:
        """The answer, now or later."""
        if request.path != "/metrics":
            return responses.refusal(404, responses.NO_RESOURCE)
        return self._routes.long_way(request)

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The answer for a request that could not be received."""
        return responses.refusal(status, message)


async def _until(stop: Stop, work: asyncio.Future[dict[str, Field]]) -> dict[str, Field] | None:
    asked = asyncio.ensure_future(stop.asked.wait())
    both: set[asyncio.Future[Any]] = {work, asked}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if work.done():
        return work.result()
    work.cancel()
    return None


async def _begin(
    settings: Settings, fleet: Fleet, workflows: Workflows, store: Store | None, sources: Sources
) -> dict[str, Field]:
    """Restores the wanted state, then loads what the command line names; returns what the announcement says."""
    models = fleet.models
    if settings.state is not None:
        kept = desired_state.read(Path(settings.state))
        for missing in await fleet.restore(kept, sources.operator):
            events.emit("version.missing", what=missing)
        for missing in await workflows.restore(kept.workflows):
            events.emit("workflow.missing", what=missing)
    record: dict[str, Field] = {"model": "", "version": "", "digest": ""}
    if settings.source is not None and not settings.resumed:
        record = await _load_source(settings, settings.source, fleet, sources)
    if store is not None and not settings.resumed:
        for entry in _named(settings.load, store):
            if entry.model in models.names() and entry.version in models.versions(entry.model):
                continue
            await fleet.load(Found(path=entry.path), entry.model, entry.version, source=entry.source)
            fleet.set_default(entry.model, entry.version)  # the newest comes last
        for name, own in fleet.how.usual.items():
            model, _, version = name.partition("/")
            if own.get("defaultVersion") is True and model in models.names() and version in models.versions(model):
                fleet.set_default(model, version)
    gc.collect()
    gc.freeze()
    return record | {"models": ",".join(models.names())}


def _usual(settings: Settings) -> dict[str, dict[str, Any]]:
    try:
        return msgspec.json.decode(settings.models or "{}", type=dict[str, dict[str, Any]])
    except msgspec.DecodeError as error:
        raise UsageError(f"what is said of models is no JSON by name: {error}") from error


def _named(load: str, store: Store) -> list[Entry]:
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
    """`source` as the state file names it: what is no path from the root and no URL there is an entry of the store."""
    return source if source.startswith("models:/") or download.is_url(source) else os.path.abspath(source)


def _bundle_name(path: Path) -> str:
    """The name in a bundle's or an archive's manifest. Raises BundleError."""
    if archive.is_archive(path):
        return archive.peek(path).model
    if path.is_dir() and (path / schema.MANIFEST).is_file():
        return schema.decode((path / schema.MANIFEST).read_bytes(), str(path)).name
    return open_bundle(path).name


def _version_of(path: Path) -> str:
    """The version of what no registry has numbered. Raises BundleError."""
    return archive.peek(path).version if archive.is_archive(path) else "1"


async def _load_source(settings: Settings, source: str, fleet: Fleet, sources: Sources) -> dict[str, Field]:
    found = await sources.operator(_whole(source))
    # An alias may move while the server is down: what is wanted is the version that was served.
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
        raise error.__cause__ or error from error  # the operator may read everything
    if _is_alias(source):
        await _moved_meanwhile(fleet, found, name, version)
    return {"model": name, "version": version, "digest": made.digest}


async def _moved_meanwhile(fleet: Fleet, found: Found, name: str, version: str) -> None:
    """The version of the alias takes over from the one that was served before the server went down."""
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
