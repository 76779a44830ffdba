"""Which path is answered how: the Open Inference Protocol under /v2, TorchServe's routes beside it, and /metrics.

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
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from trueline import events
from trueline.errors import MethodNotAllowed, NotFound, NotReady, Overloaded, RequestError, UnsupportedMedia
from trueline.serve import metrics, oip, records, torchserve
from trueline.serve.http import JSON, Request, Response
from trueline.serve.models import Models, Version
from trueline.serve.stats import ServerStats

if TYPE_CHECKING:
    from trueline.serve.models import Outputs

    Answer = Response | asyncio.Future[Response]
    Encode = Callable[[Outputs], Response]

T = TypeVar("T")
Face = Literal["oip", "torchserve"]
_PREDICT_METHODS = ("POST", "PUT", "GET")


class _Method(MethodNotAllowed):
    """The path exists, and takes other methods."""

    def __init__(self, message: str, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = ", ".join(allowed)


def face_of(path: str) -> Face:
    return "oip" if path == "/v2" or path.startswith("/v2/") else "torchserve"


def json(status: int, value: object, headers: bytes = b"") -> Response:
    return Response(status, msgspec.json.encode(value), JSON, headers)


class Routes:
    """The App of the HTTP server."""

    def __init__(self, models: Models, loop: asyncio.AbstractEventLoop) -> None:
        self.models = models
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
            extra = _extra(error)
            if face == "torchserve":
                return torchserve.error(error, extra)
            hint = f"; {error.hint}" if error.hint else ""
            return json(error.status, {"error": error.message + hint}, extra)
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
        parts = request.path.split("/")
        match parts[1:]:
            case ["v2", "models", model, "infer"]:
                return self._infer(request, self.models.find(model))
            case ["v2", "models", model, "versions", version, "infer"]:
                return self._infer(request, self.models.find(model, version))
            case ["predictions", model]:
                return self._predict(request, model, None)
            case ["predictions", model, version, *_]:
                return self._predict(request, model, version)
            case ["v2", *rest]:
                return self._oip(request, rest)
            case ["ping"]:
                _allow(request, ("GET", "POST", "HEAD"), torchserve.NO_METHOD)
                return self._ping()
            case ["metrics"]:
                _allow(request, ("GET", "HEAD"), torchserve.NO_METHOD)
                return self._metrics(request)
            case [""]:
                raise _Method(torchserve.NO_METHOD, ())
            case _:
                raise NotFound(torchserve.NO_RESOURCE)

    def _oip(self, request: Request, rest: list[str]) -> Response:
        match rest:
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
        _allow(request, ("GET", "HEAD"), "Method Not Allowed")
        return found()

    # the Open Inference Protocol

    def _server_metadata(self) -> Response:
        return json(200, {"name": "trueline", "version": _version(), "extensions": ["parameters"]})

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
            return json(200, describe(found, self.models.versions(model)))

        return answer

    def _infer(self, request: Request, version: Version) -> Answer:
        if request.method != "POST":
            raise _Method("Method Not Allowed", ("POST",))
        _check_media(request)
        call = oip.decode(request.body, version.signature)

        def encode(outputs: Outputs) -> Response:
            return Response(200, oip.encode(version.model, version.version, call, outputs))

        return self._ask(request, version, call.inputs, call.timeout_s, encode)

    # TorchServe

    def _ping(self) -> Response:
        sick = any(version.state == "failed" for version in self.models.all())
        return torchserve.status("Unhealthy", 500) if sick else torchserve.status("Healthy")

    def _predict(self, request: Request, model: str, version: str | None) -> Answer:
        _allow(request, _PREDICT_METHODS, torchserve.NO_METHOD)
        found = self.models.find(model, version or None)
        _check_media(request)
        given = records.decode(request.body, found.signature)

        def encode(outputs: Outputs) -> Response:
            return torchserve.reply(200, records.encode(outputs, single=given.single))

        return self._ask(request, found, given.inputs, None, encode)

    def _metrics(self, request: Request) -> Answer:
        page = self._loop.run_in_executor(None, metrics.page, self._collector)
        return self._later(request.path, page, lambda body: Response(200, body, metrics.CONTENT_TYPE))

    # one request of a model

    def _ask(
        self,
        request: Request,
        version: Version,
        inputs: dict[str, Any],
        timeout_s: float | None,
        encode: Encode,
    ) -> Answer:
        began = perf_counter()

        def finish(outputs: Outputs) -> Response:
            response = encode(outputs)
            version.stats.request_s.add(perf_counter() - began)
            return response

        outputs = version.ask(inputs, timeout_s)
        return finish(outputs) if isinstance(outputs, dict) else self._later(request.path, outputs, finish)


def describe(found: Version, versions: list[str]) -> dict[str, Any]:
    """Model metadata; `parameters` says what was measured and chosen when the version was loaded."""
    loaded = found.loaded
    plan, signature = loaded.plan, loaded.session.signature
    return {
        "name": found.model,
        "versions": versions,
        "platform": loaded.platform,
        "inputs": [oip.tensor_metadata(spec) for spec in signature.inputs],
        "outputs": [oip.tensor_metadata(spec) for spec in signature.outputs],
        "parameters": {
            "digest": loaded.digest,
            "golden_cases": loaded.golden_cases,
            "batching": plan.batch,
            "batching_reason": plan.why,
            "max_batch": plan.max_batch,
            "inline_values": plan.inline_values,
            "run_us": {str(rows): round(seconds * 1e6, 1) for rows, seconds in plan.latency_s.items()},
        },
    }


@cache
def _version() -> str:
    return metadata.version("trueline")


def _live() -> Response:
    return json(200, {"live": True})


def _allow(request: Request, methods: tuple[str, ...], message: str) -> None:
    if request.method not in methods:
        raise _Method(message, methods)


def _check_media(request: Request) -> None:
    """Refuses bodies that are not JSON by their own word. A body that says nothing, or `curl -d`'s form, is tried."""
    coding = request.headers.get(b"content-encoding", b"identity").decode("latin-1").lower()
    if coding != "identity":
        raise UnsupportedMedia(f"content-encoding '{coding[:64]}' is not read here; send the body plain")
    if b"inference-header-content-length" in request.headers:
        raise UnsupportedMedia("binary tensors are not read here; send the values as JSON")
    media = request.headers.get(b"content-type")
    if media is not None and media.lower().startswith((b"multipart/", b"image/", b"audio/", b"video/")):
        raise UnsupportedMedia(f"content-type '{media.decode('latin-1')[:64]}' is not read here; send JSON")


def _extra(error: RequestError) -> bytes:
    if isinstance(error, Overloaded):
        return b"retry-after: %d\r\n" % max(1, round(error.retry_after_s))
    if isinstance(error, _Method):
        return b"allow: %b\r\n" % error.allowed.encode()
    return b""
