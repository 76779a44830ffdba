"""From a request for a version to its answer, now or later: what every face over HTTP does alike.

A version is found, asked, and counted; whatever goes wrong on the way becomes the answer of that one request, in the
form of the face that was asked. Which path is which, the faces know.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable
from functools import partial
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, TypeVar

from trueline import events
from trueline.errors import NotFound, NotReady, Overloaded, RequestError
from trueline.serve.batching.policy import USUAL
from trueline.serve.counters import ServerStats
from trueline.serve.handlers import request as bodies
from trueline.serve.handlers.response import encode_answer
from trueline.serve.models.catalog import Models
from trueline.serve.models.servable import Handler, Servable
from trueline.serve.protocols.errors import NO_METHOD, ErrorFormat, allow
from trueline.serve.tensors import codec
from trueline.web.messages import Request, Response

if TYPE_CHECKING:
    from trueline.serve.models.servable import Outputs
    from trueline.serve.models.state_sync import Companion

    Answer = Response | asyncio.Future[Response]
    Encode = Callable[[Outputs], Response]

T = TypeVar("T")
KEY_HEADER = b"x-trueline-key"
"""Requests with one key go to one version of a model whose traffic is split."""
SEQUENCE_HEADER = b"ts_request_sequence_id"
"""The key of requests without one."""
PREDICT_METHODS = ("POST", "PUT", "GET")
PRIORITY_HEADER = b"x-trueline-priority"
"""How urgent a request is, 1 the most; the parameter of an infer request goes before it."""


def key_of(request: Request) -> str:
    """By which a request is sent to one version of a model whose traffic is split."""
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
    ) -> None:
        """`errors_of`: the error format of a path; `companion`: what is served beside models."""
        self.models = models
        self.stats = stats
        self._errors_of = errors_of
        self._companion = companion
        self.draining = False
        """Whether the server takes nothing new any more."""
        self._loop = loop
        self._standing: tuple[Overloaded, Response] | None = None

    @property
    def sick(self) -> bool:
        """Whether something that is served cannot answer, and will not by itself."""
        lost = self._companion is not None and self._companion.sick
        return lost or any(version.sick for version in self.models.all())

    def error(self, path: str, error: Exception) -> Response:
        """The answer for a request on `path` that failed."""
        errors = self._errors_of(path)
        if isinstance(error, RequestError):
            return errors.refused(error, path)
        where = traceback.format_exception(error)[-1].strip()
        events.emit("request.failed", path=path[:200], why=where)
        logging.getLogger("trueline").debug("request failed", exc_info=error)
        return errors.failed()

    def later(self, path: str, waiting: asyncio.Future[T], finish: Callable[[T], Response]) -> asyncio.Future[Response]:
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
                response = self.error(path, error)
            self.stats.by_status[response.status] += 1
            answer.set_result(response)

        waiting.add_done_callback(done)
        answer.add_done_callback(lambda _: waiting.cancel())
        return answer

    def find(self, request: Request, model: str, version: str | None) -> Servable:
        """The version that `request` goes to. Raises UnknownModel, UnknownVersion."""
        return self.models.find(model, version, key_of(request))

    def check_room(self, request: Request, version: Servable) -> None:
        """Raises Overloaded when the queue is full, before anything of the body is read: refusing costs little."""
        if version.full:
            refused = version.program.no_room(codec.priority(request.headers.get(PRIORITY_HEADER)))
            if refused is not None:
                raise refused.with_traceback(None)  # it is raised again and again

    def refused(
        self, version: Servable, priority: bytes | None, body: bytes | bytearray, json_bytes: int | None
    ) -> tuple[Overloaded, Response] | None:
        """Why there is no room for an infer request, and its answer; None when there may be room.

        A body whose JSON may name a priority is read first. The answer is made once for as long as the queue stands.
        """
        if body.find(b"priority", 0, json_bytes) >= 0 or body.find(b"\\", 0, json_bytes) >= 0:
            return None
        refused = version.program.no_room(USUAL if priority is None else codec.priority(priority))
        if refused is None:
            return None
        if self._standing is None or self._standing[0] is not refused:
            self._standing = refused, self.error("/v2/", refused)
        return self._standing

    def handled(
        self,
        request: Request,
        version: Servable,
        handler: Handler,
        *,
        explain: bool = False,
        rest: str = "",
        query: bool = False,
    ) -> Answer:
        """The answer of an archive's handler."""
        began = perf_counter()
        ask = bodies.read(request, explain=explain, url_path=rest, query=query)
        version.stats.decode_s += perf_counter() - began
        return self.later(request.path, handler.handle(ask, alone=explain), encode_answer)

    def explain(self, request: Request, model: str, version: str | None = None) -> Answer:
        """Why the model answers so. Raises RequestError, NotFound."""
        allow(request, PREDICT_METHODS, NO_METHOD)
        found = self.find(request, model, version or None)
        if found.handler is not None:
            return self.handled(request, found, found.handler, explain=True)
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
        """The answer of `version`; reading the request began at `began` and ends now. `priority` is as it was given."""
        version.stats.decode_s += perf_counter() - began
        found = version.ask(inputs, timeout_s, USUAL if priority is None else codec.priority(priority))
        if isinstance(found, dict):
            return self._finished(version, inputs, began, encode, found)
        return self.later(request.path, found, partial(self._finished, version, inputs, began, encode))

    def _finished(
        self, version: Servable, inputs: dict[str, Any], began: float, encode: Encode, outputs: Outputs
    ) -> Response:
        run = perf_counter()
        response = encode(outputs)
        self.answered(version, inputs, outputs, began, run)
        return response

    def answered(self, version: Servable, inputs: dict[str, Any], outputs: Outputs, began: float, run: float) -> None:
        """Counts a request that began at `began` and whose answer was there at `run`; its encoding ends now."""
        stats, now = version.stats, perf_counter()
        stats.encode_s += now - run
        stats.request_s.add(now - began)
        stats.last_at = time()
        if self.models.shadows:
            self._show(version, inputs, outputs)

    def _show(self, version: Servable, inputs: dict[str, Any], outputs: Outputs) -> None:
        """Asks the shadow of the model once the answer is on its way."""
        shadow = self.models.shadows.get(version.model)
        if shadow is not None and shadow.version is not version:
            self._loop.call_soon(shadow.show, inputs, outputs)
