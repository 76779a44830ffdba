"""The fast path of infer requests: one door (`try_answer`) and one hook (`learn`).

When a client repeats a request and only the tensor values differ, routing, parsing and validation come out the same.
Their result is cached:

    InferHead        which model and version a head names; with the head, in `web.parser`
    templates        the text of a body around its tensors; with the version
    CachedReply      arrays to which the program is bound, and the text of the answer; with the InferHead
    CachedRefusal    the answer while the queue is full; with the InferHead

The uncached path answers everything else: requests of another form, with a deadline or a priority, those that come
while others wait, and those whose run fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from trueline.errors import Overloaded, RequestError
from trueline.serve.fastpath.bound_run import CachedReply, bytes_of
from trueline.serve.tensors import codec
from trueline.web.messages import InlineFuture, Request, Response, render_lead

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.serve.counters import ServerStats
    from trueline.serve.fastpath.bound_run import BoundArrays, BoundRuns, HandleUncached
    from trueline.serve.fastpath.templates import TemplateCache

OCTETS = b"application/octet-stream"
MAX_TRIES = 8
"""To cache a reply for one head: after as many requests, theirs are of too many forms."""


class FastPath(Protocol):
    """Answers requests of a known form. Each passes `tests/conformance/fast_path.py`."""

    def try_answer(self, request: Request) -> Response | InlineFuture | None:
        """The answer that the uncached path would give, byte for byte; None: the uncached path has to give it."""
        ...


class CachedProgram(Protocol):
    """What is cached of a version."""

    @property
    def model(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def bound_runs(self) -> BoundRuns | None:
        """None: its runs are too long for the event loop."""
        ...

    @property
    def templates(self) -> TemplateCache:
        """Decodes its infer requests. Raises NotReady."""
        ...

    def stands(self, refused: Overloaded) -> bool:
        """Whether its queue would reject the next request with the same `refused`."""
        ...


class Catalog(Protocol):
    """Where requests go; `models.catalog.Models`."""

    @property
    def changes(self) -> int: ...

    @property
    def shadows(self) -> Mapping[str, object]: ...

    def leads_to(self, found: object, model: str, version: str | None) -> bool: ...

    def split(self, model: str) -> object | None: ...


class InferHead(msgspec.Struct):
    """What is known of infer requests with one head."""

    model: str
    version: str | None
    key: str
    json_bytes: int | None = None
    """Bytes of JSON at the start of the body; None: all."""
    priority: bytes | None = None
    changes: int = -1
    """`Models.changes` as of `reply`, `tries` and `refusal`."""
    reply: CachedReply | None = None
    tries: int = 0
    refusal: CachedRefusal | None = None


class CachedRefusal(msgspec.Struct, frozen=True):
    """The response of a full queue, which holds until something joins or leaves the queue."""

    version: CachedProgram
    reason: Overloaded
    response: Response
    json_bytes: int | None

    def holds_for(self, body: bytes | bytearray) -> bool:
        """False for a body that may name a priority."""
        if not self.version.stands(self.reason):
            return False
        return body.find(b"priority", 0, self.json_bytes) < 0 and body.find(b"\\", 0, self.json_bytes) < 0


def infer_head(request: Request) -> InferHead | None:
    """What is known of requests with the head of this one."""
    head = request.head
    if head is None or type(head.app_data) is not InferHead:
        return None
    return head.app_data


class InferFastPath:
    """The fast path of `/v2/models/{m}[/versions/{v}]/infer`."""

    def __init__(self, models: Catalog, stats: ServerStats, handle_uncached: HandleUncached) -> None:
        self._models = models
        self._stats = stats
        self._handle_uncached = handle_uncached

    def try_answer(self, request: Request) -> Response | InlineFuture | None:
        head, models = request.head, self._models
        known = None if head is None else head.app_data
        if type(known) is not InferHead or known.changes != models.changes:
            return None
        if known.reply is not None and not models.shadows:
            answer = known.reply.try_answer(request, self._handle_uncached)
            if answer is not None:
                return answer
        if known.refusal is not None and known.refusal.holds_for(request.body):
            return known.refusal.response
        return None

    def learn(
        self, request: Request, version: CachedProgram, call: codec.InferCall, outputs: Mapping[str, Array]
    ) -> None:
        """Caches how `version` answers requests like this one, which it answered with `outputs`."""
        known, runs = infer_head(request), version.bound_runs
        if known is None or runs is None or not runs.open:
            return
        self._forget_if_changed(known)
        if known.reply is not None or known.tries >= MAX_TRIES or known.priority is not None:
            return
        known.tries += 1
        template = version.templates.find(request.body, known.json_bytes)
        if template is None or not self._models.leads_to(version, known.model, known.version):
            return
        if sys.byteorder != "little" or call.timeout_s is not None or call.priority is not None:
            return
        if call.binary and call.binary != set(call.outputs):
            return
        arrays = runs.arrays_for(call.inputs, outputs)
        if arrays is None or template.names != tuple(arrays.inputs) or not arrays.accepts(call.inputs, outputs):
            return
        try:
            encode = (_encode_bytes if call.binary else _encode_json)(version, template.call, outputs, arrays)
        except RequestError:
            return  # the uncached path reports it each time
        known.reply = CachedReply(runs, arrays, template.pieces, encode, arrays.rows_of(call.inputs), self._stats)

    def learn_refusal(self, known: InferHead, version: CachedProgram, reason: Overloaded, response: Response) -> None:
        """Caches the `response` of `version`'s full queue."""
        self._forget_if_changed(known)
        if self._models.split(known.model) is None:  # else the next request may go to another version
            known.refusal = CachedRefusal(version, reason, response, known.json_bytes)

    def _forget_if_changed(self, known: InferHead) -> None:
        if known.changes != self._models.changes:
            known.changes, known.reply, known.tries, known.refusal = self._models.changes, None, 0, None


def _encode_bytes(
    version: CachedProgram, call: codec.InferCall, outputs: Mapping[str, Array], arrays: BoundArrays
) -> Callable[[int], Response]:
    made = codec.encode(version.model, version.version, call, outputs)
    head = made.body[: made.json_bytes]
    headers = b"inference-header-content-length: %d\r\n" % len(head)
    lead = render_lead(Response(200, made.body, OCTETS, headers))
    places = [(bytes_of(arrays.outputs[key]), arrays.row_bytes(key), outputs[key].nbytes) for key in call.outputs]
    if len(places) == 1:
        ((view, step, size),) = places

        def encode(at: int) -> Response:
            at *= step
            return Response(200, head + view[at : at + size], OCTETS, headers, False, None, lead)
    else:

        def encode(at: int) -> Response:
            tensors = [view[at * step : at * step + size] for view, step, size in places]
            return Response(200, b"".join([head, *tensors]), OCTETS, headers, False, None, lead)

    return encode


def _encode_json(
    version: CachedProgram, call: codec.InferCall, outputs: Mapping[str, Array], arrays: BoundArrays
) -> Callable[[int], Response]:
    *before, end = codec.around(version.model, version.version, call, outputs)
    places = []
    for text, key in zip(before, call.outputs, strict=True):
        flat = arrays.outputs[key].reshape(-1)
        places.append((text, flat, arrays.row_bytes(key) // flat.itemsize, outputs[key].size))
    numbers = codec.numbers

    def encode(at: int) -> Response:
        body = b""
        for text, flat, step, size in places:
            body += text + numbers(flat[at * step : at * step + size].tolist())
        return Response(200, body + end)

    return encode
