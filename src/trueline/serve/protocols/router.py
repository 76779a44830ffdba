"""The App of the data port: the fast path, the route tables of the protocols, and the server's own pages.

All errors end here: a client error is a 4xx in the format of its protocol, a server error a 5xx without internals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import time
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trueline.errors import NotFound
from trueline.serve.counters import ServerStats
from trueline.serve.fastpath.fast_path import FastPath, InferFastPath
from trueline.serve.metrics import dashboard, prometheus
from trueline.serve.models.catalog import Models
from trueline.serve.models.watchers import Companion
from trueline.serve.protocols import openapi
from trueline.serve.protocols.dispatch import (
    NO_METHOD,
    NO_RESOURCE,
    Dispatch,
    ErrorFormat,
    Method,
    OipErrors,
    RouteTable,
    allow,
    is_oip,
    json,
)
from trueline.serve.protocols.oip.rest import InferPaths, OipRoutes, Repository, infer_of
from trueline.version import __version__
from trueline.web.access_log import AccessLog
from trueline.web.body import Body
from trueline.web.compression import ON_LOOP_BYTES, Decompressor
from trueline.web.messages import App, InlineFuture, Request, Response, query_all, segments_of
from trueline.web.pages import asks_for_home
from trueline.web.parser import HttpLimits

if TYPE_CHECKING:
    from trueline.serve.protocols.dispatch import Answer, RouteHandler

PAGE_METHODS = ("GET", "HEAD")


class Extension(Protocol):
    """A further protocol, loaded by name in `assembly`; TorchServe's is `trueline.torchserve.extension`."""

    errors: ErrorFormat
    """For every path outside /v1 and /v2."""
    companion: Companion | None
    """What it serves beside models."""
    strict: bool
    """Whether its protocol takes precedence where the server's own response would contain more."""

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
        """`body_bytes` limits a decompressed body; `loader` loads and unloads models."""
        self.models = models
        self.stats = ServerStats()
        self.history = dashboard.History()
        self._oip = OipErrors()
        self._errors: ErrorFormat = self._oip if extension is None else extension.errors
        self._companion = None if extension is None else extension.companion
        self._strict = extension is not None and extension.strict
        self.dispatch = Dispatch(
            models,
            loop,
            self.stats,
            errors_of=self.errors_of,
            companion=self._companion,
            held_bytes=HttpLimits(body_bytes=body_bytes).buffered_bytes,
        )
        fast_path = InferFastPath(models, self.stats, self.handle_uncached)
        self._fast_path: FastPath = fast_path
        self._infer = InferPaths(self.dispatch, fast_path)
        self.oip = OipRoutes(self.dispatch, server_version=__version__, loader=loader)
        self._tables: list[RouteTable] = [self.oip, self]
        if extension is not None:
            self._tables.append(extension.routes(self.dispatch))
        self._body_bytes = body_bytes
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="decompress")
        self._loop = loop
        self._collector = prometheus.Collector(models, self.stats)
        document = _page(lambda: json(200, self._document()))
        self._pages: dict[str, RouteHandler] = {
            "": self._root,
            "metrics": self._metrics,
            "health": self._health,
            "version": _page(lambda: Response(200, __version__.encode(), b"text/plain")),
            "dashboard": _page(dashboard.page),
            "dashboard/history": _page(self.history.answer),
            "dashboard/state": _page(lambda: dashboard.answer(self.models, self.stats, time())),
            "try": _page(dashboard.try_page),
            "openapi.json": document,
            "api-description": document,
        }

    # what the connections call

    def answer(self, request: Request) -> Answer | InlineFuture:
        """The response, now or later. Never raises."""
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
        """The response to a request that could not be received."""
        self.stats.by_status[status] += 1
        return (self.errors_of(path) if path else self._oip).encode_malformed(path, status, message)

    def errors_of(self, path: str) -> ErrorFormat:
        """The format of errors on `path`."""
        return self._oip if is_oip(path) else self._errors

    # paths

    def _route(self, request: Request) -> Answer:
        if b"content-encoding" in request.headers:
            return self._handle_encoded(request)
        parts = segments_of(request.path)
        named = infer_of(parts)
        if named is not None:
            return self._infer.answer(request, *named)
        for table in self._tables:
            handler = table.match(parts)
            if handler is not None:
                return handler(request)
        raise NotFound(NO_RESOURCE)

    def match(self, parts: list[str]) -> RouteHandler | None:
        """The handler of one of the server's own pages."""
        return self._pages.get("/".join(parts))

    def _root(self, request: Request) -> Response:
        if request.method == "OPTIONS":
            return json(200, self._document())
        if request.method in PAGE_METHODS and not self._strict:
            if asks_for_home(request):
                return dashboard.home_page()
            return json(200, {"status": "alive"})  # for KServe's SDK
        raise Method(NO_METHOD, ("OPTIONS",) if self._strict else ("OPTIONS", "GET", "HEAD"))

    def _health(self, request: Request) -> Response:
        """In the form of MLflow's scoring server."""
        allow(request, PAGE_METHODS, NO_METHOD)
        return Response(200 if self.dispatch.ready else 503, b"\n")

    def _document(self) -> openapi.Document:
        workflows = self._companion.names() if self._companion is not None else ()
        return openapi.data_plane(self.models.all(), __version__, workflows)

    def _handle_encoded(self, request: Request) -> Answer:
        """The response to a request with a compressed body; one that becomes long is decompressed in a thread."""
        coding = request.headers[b"content-encoding"].decode("latin-1").lower()
        request.headers = {key: value for key, value in request.headers.items() if key != b"content-encoding"}
        request.head = None
        if coding == "identity":
            return self._route(request)
        opening = Decompressor(request.body, coding, self._body_bytes)
        plain = opening.run(ON_LOOP_BYTES)
        if plain is not None:
            request.body = plain
            return self._route(request)

        def handle(plain: Body | None) -> Answer:
            assert plain is not None  # run to its end
            request.body = plain
            return self._route(request)

        waiting = self._loop.run_in_executor(self._threads, opening.run)
        return self.dispatch.respond(request.path, waiting, handle)

    def close(self) -> None:
        """Ends the processes and threads that read bodies."""
        self.dispatch.offload.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _metrics(self, request: Request) -> Answer:
        allow(request, PAGE_METHODS, NO_METHOD)
        names = query_all(request.target, "name[]")
        page = self._loop.run_in_executor(None, prometheus.page, self._collector, names)
        return self.dispatch.respond(request.path, page, lambda body: Response(200, body, prometheus.CONTENT_TYPE))


def _page(make: Callable[[], Response]) -> RouteHandler:
    """The handler of a read-only page."""

    def handle(request: Request) -> Response:
        allow(request, PAGE_METHODS, NO_METHOD)
        return make()

    return handle
