"""Requests that say again what was said before, but for their numbers: from bytes to bytes in few steps.

Who asks one model the same way again and again gives nothing to decide: which version it goes to, what its JSON says,
whether the shapes are in the proven range, what the answer says around its numbers. All that is decided once, by the
long way (`Routes`, `oip`, `Version.ask`). What is left is to lay the numbers where the program reads them, to run it,
and to send what it leaves there: arrays to which the program is bound once (`runtime.session.Bindable`). It is for runs
that are short, on the loop.

    one request in a turn of the loop      it is run as it comes
    several                                they are run together at the end of the turn

The long way stays the judge: a request of another kind, one that is refused, one that names a deadline or a priority,
one that comes while others wait, and one whose run fails all go there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from time import perf_counter, time
from typing import TYPE_CHECKING

from trueline.errors import RequestError
from trueline.serve.fastpath.bound_run import Held, bytes_of
from trueline.serve.protocols.oip import codec
from trueline.web.messages import InlineFuture, Request, Response, render_lead

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.serve.counters import ServerStats
    from trueline.serve.fastpath.bound_run import Arrays, LongWay, Short
    from trueline.serve.fastpath.templates import Layout
    from trueline.serve.models.catalog import Models

OCTETS = b"application/octet-stream"


class Again:
    """Requests of one head and one layout."""

    __slots__ = ("_arrays", "_changes", "_models", "_read", "_short", "answers", "rows", "told")

    def __init__(
        self,
        models: Models,
        short: Short,
        answers: ServerStats,
        arrays: Arrays,
        layout: Layout,
        told: Callable[[int], Response],
        rows: int,
    ) -> None:
        self._models = models
        self._changes = models.changes
        self._short = short
        self._arrays = arrays
        self._read = layout.pieces
        self.answers = answers
        self.rows = rows
        self.told = told
        """The answer from the outputs' rows from one on."""

    @property
    def stands(self) -> bool:
        """Whether requests without a version still lead where they did."""
        return self._changes == self._models.changes and self._short.open

    def answer(self, request: Request, long_way: LongWay) -> Response | InlineFuture | None:
        """The answer; None for what has to go the long way."""
        short = self._short
        if self._changes != self._models.changes or not short.open or self._models.shadows:
            return None
        way = short.batcher.way()
        if way == "queue":
            return None
        began = perf_counter()
        pieces = self._read(request.body)
        if pieces is None:
            return None
        arrays, since = self._arrays, perf_counter()
        if way == "turn":
            return arrays.hold(Held(self, request, long_way, pieces, began, since))
        for view, piece in zip(arrays.views, pieces, strict=True):
            view[: len(piece)] = piece
        run = arrays.run_of(self.rows)
        if run is None:
            return None
        try:
            run()
            ran = perf_counter()
            response = self.told(0)
        except Exception:  # noqa: BLE001 - blind on purpose: the long way has the words for it
            return None
        now, stats = perf_counter(), short.stats
        stats.count_run(1, self.rows, ran - since, 0.0)
        stats.count_answers([began], since - began, now - ran, now, time())
        return response


def learn(
    models: Models,
    short: Short,
    answers: ServerStats,
    name: str,
    version: str,
    layout: Layout,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
) -> Again | None:
    """How requests like one that was answered, of `inputs` with `outputs`, are answered from now on.

    None for those that have more to say than numbers, or an answer that is not of numbers alone.
    """
    call = layout.call
    if sys.byteorder != "little" or call.timeout_s is not None or call.priority is not None:
        return None
    if call.binary and call.binary != set(call.wanted):
        return None
    arrays = short.arrays(inputs, outputs)
    if arrays is None or layout.names != tuple(arrays.inputs) or not arrays.takes(inputs, outputs):
        return None
    rows = arrays.rows_of(inputs)
    try:
        told = (_in_bytes if call.binary else _in_json)(name, version, call, outputs, arrays)
    except RequestError:
        return None  # the long way says it each time
    return Again(models, short, answers, arrays, layout, told, rows)


def _in_bytes(
    name: str, version: str, call: codec.Call, outputs: Mapping[str, Array], arrays: Arrays
) -> Callable[[int], Response]:
    made = codec.encode(name, version, call, outputs)
    head = made.body[: made.json_bytes]
    headers = b"inference-header-content-length: %d\r\n" % len(head)
    lead = render_lead(Response(200, made.body, OCTETS, headers))
    places = [(bytes_of(arrays.outputs[key]), arrays.row_bytes(key), outputs[key].nbytes) for key in call.wanted]
    if len(places) == 1:
        ((view, step, size),) = places

        def told(at: int) -> Response:
            at *= step
            return Response(200, head + view[at : at + size], OCTETS, headers, False, None, lead)
    else:

        def told(at: int) -> Response:
            numbers = [view[at * step : at * step + size] for view, step, size in places]
            return Response(200, b"".join([head, *numbers]), OCTETS, headers, False, None, lead)

    return told


def _in_json(
    name: str, version: str, call: codec.Call, outputs: Mapping[str, Array], arrays: Arrays
) -> Callable[[int], Response]:
    *before, end = codec.around(name, version, call, outputs)
    places = []
    for text, key in zip(before, call.wanted, strict=True):
        flat = arrays.outputs[key].reshape(-1)
        places.append((text, flat, arrays.row_bytes(key) // flat.itemsize, outputs[key].size))
    numbers = codec.numbers

    def told(at: int) -> Response:
        body = b""
        for text, flat, step, size in places:
            body += text + numbers(flat[at * step : at * step + size].tolist())
        return Response(200, body + end)

    return told
