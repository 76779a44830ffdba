"""Short runs of a version's program on the event loop, in arrays to which it is bound (`runtime.session.Bindable`).

A request alone in its turn of the loop runs as it comes; several are held and run together at the end of the turn.
What cannot be run here is answered by the uncached path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from trueline.web.messages import Answer, InlineFuture, Request, Response

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.runtime.session import Bindable
    from trueline.serve.batching.queue import Batcher
    from trueline.serve.counters import ServerStats, VersionStats

    Kind = tuple[tuple[int, ...], ...]
    HandleUncached = Callable[[Request], Answer]
    EncodeReply = Callable[[int, bytes | None], Response]
    """Makes the response from the outputs' rows from one on, with the text of an id if the request has one."""
    Spans = Sequence[tuple[int, int]]
    """Where in a body each input lies."""

MAX_BYTES = 64 * 2**10
"""Of a request's tensors: larger ones are read faster in place than copied."""
MAX_KINDS = 8
"""Shapes of one row that a version binds; requests of further shapes take the uncached path."""
MAX_TRIES = 3
"""To bind a number of rows, on the values of as many requests."""


class InputReader(Protocol):
    """Reads the inputs of one form of requests; `templates.Template`."""

    def pieces(self, body: bytes | bytearray, spans: Spans) -> Sequence[bytes | bytearray] | None:
        """The bytes of each input; None for malformed ones."""
        ...


@dataclass(slots=True, eq=False)
class CachedReply:
    """Answers requests of one template."""

    runs: BoundRuns
    arrays: BoundArrays
    encode: EncodeReply
    rows: int
    stats: ServerStats

    def try_answer(
        self,
        request: Request,
        handle_uncached: HandleUncached,
        reader: InputReader,
        spans: Spans,
        request_id: bytes | None,
        began: float,
    ) -> Response | InlineFuture | None:
        """The response to `request`, whose inputs lie at `spans` and whose decoding began at `began`; None: the
        uncached path has to answer it.
        """
        runs = self.runs
        if not runs.open:
            return None
        mode = runs.batcher.run_mode()
        if mode == "queue":
            return None
        body = request.body
        pieces = None if isinstance(body, memoryview) else reader.pieces(body, spans)
        if pieces is None:
            return None
        arrays, since = self.arrays, perf_counter()
        if mode == "turn":
            return arrays.hold(PendingRequest(self, request, handle_uncached, pieces, request_id, (began, since)))
        for view, piece in zip(arrays.views, pieces, strict=True):
            view[: len(piece)] = piece
        run = arrays.run_of(self.rows)
        if run is None:
            return None
        try:
            run()
            ran = perf_counter()
            response = self.encode(0, request_id)
        except Exception:  # noqa: BLE001 - blind on purpose: the uncached path reports what is wrong
            return None
        now, stats = perf_counter(), runs.stats
        stats.count_run(1, self.rows, ran - since, 0.0)
        stats.count_answers([began], since - began, now - ran, now, time())
        return response


class PendingRequest(InlineFuture):
    """A request that waits for the end of a turn."""

    __slots__ = ("began", "handle_uncached", "pieces", "reply", "request", "request_id", "since")

    def __init__(
        self,
        reply: CachedReply,
        request: Request,
        handle_uncached: HandleUncached,
        pieces: Sequence[bytes | bytearray],
        request_id: bytes | None,
        times: tuple[float, float],
    ) -> None:
        """`times`: when decoding began and when it ended."""
        super().__init__()
        self.reply, self.request, self.handle_uncached = reply, request, handle_uncached
        self.pieces, self.request_id = pieces, request_id
        self.began, self.since = times

    def take_uncached_path(self) -> None:
        answer = self.handle_uncached(self.request)
        if isinstance(answer, Response):
            self.set_result(answer)
            return
        answer.add_done_callback(lambda done: None if done.cancelled() else self.set_result(done.result()))
        self.add_done_callback(lambda _: answer.cancel())


class BoundArrays:
    """Inputs and outputs of requests whose rows have one shape, with room for a full batch, and the bound program."""

    def __init__(
        self,
        runs: BoundRuns,
        program: Bindable,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        *,
        by_rows: bool,
        capacity: int,
    ) -> None:
        """`inputs` and `outputs` are those of one request; there is room for `capacity` rows, or without rows for one
        request.
        """
        self._runs = runs
        self._program: Bindable | None = program
        self._by_rows = by_rows
        self.capacity = capacity
        self.inputs = {name: self._allocate(array) for name, array in inputs.items()}
        self.outputs = {name: self._allocate(array) for name, array in outputs.items()}
        self.views = [bytes_of(array) for array in self.inputs.values()]
        self._bound: dict[int, Callable[[], None]] = {}
        self._tries: dict[int, int] = {}
        self._pending: list[PendingRequest] = []
        self._pending_rows = 0

    def _allocate(self, array: Array) -> Array:
        return np.zeros((self.capacity, *array.shape[1:]) if self._by_rows else array.shape, array.dtype)

    def rows_of(self, inputs: Mapping[str, Array]) -> int:
        return next(iter(inputs.values())).shape[0] if self._by_rows else 1

    def row_bytes(self, output: str) -> int:
        return self.outputs[output].nbytes // (self.capacity if self._by_rows else 1)

    def accepts(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> bool:
        """Whether a request of `inputs`, answered with `outputs`, can be run here: tried on it."""
        rows = self.rows_of(inputs)
        if rows > self.capacity or outputs.keys() != self.outputs.keys():
            return False
        if any(self._first(self.outputs[name], rows).shape != array.shape for name, array in outputs.items()):
            return False  # the output's shape depends on the values, and was another for other values
        for name, array in inputs.items():
            self._first(self.inputs[name], rows)[...] = array
        return self.run_of(rows) is not None

    def _first(self, array: Array, rows: int) -> Array:
        return array[:rows] if self._by_rows else array

    def run_of(self, rows: int) -> Callable[[], None] | None:
        """The bound run of the first `rows`, which binding tries on their present values; None: it cannot be bound."""
        run = self._bound.get(rows)
        if run is None and self._program is not None and self._tries.get(rows, 0) < MAX_TRIES:
            self._tries[rows] = self._tries.get(rows, 0) + 1
            try:
                run = self._program.bind(
                    {name: self._first(array, rows) for name, array in self.inputs.items()},
                    {name: self._first(array, rows) for name, array in self.outputs.items()},
                )
            except Exception:  # noqa: BLE001 - blind on purpose: the uncached path reports what is wrong
                return None
            if run is not None:
                self._bound[rows] = run
        return run

    def close(self) -> None:
        """Releases the program."""
        self._program = None
        self._bound.clear()

    # a turn of the loop

    def hold(self, pending: PendingRequest) -> PendingRequest:
        """Runs `pending` with the others of this turn, at its end."""
        rows = pending.reply.rows
        if self._pending_rows + rows > self.capacity:
            self._run_pending()
        if not self._pending:
            self._runs.loop.call_soon(self._run_pending)
            self._runs.batcher.hold()
        self._pending.append(pending)
        self._pending_rows += rows
        return pending

    def _run_pending(self) -> None:
        pending, self._pending, self._pending_rows = self._pending, [], 0
        if not pending:
            return  # a full batch has run before the end of the turn
        still_open = [one for one in pending if not one.gone]
        if still_open and not self._answer(still_open):
            for one in still_open:
                one.take_uncached_path()
        self._runs.batcher.release(len(pending))

    def _answer(self, pending: list[PendingRequest]) -> bool:
        """Runs all of `pending` together and answers them; False: none was answered."""
        for at, view in enumerate(self.views):
            joined = b"".join([one.pieces[at] for one in pending])
            view[: len(joined)] = joined
        rows = sum([one.reply.rows for one in pending])
        run = self.run_of(rows)
        if run is None:
            return False
        began, at, responses = perf_counter(), 0, []
        try:
            run()
            ran = perf_counter()
            for one in pending:
                responses.append(one.reply.encode(at, one.request_id))
                at += one.reply.rows
        except Exception:  # noqa: BLE001 - blind on purpose: each takes the uncached path, and fails there if it has to
            return False
        now, stats, count = perf_counter(), self._runs.stats, len(pending)
        since_s = sum([one.since for one in pending])
        stats.count_run(count, rows, ran - began, began * count - since_s)
        began_s = [one.began for one in pending]
        stats.count_answers(began_s, since_s - sum(began_s), now - ran, now, time())
        pending[0].reply.stats.by_status[200] += count
        for one, response in zip(pending, responses, strict=True):
            one.set_result(response)
        return True


@dataclass(slots=True, eq=False)
class BoundRuns:
    """The arrays that one version has bound for short runs."""

    program: Bindable | None
    names: tuple[str, ...]
    """Of the inputs."""
    batcher: Batcher
    stats: VersionStats
    loop: asyncio.AbstractEventLoop
    by_rows: bool
    """Whether the first dimension of all inputs and outputs counts rows."""
    values: int
    """The most input values of a short run."""
    open: bool = True
    kinds: dict[Kind, BoundArrays] = field(default_factory=dict)

    def close(self) -> None:
        """Releases the program: there are no more requests."""
        self.open = False
        for arrays in self.kinds.values():
            arrays.close()
        self.kinds.clear()
        self.program = None

    def arrays_for(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> BoundArrays | None:
        """Where requests like this one are run; None where they are not."""
        if self.program is None or inputs.keys() != set(self.names) or any(not array.size for array in inputs.values()):
            return None
        inputs = {name: inputs[name] for name in self.names}
        values = sum([array.size for array in inputs.values()])
        if values > self.values or sum([array.nbytes for array in inputs.values()]) > MAX_BYTES:
            return None
        kind = tuple([array.shape[self.by_rows :] for array in inputs.values()])
        arrays = self.kinds.get(kind)
        if arrays is None and len(self.kinds) < MAX_KINDS:
            rows = inputs[self.names[0]].shape[0] if self.by_rows else 1
            if self.by_rows and rows > self.batcher.policy.max_batch:
                return None
            capacity = max(rows, min(self.batcher.full_rows, self.values * rows // values))
            arrays = BoundArrays(self, self.program, inputs, outputs, by_rows=self.by_rows, capacity=capacity)
            self.kinds[kind] = arrays
        return arrays


def bytes_of(array: Array) -> memoryview:
    """The array's memory, readable and writable."""
    return array.reshape(-1).view(np.uint8).data
