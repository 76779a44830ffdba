"""What all HTTP protocols share: route tables, asking a version, counting requests, and the format of errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from trueline import events
from trueline.errors import MethodNotAllowed, NotFound, NotReady, Overloaded, RequestError, UnsupportedMedia
from trueline.serve import column_records
from trueline.serve.batching.policy import USUAL
from trueline.serve.counters import ServerStats
from trueline.serve.faults import find_fault
from trueline.serve.handlers import messages
from trueline.serve.handlers.messages import encode_answer
from trueline.serve.models.catalog import Models
from trueline.serve.models.servable import Handler, Servable
from trueline.serve.offload.process import LONG_BYTES, LONG_VALUES, Offload
from trueline.serve.tensors import codec
from trueline.serve.tensors.bounds import decode_within
from trueline.web.body import Body
from trueline.web.messages import JSON, Request, Response
from trueline.web.parser import HttpLimits

if TYPE_CHECKING:
    from trueline.serve.models.servable import Outputs
    from trueline.serve.models.watchers import Companion

    Answer = Response | asyncio.Future[Response]
    Encode = Callable[[Outputs], Answer]
    RouteHandler = Callable[[Request], Answer]
    """Answers one request, now or later. Raises RequestError, NotFound."""

T = TypeVar("T")
KEY_HEADER = b"x-trueline-key"
"""Of a model whose traffic is split, requests with one key go to one version."""
SEQUENCE_HEADER = b"ts_request_sequence_id"
"""The key of requests without one."""
PREDICT_METHODS = ("POST", "PUT", "GET")
NO_METHOD = "Requested method is not allowed, please refer to API document."
NO_RESOURCE = "Requested resource is not found, please refer to API document."
"""TorchServe's words, which its clients compare; all paths outside /v1 and /v2 use them."""


class BytesInFlight:
    """Of all gRPC messages together, from when each is whole until its answer is made. REST counts its own bodies."""

    def __init__(self, most: int = HttpLimits().buffered_bytes) -> None:
        self.most = most
        self.held = 0

    @contextlib.contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Raises Overloaded; one message alone is always taken."""
        if self.held and self.held + num_bytes > self.most:
            raise Overloaded(
                f"the message has {num_bytes} bytes, and the server holds {self.held} of at most {self.most}",
                hint="come back later",
                retry_after_s=1.0,
            )
        self.held += num_bytes
        try:
            yield
        finally:
            self.held -= num_bytes


class RouteTable(Protocol):
    """The paths of one protocol. Each passes `tests/conformance/route_table.py`."""

    def match(self, parts: list[str]) -> RouteHandler | None:
        """The handler for the path with the segments `parts`; None: it is not this protocol's path."""
        ...


def key_of(request: Request) -> str:
    key = request.headers.get(KEY_HEADER) or request.headers.get(SEQUENCE_HEADER)
    return "" if key is None else key.decode("latin-1")


class Dispatch:
    """Sends requests to the versions of `models`. Its methods are called on the loop."""

    def __init__(
        self,
        models: Models,
        loop: asyncio.AbstractEventLoop,
        stats: ServerStats,
        *,
        errors_of: Callable[[str], ErrorFormat],
        companion: Companion | None = None,
        held_bytes: int = HttpLimits().buffered_bytes,
    ) -> None:
        """`errors_of`: the error format of a path; `companion` is served beside the models;
        `held_bytes`: of all gRPC messages together.
        """
        self.models = models
        self.stats = stats
        self._errors_of = errors_of
        self._companion = companion
        self.draining = False
        self._loop = loop
        self.offload = Offload(loop)
        self.in_flight = BytesInFlight(held_bytes)
        self._standing: tuple[Overloaded, Response] | None = None

    @property
    def ready(self) -> bool:
        """Whether requests to every model and workflow would be answered now; see `Models.ready`."""
        beside = self._companion is not None and bool(self._companion.obstacle)
        return self.models.ready and not beside and not self.draining

    def obstacle(self, model: str, version: str | None = None) -> str:
        """Why a request would not be answered now; empty if it would. Raises UnknownModel, UnknownVersion."""
        return self.models.obstacle(model, version) or ("draining" if self.draining else "")

    @property
    def sick(self) -> bool:
        """Whether something cannot answer, and will not recover by itself."""
        lost = self._companion is not None and self._companion.sick
        return lost or any(version.sick for version in self.models.all())

    def error(self, path: str, error: Exception) -> Response:
        """The response for `error` on `path`."""
        errors = self._errors_of(path)
        error = find_fault(error) or error
        if isinstance(error, RequestError):
            return errors.encode_error(error, path)
        where = traceback.format_exception(error)[-1].strip()
        events.emit("request.failed", path=path[:200], why=where)
        logging.getLogger("trueline").debug("request failed", exc_info=error)
        return errors.encode_failure()

    def respond(self, path: str, waiting: asyncio.Future[T], encode: Callable[[T], Answer]) -> asyncio.Future[Response]:
        """The response that `encode` makes of the result of `waiting`, which ends when the response is cancelled."""
        answer: asyncio.Future[Response] = self._loop.create_future()

        def finish(work: asyncio.Future[T]) -> None:
            failure = NotReady("the server stops", retry_after_s=1.0) if work.cancelled() else work.exception()
            if answer.done():
                return
            try:
                if failure is not None:
                    raise failure
                response = encode(work.result())
            except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails, never the server
                response = self.error(path, error)
            if isinstance(response, Response):
                self.stats.by_status[response.status] += 1
                answer.set_result(response)
                return
            response.add_done_callback(lambda late: None if answer.done() else answer.set_result(late.result()))
            answer.add_done_callback(lambda _: response.cancel())

        waiting.add_done_callback(finish)
        answer.add_done_callback(lambda _: waiting.cancel())
        return answer

    def decode(
        self, request: Request, then: Callable[[T], Answer], work: Callable[..., T], *args: object,
        json_bytes: int | None = None,
    ) -> Answer:  # fmt: skip
        """`then` of what `work(body, *args)` returns; a long body, or long JSON in it, is decoded beside the loop."""
        body = request.body
        size = len(body) if json_bytes is None else json_bytes
        if size <= LONG_BYTES:
            return then(work(body, *args))
        request.head = None
        return self.respond(request.path, self.offload.run(work, body, *args, num_bytes=size), then)

    def encode(
        self, path: str, outputs: Outputs, wrap: Callable[[T], Response], work: Callable[..., T], *args: object
    ) -> Answer:
        """`wrap` of what `work(*args)` returns, which writes `outputs` as JSON; many numbers beside the loop."""
        values = sum(array.size for array in outputs.values())
        if values <= LONG_VALUES:
            return wrap(work(*args))
        return self.respond(path, self.offload.run(work, *args, num_bytes=8 * values), wrap)

    def answer_records(
        self, request: Request, version: Servable, began: float, *, media: bytes | None = None, wraps: bool = False
    ) -> Answer:
        """Answers records by column name, for a program with columns. `wraps`: as {"predictions": ...}."""
        columns, bounds = version.program.columns, version.program.bounds
        assert columns is not None

        def ask(records: column_records.ColumnRecords) -> Answer:
            def encode(outputs: Outputs) -> Answer:
                work = column_records.encode
                answer = partial(Response, 200, headers=column_records.ignored_header(records))
                return self.encode(request.path, outputs, answer, work, outputs, columns, records)

            priority = request.headers.get(codec.PRIORITY_HEADER)
            return self.ask(request, version, records.inputs, None, encode, began, priority)

        return self.decode(request, ask, decode_within, bounds, column_records.decode, columns, bounds, media, wraps)

    def find(self, request: Request, model: str, version: str | None) -> Servable:
        """The version that answers `request`. Raises UnknownModel, UnknownVersion."""
        return self.models.find(model, version, key_of(request))

    def check_room(self, request: Request, version: Servable) -> None:
        """Raises Overloaded when the queue is full; called before the body is decoded, so that a refusal is cheap."""
        if version.full:
            refused = version.program.no_room(codec.priority(request.headers.get(codec.PRIORITY_HEADER)))
            if refused is not None:
                raise refused.with_traceback(None)  # one object is raised many times

    def refuse_if_full(
        self, version: Servable, priority: bytes | None, body: Body, json_bytes: int | None
    ) -> tuple[Overloaded, Response] | None:
        """Why the queue takes no infer request, and the response, made once while that holds; None: it may take it.

        A body whose JSON may name a priority, or is long, is decoded first.
        """
        if (len(body) if json_bytes is None else json_bytes) > LONG_BYTES:
            return None
        if isinstance(body, memoryview):
            body = bytes(body[:json_bytes])
        if body.find(b"priority", 0, json_bytes) >= 0 or body.find(b"\\", 0, json_bytes) >= 0:
            return None
        refused = version.program.no_room(USUAL if priority is None else codec.priority(priority))
        if refused is None:
            return None
        if self._standing is None or self._standing[0] is not refused:
            self._standing = refused, self.error("/v2/", refused)
        return self._standing

    def handle(
        self,
        request: Request,
        version: Servable,
        handler: Handler,
        *,
        explain: bool = False,
        rest: str = "",
        query: bool = False,
    ) -> Answer:
        began = perf_counter()

        def hand_on(parts: messages.Parts | None) -> Answer:
            ask = messages.decode_request(request, parts, explain=explain, url_path=rest, query=query)
            version.stats.decode_s += perf_counter() - began
            return self.respond(request.path, handler.handle(ask, alone=explain), encode_answer)

        return self.decode_form(request, hand_on)

    def decode_form(self, request: Request, then: Callable[[messages.Parts | None], Answer]) -> Answer:
        """`then` of the parts of a body that is a form; None: it is another one."""
        kind = messages.form_of(request)
        return then(None) if not kind else self.decode(request, then, messages.decode_parts, kind)

    def explain(self, request: Request, model: str, version: str | None = None) -> Answer:
        """The handler's explanation. Raises RequestError, NotFound."""
        allow(request, PREDICT_METHODS, NO_METHOD)
        servable = self.find(request, model, version or None)
        if servable.handler is not None:
            return self.handle(request, servable, servable.handler, explain=True)
        raise NotFound("no explainer is served for this model")

    def ask(
        self,
        request: Request,
        version: Servable,
        inputs: dict[str, Any],
        timeout_s: float | None,
        encode: Encode,
        began: float,
        priority: object = None,
    ) -> Answer:
        """The answer of `version`. Decoding began at `began` and ends now; `priority` is as the client gave it."""
        version.stats.decode_s += perf_counter() - began
        outputs = version.ask(inputs, timeout_s, USUAL if priority is None else codec.priority(priority))
        if isinstance(outputs, dict):
            return self._finish(version, inputs, began, encode, outputs)
        return self.respond(request.path, outputs, partial(self._finish, version, inputs, began, encode))

    def _finish(
        self, version: Servable, inputs: dict[str, Any], began: float, encode: Encode, outputs: Outputs
    ) -> Answer:
        run = perf_counter()
        response = encode(outputs)
        self.count_answer(version, inputs, outputs, began, run)
        return response

    def count_answer(
        self, version: Servable, inputs: dict[str, Any], outputs: Outputs, began: float, run: float
    ) -> None:
        """Counts a request that began at `began`, had outputs at `run` and is encoded now; copies it to a shadow."""
        stats, now = version.stats, perf_counter()
        stats.encode_s += now - run
        stats.request_s.add(now - began)
        stats.last_at = time()
        shadow = self.models.shadows.get(version.model) if self.models.shadows else None
        if shadow is not None and shadow.version is not version:
            self._loop.call_soon(shadow.show, inputs, outputs)


def json(status: int, value: object, headers: bytes = b"") -> Response:
    return Response(status, msgspec.json.encode(value), JSON, headers)


class ErrorFormat(Protocol):
    """The form in which a protocol writes errors."""

    def encode_error(self, error: RequestError, path: str) -> Response:
        """The response to a rejected request."""
        ...

    def encode_failure(self) -> Response:
        """The response to a request on which the model or the server failed; the log says why."""
        ...

    def encode_malformed(self, path: str, status: int, message: str) -> Response:
        """The response to a request that could not be received."""
        ...


class OipErrors:
    """`{"error": ...}`, the form of the Open Inference Protocol."""

    def encode_error(self, error: RequestError, path: str) -> Response:
        hint = f"; {error.hint}" if error.hint else ""
        return json(error.status, {"error": error.message + hint}, extra(error))

    def encode_failure(self) -> Response:
        return json(500, {"error": "the model failed on this request; the server's log says why"})

    def encode_malformed(self, path: str, status: int, message: str) -> Response:
        return json(status, {"error": message})


class Method(MethodNotAllowed):
    """The path exists, but not for this method."""

    def __init__(self, message: str, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = ", ".join(allowed)


def is_oip(path: str) -> bool:
    """Whether `path` belongs to the Open Inference Protocol or to KServe's V1."""
    return path in ("/v1", "/v2") or path.startswith(("/v1/", "/v2/"))


def is_vital(path: str) -> bool:
    """Whether `path` is a health check or the metrics, which are answered when all connections are in use."""
    return path in ("/ping", "/health", "/metrics") or path.startswith("/v2/health/") or path.endswith("/ready")


def allow(request: Request, methods: tuple[str, ...], message: str) -> None:
    """Raises Method."""
    if request.method not in methods:
        raise Method(message, methods)


def check_media(request: Request) -> None:
    """Raises UnsupportedMedia for a media type that is not JSON. No type, or the form of `curl -d`, is accepted."""
    media = request.headers.get(b"content-type")
    if media is not None and media.lower().startswith((b"multipart/", b"image/", b"audio/", b"video/")):
        raise UnsupportedMedia(f"content-type '{media.decode('latin-1')[:64]}' is not supported here; send JSON")


def retry_after_s(error: Exception) -> int | None:
    """When the request may succeed, in whole seconds; None: unknown."""
    found = error.retry_after_s if isinstance(error, Overloaded | NotReady) else None
    return None if found is None else max(1, round(found))


def extra(error: RequestError) -> bytes:
    """Header lines of an error's response."""
    wait_s = retry_after_s(error)
    if wait_s is not None:
        return b"retry-after: %d\r\n" % wait_s
    if isinstance(error, Method):
        return b"allow: %b\r\n" % error.allowed.encode()
    return b""
