"""The infer requests of the Open Inference Protocol on the uncached path: decode, ask the version, encode."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from trueline.serve.fastpath.fast_path import OCTETS, InferFastPath, InferHead, infer_head
from trueline.serve.models.servable import Servable
from trueline.serve.protocols.dispatch import PRIORITY_HEADER, Dispatch, key_of
from trueline.serve.protocols.errors import Method, check_media
from trueline.serve.tensors import binary, codec
from trueline.web.messages import Request, Response

if TYPE_CHECKING:
    from trueline.serve.models.servable import Outputs
    from trueline.serve.protocols.dispatch import Answer


class InferPaths:
    """Answers `/v2/models/{m}[/versions/{v}]/infer`."""

    def __init__(self, dispatch: Dispatch, fast_path: InferFastPath) -> None:
        self._dispatch = dispatch
        self._models = dispatch.models
        self._fast_path = fast_path

    def answer(self, request: Request, model: str, version: str | None) -> Answer:
        """Raises RequestError, NotFound."""
        head = infer_head(request) or self._read_head(request, model, version)
        began = perf_counter()
        found = self._models.find(head.model, head.version, head.key)
        if found.handler is not None:
            return self._dispatch.handle(request, found, found.handler)
        if found.full:
            refused = self._dispatch.refuse_if_full(found, head.priority, request.body, head.json_bytes)
            if refused is not None:
                self._fast_path.learn_refusal(head, found.program, *refused)
                return refused[1]
        call = found.program.templates.decode(request.body, head.json_bytes)
        priority = head.priority if call.priority is None else call.priority
        encode = partial(self._encode, found, call, request)
        return self._dispatch.ask(request, found, call.inputs, call.timeout_s, encode, began, priority)

    def _read_head(self, request: Request, model: str, version: str | None) -> InferHead:
        """What the request's head says; it is cached with the head, unless a handler answers."""
        if request.method != "POST":
            self._models.find(model, version)
            raise Method("Method Not Allowed", ("POST",))
        key = key_of(request)
        if self._models.find(model, version, key).handler is not None:
            return InferHead(model, version, key)
        check_media(request)
        length = request.headers.get(binary.LENGTH_HEADER)
        json_bytes = None if length is None else binary.header_length(length, len(request.body))
        made = InferHead(model, version, key, json_bytes, request.headers.get(PRIORITY_HEADER))
        if request.head is not None:
            request.head.app_data = made
        return made

    def _encode(self, version: Servable, call: codec.InferCall, request: Request, outputs: Outputs) -> Response:
        self._fast_path.learn(request, version.program, call, outputs)
        made = codec.encode(version.model, version.version, call, outputs)
        if made.json_bytes is None:
            return Response(200, made.body)
        return Response(200, made.body, OCTETS, b"inference-header-content-length: %d\r\n" % made.json_bytes)


def infer_of(parts: list[str]) -> tuple[str, str | None] | None:
    """Model and version of an infer path; None for another path."""
    match parts:
        case ["v2", "models", model, "infer"]:
            return model, None
        case ["v2", "models", model, "versions", version, "infer"]:
            return model, version
    return None
