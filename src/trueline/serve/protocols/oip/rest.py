"""The paths of the Open Inference Protocol under /v2 but for `infer`, and KServe's older one under /v1.

What is served and how it fares, Triton's extensions (statistics, configuration, the repository) among it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from trueline.errors import NotFound, RequestError
from trueline.serve.protocols.dispatch import PRIORITY_HEADER, Dispatch
from trueline.serve.protocols.errors import allow, check_media, json
from trueline.serve.protocols.oip import repository, triton, v1
from trueline.serve.protocols.oip.repository import Repository
from trueline.web.messages import Request, Response

if TYPE_CHECKING:
    from trueline.serve.protocols.dispatch import Answer
    from trueline.serve.protocols.route_table import Handler


class OipRoutes:
    """The route table of what KServe and Triton answer."""

    def __init__(self, dispatch: Dispatch, *, server_version: str, loader: Repository | None) -> None:
        """`loader` loads and unloads, if there is one."""
        self._dispatch = dispatch
        self._models = dispatch.models
        self._server_version = server_version
        self._loader = loader

    def match(self, parts: list[str]) -> Handler | None:
        """The handler for the path of `parts`."""
        match parts:
            case ["v2", *rest]:
                return lambda request: self._v2(request, rest)
            case ["v1", "models", *rest]:
                return lambda request: self._v1(request, rest)
            case _:
                return None

    def _v2(self, request: Request, rest: list[str]) -> Answer:
        """The answer for the path of `rest` under /v2. Raises RequestError, NotFound."""
        match rest:
            case ["repository", "models", model, "load" | "unload" as act]:
                return self._repository_act(request, model, act)
            case ["repository", "index"]:
                return self._index(request)
            case ["models", model, "explain"]:
                return self._dispatch.explain(request, model)
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
                found = self._live
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

    @staticmethod
    def _live() -> Response:
        return json(200, {"live": True})

    def _server_metadata(self) -> Response:
        return json(200, {"name": "trueline", "version": self._server_version, "extensions": list(triton.EXTENSIONS)})

    def _server_ready(self) -> Response:
        ready = self._models.ready and not self._dispatch.draining
        return json(200 if ready else 503, {"ready": ready})

    def _model_ready(self, model: str, version: str | None) -> Callable[[], Response]:
        def answer() -> Response:
            found = self._models.find(model, version)
            ready = found.state == "ready" and not self._dispatch.draining
            body: dict[str, object] = {"name": found.model, "version": found.version, "ready": ready}
            if not ready:
                body["reason"] = found.reason or ("draining" if self._dispatch.draining else found.state)
            return json(200 if ready else 503, body)

        return answer

    def _metadata(self, model: str, version: str | None) -> Callable[[], Response]:
        def answer() -> Response:
            found = self._models.find(model, version)
            return json(200, triton.describe(found, self._models.versions(model)))

        return answer

    def _statistics(self, model: str | None, version: str | None) -> Callable[[], Response]:
        def answer() -> Response:
            if model is None:
                found = self._models.all()
            elif version is None:
                found = [self._models.find(model, one) for one in self._models.versions(model)]
            else:
                found = [self._models.find(model, version)]
            return json(200, triton.statistics(found))

        return answer

    def _configuration(self, model: str, version: str | None) -> Callable[[], Response]:
        return lambda: json(200, triton.configuration(self._models.find(model, version)))

    def _index(self, request: Request) -> Response:
        allow(request, ("POST",), "Method Not Allowed")
        try:
            asked = msgspec.json.decode(request.body or b"{}", type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"the body is no index request: {error}") from error
        return json(200, triton.index(self._models.all(), ready_only=asked.get("ready") is True))

    def _repository_act(self, request: Request, model: str, act: str) -> Answer:
        allow(request, ("POST",), "Method Not Allowed")
        given = repository.parameters(request.body)
        work = self.repository.load(model, given) if act == "load" else self.repository.unload(model)
        return self._dispatch.later(request.path, work, lambda found: found)

    @property
    def repository(self) -> Repository:
        """What loads and unloads. Raises NotFound."""
        if self._loader is None:
            raise NotFound("this server has no model store to load from; start it with --model-store")
        return self._loader

    def _v1(self, request: Request, rest: list[str]) -> Answer:
        """The answer for the path of `rest` under /v1. Raises RequestError, NotFound."""
        match rest:
            case [] | [""]:
                allow(request, ("GET", "HEAD"), "Method Not Allowed")
                return json(200, {"models": self._models.names()})
            case [called] if called.endswith(":predict"):
                return self._v1_predict(request, called.removesuffix(":predict"))
            case [called] if called.endswith(":explain"):
                return self._dispatch.explain(request, called.removesuffix(":explain"))
            case [model]:
                allow(request, ("GET", "HEAD"), "Method Not Allowed")
                ready = self._models.find(model).state == "ready" and not self._dispatch.draining
                return json(200 if ready else 503, {"name": model, "ready": ready})
            case _:
                raise NotFound("Not Found")

    def _v1_predict(self, request: Request, model: str) -> Answer:
        began = perf_counter()
        allow(request, ("POST",), "Method Not Allowed")
        found = self._dispatch.find(request, model, None)
        if found.handler is not None:
            return self._dispatch.handled(request, found, found.handler)
        check_media(request)
        self._dispatch.check_room(request, found)
        call = v1.decode(request.body, found.program.signature)
        return self._dispatch.ask(
            request,
            found,
            call.inputs,
            None,
            lambda outputs: Response(200, v1.encode(outputs, call)),
            began,
            request.headers.get(PRIORITY_HEADER),
        )
