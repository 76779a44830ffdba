"""The fast path of infer requests: one door (`try_answer`) and one hook (`learn`).

When a client repeats a request and only the tensor values differ, routing, parsing and validation come out the same.
Their result is cached:

    InferHead        which model and version a request's target names, and where that leads
    templates        the text of a body around its tensors and around what is new in each, as its id; with the version
    CachedReply      arrays to which the program is bound, and the text of the answer; with the template
    CachedRefusal    the answer while the queue is full; with the InferHead

The uncached path answers everything else: requests of another form, with a deadline that is near, those that come while
others wait, and those whose run fails. All caches are bounded, and what is used least goes first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import msgspec

from trueline.errors import Overloaded, RequestError
from trueline.serve.fastpath.bound_run import CachedReply, bytes_of
from trueline.serve.tensors import arrays, codec
from trueline.web.messages import InlineFuture, Request, Response, render_lead

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.serve.counters import ServerStats
    from trueline.serve.fastpath.bound_run import BoundArrays, BoundRuns, EncodeReply, HandleUncached, Spans
    from trueline.serve.fastpath.templates import Template, TemplateCache

OCTETS = b"application/octet-stream"
MAX_HEADS = 512
"""With more, all are dropped; each is found again by the next request that takes the uncached path."""
MAX_TRIES = 8
"""To cache a reply for one template."""
MIN_TIMEOUT_US = 50_000
"""A request with a shorter deadline takes the uncached path; a run on the loop ends long before a longer one."""
DECIDING = (b"content-type", arrays.LENGTH_HEADER, codec.PRIORITY_HEADER, b"content-encoding")
"""Headers by which an InferHead is found beside method and target. No other header is read to make one, or to answer
by one.
"""


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


class InferHead(msgspec.Struct, eq=False):
    """What is known of infer requests with one method, target and `DECIDING` headers."""

    model: str
    version: str | None
    json_bytes: int | None = None
    """Bytes of JSON at the start of the body, which may be shorter; None: all."""
    priority: bytes | None = None
    changes: int = -1
    """`Models.changes` as of `templates` and `refusal`."""
    templates: TemplateCache | None = None
    """Those of the version to which all these requests go."""
    last: Template | None = None
    """That of the last request of a known form."""
    refusal: CachedRefusal | None = None


class CachedRefusal(msgspec.Struct, frozen=True):
    """The response of a full queue, which holds until something joins or leaves the queue."""

    version: CachedProgram
    reason: Overloaded
    response: Response
    json_bytes: int | None

    def holds_for(self, body: bytes | bytearray) -> bool:
        """False for a body that may name a priority."""
        if not self.version.stands(self.reason) or len(body) < (self.json_bytes or 0):
            return False
        return body.find(b"priority", 0, self.json_bytes) < 0 and body.find(b"\\", 0, self.json_bytes) < 0


class InferFastPath:
    """The fast path of `/v2/models/{m}[/versions/{v}]/infer`."""

    def __init__(self, models: Catalog, stats: ServerStats, handle_uncached: HandleUncached) -> None:
        self._models = models
        self._stats = stats
        self._handle_uncached = handle_uncached
        self._heads: dict[object, InferHead] = {}

    def try_answer(self, request: Request) -> Response | InlineFuture | None:
        head, models = request.head, self._models
        known = None if head is None else head.app_data
        if type(known) is not InferHead:
            known = self.find_head(request)
        if known is None or known.changes != models.changes:
            return None
        template, body = known.last, request.body
        if isinstance(body, memoryview):  # a long one: decoding it costs more than its form
            return None
        if template is not None and not models.shadows:
            began = perf_counter()
            values: list[bytes] = []
            spans = template.match(body, known.json_bytes, values)
            if spans is None:
                template, spans = self._find_other(known, body, values)
            if spans is not None and template.reply is not None and _is_in_time(template, values):
                template.uses += 1
                at = template.texts.id_at
                request_id = bytes(values[at]) if at >= 0 else None
                reply = template.reply
                answer = reply.try_answer(request, self._handle_uncached, template, spans, request_id, began)
                if answer is not None:
                    return answer
        if known.refusal is not None and known.refusal.holds_for(body):
            return known.refusal.response
        return None

    def _find_other(
        self, known: InferHead, body: bytes | bytearray, values: list[bytes]
    ) -> tuple[Template, Spans | None]:
        """Like `TemplateCache.find` for a body that is not of the form of the last."""
        assert known.templates is not None
        assert known.last is not None
        found = known.templates.find(body, known.json_bytes, values, None)
        if found is None:
            return known.last, None
        known.last = found[0]
        return found

    def find_head(self, request: Request) -> InferHead | None:
        """What is known of requests with the head of this one."""
        known = self._heads.get(_key_of(request))
        if known is not None and request.head is not None and request.head.varying.isdisjoint(DECIDING):
            request.head.app_data = known
        return known

    def keep_head(self, request: Request, made: InferHead) -> None:
        """Caches what the head of `request` says."""
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        self._heads[_key_of(request)] = made

    def learn(
        self, request: Request, version: CachedProgram, call: codec.InferCall, outputs: Mapping[str, Array]
    ) -> None:
        """Caches how `version` answers requests like this one, which it answered with `outputs`."""
        known, runs = self.find_head(request), version.bound_runs
        if known is None or runs is None or not runs.open or isinstance(request.body, memoryview):
            return
        self._forget_if_changed(known)
        if known.templates is None:
            if not self._models.leads_to(version, known.model, known.version):
                return
            known.templates = version.templates
        found = version.templates.find(request.body, known.json_bytes, [], known.last)
        if found is None:
            return
        known.last = found[0]
        if found[0].reply is not None or found[0].tries >= MAX_TRIES:
            return
        template, plain = found[0], found[0].call
        template.tries += 1
        if sys.byteorder != "little" or plain.timeout_s is not None or plain.priority is not None:
            return
        if call.binary and call.binary != set(call.outputs):
            return
        bound = runs.arrays_for(call.inputs, outputs)
        if bound is None or template.names != tuple(bound.inputs) or not bound.accepts(call.inputs, outputs):
            return
        try:
            encode = (_encode_bytes if call.binary else _encode_json)(version, plain, outputs, bound)
        except RequestError:
            return  # the uncached path reports it each time
        template.reply = CachedReply(runs, bound, encode, bound.rows_of(call.inputs), self._stats)

    def learn_refusal(self, known: InferHead, version: CachedProgram, reason: Overloaded, response: Response) -> None:
        """Caches the `response` of `version`'s full queue."""
        self._forget_if_changed(known)
        if self._models.split(known.model) is None:  # else the next request may go to another version
            known.refusal = CachedRefusal(version, reason, response, known.json_bytes)

    def _forget_if_changed(self, known: InferHead) -> None:
        if known.changes != self._models.changes:
            known.changes, known.templates, known.last, known.refusal = self._models.changes, None, None, None


def _is_in_time(template: Template, values: Sequence[bytes]) -> bool:
    """Whether the request has no deadline that is near."""
    at = template.texts.timeout_at
    return at < 0 or not 0 < int(values[at]) < MIN_TIMEOUT_US


def _key_of(request: Request) -> object:
    get = request.headers.get
    return (request.method, request.target, *map(get, DECIDING))


def _encode_bytes(
    version: CachedProgram, call: codec.InferCall, outputs: Mapping[str, Array], bound: BoundArrays
) -> EncodeReply:
    made = codec.encode(version.model, version.version, call, outputs)
    plain = made.body[: made.json_bytes]
    before_id, after_id = codec.with_id(plain)
    places = [(bytes_of(bound.outputs[key]), bound.row_bytes(key), outputs[key].nbytes) for key in call.outputs]
    size_of_all = len(made.body) - len(plain)

    def lead_of(json_bytes: int) -> tuple[bytes, bytes]:
        headers = b"inference-header-content-length: %d\r\n" % json_bytes
        return headers, render_lead(Response(200, bytes(json_bytes + size_of_all), OCTETS, headers))

    plain_lead = lead_of(len(plain))
    leads: dict[int, tuple[bytes, bytes]] = {}  # by the length of an id, of which there are at most 256

    def encode(at: int, request_id: bytes | None) -> Response:
        head, lead = plain, plain_lead
        if request_id is not None:
            head = before_id + request_id + after_id
            lead = leads.get(len(head)) or leads.setdefault(len(head), lead_of(len(head)))
        if len(places) == 1:
            ((view, step, size),) = places
            body = head + view[at * step : at * step + size]
        else:
            body = b"".join([head, *[view[at * step : at * step + size] for view, step, size in places]])
        return Response(200, body, OCTETS, lead[0], False, None, lead[1])

    return encode


def _encode_json(
    version: CachedProgram, call: codec.InferCall, outputs: Mapping[str, Array], bound: BoundArrays
) -> EncodeReply:
    *before, end = codec.around(version.model, version.version, call, outputs)
    before_id, after_id = codec.with_id(end)
    places = []
    for text, key in zip(before, call.outputs, strict=True):
        flat = bound.outputs[key].reshape(-1)
        places.append((text, flat, bound.row_bytes(key) // flat.itemsize, outputs[key].size))
    numbers = codec.numbers

    def encode(at: int, request_id: bytes | None) -> Response:
        body = b""
        for text, flat, step, size in places:
            body += text + numbers(flat[at * step : at * step + size].tolist())
        return Response(200, body + (end if request_id is None else before_id + request_id + after_id))

    return encode
