"""Which path is answered how: the Open Inference Protocol under /v2, KServe's older one under /v1, TorchServe's routes
beside them, and /metrics.

A request is answered at once where that is possible, else by a future. Everything that goes wrong ends here: a client's
fault is a 4xx in the shape of the face that was asked, ours is a 5xx that says nothing of our insides.
"""

from __future__ import annotations

import asyncio
from importlib import metadata
from time import time
from typing import TYPE_CHECKING

from trueline.serve.counters import ServerStats
from trueline.serve.metrics import dashboard, prometheus
from trueline.serve.models.catalog import Models
from trueline.serve.protocols import openapi
from trueline.serve.protocols.dispatch import Asking, json
from trueline.serve.protocols.errors import Method, allow, face_of
from trueline.serve.protocols.oip.infer import InferPaths, infer_of
from trueline.serve.protocols.oip.repository import Repository
from trueline.serve.protocols.oip.rest import KServePaths
from trueline.torchserve import responses
from trueline.torchserve.rest import TorchServePaths
from trueline.web import content_encoding
from trueline.web.limits import HttpLimits
from trueline.web.messages import InlineFuture, Request, Response, query_all

if TYPE_CHECKING:
    from trueline.serve.protocols.dispatch import Answer
    from trueline.torchserve.workflows.registry import Workflows


class Routes:
    """The App of the HTTP server."""

    def __init__(
        self,
        models: Models,
        loop: asyncio.AbstractEventLoop,
        *,
        body_bytes: int = HttpLimits().body_bytes,
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
        self.asking = Asking(models, loop, self.stats, workflows=workflows, strict=strict)
        self._server_version = metadata.version("trueline")
        self._torchserve = TorchServePaths(self.asking)
        self._infer = InferPaths(self.asking)
        self._kserve = KServePaths(self.asking, self._torchserve, server_version=self._server_version, loader=loader)
        self._strict = strict
        self._body_bytes = body_bytes
        self._loop = loop
        self._collector = prometheus.Collector(models, self.stats)

    # what the connections call

    def answer(self, request: Request) -> Answer | InlineFuture:
        """The answer, now or later. Never raises."""
        known = self._infer.again(request, self.long_way)
        if known is not None:
            if type(known) is Response:
                self.stats.by_status[200] += 1
            return known
        return self.long_way(request)

    def long_way(self, request: Request) -> Answer:
        """The same, whatever has been learned of such requests. Never raises."""
        found: Answer | None
        try:
            found = self._infer.known(request)
            if found is None:
                found = self._route(request)
        except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails, never the server
            found = self.asking.error(request.path, error)
        if isinstance(found, Response):
            self.stats.by_status[found.status] += 1
        return found

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The answer for a request that could not be received."""
        self.stats.by_status[status] += 1
        if self._strict and status == 413 and face_of(path) == "torchserve" and path:
            return Response(413, b"", b"", close=True)  # as bare as TorchServe's
        if face_of(path) == "oip" or not path:
            return json(status, {"error": message})
        return responses.refusal(status, message)

    @property
    def repository(self) -> Repository:
        """What loads and unloads. Raises NotFound."""
        return self._kserve.repository

    # paths

    def _route(self, request: Request) -> Answer:
        if b"content-encoding" in request.headers:
            return self._opened(request)
        path = request.path
        asked = infer_of(path)
        if asked is not None:
            return self._infer.first(request, *asked)
        parts = path.split("/")
        match parts[1:]:
            case ["predictions", model] if request.method == "OPTIONS":
                return json(200, openapi.of_model(self.models.find(model), self._server_version))
            case ["predictions", *_]:
                return self._torchserve.answer(request, parts[1:])
            case ["v1", "models", *rest]:
                return self._kserve.v1(request, rest)
            case ["v2", *rest]:
                return self._kserve.v2(request, rest)
            case ["metrics"]:
                allow(request, ("GET", "HEAD"), responses.NO_METHOD)
                return self._metrics(request)
            case ["health"]:
                allow(request, ("GET", "HEAD"), responses.NO_METHOD)
                return self._health()
            case ["version"]:
                allow(request, ("GET", "HEAD"), responses.NO_METHOD)
                return Response(200, self._server_version.encode(), b"text/plain")
            case ["dashboard", *rest] if rest in ([], ["state"]):
                allow(request, ("GET", "HEAD"), responses.NO_METHOD)
                return dashboard.answer(self.models, self.stats, time()) if rest else dashboard.page()
            case ["try"]:
                allow(request, ("GET", "HEAD"), responses.NO_METHOD)
                return dashboard.try_page()
            case ["openapi.json"] | ["api-description"]:
                allow(request, ("GET", "HEAD"), responses.NO_METHOD)
                return json(200, self._document())
            case [""] if request.method == "OPTIONS":
                return json(200, self._document())
            case [""] if request.method in ("GET", "HEAD") and not self._strict:
                return json(200, {"status": "alive"})  # KServe's V1: its SDK asks here whether a server lives
            case [""]:
                raise Method(responses.NO_METHOD, ("OPTIONS",) if self._strict else ("OPTIONS", "GET", "HEAD"))
            case _:
                return self._torchserve.answer(request, parts[1:])

    def _health(self) -> Response:
        """As MLflow's scoring server says it."""
        return Response(200 if self.models.ready and not self.asking.draining else 503, b"\n")

    def _document(self) -> openapi.Document:
        workflows = self.asking.workflows
        return openapi.data_plane(
            self.models.all(), self._server_version, workflows.names() if workflows is not None else ()
        )

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

    def _metrics(self, request: Request) -> Answer:
        names = query_all(request.target, "name[]")
        page = self._loop.run_in_executor(None, prometheus.page, self._collector, names)
        return self.asking.later(request.path, page, lambda body: Response(200, body, prometheus.CONTENT_TYPE))
