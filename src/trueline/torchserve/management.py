"""TorchServe's management API of models and workflows. Only translates.

Source: TorchServe 0.12's ManagementRequestHandler and WorkflowMgmtRequestHandler, as the contract page has them. A
bundle ignores `handler` and `s3_sse_kms`; its workers are the runs that may run at the same time, an archive's are
processes. Beyond TorchServe: traffic splits, canaries and shadows.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec

from trueline import events
from trueline.errors import MethodNotAllowed, NotFound, RequestError
from trueline.serve.faults import find_fault
from trueline.serve.handlers.messages import reply
from trueline.serve.metrics import dashboard
from trueline.serve.models.catalog import UnknownVersion
from trueline.serve.models.controller import Fleet
from trueline.serve.models.loader import ResolvedSource, VersionOptions
from trueline.serve.models.servable import HandlerRequest, Servable
from trueline.serve.models.sources import Store, check_name
from trueline.serve.protocols import openapi
from trueline.serve.protocols.dispatch import NO_METHOD, NO_RESOURCE, extra
from trueline.serve.traffic import canary
from trueline.serve.traffic.rollout import Traffic
from trueline.storage.object_store import redact_uri
from trueline.torchserve import responses
from trueline.torchserve.parameters import number_of, parameters_of, parse_int, url_of, workers_of
from trueline.torchserve.responses import describe_version, pretty
from trueline.torchserve.workflows import routes as workflow_routes
from trueline.torchserve.workflows.registry import Workflows
from trueline.version import __version__
from trueline.web.auth import Keys
from trueline.web.messages import Request, Response, query_of, segments_of

Find = Callable[[str], Awaitable[ResolvedSource]]
Work = Coroutine[Any, Any, Response]
"""A response that takes time."""
_OF_ARCHIVES = frozenset(
    {"handler", "initial_workers", "batch_size", "max_batch_delay", "response_timeout", "startup_timeout"}
)
"""Parameters of a registration for an archive's handler."""


class _NegativeWorkers(RequestError):
    """Fewer workers than none; TorchServe calls that an internal error."""

    code = "negative_workers"

    def __init__(self, message: str, *, strict: bool) -> None:
        super().__init__(message)
        self.status = 500 if strict else 400


class Management:
    """The App of the management port."""

    def __init__(
        self, fleet: Fleet, store: Store | None, find: Find, loop: asyncio.AbstractEventLoop,
        keys: Keys | None = None, workflows: Workflows | None = None, *, strict: bool = False,
        forget: Callable[[str], None] = lambda url: None,
    ) -> None:  # fmt: skip
        """`find` locates a source that the operator allows, and `forget` deletes it if that was a download; /token
        renews `keys`; `strict`: TorchServe's status codes
        also where Trueline's are more precise.
        """
        self._strict, self._workflows, self._keys = strict, workflows, keys
        self._traffic = Traffic(fleet, loop)
        self._fleet, self._models = fleet, fleet.models
        self._store, self._find, self._loop, self._forget = store, find, loop, forget
        self._loading: set[asyncio.Task[Servable]] = set()
        """Registrations that were answered before their end."""

    def answer(self, request: Request) -> Response | asyncio.Future[Response]:
        """The response, or its future. Never raises."""
        try:
            found = self._route(request)
        except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails, never the server
            return self._refuse_for(request, error)
        return found if isinstance(found, Response) else self._loop.create_task(self._run(request, found))

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The response to a request that could not be received."""
        return responses.refusal(status, message)

    async def _run(self, request: Request, work: Work) -> Response:
        try:
            return await asyncio.shield(asyncio.ensure_future(work))  # a client that disconnects undoes nothing
        except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails, never the server
            return self._refuse_for(request, error)

    def _refuse_for(self, request: Request, error: Exception) -> Response:
        if isinstance(error, UnknownVersion) and request.path.rstrip("/").endswith("/set-default"):
            message = f"Model version {error.version} does not exist for model {error.model}"
            return responses.refusal(404, message, kind="ModelVersionNotFoundException")
        error = find_fault(error) or error
        if isinstance(error, RequestError):
            return responses.error(error, extra(error), strict=self._strict)
        return responses.server_fault(request.path, error)

    def _route(self, request: Request) -> Response | Work:
        query = query_of(request.target)
        method = "GET" if request.method == "HEAD" else request.method
        match method, segments_of(request.path):
            case _, ["models", *rest]:
                return self._route_models(request, method, rest, query)
            case _, ["workflows", *rest] if self._workflows is not None:
                return workflow_routes.route(self._workflows, method, rest, query, request)
            case "GET", ["v1", "models", model]:
                ready = not self._models.obstacle(model)
                return reply(200, pretty({"name": model, "ready": ready}))
            case "GET", ["token"] if self._keys is not None and request.method == "GET":
                return self._renew(self._keys, query.get("type", ""))
            case ("OPTIONS", [""]) | ("GET", ["openapi.json"] | ["api-description"]):
                return reply(200, pretty(openapi.management(__version__, workflows=self._workflows is not None)))
            case "GET", ["try"]:
                return dashboard.try_page()
            case "GET" | "POST", ["ping"]:
                return responses.status("Healthy")
            case _, [""] | ["v1", "models", _]:
                raise MethodNotAllowed(NO_METHOD)
            case _:
                raise NotFound(NO_RESOURCE)

    def _route_models(self, request: Request, method: str, parts: list[str], query: dict[str, str]) -> Response | Work:
        match method, parts:
            case "POST", []:
                return self._register(query | parameters_of(request))
            case "GET", []:
                return self._list(query)
            case "GET", [model]:
                return self._describe(model, None, query)
            case "GET", [model, "traffic"]:
                return reply(200, pretty(self._traffic.facts(model)))
            case "GET", [model, version]:
                return self._describe(model, version, query)
            case "PUT", [model]:
                return self._scale(model, query.get("model_version"), query)
            case "PUT", [model, "split"]:
                return self._split(model, query)
            case "PUT", [model, version]:
                return self._scale(model, version, query)
            case "PUT", [model, version, "canary"]:
                return self._canary(model, version, query)
            case "PUT", [model, version, "shadow"]:
                self._traffic.set_shadow(model, version)
                return responses.status(f'Version "{version}" shadows model "{model}"')
            case "PUT", [model, version, "set-default"]:
                return self._set_default(model, version)
            case "DELETE", [model, "canary"]:
                self._traffic.end_canary(model)
                return responses.status(f'Canary of model "{model}" ended')
            case "DELETE", [model, "shadow"]:
                self._traffic.end_shadow(model)
                return responses.status(f'Shadow of model "{model}" ended')
            case "DELETE", [model] | [model, _]:
                return self._unregister(model, parts[1] if len(parts) == 2 else None)
            case "OPTIONS", [model]:
                return reply(200, pretty(openapi.of_model(self._models.find(model), __version__)))
            case _, [] | [_] | [_, _] | [_, _, "set-default" | "canary" | "shadow"]:
                raise MethodNotAllowed(NO_METHOD)
            case _:
                raise NotFound(NO_RESOURCE)

    async def _register(self, given: Mapping[str, str]) -> Response:
        url, runtime = url_of(given), given.get("runtime", "python")
        if runtime not in ("python", "python2", "python3"):
            raise RequestError(f"Invalid RuntimeType value: {runtime[:32]}")
        workers = workers_of(given, "initial_workers", 0, strict=self._strict)
        if workers < 0 and not self._strict:
            raise _NegativeWorkers(f"initial_workers is 0 or more; got {workers}", strict=False)
        workers = max(0, workers)  # as in TorchServe
        found = await self._find(url)
        loading = self._loop.create_task(self._load(found, url, given))
        waits = given.get("synchronous", "true").lower() == "true"
        if self._strict and workers > 0 and not waits and not await self._ends_at_once(loading):
            return responses.status("Processing worker updates...", 202)
        loaded = await loading
        workers = loaded.policy.lanes if loaded.handler is not None else workers
        text = f'Model "{loaded.model}" Version: {loaded.version} registered with {workers} initial workers'
        if workers <= 0:
            text += ". Use scale workers API to add workers for the model."
        elif not waits:  # the workers are ready all the same: a failure was reported
            return responses.status("Processing worker updates...", 202)
        return responses.status(text)

    async def _load(self, found: ResolvedSource, url: str, given: Mapping[str, str]) -> Servable:
        """Loads what is registered; if that fails, what was downloaded for it is deleted."""
        try:
            entries = self._store.entries() if self._store is not None else []
            named = [(one.model, one.version) for one in entries if url == one.source or found.path == one.path]
            usual = next(iter(named), ("", "1"))
            model = check_name("model", given.get("model_name") or found.name or usual[0])
            version = check_name("version", given.get("model_version") or found.version or usual[1])
            workers = max(0, workers_of(given, "initial_workers", 0, strict=self._strict))
            of_archive = {name: value for name, value in given.items() if name in _OF_ARCHIVES}
            if workers:
                of_archive["initial_workers"] = str(workers)
            how = VersionOptions(
                max_batch=max(1, parse_int(given.get("batch_size"), 64)),
                max_delay_s=max(0, parse_int(given["max_batch_delay"], 0)) / 1e3
                if "max_batch_delay" in given
                else None,
                workers=workers,
                max_queue=self._fleet.how.max_queue,
                way=self._fleet.how.way,
                given=of_archive,
            )
            return await self._fleet.load(found, model, version, source=url, how=how)
        except BaseException:
            self._forget(url)
            raise

    async def _ends_at_once(self, loading: asyncio.Task[Servable]) -> bool:
        """Whether the registration has ended already, as for a name in use; else its end is logged later."""
        await asyncio.sleep(0)  # it begins with what can be refused at once
        if loading.done():
            return True
        self._loading.add(loading)
        loading.add_done_callback(self._log_end)
        return False

    def _log_end(self, loading: asyncio.Task[Servable]) -> None:
        self._loading.discard(loading)
        error = None if loading.cancelled() else loading.exception()
        if error is not None:
            events.emit("registration.failed", why=str(error))

    def _scale(self, model: str, named: str | None, query: Mapping[str, str]) -> Response | Work:
        """`named`: the version in the path or the query; None: the default."""
        least = workers_of(query, "min_worker", 1, strict=self._strict)
        most = workers_of(query, "max_worker", least, strict=self._strict)
        if most < least:
            raise RequestError("max_worker cannot be less than min_worker.")
        version = named or self._models.default(model)
        self._models.find(model, version)
        if least < 0:
            raise _NegativeWorkers(
                f"min_worker and max_worker are 0 or more; got {least} and {most}", strict=self._strict
            )
        workers = self._fleet.scale(model, version, most)
        if query.get("synchronous", "false").lower() != "true":
            return responses.status("Processing worker updates...", 202)
        which = f", version: {version}" if named else ""
        text = f"Workers scaled to {workers} for model: {model}{which}"
        return self._settle(self._models.find(model, version), text)

    async def _settle(self, version: Servable, text: str) -> Response:
        if version.handler is not None:
            await version.handler.wait_ready()
        return responses.status(text)

    def _set_default(self, model: str, version: str) -> Response | Work:
        """Waits for a worker that is starting: until it is ready, the default before answers."""

        async def wait() -> Response:
            await self._fleet.wait_able(model, version)
            return switch()

        def switch() -> Response:
            self._fleet.set_default(model, version)
            return responses.status(f'Default version successfully updated for model "{model}" to "{version}"')

        return wait() if not self._strict and self._models.obstacle(model, version) else switch()

    def _split(self, model: str, query: Mapping[str, str]) -> Response:
        try:
            weights = {version: float(weight) for version, weight in query.items()}
        except ValueError as error:
            raise RequestError(f"weights are numbers by version, as in ?1=90&2=10; got {dict(query)}") from error
        if not weights:
            raise RequestError("name the versions and their weights, as in ?1=90&2=10")
        self._fleet.set_split(model, weights)
        shares = ", ".join(f"{version}: {weight:g}" for version, weight in weights.items())
        return responses.status(f'Traffic of model "{model}" is split: {shares}')

    def _canary(self, model: str, version: str, query: Mapping[str, str]) -> Response:
        rule = canary.CanaryRule(
            max_error_rate=number_of(query, "max_error_rate", canary.MAX_ERROR_RATE),
            max_latency_ratio=number_of(query, "max_latency_ratio", canary.MAX_LATENCY_RATIO),
            min_requests=parse_int(query.get("min_requests"), canary.MIN_REQUESTS),
            promote_after=parse_int(query.get("promote_after"), 0),
            max_disagreement=number_of(query, "max_disagreement", 0.0) if "max_disagreement" in query else None,
            max_difference=number_of(query, "max_difference", 0.0) if "max_difference" in query else None,
        )
        weight = number_of(query, "weight", 10.0) / 100
        self._traffic.begin_canary(model, version, weight, rule)
        return responses.status(f'Version "{version}" is a canary of model "{model}" with {weight:.3g} of its requests')

    async def _unregister(self, model: str, version: str | None) -> Response:
        """Without a version: the default, which has to be the last."""
        version = version or self._models.default(model)
        source = self._models.find(model, version).source
        await self._fleet.retire(model, version)
        if not any(one.source == source for one in self._models.all()):
            self._forget(source)
        return responses.status(f'Model "{model}" unregistered')

    def _renew(self, keys: Keys, kind: str) -> Response:
        if kind not in ("management", "inference"):
            raise RequestError(f"type is to be management or inference, got '{kind[:32]}'")
        keys.renew("management" if kind == "management" else "inference")
        return reply(200, b"\n")

    def _list(self, query: Mapping[str, str]) -> Response:
        defaults = {name: self._models.find(name, self._models.default(name)) for name in self._models.names()}
        listed = sorted(name for name, one in defaults.items() if one.source or not one.workflow)  # no functions
        page, names = responses.page(listed, query)
        page["models"] = [{"modelName": name, "modelUrl": redact_uri(defaults[name].source)} for name in names]
        return reply(200, pretty(page))

    def _describe(self, model: str, version: str | None, query: Mapping[str, str]) -> Response | Work:
        names = self._models.versions(model) if version == "all" else [version or self._models.default(model)]
        versions = [self._models.find(model, name) for name in names]
        if query.get("customized", "false").lower() == "true":
            return self._describe_by_handlers(versions)
        return reply(200, pretty([describe_version(one) for one in versions]))

    async def _describe_by_handlers(self, versions: list[Servable]) -> Response:
        """The descriptions, with what each archive's handler adds to its own, if it has a worker."""
        descriptions = []
        for one in versions:
            facts = describe_version(one)
            if one.handler is not None and one.state == "ready" and one.policy.lanes:
                headers = {"describe": "True", "explain": "False"}
                request = HandlerRequest(request_id="describe", parts=[], headers=headers)
                answer = await one.handler.handle(request, alone=True, loose=True)
                body = answer.body if answer.pieces is None else await answer.pieces.whole()
                facts["customizedMetadata"] = _decode(body)
            descriptions.append(facts)
        return reply(200, pretty(descriptions))


def _decode(body: bytes | bytearray) -> Any:
    """JSON as its value, else the text."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return bytes(body).decode("utf-8", "replace")
