"""The REST paths of the Open Inference Protocol: /v2 with Triton's extensions, and KServe's V1 in /v1.

Source of the repository paths: Triton's page extension_model_repository.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from trueline.errors import NotFound, RequestError, TooLarge
from trueline.serve.fastpath.fast_path import OCTETS, InferFastPath, InferHead
from trueline.serve.models.controller import Fleet
from trueline.serve.models.loader import ResolvedSource
from trueline.serve.models.sources import Entry, Store, check_name
from trueline.serve.offload.process import LONG_BYTES
from trueline.serve.protocols import predict
from trueline.serve.protocols.dispatch import Dispatch, Method, allow, check_media, json, key_of
from trueline.serve.protocols.oip import triton
from trueline.serve.tensors import arrays, codec
from trueline.serve.tensors.bounds import decode_within
from trueline.web.body import Body
from trueline.web.messages import Request, Response

if TYPE_CHECKING:
    from trueline.serve.models.servable import Outputs, Servable
    from trueline.serve.protocols.dispatch import Answer, RouteHandler


SHORT_BYTES = 256 * 2**10
"""Of a body without tensors."""


class InferPaths:
    """Answers `/v2/models/{m}[/versions/{v}]/infer`."""

    def __init__(self, dispatch: Dispatch, fast_path: InferFastPath) -> None:
        self._dispatch = dispatch
        self._models = dispatch.models
        self._fast_path = fast_path

    def answer(self, request: Request, model: str, version: str | None) -> Answer:
        """Raises RequestError, NotFound."""
        head = self._fast_path.find_head(request) or self._read_head(request, model, version)
        began = perf_counter()
        if head.json_bytes is not None and head.json_bytes > len(request.body):
            head = self._read_head(request, model, version)  # which rejects it
        servable = self._models.find(head.model, head.version, key_of(request))
        if servable.handler is not None:
            return self._dispatch.handle(request, servable, servable.handler)
        if servable.full:
            refused = self._dispatch.refuse_if_full(servable, head.priority, request.body, head.json_bytes)
            if refused is not None:
                self._fast_path.learn_refusal(head, servable.program, *refused)
                return refused[1]

        def ask(call: codec.InferCall) -> Answer:
            priority = head.priority if call.priority is None else call.priority
            encode = partial(self._encode, servable, call, request)
            return self._dispatch.ask(request, servable, call.inputs, call.timeout_s, encode, began, priority)

        size = len(request.body) if head.json_bytes is None else head.json_bytes
        args = (servable.program.signature, head.json_bytes, servable.program.bounds)
        body = request.body
        if size > LONG_BYTES:
            return self._dispatch.decode(request, ask, codec.decode, *args, json_bytes=head.json_bytes)
        if isinstance(body, memoryview):  # long for its raw tensors, which are not copied
            return ask(codec.decode(body, *args))
        return ask(servable.program.templates.decode(body, head.json_bytes))

    def _read_head(self, request: Request, model: str, version: str | None) -> InferHead:
        """What the request's head says; it is cached with the head, unless a handler answers."""
        if request.method != "POST":
            self._models.find(model, version)
            raise Method("Method Not Allowed", ("POST",))
        if self._models.find(model, version, key_of(request)).handler is not None:
            return InferHead(model, version)
        check_media(request)
        length = request.headers.get(arrays.LENGTH_HEADER)
        json_bytes = None if length is None else arrays.header_length(length, len(request.body))
        made = InferHead(model, version, json_bytes, request.headers.get(codec.PRIORITY_HEADER))
        self._fast_path.keep_head(request, made)
        return made

    def _encode(self, version: Servable, call: codec.InferCall, request: Request, outputs: Outputs) -> Answer:
        self._fast_path.learn(request, version.program, call, outputs)
        if call.binary:
            return _wrap(codec.encode(version.model, version.version, call, outputs))
        args = (version.model, version.version, call.of({}), outputs)
        return self._dispatch.encode(request.path, outputs, _wrap, codec.encode, *args)


def _wrap(made: codec.Encoded) -> Response:
    if made.json_bytes is None:
        return Response(200, made.body)
    return Response(200, made.body, OCTETS, b"inference-header-content-length: %d\r\n" % made.json_bytes)


def infer_of(parts: list[str]) -> tuple[str, str | None] | None:
    """Model and version of an infer path; None for another path."""
    match parts:
        case ["v2", "models", model, "infer"]:
            return model, None
        case ["v2", "models", model, "versions", version, "infer"]:
            return model, version
    return None


class OipRoutes:
    """The route table."""

    def __init__(self, dispatch: Dispatch, *, server_version: str, loader: Repository | None) -> None:
        """`loader` loads and unloads models."""
        self._dispatch = dispatch
        self._models = dispatch.models
        self._server_version = server_version
        self._loader = loader

    def match(self, parts: list[str]) -> RouteHandler | None:
        """The handler of a path under /v2 or /v1/models."""
        match parts:
            case ["v2", *rest]:
                return lambda request: self._v2(request, rest)
            case ["v1", "models", *rest]:
                return lambda request: self._v1(request, rest)
            case _:
                return None

    def _v2(self, request: Request, rest: list[str]) -> Answer:
        page: Callable[[], Response]
        match rest:
            case ["repository", "models", model, "load" | "unload" as act]:
                return self._repository_act(request, model, act)
            case ["repository", "index"]:
                return self._index(request)
            case ["systemsharedmemory" | "cudasharedmemory", *_]:
                raise NotFound(f"shared-memory regions are not supported; {codec.NO_REGIONS}")
            case ["models", model, "explain"]:
                return self._dispatch.explain(request, model)
            case [] | [""]:
                body = {"name": "trueline", "version": self._server_version, "extensions": list(triton.EXTENSIONS)}
                page = lambda: json(200, body)  # noqa: E731
            case ["health", "live"]:
                page = lambda: json(200, {"live": True})  # noqa: E731
            case ["health", "ready"]:
                ready = self._dispatch.ready
                page = lambda: json(200 if ready else 503, {"ready": ready})  # noqa: E731
            case ["models", "stats"]:
                page = lambda: json(200, triton.statistics(self._models, None, None))  # noqa: E731
            case ["models", model, "versions", version]:
                page = self._model_page(model, version)
            case ["models", model, "versions", version, about]:
                page = self._model_page(model, version, about)
            case ["models", model, *about] if len(about) <= 1:
                page = self._model_page(model, None, *about)
            case _:
                raise NotFound("Not Found")
        allow(request, ("GET", "HEAD"), "Method Not Allowed")
        return page()

    def _model_page(self, model: str, version: str | None, about: str | None = None) -> Callable[[], Response]:
        models = self._models
        match about:
            case None:
                return lambda: json(200, triton.describe(models.find(model, version), models.versions(model)))
            case "ready":
                return lambda: self._model_ready(model, version)
            case "stats":
                return lambda: json(200, triton.statistics(models, model, version))
            case "config":
                return lambda: json(200, triton.configuration(models.find(model, version)))
        raise NotFound("Not Found")

    def _model_ready(self, model: str, version: str | None) -> Response:
        why = self._dispatch.obstacle(model, version)
        body: dict[str, object] = {"name": model, "version": version or self._models.default(model), "ready": not why}
        return json(503, body | {"reason": why}) if why else json(200, body)

    def _index(self, request: Request) -> Response:
        allow(request, ("POST",), "Method Not Allowed")
        _check_short(request)
        try:
            options = msgspec.json.decode(request.body or b"{}", type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"the body is no index request: {error}") from error
        return json(200, triton.index(self._models.all(), ready_only=options.get("ready") is True))

    def _repository_act(self, request: Request, model: str, act: str) -> Answer:
        allow(request, ("POST",), "Method Not Allowed")
        _check_short(request)
        given = _parameters(request.body)
        work = self.repository.load(model, given) if act == "load" else self.repository.unload(model)
        return self._dispatch.respond(request.path, work, lambda response: response)

    @property
    def repository(self) -> Repository:
        """Loads and unloads models. Raises NotFound."""
        if self._loader is None:
            raise NotFound("this server has no model store to load from; start it with --model-store")
        return self._loader

    def _v1(self, request: Request, rest: list[str]) -> Answer:
        match rest:
            case [] | [""]:
                allow(request, ("GET", "HEAD"), "Method Not Allowed")
                return json(200, {"models": self._models.names()})
            case [action] if action.endswith(":predict"):
                return self._v1_predict(request, action.removesuffix(":predict"))
            case [action] if action.endswith(":explain"):
                return self._dispatch.explain(request, action.removesuffix(":explain"))
            case [model]:
                allow(request, ("GET", "HEAD"), "Method Not Allowed")
                ready = not self._dispatch.obstacle(model)
                return json(200 if ready else 503, {"name": model, "ready": ready})
            case _:
                raise NotFound("Not Found")

    def _v1_predict(self, request: Request, model: str) -> Answer:
        began = perf_counter()
        allow(request, ("POST",), "Method Not Allowed")
        servable = self._dispatch.find(request, model, None)
        if servable.handler is not None:
            return self._dispatch.handle(request, servable, servable.handler)
        check_media(request)
        self._dispatch.check_room(request, servable)
        if servable.program.columns is not None:
            return self._dispatch.answer_records(request, servable, began, wraps=True)
        priority = request.headers.get(codec.PRIORITY_HEADER)

        def ask(call: predict.PredictBatch) -> Answer:
            def encode(outputs: Outputs) -> Answer:
                wrap = partial(Response, 200)
                return self._dispatch.encode(request.path, outputs, wrap, predict.encode, outputs, call)

            return self._dispatch.ask(request, servable, call.inputs, None, encode, began, priority)

        program = servable.program
        return self._dispatch.decode(request, ask, decode_within, program.bounds, predict.decode_v1, program.signature)


class Repository:
    """Loads models from a store and unloads them."""

    def __init__(self, fleet: Fleet, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._fleet = fleet
        self._store = store
        self._loop = loop

    def load(self, model: str, given: Mapping[str, object]) -> asyncio.Future[Response]:
        """Serves the store's newest version; older versions are retired after their last request.

        Raises RequestError for parameters that a sealed bundle does not allow, NotFound.
        """
        if given:
            raise RequestError(
                f"parameter '{next(iter(given))[:64]}' is not supported: bundles are served as they were sealed"
            )
        check_name("model", model)
        entries = self._store.of(model)
        if not entries:
            raise NotFound(f"failed to load '{model}', the model store has no such model")
        return self._start(self._load(model, entries[-1]))

    async def _load(self, model: str, entry: Entry) -> Response:
        models = self._fleet.models
        older = [one for one in models.versions(model) if one != entry.version] if model in models.names() else []
        await self._fleet.load(
            ResolvedSource(path=entry.path), model, entry.version, source=entry.source, replace_it=True
        )
        await self._fleet.make_default(model, entry.version)
        for version in older:
            with suppress(NotFound):  # this process follows another one, which has retired it already
                await self._fleet.retire(model, version)
        return Response(200, b"")

    def unload(self, model: str) -> asyncio.Future[Response]:
        """Raises NotFound."""
        self._fleet.models.find(model)
        return self._start(self._unload(model))

    async def _unload(self, model: str) -> Response:
        await self._fleet.retire(model)
        return Response(200, b"")

    def _start(self, work: Coroutine[Any, Any, Response]) -> asyncio.Future[Response]:
        """Continues when the client leaves."""
        return asyncio.shield(self._loop.create_task(work))


class _Parameters(msgspec.Struct):
    parameters: dict[str, Any] = {}


def _check_short(request: Request) -> None:
    """Raises TooLarge: a request without tensors needs no long body, and it is read on the loop."""
    size = len(request.body)
    if size > SHORT_BYTES:
        raise TooLarge(f"the body has {size} bytes, a request without tensors has at most {SHORT_BYTES}")


def _parameters(body: Body) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=_Parameters).parameters if body else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no repository request: {error}") from error
