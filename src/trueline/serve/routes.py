"""Which path is answered how: the Open Inference Protocol under /v2, KServe's older one under /v1, TorchServe's routes
beside them, and /metrics.

A request is answered at once where that is possible, else by a future. Everything that goes wrong ends here: a client's
fault is a 4xx in the shape of the face that was asked, ours is a 5xx that says nothing of our insides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache, lru_cache, partial
from importlib import metadata
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

import msgspec

from trueline.errors import NotFound, Overloaded, RequestError
from trueline.serve import (
    binary,
    coding,
    dashboard,
    extensions,
    metrics,
    oip,
    openapi,
    repository,
    torchserve,
    v1,
)
from trueline.serve.again import OCTETS, Again, learn
from trueline.serve.asking import PRIORITY_HEADER, Asking, json, key_of
from trueline.serve.handlers.version import HandlerVersion
from trueline.serve.http import Later, Request, Response, query_all
from trueline.serve.limits import Limits
from trueline.serve.models import Models
from trueline.serve.refusals import Method, allow, check_media, face_of
from trueline.serve.repository import Repository
from trueline.serve.stats import ServerStats
from trueline.serve.torchserve_paths import TorchServePaths

if TYPE_CHECKING:
    from trueline.serve.asking import Answer
    from trueline.serve.models import Outputs, Version
    from trueline.serve.workflows.register import Workflows


class Routes:
    """The App of the HTTP server."""

    def __init__(
        self,
        models: Models,
        loop: asyncio.AbstractEventLoop,
        *,
        body_bytes: int = Limits().body_bytes,
        loader: Repository | None = None,
        workflows: Workflows | None = None,
        strict: bool = False,
    ) -> None:
        """`body_bytes` bounds what a compressed body may open into; `loader` loads and unloads, if there is one;
        `workflows` are asked too; with `strict` TorchServe's routes answer with its statuses also where ours are
        better.
        """
        self.models = models
        self.stats = ServerStats()
        self.draining = False
        self.asking = Asking(models, loop, self.stats, workflows=workflows, strict=strict)
        self._torchserve = TorchServePaths(self.asking)
        self._repository = loader
        self._strict = strict
        self._body_bytes = body_bytes
        self._loop = loop
        self._collector = metrics.Collector(models, self.stats)

    # what the connections call

    def answer(self, request: Request) -> Answer | Later:
        """The answer, now or later. Never raises."""
        head = request.head
        if head is not None:
            asks = head.asks
            if type(asks) is _Infer and asks.again is not None:
                known = asks.again.answer(request, self.long_way)
                if known is not None:
                    if type(known) is Response:
                        self.stats.by_status[200] += 1
                    return known
        return self.long_way(request)

    def long_way(self, request: Request) -> Answer:
        """The same, whatever has been learned of such requests. Never raises."""
        head = request.head
        found: Answer
        try:
            if head is not None and type(head.asks) is _Infer:
                asks = head.asks
                if asks.shut is not None and asks.shut.stands(self.models, request.body):
                    found = asks.shut.answer
                else:
                    found = self._infer(request, asks)
            else:
                found = self._route(request)
        except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails, never the server
            found = self.asking.error(request.path, error)
        if isinstance(found, Response):
            self.stats.by_status[found.status] += 1
        return found

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The answer for a request that could not be received."""
        self.stats.by_status[status] += 1
        if face_of(path) == "oip" or not path:
            return json(status, {"error": message})
        return torchserve.refusal(status, message)

    # paths

    def _route(self, request: Request) -> Answer:
        if b"content-encoding" in request.headers:
            return self._opened(request)
        path = request.path
        asked = _infer_of_short(path) if len(path) <= _SHORT else _infer_of(path)
        if asked is not None:
            return self._first_infer(request, *asked)
        parts = path.split("/")
        match parts[1:]:
            case ["predictions", model] if request.method == "OPTIONS":
                return json(200, openapi.of_model(self.models.find(model), _version()))
            case ["predictions", *_]:
                return self._torchserve.answer(request, parts[1:])
            case ["v1", "models", *rest]:
                return self._v1(request, rest)
            case ["v2", *rest]:
                return self._oip(request, rest)
            case ["metrics"]:
                allow(request, ("GET", "HEAD"), torchserve.NO_METHOD)
                return self._metrics(request)
            case ["dashboard", *rest] if rest in ([], ["state"]):
                allow(request, ("GET", "HEAD"), torchserve.NO_METHOD)
                return dashboard.answer(self.models, self.stats, time()) if rest else dashboard.page()
            case ["try"]:
                allow(request, ("GET", "HEAD"), torchserve.NO_METHOD)
                return dashboard.try_page()
            case ["openapi.json"] | ["api-description"]:
                allow(request, ("GET", "HEAD"), torchserve.NO_METHOD)
                return json(200, self._document())
            case [""] if request.method == "OPTIONS":
                return json(200, self._document())
            case [""] if request.method in ("GET", "HEAD") and not self._strict:
                return json(200, {"status": "alive"})  # KServe's V1: its SDK asks here whether a server lives
            case [""]:
                raise Method(torchserve.NO_METHOD, ("OPTIONS",) if self._strict else ("OPTIONS", "GET", "HEAD"))
            case _:
                return self._torchserve.answer(request, parts[1:])

    def _document(self) -> openapi.Document:
        workflows = self.asking.workflows
        return openapi.data_plane(self.models.all(), _version(), workflows.names() if workflows is not None else ())

    def _opened(self, request: Request) -> Answer:
        """The answer to a request whose body is compressed; a large one is opened in a thread."""
        name = request.headers[b"content-encoding"].decode("latin-1").lower()
        request.headers = {key: value for key, value in request.headers.items() if key != b"content-encoding"}
        request.head = None
        if name == "identity":
            return self._route(request)
        coding.check(name)
        if len(request.body) <= coding.IN_THREAD_BYTES:
            request.body = coding.opened(request.body, name, self._body_bytes)
            return self._route(request)
        answer: asyncio.Future[Response] = self._loop.create_future()
        opening = self._loop.run_in_executor(None, coding.opened, request.body, name, self._body_bytes)

        def done(found: asyncio.Future[bytes]) -> None:
            if answer.done():
                return
            try:
                request.body = found.result()
            except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails, never the server
                response = self.asking.error(request.path, error)
                self.stats.by_status[response.status] += 1
                answer.set_result(response)
                return
            self._pass_on(self.long_way(request), answer)

        opening.add_done_callback(done)
        return answer

    @staticmethod
    def _pass_on(found: Answer, answer: asyncio.Future[Response]) -> None:
        if isinstance(found, Response):
            answer.set_result(found)
            return

        def done(later: asyncio.Future[Response]) -> None:
            if not answer.done() and not later.cancelled():
                answer.set_result(later.result())

        found.add_done_callback(done)
        answer.add_done_callback(lambda _: found.cancel())

    def _oip(self, request: Request, rest: list[str]) -> Answer:
        match rest:
            case ["repository", "models", model, "load" | "unload" as act]:
                return self._repository_act(request, model, act)
            case ["repository", "index"]:
                return self._index(request)
            case ["models", model, "explain"]:
                return self._torchserve.explain(request, model, None)
            case ["models", "stats"]:
                found = self._statistics(None, None)
            case ["models", model, "stats"]:
                found = self._statistics(model, None)
            case ["models", model, "versions", version, "stats"]:
                found = self._statistics(model, version)
            case ["models", model, "config"] | ["models", model, "versions", _, "config"] if len(rest) in (3, 5):
                found = self._configuration(model, rest[3] if len(rest) == 5 else None)
            case [] | [""]:
                found = self._server_metadata
            case ["health", "live"]:
                found = _live
            case ["health", "ready"]:
                found = self._server_ready
            case ["models", model]:
                found = self._metadata(model, None)
            case ["models", model, "versions", version]:
                found = self._metadata(model, version)
            case ["models", model, "ready"]:
                found = self._model_ready(model, None)
            case ["models", model, "versions", version, "ready"]:
                found = self._model_ready(model, version)
            case _:
                raise NotFound("Not Found")
        allow(request, ("GET", "HEAD"), "Method Not Allowed")
        return found()

    # the Open Inference Protocol

    def _server_metadata(self) -> Response:
        return json(200, {"name": "trueline", "version": _version(), "extensions": list(extensions.EXTENSIONS)})

    def _server_ready(self) -> Response:
        ready = self.models.ready and not self.draining
        return json(200 if ready else 503, {"ready": ready})

    def _model_ready(self, model: str, version: str | None) -> Callable[[], Response]:
        def answer() -> Response:
            found = self.models.find(model, version)
            ready = found.state == "ready" and not self.draining
            body: dict[str, object] = {"name": found.model, "version": found.version, "ready": ready}
            if not ready:
                body["reason"] = found.reason or ("draining" if self.draining else found.state)
            return json(200 if ready else 503, body)

        return answer

    def _metadata(self, model: str, version: str | None) -> Callable[[], Response]:
        def answer() -> Response:
            found = self.models.find(model, version)
            return json(200, extensions.describe(found, self.models.versions(model)))

        return answer

    def _statistics(self, model: str | None, version: str | None) -> Callable[[], Response]:
        def answer() -> Response:
            if model is None:
                found = self.models.all()
            elif version is None:
                found = [self.models.find(model, one) for one in self.models.versions(model)]
            else:
                found = [self.models.find(model, version)]
            return json(200, extensions.statistics(found))

        return answer

    def _configuration(self, model: str, version: str | None) -> Callable[[], Response]:
        return lambda: json(200, extensions.configuration(self.models.find(model, version)))

    def _index(self, request: Request) -> Response:
        allow(request, ("POST",), "Method Not Allowed")
        try:
            asked = msgspec.json.decode(request.body or b"{}", type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"the body is no index request: {error}") from error
        return json(200, extensions.index(self.models.all(), ready_only=asked.get("ready") is True))

    def _repository_act(self, request: Request, model: str, act: str) -> Answer:
        allow(request, ("POST",), "Method Not Allowed")
        given = repository.parameters(request.body)
        work = self.repository.load(model, given) if act == "load" else self.repository.unload(model)
        return self.asking.later(request.path, work, lambda found: found)

    @property
    def repository(self) -> Repository:
        """What loads and unloads. Raises NotFound."""
        if self._repository is None:
            raise NotFound("this server has no model store to load from; start it with --model-store")
        return self._repository

    def _first_infer(self, request: Request, model: str, version: str | None) -> Answer:
        """The answer to an infer request whose head is new; what it says is kept with the head."""
        if request.method != "POST":
            self.models.find(model, version)
            raise Method("Method Not Allowed", ("POST",))
        key = key_of(request)
        if isinstance(self.models.find(model, version, key), HandlerVersion):
            return self._infer(request, _Infer(model, version, key))
        check_media(request)
        length = request.headers.get(binary.LENGTH_HEADER)
        json_bytes = None if length is None else binary.header_length(length, len(request.body))
        asks = _Infer(model, version, key, json_bytes, request.headers.get(PRIORITY_HEADER))
        if request.head is not None:
            request.head.asks = asks
        return self._infer(request, asks)

    def _infer(self, request: Request, asks: _Infer) -> Answer:
        began = perf_counter()
        found = self.models.find(asks.model, asks.version, asks.key)
        if isinstance(found, HandlerVersion):
            return self.asking.handled(request, found)
        if found.full:
            refused = self.asking.refused(found, asks.priority, request.body, asks.json_bytes)
            if refused is not None:
                alone = self.models.split(asks.model) is None
                asks.shut = _Shut(found, self.models.changes, *refused, asks.json_bytes) if alone else None
                return refused[1]
        call = found.layouts.decode(request.body, asks.json_bytes)
        priority = asks.priority if call.priority is None else call.priority
        return self.asking.ask(
            request, found, call.inputs, call.timeout_s, partial(self._told, found, call, request), began, priority
        )

    def _told(self, version: Version, call: oip.Call, request: Request, outputs: Outputs) -> Response:
        """The answer; requests that say the same again are answered in few steps from now on, where that goes."""
        head = request.head
        if head is not None and type(head.asks) is _Infer and version.short is not None and version.short.open:
            self._learn(version, call, request.body, head.asks, outputs)
        return _told(version, call, outputs)

    def _learn(self, version: Version, call: oip.Call, body: bytes | bytearray, asks: _Infer, outputs: Outputs) -> None:
        models = self.models
        if asks.again is not None and not asks.again.stands:
            asks.again, asks.tries = None, 0
        if asks.again is not None or asks.tries >= _TRIES or asks.priority is not None:
            return
        asks.tries += 1
        layout = version.layout(body, asks.json_bytes)
        if layout is not None and version.short is not None and models.leads_to(version, asks.model, asks.version):
            names = version.model, version.version
            asks.again = learn(models, version.short, self.stats, *names, layout, call.inputs, outputs)

    # KServe's V1

    def _v1(self, request: Request, rest: list[str]) -> Answer:
        match rest:
            case [] | [""]:
                allow(request, ("GET", "HEAD"), "Method Not Allowed")
                return json(200, {"models": self.models.names()})
            case [called] if called.endswith(":predict"):
                return self._v1_predict(request, called.removesuffix(":predict"))
            case [called] if called.endswith(":explain"):
                return self._torchserve.explain(request, called.removesuffix(":explain"), None)
            case [model]:
                allow(request, ("GET", "HEAD"), "Method Not Allowed")
                ready = self.models.find(model).state == "ready" and not self.draining
                return json(200 if ready else 503, {"name": model, "ready": ready})
            case _:
                raise NotFound("Not Found")

    def _v1_predict(self, request: Request, model: str) -> Answer:
        began = perf_counter()
        allow(request, ("POST",), "Method Not Allowed")
        found = self.asking.find(request, model, None)
        if isinstance(found, HandlerVersion):
            return self.asking.handled(request, found)
        check_media(request)
        self.asking.check_room(request, found)
        call = v1.decode(request.body, found.signature)
        return self.asking.ask(
            request,
            found,
            call.inputs,
            None,
            lambda outputs: Response(200, v1.encode(outputs, call)),
            began,
            request.headers.get(PRIORITY_HEADER),
        )

    def _metrics(self, request: Request) -> Answer:
        names = query_all(request.target, "name[]")
        page = self._loop.run_in_executor(None, metrics.page, self._collector, names)
        return self.asking.later(request.path, page, lambda body: Response(200, body, metrics.CONTENT_TYPE))


class _Shut(msgspec.Struct, frozen=True):
    """The last refusal of requests that begin alike, by a full queue."""

    version: Version
    changes: int
    refused: Overloaded
    answer: Response
    json_bytes: int | None

    def stands(self, models: Models, body: bytes | bytearray) -> bool:
        """Whether a further request would come to the same: nothing has come or gone, in the queue or in `models`."""
        if self.changes != models.changes or not self.version.stands(self.refused):
            return False
        return body.find(b"priority", 0, self.json_bytes) < 0 and body.find(b"\\", 0, self.json_bytes) < 0


class _Infer(msgspec.Struct):
    """What the head of an infer request says."""

    model: str
    version: str | None
    key: str
    json_bytes: int | None = None
    """Of its body; None: all."""
    priority: bytes | None = None
    shut: _Shut | None = None
    again: Again | None = None
    """How those that say the same again are answered."""
    tries: int = 0
    """To find that out."""


def _told(version: Version, call: oip.Call, outputs: Outputs) -> Response:
    made = oip.encode(version.model, version.version, call, outputs)
    if made.json_bytes is None:
        return Response(200, made.body)
    return Response(200, made.body, OCTETS, b"inference-header-content-length: %d\r\n" % made.json_bytes)


def _infer_of(path: str) -> tuple[str, str | None] | None:
    """Model and version of a path that asks for an inference."""
    match path.split("/")[1:]:
        case ["v2", "models", model, "infer"]:
            return model, None
        case ["v2", "models", model, "versions", version, "infer"]:
            return model, version
    return None


_infer_of_short = lru_cache(maxsize=256)(_infer_of)
_TRIES = 8
"""For one head to find out whether its requests are short: more, and they are of many kinds."""
_SHORT = 256
"""Characters of a path that is worth remembering."""


@cache
def _version() -> str:
    return metadata.version("trueline")


def _live() -> Response:
    return json(200, {"live": True})
