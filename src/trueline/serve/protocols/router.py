"""The App of the data port: the route tables of the Open Inference Protocol, an extension, and the server's own pages.

A request is answered at once where that is possible, else by a future. Everything that goes wrong ends here: a client's
fault is a 4xx in the shape of the face that was asked, ours is a 5xx that says nothing of our insides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import time
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trueline.errors import NotFound
from trueline.serve.counters import ServerStats
from trueline.serve.fastpath.fast_path import FastPath, InferFastPath
from trueline.serve.metrics import dashboard, prometheus
from trueline.serve.models.catalog import Models
from trueline.serve.models.state_sync import Companion
from trueline.serve.protocols import openapi
from trueline.serve.protocols.dispatch import Dispatch
from trueline.serve.protocols.errors import NO_METHOD, NO_RESOURCE, ErrorFormat, Method, OipErrors, allow, is_oip, json
from trueline.serve.protocols.oip.infer import InferPaths, infer_of
from trueline.serve.protocols.oip.repository import Repository
from trueline.serve.protocols.oip.rest import OipRoutes
from trueline.serve.protocols.route_table import RouteTable
from trueline.version import __version__
from trueline.web import content_encoding
from trueline.web.access_log import AccessLog
from trueline.web.limits import HttpLimits
from trueline.web.messages import App, InlineFuture, Request, Response, query_all

if TYPE_CHECKING:
    from trueline.serve.protocols.dispatch import Answer
    from trueline.serve.protocols.route_table import Handler

PAGE_METHODS = ("GET", "HEAD")


class Extension(Protocol):
    """What a further protocol contributes to the server.

    `trueline.serve.assembly` loads it by name: `serve` imports none. TorchServe's is `trueline.torchserve.extension`.
    """

    errors: ErrorFormat
    """For every path outside /v1 and /v2."""
    companion: Companion | None
    """What it serves beside models."""
    strict: bool
    """Whether its protocol is kept to the letter also where the server's own answer would say more."""

    def routes(self, dispatch: Dispatch) -> RouteTable: ...

    def management(self) -> App: ...

    def grpc_services(
        self, kind: Literal["inference", "management"], routes: Routes, log: AccessLog | None
    ) -> list[Any]:
        """Handlers for `grpc.Server.add_generic_rpc_handlers`."""
        ...


class Routes:
    """The App of the HTTP server."""

    def __init__(
        self,
        models: Models,
        loop: asyncio.AbstractEventLoop,
        *,
        body_bytes: int = HttpLimits().body_bytes,
        loader: Repository | None = None,
        extension: Extension | None = None,
    ) -> None:
        """`body_bytes` bounds what a compressed body may open into; `loader` loads and unloads, if there is one."""
        self.models = models
        self.stats = ServerStats()
        self._oip = OipErrors()
        self._errors: ErrorFormat = self._oip if extension is None else extension.errors
        self._companion = None if extension is None else extension.companion
        self._strict = extension is not None and extension.strict
        self.dispatch = Dispatch(models, loop, self.stats, errors_of=self.errors_of, companion=self._companion)
        fast_path = InferFastPath(models, self.stats, self.handle_uncached)
        self._fast_path: FastPath = fast_path
        self._infer = InferPaths(self.dispatch, fast_path)
        self.oip = OipRoutes(self.dispatch, server_version=__version__, loader=loader)
        self._tables: list[RouteTable] = [self.oip, self]
        if extension is not None:
            self._tables.append(extension.routes(self.dispatch))
        self._body_bytes = body_bytes
        self._loop = loop
        self._collector = prometheus.Collector(models, self.stats)

    # what the connections call

    def answer(self, request: Request) -> Answer | InlineFuture:
        """The answer, now or later. Never raises."""
        answer = self._fast_path.try_answer(request)
        if answer is None:
            return self.handle_uncached(request)
        if type(answer) is Response:
            self.stats.by_status[answer.status] += 1
        return answer

    def handle_uncached(self, request: Request) -> Answer:
        """The same without the fast path. Never raises."""
        answer: Answer
        try:
            answer = self._route(request)
        except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails, never the server
            answer = self.dispatch.error(request.path, error)
        if isinstance(answer, Response):
            self.stats.by_status[answer.status] += 1
        return answer

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The answer for a request that could not be received."""
        self.stats.by_status[status] += 1
        return (self.errors_of(path) if path else self._oip).malformed(path, status, message)

    def errors_of(self, path: str) -> ErrorFormat:
        """The form in which errors of `path` are written."""
        return self._oip if is_oip(path) else self._errors

    @property
    def repository(self) -> Repository:
        """What loads and unloads. Raises NotFound."""
        return self.oip.repository

    # paths

    def _route(self, request: Request) -> Answer:
        if b"content-encoding" in request.headers:
            return self._opened(request)
        parts = request.path.split("/")[1:]
        named = infer_of(parts)
        if named is not None:
            return self._infer.answer(request, *named)
        for table in self._tables:
            handler = table.match(parts)
            if handler is not None:
                return handler(request)
        raise NotFound(NO_RESOURCE)

    def match(self, parts: list[str]) -> Handler | None:
        """The handler of one of the server's own pages."""
        match parts:
            case ["metrics"]:
                return self._metrics
            case ["health"]:
                return self._health
            case ["version"]:
                return _page(lambda: Response(200, __version__.encode(), b"text/plain"))
            case ["dashboard"]:
                return _page(dashboard.page)
            case ["dashboard", "state"]:
                return _page(lambda: dashboard.answer(self.models, self.stats, time()))
            case ["try"]:
                return _page(dashboard.try_page)
            case ["openapi.json"] | ["api-description"]:
                return _page(lambda: json(200, self._document()))
            case [""]:
                return self._root
            case _:
                return None

    def _root(self, request: Request) -> Response:
        if request.method == "OPTIONS":
            return json(200, self._document())
        if request.method in ("GET", "HEAD") and not self._strict:
            return json(200, {"status": "alive"})  # KServe's V1: its SDK asks here whether a server lives
        raise Method(NO_METHOD, ("OPTIONS",) if self._strict else ("OPTIONS", "GET", "HEAD"))

    def _health(self, request: Request) -> Response:
        """As MLflow's scoring server says it."""
        allow(request, PAGE_METHODS, NO_METHOD)
        return Response(200 if self.models.ready and not self.dispatch.draining else 503, b"\n")

    def _document(self) -> openapi.Document:
        beside = self._companion
        return openapi.data_plane(self.models.all(), __version__, beside.names() if beside is not None else ())

    def _opened(self, request: Request) -> Answer:
        """The answer to a request whose body is compressed; a large one is opened in a thread."""
        name = request.headers[b"content-encoding"].decode("latin-1").lower()
        request.headers = {key: value for key, value in request.headers.items() if key != b"content-encoding"}
        request.head = None
        if name == "identity":
            return self._route(request)
        content_encoding.check_coding(name)
        if len(request.body) <= content_encoding.IN_THREAD_BYTES:
            request.body = content_encoding.decompress(request.body, name, self._body_bytes)
            return self._route(request)
        answer: asyncio.Future[Response] = self._loop.create_future()
        opening = self._loop.run_in_executor(None, content_encoding.decompress, request.body, name, self._body_bytes)

        def done(found: asyncio.Future[bytes]) -> None:
            if answer.done():
                return
            try:
                request.body = found.result()
            except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails, never the server
                response = self.dispatch.error(request.path, error)
                self.stats.by_status[response.status] += 1
                answer.set_result(response)
                return
            self._pass_on(self.handle_uncached(request), answer)

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

    def _metrics(self, request: Request) -> Answer:
        allow(request, PAGE_METHODS, NO_METHOD)
        names = query_all(request.target, "name[]")
        page = self._loop.run_in_executor(None, prometheus.page, self._collector, names)
        return self.dispatch.later(request.path, page, lambda body: Response(200, body, prometheus.CONTENT_TYPE))


def _page(make: Callable[[], Response]) -> Handler:
    """A handler of a page that is only read."""

    def handle(request: Request) -> Response:
        allow(request, PAGE_METHODS, NO_METHOD)
        return make()

    return handle
