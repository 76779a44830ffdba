"""TorchServe's management API: register, scale, set the default, list, describe, unregister. Only translates.

Source: TorchServe 0.12's ManagementRequestHandler, as the contract page has it. Of a sealed bundle `handler` and
`s3_sse_kms` have nothing to say, and a worker is one of the runs that may go on at the same time; of a model archive a
worker is a process. Beyond TorchServe: `PUT /models/{m}/split?1=90&2=10`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import msgspec

from trueline import events
from trueline.errors import MethodNotAllowed, NotFound, RequestError
from trueline.serve.handlers.response import reply
from trueline.serve.handlers.version import HandlerVersion
from trueline.serve.handlers.worker import Ask
from trueline.serve.metrics import dashboard
from trueline.serve.models.catalog import UnknownVersion
from trueline.serve.models.controller import Fleet, Found, How
from trueline.serve.models.model_store import Store, check_name
from trueline.serve.models.version import Version
from trueline.serve.protocols import openapi
from trueline.serve.protocols.errors import NO_METHOD, NO_RESOURCE
from trueline.serve.traffic import canary
from trueline.serve.traffic.rollout import Traffic
from trueline.torchserve import responses
from trueline.torchserve.responses import whole
from trueline.torchserve.workflows import rest as workflow_face
from trueline.torchserve.workflows.registry import Workflows
from trueline.web.auth import Keys
from trueline.web.messages import Request, Response, query_of

Find = Callable[[str], Awaitable[Found]]
_OF_ARCHIVES = frozenset(
    {"handler", "initial_workers", "batch_size", "max_batch_delay", "response_timeout", "startup_timeout"}
)
"""Parameters of a registration that say how an archive's handler is run."""


@dataclass(frozen=True, slots=True)
class _Later:
    """An act that takes its time."""

    work: Coroutine[Any, Any, Response]


class _Negative(RequestError):
    """Fewer workers than none; to TorchServe a failure of its own."""

    code = "negative_workers"

    def __init__(self, message: str, *, strict: bool) -> None:
        super().__init__(message)
        self.status = 500 if strict else 400


class Management:
    """The App of the management port."""

    def __init__(
        self,
        fleet: Fleet,
        store: Store | None,
        find: Find,
        loop: asyncio.AbstractEventLoop,
        keys: Keys | None = None,
        workflows: Workflows | None = None,
        *,
        strict: bool = False,
    ) -> None:
        """`find` turns a source that the operator allows into a bundle's place; `keys` are what /token renews;
        `workflows` are managed too, if there are any to be; `strict`: TorchServe's statuses also where ours are better.
        """
        self._strict = strict
        self._workflows = workflows
        self._keys = keys
        self._traffic = Traffic(fleet, loop)
        self._fleet = fleet
        self._models = fleet.models
        self._store = store
        self._find = find
        self._loop = loop
        self._loading: set[asyncio.Task[Version]] = set()
        """Registrations that were answered before their end."""

    def answer(self, request: Request) -> Response | asyncio.Future[Response]:
        """The answer, now or later. Never raises."""
        try:
            found = self._route(request)
        except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails, never the server
            return self._failed(request, error)
        if isinstance(found, Response):
            return found
        return self._loop.create_task(self._guarded(request, found.work))

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The answer for a request that could not be received."""
        return responses.refusal(status, message)

    async def _guarded(self, request: Request, work: Coroutine[Any, Any, Response]) -> Response:
        try:
            return await asyncio.shield(asyncio.ensure_future(work))  # a client that goes away undoes nothing
        except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails, never the server
            return self._failed(request, error)

    def _failed(self, request: Request, error: Exception) -> Response:
        if isinstance(error, UnknownVersion):
            message = f"Model version {error.version} does not exist for model {error.model}"
            return responses.refusal(404, message, kind="ModelVersionNotFoundException")
        if isinstance(error, RequestError):
            return responses.error(error, strict=self._strict)
        return responses.unexpected(request.path, error)

    def _route(self, request: Request) -> Response | _Later:
        query = query_of(request.target)
        parts = request.path.split("/")[1:]
        match request.method, parts:
            case "POST", ["models"]:
                return self._register(query | _json(request))
            case "GET" | "HEAD", ["models"]:
                return self._list(query)
            case "GET" | "HEAD", ["models", model]:
                return self._describe(model, None, query)
            case "GET" | "HEAD", ["models", model, version] if version != "traffic":
                return self._describe(model, version, query)
            case "PUT", ["models", model]:
                return self._scale(model, self._models.default(model), query, named=False)
            case "PUT", ["models", model, "split"]:
                return self._split(model, query)
            case "GET" | "HEAD", ["models", model, "traffic"]:
                return reply(200, responses.pretty(self._traffic.facts(model)))
            case "PUT", ["models", model, version, "canary"]:
                return self._canary(model, version, query)
            case "DELETE", ["models", model, "canary"]:
                self._traffic.end_canary(model)
                return responses.status(f'Canary of model "{model}" ended')
            case "PUT", ["models", model, version, "shadow"]:
                self._traffic.set_shadow(model, version)
                return responses.status(f'Version "{version}" shadows model "{model}"')
            case "DELETE", ["models", model, "shadow"]:
                self._traffic.end_shadow(model)
                return responses.status(f'Shadow of model "{model}" ended')
            case "PUT", ["models", model, version]:
                return self._scale(model, version, query, named=True)
            case "PUT", ["models", model, version, "set-default"]:
                return self._set_default(model, version)
            case "DELETE", ["models", model]:
                return _Later(self._unregister(model, None))
            case "DELETE", ["models", model, version]:
                return _Later(self._unregister(model, version))
            case method, ["workflows", *rest] if self._workflows is not None:
                return self._of_workflows(self._workflows, request, method, rest)
            case "GET" | "HEAD", ["v1", "models", model]:
                ready = self._models.find(model).state == "ready"
                return reply(200, responses.pretty({"name": model, "ready": ready}))
            case "GET", ["token"] if self._keys is not None:
                return self._renew(self._keys, query.get("type", ""))
            case ("OPTIONS", [""]) | ("GET" | "HEAD", ["openapi.json"] | ["api-description"]):
                told = openapi.management(metadata.version("trueline"), workflows=self._workflows is not None)
                return reply(200, responses.pretty(told))
            case "GET" | "HEAD", ["try"]:
                return dashboard.try_page()
            case "OPTIONS", ["models", model]:
                told = openapi.of_model(self._models.find(model), metadata.version("trueline"))
                return reply(200, responses.pretty(told))
            case "GET" | "HEAD" | "POST", ["ping"]:
                return responses.status("Healthy")
            case _, ["models", *_]:
                raise MethodNotAllowed(NO_METHOD)
            case _:
                raise NotFound(NO_RESOURCE)

    def _of_workflows(self, workflows: Workflows, request: Request, method: str, rest: list[str]) -> Response | _Later:
        match method, rest:
            case "POST", []:
                return _Later(workflow_face.register(workflows, query_of(request.target) | _json(request)))
            case "GET" | "HEAD", []:
                return workflow_face.listed(workflows, query_of(request.target))
            case "GET" | "HEAD", [name]:
                return workflow_face.described(workflows, name)
            case "DELETE", [name]:
                return _Later(workflow_face.unregister(workflows, name))
            case _:
                raise MethodNotAllowed(NO_METHOD)

    # acts

    def _register(self, given: Mapping[str, str]) -> _Later:
        url = given.get("url")
        if url is None:
            raise RequestError("Parameter url is required.")
        if not url:
            raise NotFound("empty url")
        return _Later(self._registered(url, given))

    async def _registered(self, url: str, given: Mapping[str, str]) -> Response:
        found = await self._find(url)
        entry = self._entry(url)
        model = check_name("model", given.get("model_name") or found.name or (entry[0] if entry else ""))
        version = check_name("version", given.get("model_version") or found.version or (entry[1] if entry else "1"))
        runtime = given.get("runtime") or "python"
        if runtime not in ("python", "python2", "python3"):
            raise RequestError(f"Invalid RuntimeType value: {runtime[:32]}")
        workers = whole(given.get("initial_workers"), 0)
        delay_s = whole(given["max_batch_delay"], 0) / 1e3 if "max_batch_delay" in given else None
        how = How(max_batch=max(1, whole(given.get("batch_size"), 64)), max_delay_s=delay_s, workers=workers)
        told = {name: value for name, value in given.items() if name in _OF_ARCHIVES}
        how = replace(how, max_queue=self._fleet.how.max_queue, way=self._fleet.how.way, given=told)
        waits = given.get("synchronous", "").lower() != "false"
        loading = self._loop.create_task(self._fleet.load(found, model, version, source=url, how=how))
        if self._strict and workers and not waits and not await self._is_over(loading):
            return responses.status("Processing worker updates...", 202)
        made = await loading
        workers = made.policy.lanes if isinstance(made, HandlerVersion) else workers
        text = f'Model "{model}" Version: {version} registered with {workers} initial workers'
        if not workers:
            text += ". Use scale workers API to add workers for the model."
        elif not waits:  # they are ready nevertheless: what failed was said
            return responses.status("Processing worker updates...", 202)
        return responses.status(text)

    async def _is_over(self, loading: asyncio.Task[Version]) -> bool:
        """Whether there is no more to wait for, as for a name that is taken; else it goes on, and its end is logged."""
        await asyncio.sleep(0)  # it begins with what can be refused at once
        if loading.done():
            return True
        self._loading.add(loading)
        loading.add_done_callback(self._loaded)
        return False

    def _loaded(self, loading: asyncio.Task[Version]) -> None:
        self._loading.discard(loading)
        error = None if loading.cancelled() else loading.exception()
        if error is not None:
            events.emit("registration.failed", why=str(error))

    def _entry(self, url: str) -> tuple[str, str] | None:
        entries = self._store.entries() if self._store is not None else []
        return next(((one.model, one.version) for one in entries if one.source == url), None)

    def _scale(self, model: str, version: str, query: Mapping[str, str], *, named: bool) -> Response | _Later:
        least = whole(query.get("min_worker"), 1)
        most = whole(query.get("max_worker"), least)
        if least < 0 or most < 0:
            raise _Negative(f"min_worker and max_worker are 0 or more; got {least} and {most}", strict=self._strict)
        if most < least:
            raise RequestError("max_worker cannot be less than min_worker.")
        workers = self._fleet.scale(model, version, most)
        if query.get("synchronous", "false").lower() != "true":
            return responses.status("Processing worker updates...", 202)
        return _Later(self._scaled(model, version, workers, named=named))

    async def _scaled(self, model: str, version: str, workers: int, *, named: bool) -> Response:
        await self._models.find(model, version).settled()
        which = f", version: {version}" if named else ""
        return responses.status(f"Workers scaled to {workers} for model: {model}{which}")

    def _split(self, model: str, query: Mapping[str, str]) -> Response:
        try:
            weights = {version: float(weight) for version, weight in query.items()}
        except ValueError as error:
            raise RequestError(f"weights are numbers by version, as in ?1=90&2=10; got {dict(query)}") from error
        if not weights:
            raise RequestError("name the versions and their weights, as in ?1=90&2=10")
        self._fleet.set_split(model, weights)
        told = ", ".join(f"{version}: {weight:g}" for version, weight in weights.items())
        return responses.status(f'Traffic of model "{model}" is split: {told}')

    def _canary(self, model: str, version: str, query: Mapping[str, str]) -> Response:
        rule = canary.Rule(
            max_error_rate=_number(query, "max_error_rate", canary.MAX_ERROR_RATE),
            max_latency_ratio=_number(query, "max_latency_ratio", canary.MAX_LATENCY_RATIO),
            min_requests=whole(query.get("min_requests"), canary.MIN_REQUESTS),
            promote_after=whole(query.get("promote_after"), 0),
        )
        weight = _number(query, "weight", 10.0) / 100
        self._traffic.begin_canary(model, version, weight, rule)
        return responses.status(f'Version "{version}" is a canary of model "{model}" with {weight:.3g} of its requests')

    def _set_default(self, model: str, version: str) -> Response:
        self._fleet.set_default(model, version)
        return responses.status(f'Default version successfully updated for model "{model}" to "{version}"')

    async def _unregister(self, model: str, version: str | None) -> Response:
        await self._fleet.retire(model, version)
        return responses.status(f'Model "{model}" unregistered')

    def _renew(self, keys: Keys, kind: str) -> Response:
        if kind not in ("management", "inference"):
            raise RequestError(f"type is to be management or inference, got '{kind[:32]}'")
        keys.renew("management" if kind == "management" else "inference")
        return reply(200, b"\n")

    # reading

    def _list(self, query: Mapping[str, str]) -> Response:
        defaults = {name: self._models.find(name, self._models.default(name)) for name in self._models.names()}
        shown = sorted(name for name, one in defaults.items() if one.source or not one.workflow)  # functions are none
        page, names = responses.page(shown, query)
        page["models"] = [{"modelName": name, "modelUrl": defaults[name].source} for name in names]
        return reply(200, responses.pretty(page))

    def _describe(self, model: str, version: str | None, query: Mapping[str, str]) -> Response | _Later:
        if version == "all":
            names = self._models.versions(model)
        else:
            names = [version or self._models.default(model)]
        versions = [self._models.find(model, name) for name in names]
        if query.get("customized", "false").lower() == "true":
            return _Later(self._customized(versions))
        return reply(200, responses.pretty([self._described(one) for one in versions]))

    async def _customized(self, versions: list[Version]) -> Response:
        """The description, with what each archive's handler says of itself, if it has a worker to say it."""
        told = []
        for one in versions:
            facts = self._described(one)
            if isinstance(one, HandlerVersion) and one.state == "ready" and one.policy.lanes:
                asked = Ask(request_id="describe", parts=[], headers={"describe": "True", "explain": "False"})
                answer = await one.handle(asked, alone=True, loose=True)
                said = answer.body if answer.pieces is None else await answer.pieces.whole()
                facts["customizedMetadata"] = _read(said)
            told.append(facts)
        return reply(200, responses.pretty(told))

    def _described(self, version: Version) -> dict[str, Any]:
        found: dict[str, Any] = {
            "modelName": version.model,
            "modelVersion": version.version,
            "modelUrl": version.source,
            "runtime": "trueline",
            "minWorkers": 0,
            "maxWorkers": 0,
            "batchSize": 1,
            "maxBatchDelay": 0,
            "responseTimeout": 120,
            "startupTimeout": 120,
            "maxRetryTimeoutInSec": 300,
            "clientTimeoutInMills": 0,
            "parallelType": "",
            "parallelLevel": 0,
            "deviceType": "cpu",
            "continuousBatching": False,
            "useJobTicket": False,
            "useVenv": False,
            "stateful": False,
            "sequenceMaxIdleMSec": 0,
            "sequenceTimeoutMSec": 0,
            "maxNumSequence": 1,
            "maxSequenceJobQueueSize": 1,
            "loadedAtStartup": version.at_start,
            "workers": [],
            "jobQueueStatus": {"remainingCapacity": 0, "pendingRequests": version.num_waiting},
        }
        if version.state != "ready":
            return found | {"state": version.state, "reason": version.reason}
        policy = version.policy
        started = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(version.since))
        found |= {
            "minWorkers": policy.lanes,
            "maxWorkers": policy.lanes,
            "batchSize": policy.max_batch if policy.batch else 1,
            "maxBatchDelay": round((policy.max_delay_s or 0.0) * 1000),
            "workers": [
                {
                    "id": str(9000 + i),
                    "startTime": started,
                    "status": "READY",
                    "memoryUsage": 0,
                    "pid": os.getpid(),
                    "gpu": False,
                    "gpuUsage": "N/A",
                }
                for i in range(policy.lanes)
            ],
        }
        found["jobQueueStatus"]["remainingCapacity"] = policy.max_requests - version.num_waiting
        return found | version.described() if isinstance(version, HandlerVersion) else found


def _read(body: bytes | bytearray) -> Any:
    """JSON as its value, else the text."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return bytes(body).decode("utf-8", "replace")


def _json(request: Request) -> dict[str, str]:
    """The same parameters as a JSON body; what is no JSON says nothing, as in TorchServe."""
    if b"json" not in request.headers.get(b"content-type", b"").lower() or not request.body:
        return {}
    try:
        found = msgspec.json.decode(request.body, type=dict[str, str | int | bool | float | None])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no JSON object of parameters: {error}") from error
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in found.items()}


def _number(query: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(query.get(name, default))
    except ValueError as error:
        raise RequestError(f"{name} is a number, got '{query[name][:32]}'") from error
