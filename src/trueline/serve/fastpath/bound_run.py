"""Short runs of one version, on the loop, in arrays to which its program is bound. See `again` for whose they are.

    inputs     numbers are laid here, row after row          bound once for each number of rows that is run,
    outputs    and the answers are read from here            by `runtime.session.Bindable`

What is held in a turn of the loop is run at its end, all together. What cannot be run here goes the long way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, time
from typing import TYPE_CHECKING

import numpy as np

from trueline.web.messages import InlineFuture, Request, Response

if TYPE_CHECKING:
    from trueline.bundle.signature import Array, Signature
    from trueline.runtime.session import Bindable
    from trueline.serve.batching.queue import Batcher
    from trueline.serve.counters import VersionStats
    from trueline.serve.fastpath.replay import Again
    from trueline.serve.protocols.dispatch import Answer

    Kind = tuple[tuple[int, ...], ...]
    LongWay = Callable[[Request], Answer]

MAX_BYTES = 64 * 2**10
"""Of a request's numbers: a larger one is sooner read where it lies than copied."""
MAX_KINDS = 8
"""Of one version; who asks for more goes the long way."""
MAX_TRIES = 3
"""To bind a number of rows, on the values of as many requests."""


class Held(InlineFuture):
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
        super().__init__()
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
        self.views = [bytes_of(array) for array in self.inputs.values()]
        self._runs: dict[int, Callable[[], None]] = {}
        self._tries: dict[int, int] = {}
        self._short = short
        self._held: list[Held] = []
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

    def hold(self, held: Held) -> Held:
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

    def _answer(self, held: list[Held]) -> bool:
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


def bytes_of(array: Array) -> memoryview:
    """Where it lies, to be written and read."""
    return array.reshape(-1).view(np.uint8).data
