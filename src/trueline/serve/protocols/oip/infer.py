"""The infer requests of the Open Inference Protocol: what their head says is found out once and kept with it.

the first of a head      which model, which version, how much of the body is JSON
the next                 only the body is read
those that say it again  neither (`again`); and while a queue is full, its refusal as it was made (`_Shut`)
"""

from __future__ import annotations

from functools import lru_cache, partial
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from trueline.errors import Overloaded
from trueline.serve.fastpath.replay import OCTETS, Again, learn
from trueline.serve.handlers.version import HandlerVersion
from trueline.serve.models.catalog import Models
from trueline.serve.models.version import Version
from trueline.serve.protocols.dispatch import PRIORITY_HEADER, Dispatch, key_of
from trueline.serve.protocols.errors import Method, check_media
from trueline.serve.protocols.oip import binary, codec
from trueline.web.messages import InlineFuture, Request, Response

if TYPE_CHECKING:
    from trueline.serve.fastpath.bound_run import LongWay
    from trueline.serve.models.version import Outputs
    from trueline.serve.protocols.dispatch import Answer


class InferPaths:
    """Answers `/v2/models/{m}[/versions/{v}]/infer`."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._models = dispatch.models

    def again(self, request: Request, long_way: LongWay) -> Response | InlineFuture | None:
        """The answer to what was asked before, but for its numbers; None for what has to go the `long_way`."""
        head = request.head
        asks = None if head is None else head.app_data
        if type(asks) is not _Infer or asks.again is None:
            return None
        return asks.again.answer(request, long_way)

    def known(self, request: Request) -> Answer | None:
        """The answer to a request whose head was read before; None for another. Raises RequestError."""
        head = request.head
        asks = None if head is None else head.app_data
        if type(asks) is not _Infer:
            return None
        if asks.shut is not None and asks.shut.stands(self._models, request.body):
            return asks.shut.answer
        return self._infer(request, asks)

    def first(self, request: Request, model: str, version: str | None) -> Answer:
        """The answer to an infer request whose head is new; what it says is kept with the head."""
        if request.method != "POST":
            self._models.find(model, version)
            raise Method("Method Not Allowed", ("POST",))
        key = key_of(request)
        if isinstance(self._models.find(model, version, key), HandlerVersion):
            return self._infer(request, _Infer(model, version, key))
        check_media(request)
        length = request.headers.get(binary.LENGTH_HEADER)
        json_bytes = None if length is None else binary.header_length(length, len(request.body))
        asks = _Infer(model, version, key, json_bytes, request.headers.get(PRIORITY_HEADER))
        if request.head is not None:
            request.head.app_data = asks
        return self._infer(request, asks)

    def _infer(self, request: Request, asks: _Infer) -> Answer:
        began = perf_counter()
        found = self._models.find(asks.model, asks.version, asks.key)
        if isinstance(found, HandlerVersion):
            return self._dispatch.handled(request, found)
        if found.full:
            refused = self._dispatch.refused(found, asks.priority, request.body, asks.json_bytes)
            if refused is not None:
                alone = self._models.split(asks.model) is None
                asks.shut = _Shut(found, self._models.changes, *refused, asks.json_bytes) if alone else None
                return refused[1]
        call = found.layouts.decode(request.body, asks.json_bytes)
        priority = asks.priority if call.priority is None else call.priority
        return self._dispatch.ask(
            request, found, call.inputs, call.timeout_s, partial(self._told, found, call, request), began, priority
        )

    def _told(self, version: Version, call: codec.Call, request: Request, outputs: Outputs) -> Response:
        """The answer; requests that say the same again are answered in few steps from now on, where that goes."""
        head = request.head
        if head is not None and type(head.app_data) is _Infer and version.short is not None and version.short.open:
            self._learn(version, call, request.body, head.app_data, outputs)
        return _told(version, call, outputs)

    def _learn(
        self, version: Version, call: codec.Call, body: bytes | bytearray, asks: _Infer, outputs: Outputs
    ) -> None:
        models = self._models
        if asks.again is not None and not asks.again.stands:
            asks.again, asks.tries = None, 0
        if asks.again is not None or asks.tries >= _TRIES or asks.priority is not None:
            return
        asks.tries += 1
        layout = version.layout(body, asks.json_bytes)
        if layout is not None and version.short is not None and models.leads_to(version, asks.model, asks.version):
            names = version.model, version.version
            asks.again = learn(models, version.short, self._dispatch.stats, *names, layout, call.inputs, outputs)


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


def _told(version: Version, call: codec.Call, outputs: Outputs) -> Response:
    made = codec.encode(version.model, version.version, call, outputs)
    if made.json_bytes is None:
        return Response(200, made.body)
    return Response(200, made.body, OCTETS, b"inference-header-content-length: %d\r\n" % made.json_bytes)


def infer_of(path: str) -> tuple[str, str | None] | None:
    """Model and version of a path that asks for an inference; None for another path."""
    return _known(path) if len(path) <= _SHORT else _parted(path)


def _parted(path: str) -> tuple[str, str | None] | None:
    match path.split("/")[1:]:
        case ["v2", "models", model, "infer"]:
            return model, None
        case ["v2", "models", model, "versions", version, "infer"]:
            return model, version
    return None


_known = lru_cache(maxsize=256)(_parted)
_TRIES = 8
"""For one head to find out whether its requests are short: more, and they are of many kinds."""
_SHORT = 256
"""Characters of a path that is worth remembering."""
