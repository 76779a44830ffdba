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

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, time
from typing import TYPE_CHECKING

import numpy as np

from trueline.errors import RequestError
from trueline.serve import oip
from trueline.serve.http import Later, Request, Response, lead_of

if TYPE_CHECKING:
    from trueline.bundle.signature import Array, Signature
    from trueline.runtime.session import Bindable
    from trueline.serve.asking import Answer
    from trueline.serve.lanes import Batcher
    from trueline.serve.layouts import Layout
    from trueline.serve.models import Models
    from trueline.serve.stats import ServerStats, VersionStats

    Kind = tuple[tuple[int, ...], ...]
    LongWay = Callable[[Request], Answer]

MAX_BYTES = 64 * 2**10
"""Of a request's numbers: a larger one is sooner read where it lies than copied."""
MAX_KINDS = 8
"""Of one version; who asks for more goes the long way."""
MAX_TRIES = 3
"""To bind a number of rows, on the values of as many requests."""
OCTETS = b"application/octet-stream"


class _Held(Later):
    """A request that waits for the end of a turn."""

    __slots__ = ("again", "began", "long_way", "pieces", "request", "since")

    def __init__(
        self,
        again: Again,
        request: Request,
        long_way: LongWay,
        pieces: Sequence[bytes | bytearray],
        began: float,
        since: float,
    ) -> None:
        self._call = self._more = self._response = None  # what `Later` begins with, without a call
        self.gone = False
        self.again = again
        self.request = request
        self.long_way = long_way
        self.pieces = pieces
        self.began = began
        self.since = since

    def go_the_long_way(self) -> None:
        found = self.long_way(self.request)
        if isinstance(found, Response):
            self.set_result(found)
            return
        found.add_done_callback(lambda later: None if later.cancelled() else self.set_result(later.result()))
        self.add_done_callback(lambda _: found.cancel())


class Arrays:
    """The inputs and outputs of one kind of requests, with room for a full batch, and the program bound to them."""

    def __init__(
        self,
        program: Bindable,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        *,
        by_rows: bool,
        capacity: int,
        short: Short,
    ) -> None:
        """Both as of one request. `capacity` rows have room; without rows the arrays are those of one request."""
        self._program: Bindable | None = program
        self._by_rows = by_rows
        self.capacity = capacity
        self.inputs = {name: self._room(array) for name, array in inputs.items()}
        self.outputs = {name: self._room(array) for name, array in outputs.items()}
        self.views = [_bytes_of(array) for array in self.inputs.values()]
        self._runs: dict[int, Callable[[], None]] = {}
        self._tries: dict[int, int] = {}
        self._short = short
        self._held: list[_Held] = []
        self._held_rows = 0

    def _room(self, array: Array) -> Array:
        return np.zeros((self.capacity, *array.shape[1:]) if self._by_rows else array.shape, array.dtype)

    def rows_of(self, inputs: Mapping[str, Array]) -> int:
        """Of a request."""
        return next(iter(inputs.values())).shape[0] if self._by_rows else 1

    def row_bytes(self, output: str) -> int:
        """From one row of an output to the next."""
        return self.outputs[output].nbytes // (self.capacity if self._by_rows else 1)

    def takes(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> bool:
        """Whether a request like this one, with such an answer, can be run here: tried on it."""
        rows = self.rows_of(inputs)
        if rows > self.capacity or outputs.keys() != self.outputs.keys():
            return False
        if any(self._first(self.outputs[name], rows).shape != array.shape for name, array in outputs.items()):
            return False  # the values decide the shape of the answer, and those of others decided otherwise
        for name, array in inputs.items():
            self._first(self.inputs[name], rows)[...] = array
        return self.run_of(rows) is not None

    def _first(self, array: Array, rows: int) -> Array:
        return array[:rows] if self._by_rows else array

    def run_of(self, rows: int) -> Callable[[], None] | None:
        """The run of the first `rows`, bound, and tried on what lies there, when it is not yet; None: not here."""
        run = self._runs.get(rows)
        if run is None and self._program is not None and self._tries.get(rows, 0) < MAX_TRIES:
            self._tries[rows] = self._tries.get(rows, 0) + 1
            try:
                run = self._program.bind(
                    {name: self._first(array, rows) for name, array in self.inputs.items()},
                    {name: self._first(array, rows) for name, array in self.outputs.items()},
                )
            except Exception:  # noqa: BLE001 - blind on purpose: the long way has the words for what is wrong
                return None
            if run is not None:
                self._runs[rows] = run
        return run

    def close(self) -> None:
        """Lets go of the program."""
        self._program = None
        self._runs.clear()

    # a turn of the loop

    def hold(self, held: _Held) -> _Held:
        rows = held.again.rows
        if self._held_rows + rows > self.capacity:
            self._run_held()
        if not self._held:
            self._short.loop.call_soon(self._run_held)
            self._short.batcher.hold()
        self._held.append(held)
        self._held_rows += rows
        return held

    def _run_held(self) -> None:
        everyone, self._held, self._held_rows = self._held, [], 0
        if not everyone:
            return  # the turn was cut in two
        held = [one for one in everyone if not one.gone]
        if held and not self._answer(held):
            for one in held:
                one.go_the_long_way()
        self._short.batcher.released(len(everyone))

    def _answer(self, held: list[_Held]) -> bool:
        """Runs all of `held` together and answers them; False: nobody was answered."""
        for at, view in enumerate(self.views):
            joined = b"".join([one.pieces[at] for one in held])
            view[: len(joined)] = joined
        rows = sum([one.again.rows for one in held])
        run = self.run_of(rows)
        if run is None:
            return False
        began, at, responses = perf_counter(), 0, []
        try:
            run()
            ran = perf_counter()
            for one in held:
                responses.append(one.again.told(at))
                at += one.again.rows
        except Exception:  # noqa: BLE001 - blind on purpose: each goes the long way, and fails there if it has to
            return False
        now, stats, count = perf_counter(), self._short.stats, len(held)
        since_s = sum([one.since for one in held])
        stats.count_run(count, rows, ran - began, began * count - since_s)
        began_s = [one.began for one in held]
        stats.count_answers(began_s, since_s - sum(began_s), now - ran, now, time())
        held[0].again.answers.by_status[200] += count
        for one, response in zip(held, responses, strict=True):
            one.set_result(response)
        return True


class Short:
    """What one version has bound for short requests."""

    def __init__(
        self,
        program: Bindable,
        signature: Signature,
        batcher: Batcher,
        stats: VersionStats,
        loop: asyncio.AbstractEventLoop,
        *,
        by_rows: bool,
        values: int,
    ) -> None:
        """`by_rows`: the first dimension of all inputs and outputs counts rows. Runs of at most `values` are short."""
        self._program = program
        self._names = tuple([spec.name for spec in signature.inputs])
        self._by_rows = by_rows
        self._values = values
        self._kinds: dict[Kind, Arrays] = {}
        self.batcher = batcher
        self.stats = stats
        self.loop = loop
        self.open = True

    def close(self) -> None:
        """Lets go of the program: nothing is asked any more."""
        self.open = False
        for arrays in self._kinds.values():
            arrays.close()
        self._kinds.clear()
        del self._program

    def arrays(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Arrays | None:
        """Where requests like this one are run; None where they are not."""
        if not self.open or inputs.keys() != set(self._names) or any(not array.size for array in inputs.values()):
            return None
        given = {name: inputs[name] for name in self._names}
        values = sum([array.size for array in given.values()])
        if values > self._values or sum([array.nbytes for array in given.values()]) > MAX_BYTES:
            return None
        kind = tuple([array.shape[self._by_rows :] for array in given.values()])
        found = self._kinds.get(kind)
        if found is None and len(self._kinds) < MAX_KINDS:
            rows = given[self._names[0]].shape[0] if self._by_rows else 1
            capacity = max(rows, min(self.batcher.full_rows, self._values * rows // values))
            found = Arrays(self._program, given, outputs, by_rows=self._by_rows, capacity=capacity, short=self)
            self._kinds[kind] = found
        return found


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

    def answer(self, request: Request, long_way: LongWay) -> Response | Later | None:
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
            return arrays.hold(_Held(self, request, long_way, pieces, began, since))
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


def _bytes_of(array: Array) -> memoryview:
    """Where it lies, to be written and read."""
    return array.reshape(-1).view(np.uint8).data


def _in_bytes(
    name: str, version: str, call: oip.Call, outputs: Mapping[str, Array], arrays: Arrays
) -> Callable[[int], Response]:
    made = oip.encode(name, version, call, outputs)
    head = made.body[: made.json_bytes]
    headers = b"inference-header-content-length: %d\r\n" % len(head)
    lead = lead_of(Response(200, made.body, OCTETS, headers))
    places = [(_bytes_of(arrays.outputs[key]), arrays.row_bytes(key), outputs[key].nbytes) for key in call.wanted]
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
    name: str, version: str, call: oip.Call, outputs: Mapping[str, Array], arrays: Arrays
) -> Callable[[int], Response]:
    *before, end = oip.around(name, version, call, outputs)
    places = []
    for text, key in zip(before, call.wanted, strict=True):
        flat = arrays.outputs[key].reshape(-1)
        places.append((text, flat, arrays.row_bytes(key) // flat.itemsize, outputs[key].size))
    numbers = oip.numbers

    def told(at: int) -> Response:
        body = b""
        for text, flat, step, size in places:
            body += text + numbers(flat[at * step : at * step + size].tolist())
        return Response(200, body + end)

    return told
