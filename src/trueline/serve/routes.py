"""Which path is answered how: the Open Inference Protocol under /v2, KServe's older one under /v1, TorchServe's routes
beside them, and /metrics.

A request is answered at once where that is possible, else by a future. Everything that goes wrong ends here: a client's
fault is a 4xx in the shape of the face that was asked, ours is a 5xx that says nothing of our insides.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable
from functools import cache
from importlib import metadata
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from trueline import events
from trueline.errors import NotFound, NotReady, RequestError
from trueline.serve import (
    binary,
    coding,
    dashboard,
    extensions,
    metrics,
    oip,
    openapi,
    records,
    repository,
    torchserve,
    v1,
)
from trueline.serve.handlers import body as bodies
from trueline.serve.handlers.version import HandlerVersion
from trueline.serve.http import JSON, Request, Response, query_of
from trueline.serve.limits import Limits
from trueline.serve.models import Models, Version
from trueline.serve.refusals import Method, allow, check_media, extra, face_of
from trueline.serve.repository import Repository
from trueline.serve.stats import ServerStats

if TYPE_CHECKING:
    from trueline.serve.models import Outputs

    Answer = Response | asyncio.Future[Response]
    Encode = Callable[[Outputs], Response]

T = TypeVar("T")
_PREDICT_METHODS = ("POST", "PUT", "GET")
KEY_HEADER = b"x-trueline-key"
"""Requests with one key go to one version of a model whose traffic is split."""
SEQUENCE_HEADER = b"ts_request_sequence_id"
"""The key of requests without one."""
PRIORITY_HEADER = b"x-trueline-priority"
"""How urgent a request is, 1 the most; the parameter of an infer request goes before it."""


def json(status: int, value: object, headers: bytes = b"") -> Response:
    return Response(status, msgspec.json.encode(value), JSON, headers)


class Routes:
    """The App of the HTTP server."""

    def __init__(
        self,
        models: Models,
        loop: asyncio.AbstractEventLoop,
        *,
        body_bytes: int = Limits().body_bytes,
        loader: Repository | None = None,
        strict: bool = False,
    ) -> None:
        """`body_bytes` bounds what a compressed body may open into; `loader` loads and unloads, if there is one; with
        `strict` TorchServe's routes answer with its statuses also where ours are better.
        """
        self.models = models
        self._repository = loader
        self._strict = strict
        self._body_bytes = body_bytes
        self.stats = ServerStats()
        self.draining = False
        self._loop = loop
        self._collector = metrics.Collector(models, self.stats)

    # what the connections call

    def answer(self, request: Request) -> Answer:
        """The answer, now or later. Never raises."""
        try:
            found = self._route(request)
        except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails, never the server
            found = self._error(request.path, error)
        if isinstance(found, Response):
            self.stats.by_status[found.status] += 1
        return found

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The answer for a request that could not be received."""
        self.stats.by_status[status] += 1
        if face_of(path) == "oip" or not path:
            return json(status, {"error": message})
        return torchserve.refusal(status, message)

    def _error(self, path: str, error: Exception) -> Response:
        face = face_of(path)
        if isinstance(error, RequestError):
            if face == "torchserve":
                return torchserve.error(error, extra(error), strict=self._strict)
            hint = f"; {error.hint}" if error.hint else ""
            return json(error.status, {"error": error.message + hint}, extra(error))
        where = traceback.format_exception(error)[-1].strip()
        events.emit("request.failed", path=path[:200], why=where)
        logging.getLogger("trueline").debug("request failed", exc_info=error)
        if face == "torchserve":
            return torchserve.failed()
        return json(500, {"error": "the model failed on this request; the server's log says why"})

    def _later(
        self, path: str, waiting: asyncio.Future[T], finish: Callable[[T], Response]
    ) -> asyncio.Future[Response]:
        """The answer that `finish` makes of what `waiting` brings. Cancelling it cancels `waiting`."""
        answer: asyncio.Future[Response] = self._loop.create_future()

        def done(found: asyncio.Future[T]) -> None:
            failure = NotReady("the server stops") if found.cancelled() else found.exception()
            if answer.done():
                return
            try:
                if failure is not None:
                    raise failure
                response = finish(found.result())
            except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails, never the server
                response = self._error(path, error)
            self.stats.by_status[response.status] += 1
            answer.set_result(response)

        waiting.add_done_callback(done)
        answer.add_done_callback(lambda _: waiting.cancel())
        return answer

    # paths

    def _route(self, request: Request) -> Answer:
        if b"content-encoding" in request.headers:
            return self._opened(request)
        parts = request.path.split("/")
        match parts[1:]:
            case ["v2", "models", model, "infer"]:
                return self._infer(request, model, None)
            case ["v2", "models", model, "versions", version, "infer"]:
                return self._infer(request, model, version)
            case ["predictions", model]:
                return self._predict(request, model, None)
            case ["predictions", model, version, *rest]:
                return self._predict(request, model, version, "/".join(rest))
            case ["explanations", model]:
                return self._explain(request, model, None)
            case ["explanations", model, version]:
                return self._explain(request, model, version)
            case ["v1", "models", *rest]:
                return self._v1(request, rest)
            case ["v2", *rest]:
                return self._oip(request, rest)
            case ["invocations"]:
                return self._invoke(request)
            case ["models", model, "invoke"] | [model, "predict"]:
                return self._predict(request, model, None, older=True)
            case [model, version, "predict"]:
                return self._predict(request, model, version, older=True)
            case ["ping"]:
                allow(request, ("GET", "POST", "HEAD"), torchserve.NO_METHOD)
                return self._ping()
            case ["metrics"]:
                allow(request, ("GET", "HEAD"), torchserve.NO_METHOD)
                return self._metrics(request)
            case ["dashboard", *rest] if rest in ([], ["state"]):
                allow(request, ("GET", "HEAD"), torchserve.NO_METHOD)
                return dashboard.answer(self.models, self.stats, time()) if rest else dashboard.page()
            case ["openapi.json"] | ["api-description"]:
                allow(request, ("GET", "HEAD"), torchserve.NO_METHOD)
                return json(200, openapi.data_plane(self.models.all(), _version()))
            case [""] if request.method == "OPTIONS":
                return json(200, openapi.data_plane(self.models.all(), _version()))
            case [""] if request.method in ("GET", "HEAD") and not self._strict:
                return json(200, {"status": "alive"})  # KServe's V1: its SDK asks here whether a server lives
            case [""]:
                raise Method(torchserve.NO_METHOD, ("OPTIONS",) if self._strict else ("OPTIONS", "GET", "HEAD"))
            case _:
                raise NotFound(torchserve.NO_RESOURCE)

    def _opened(self, request: Request) -> Answer:
        """The answer to a request whose body is compressed; a large one is opened in a thread."""
        name = request.headers.pop(b"content-encoding").decode("latin-1").lower()
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
                response = self._error(request.path, error)
                self.stats.by_status[response.status] += 1
                answer.set_result(response)
                return
            self._pass_on(self.answer(request), answer)

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
        return self._later(request.path, work, lambda found: found)

    @property
    def repository(self) -> Repository:
        """What loads and unloads. Raises NotFound."""
        if self._repository is None:
            raise NotFound("this server has no model store to load from; start it with --model-store")
        return self._repository

    def _infer(self, request: Request, model: str, version: str | None) -> Answer:
        if request.method != "POST":
            self.models.find(model, version)
            raise Method("Method Not Allowed", ("POST",))
        began = perf_counter()
        found = self._find(request, model, version)
        if isinstance(found, HandlerVersion):
            return self._handled(request, found)
        check_media(request)
        length = request.headers.get(binary.LENGTH_HEADER)
        json_bytes = None if length is None else binary.header_length(length, len(request.body))
        call = oip.decode(request.body, found.signature, json_bytes)

        def encode(outputs: Outputs) -> Response:
            made = oip.encode(found.model, found.version, call, outputs)
            if made.json_bytes is None:
                return Response(200, made.body)
            head = b"inference-header-content-length: %d\r\n" % made.json_bytes
            return Response(200, made.body, b"application/octet-stream", head)

        return self._ask(request, found, call.inputs, call.timeout_s, encode, began, call.priority)

    def _find(self, request: Request, model: str, version: str | None) -> Version:
        key = request.headers.get(KEY_HEADER) or request.headers.get(SEQUENCE_HEADER)
        return self.models.find(model, version, "" if key is None else key.decode("latin-1"))

    # KServe's V1

    def _v1(self, request: Request, rest: list[str]) -> Answer:
        match rest:
            case [] | [""]:
                allow(request, ("GET", "HEAD"), "Method Not Allowed")
                return json(200, {"models": self.models.names()})
            case [called] if called.endswith(":predict"):
                return self._v1_predict(request, called.removesuffix(":predict"))
            case [called] if called.endswith(":explain"):
                return self._explain(request, called.removesuffix(":explain"), None)
            case [model]:
                allow(request, ("GET", "HEAD"), "Method Not Allowed")
                ready = self.models.find(model).state == "ready" and not self.draining
                return json(200 if ready else 503, {"name": model, "ready": ready})
            case _:
                raise NotFound("Not Found")

    def _v1_predict(self, request: Request, model: str) -> Answer:
        began = perf_counter()
        allow(request, ("POST",), "Method Not Allowed")
        found = self._find(request, model, None)
        if isinstance(found, HandlerVersion):
            return self._handled(request, found)
        check_media(request)
        call = v1.decode(request.body, found.signature)
        return self._ask(
            request, found, call.inputs, None, lambda outputs: Response(200, v1.encode(outputs, call)), began
        )

    # TorchServe

    def _ping(self) -> Response:
        sick = any(version.sick for version in self.models.all())
        return torchserve.status("Unhealthy", 500) if sick else torchserve.status("Healthy")

    def _handled(
        self,
        request: Request,
        version: HandlerVersion,
        *,
        explain: bool = False,
        rest: str = "",
        query: bool = False,
    ) -> Answer:
        """The answer of an archive's handler."""
        began = perf_counter()
        ask = bodies.read(request, explain=explain, url_path=rest, query=query)
        version.stats.decode_s += perf_counter() - began
        return self._later(request.path, version.handle(ask, alone=explain), torchserve.handled)

    def _explain(self, request: Request, model: str, version: str | None) -> Answer:
        allow(request, _PREDICT_METHODS, torchserve.NO_METHOD)
        found = self._find(request, model, version or None)
        if isinstance(found, HandlerVersion):
            return self._handled(request, found, explain=True)
        raise NotFound("no explainer is served for this model")

    def _invoke(self, request: Request) -> Answer:
        """SageMaker's route: the model is named in the query, or the only one."""
        allow(request, _PREDICT_METHODS, torchserve.NO_METHOD)
        names = self.models.names()
        model = query_of(request.target).get("model_name") or (names[0] if len(names) == 1 else "")
        if not model:
            raise RequestError("Parameter model_name is required.")
        return self._predict(request, model, None, older=True)

    def _predict(
        self, request: Request, model: str, version: str | None, rest: str = "", *, older: bool = False
    ) -> Answer:
        allow(request, _PREDICT_METHODS, torchserve.NO_METHOD)
        began = perf_counter()
        found = self._find(request, model, version or None)
        if isinstance(found, HandlerVersion):
            return self._handled(request, found, rest=rest, query=older)
        check_media(request)
        given = records.decode(request.body, found.signature)

        def encode(outputs: Outputs) -> Response:
            return torchserve.reply(200, records.encode(outputs, single=given.single))

        return self._ask(request, found, given.inputs, None, encode, began)

    def _metrics(self, request: Request) -> Answer:
        page = self._loop.run_in_executor(None, metrics.page, self._collector)
        return self._later(request.path, page, lambda body: Response(200, body, metrics.CONTENT_TYPE))

    def _ask(
        self,
        request: Request,
        version: Version,
        inputs: dict[str, Any],
        timeout_s: float | None,
        encode: Encode,
        began: float,
        priority: object = None,
    ) -> Answer:
        """The answer of `version`; reading the request began at `began`, and ends now."""
        version.stats.decode_s += perf_counter() - began

        def finish(outputs: Outputs) -> Response:
            run = perf_counter()
            response = encode(outputs)
            self.answered(version, inputs, outputs, began, run)
            return response

        given = request.headers.get(PRIORITY_HEADER) if priority is None else priority
        outputs = version.ask(inputs, timeout_s, oip.priority(given))
        return finish(outputs) if isinstance(outputs, dict) else self._later(request.path, outputs, finish)

    def answered(self, version: Version, inputs: dict[str, Any], outputs: Outputs, began: float, run: float) -> None:
        """Counts a request that began at `began` and whose answer was there at `run`; its encoding ends now."""
        stats, now = version.stats, perf_counter()
        stats.encode_s += now - run
        stats.request_s.add(now - began)
        stats.last_at = time()
        if self.models.shadows:
            self._show(version, inputs, outputs)

    def _show(self, version: Version, inputs: dict[str, Any], outputs: Outputs) -> None:
        """Asks the shadow of the model once the answer is on its way."""
        shadow = self.models.shadows.get(version.model)
        if shadow is not None and shadow.version is not version:
            self._loop.call_soon(shadow.show, inputs, outputs)


@cache
def _version() -> str:
    return metadata.version("trueline")


def _live() -> Response:
    return json(200, {"live": True})
