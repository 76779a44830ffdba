"""Builds a server from its settings: the fleet of models, the extension (loaded by name), the apps of its ports."""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from trueline.bundle.signing import Trusted
from trueline.errors import RequestError, UsageError
from trueline.serve import host
from trueline.serve.handlers.budget import Limits as HandlerLimits
from trueline.serve.handlers.budget import WorkerBudget
from trueline.serve.handlers.loader import ArchiveLoader, name_in_store
from trueline.serve.models.catalog import Models
from trueline.serve.models.controller import Fleet
from trueline.serve.models.loader import RuntimeOptions, VersionOptions
from trueline.serve.models.sources import Sources, Store, in_thread
from trueline.serve.protocols.dispatch import NO_METHOD, NO_RESOURCE, is_oip
from trueline.serve.protocols.oip.rest import Repository
from trueline.serve.protocols.router import Extension, Routes
from trueline.serve.settings import ServeSettings
from trueline.web import auth, tracing
from trueline.web.access_log import AccessLog
from trueline.web.auth import AuthMiddleware, Keys, TokenKind
from trueline.web.messages import App, Request, Response

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXTENSION = "trueline.torchserve.extension:extend"  # from a Core to an Extension


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """What an extension builds on."""

    settings: ServeSettings
    fleet: Fleet
    store: Store | None
    sources: Sources
    keys: Keys | None
    state: Path | None  # the state file
    handlers: HandlerLimits | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A server before it listens."""

    core: Core
    extension: Extension
    routes: Routes
    apps: dict[Literal["data", "management", "metrics"], tuple[App, int | None]]
    """App and number of each port; None: closed."""
    tracer: TracerProvider | None

    def grpc_services(self, kind: Literal["inference", "management"], log: AccessLog | None) -> list[Any]:
        """Handlers of the services of one gRPC port."""
        from trueline.serve.protocols.oip import grpc  # slow to import

        own = [grpc.OipService(self.routes, self.core.keys, log).handler()] if kind == "inference" else []
        return own + self.extension.grpc_services(kind, self.routes, log)


def assemble(settings: ServeSettings) -> Parts:
    """Call it on the loop. Raises UsageError for settings that contradict each other, StorageError, BundleError."""
    loop = asyncio.get_running_loop()
    store = _store(settings)
    state = Path(settings.state) if settings.state is not None else None
    how, in_a_thread = _how(settings), partial(in_thread, loop)
    handlers = handlers_of(settings)
    archives = ArchiveLoader(how, handlers, loop, in_a_thread)
    fleet = Fleet(
        Models(), loop, in_a_thread, how=how, state=state, loaders=[archives], strict=settings.torchserve_strict
    )
    core = Core(
        settings=settings,
        fleet=fleet,
        store=store,
        sources=Sources(settings, store, loop),
        keys=auth.load_keys(Path(settings.key_file)) if settings.key_file is not None else None,
        state=state,
        handlers=handlers,
    )
    module, _, function = EXTENSION.partition(":")
    extension: Extension = getattr(importlib.import_module(module), function)(core)
    repository = Repository(fleet, store, loop) if store is not None else None
    routes = Routes(fleet.models, loop, body_bytes=settings.max_body_bytes, loader=repository, extension=extension)
    tracer = None if settings.traces is None else tracing.make_tracer_provider(settings.traces)
    traced: App = routes if tracer is None else tracing.TracingMiddleware(routes, tracer.get_tracer("trueline"))
    metrics, management = _MetricsOnly(routes), extension.management()
    parts = Parts(core=core, extension=extension, routes=routes, apps={}, tracer=tracer)
    parts.apps["data"] = _require_token(traced, parts, "inference"), settings.port
    parts.apps["management"] = _require_token(management, parts, "management"), settings.management_port
    parts.apps["metrics"] = _require_token(metrics, parts, "inference"), settings.metrics_port
    return parts


def _how(settings: ServeSettings) -> VersionOptions:
    return VersionOptions(
        way=RuntimeOptions(
            program=settings.program,
            threads=settings.threads,
            device=settings.device,
            precision=settings.precision,
            native=settings.allow_code,
            max_values=settings.max_values,
            max_size=settings.max_size,
            memory_bytes=settings.run_memory_bytes or host.run_memory_of(processes=1),
            most_threads=settings.most_threads,
            hide_examples=settings.hide_examples,
            shared=None if settings.shared_weights is None else Path(settings.shared_weights),
        ),
        max_batch=settings.max_batch,
        max_delay_s=settings.max_delay_s,
        max_queue=settings.max_queue,
        shared=settings.shared,
        trusted=None if settings.trusted_keys is None else Trusted.read(Path(settings.trusted_keys)),
        usual=_usual(settings),
    )


def handlers_of(settings: ServeSettings) -> HandlerLimits | None:
    """Bounds of handlers' processes; None: no code is run."""
    if not settings.allow_code:
        return None
    return HandlerLimits(
        address_space=settings.handler_memory_bytes,
        max_bytes=4 * settings.max_body_bytes,
        budget=WorkerBudget(processes=settings.siblings),
    )


def _require_token(app: App, parts: Parts, kind: TokenKind) -> App:
    if parts.core.keys is None:
        return app

    def render(path: str, error: RequestError) -> Response:
        if kind != "management" and is_oip(path):
            return app.refuse(path, error.status, error.message + (f"; {error.hint}" if error.hint else ""))
        answer = parts.extension.errors.encode_error(error, path)
        app.refuse(path, answer.status, error.message)  # counts it
        return answer

    return AuthMiddleware(app, parts.core.keys, kind, render)


def _store(settings: ServeSettings) -> Store | None:
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
    return Store(Path(settings.model_store), name_in_store)


class _MetricsOnly:
    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    def answer(self, request: Request) -> Response | asyncio.Future[Response]:
        path, about = request.path.rstrip("/"), request.method == "OPTIONS"
        if path in ("/metrics", "/api-description") or (about and not path):
            return self._routes.handle_uncached(request)
        return self.refuse(request.path, *((404, NO_RESOURCE) if path else (405, NO_METHOD)))

    def refuse(self, path: str, status: int, message: str) -> Response:
        return self._routes.errors_of("/metrics").encode_malformed(path, status, message)


def _usual(settings: ServeSettings) -> dict[str, dict[str, Any]]:
    try:
        return msgspec.json.decode(settings.models or "{}", type=dict[str, dict[str, Any]])
    except msgspec.DecodeError as error:
        raise UsageError(f"--models is no JSON object by name: {error}") from error
