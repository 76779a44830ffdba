"""Bounds of one request: its rows, the sizes of its free dimensions, and the numbers in it and in its answer. Pure.

Without them a small compressed body becomes gigabytes (CWE-409, CWE-770). The defaults come from what a bundle proves:
what the capture has compared, with room for more, is accepted. Rows that were shown to be independent are not bounded:
a larger request is cut into runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from trueline.bundle.signature import Signature, TensorSpec
from trueline.errors import TooLarge
from trueline.web.body import Body

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

    Shapes = Mapping[str, tuple[int, ...]]

T = TypeVar("T")
LEAST_VALUES = 2**22
"""As many numbers are accepted at least: 16 MiB of FP32."""
LEAST_SIZE = 4096
"""A free dimension may be as large at least."""
LARGER = 16
"""How many times as large as the largest probe a free dimension may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBounds:
    """Of one request; numbers of all inputs, or outputs, together."""

    values: int
    answer_values: int
    rows: int | None = None
    """Of a program whose rows may not be cut into runs; None: unbounded."""
    row_symbol: str | None = None
    open_answer: bool = False
    """Whether only a run shows the sizes of its outputs."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of the free dimensions without a proven end, by symbol."""

    def check_text(self, text: bytes | bytearray | memoryview, num_bytes: int | None = None) -> None:
        """Raises TooLarge if the JSON or CSV in the first `num_bytes` (None: all) has more values than a request may.

        Values are counted by what separates them, before anything is made of them.
        """
        length = len(text) if num_bytes is None else num_bytes
        if length <= 2 * self.values:
            return
        start = bytes(text) if num_bytes is None else bytes(text[:num_bytes])
        count = start.count(b",") + 1
        if start.lstrip()[:1] not in (b"{", b"["):  # CSV: a line ends its last value too
            count += max(start.count(b"\n"), start.count(b"\r"))
        if count > self.values + start.count(b":"):
            raise _too_many("the body has", count, self.values)

    def check_values(self, count: int) -> None:
        """Raises TooLarge for inputs of `count` numbers."""
        if count > self.values:
            raise _too_many("the inputs have", count, self.values)

    def check(self, signature: Signature, inputs: Mapping[str, Array]) -> None:
        """Raises TooLarge that names the value, the bound and what to do, for inputs that `signature` accepts."""
        self.check_values(sum([array.size for array in inputs.values()]))
        for symbol, most in self.sizes.items():
            name, axis = signature.symbols[symbol]
            size = inputs[name].shape[axis]
            if size > most:
                raise TooLarge(
                    f"input '{name}' has size {size} in dimension {axis} ({symbol}), at most {most} are accepted",
                    hint="send less in one request, or start the server with a larger --max-size",
                )
        sizes = signature.sizes(inputs)
        rows = 0 if self.row_symbol is None else sizes.get(self.row_symbol, 0)
        if self.rows is not None and rows > self.rows:
            raise TooLarge(
                f"the request has {rows} rows, at most {self.rows} may run together (answers may depend on other rows)",
                hint="send fewer rows in one request, or start the server with a larger --max-batch",
            )
        count = sum(_count(spec, sizes) for spec in signature.outputs)
        if count > self.answer_values:
            raise _too_many("the answer would have", count, self.answer_values)

    def check_answer(self, outputs: Mapping[str, Array]) -> None:
        """Raises TooLarge for outputs whose sizes only the run has shown."""
        count = sum([array.size for array in outputs.values()])
        if count > self.answer_values:
            raise _too_many("the answer has", count, self.answer_values)


def _too_many(what: str, count: int, most: int) -> TooLarge:
    return TooLarge(
        f"{what} {count} values, at most {most} are accepted",
        hint="send less in one request, or start the server with a larger --max-values",
    )


UNBOUNDED = RequestBounds(values=2**1024, answer_values=2**1024)  # no shape of 32 dimensions has as many


def decode_within(body: Body, bounds: RequestBounds, work: Callable[..., T], *args: object) -> T:
    """`work(body, *args)`, for a body whose values are within `bounds`. Raises TooLarge."""
    bounds.check_text(body)
    return work(body, *args)


def _count(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    """Numbers in a tensor; 0 where a size is not known."""
    return math.prod(size if isinstance(size, int) else sizes.get(size, 0) for size in spec.shape)


def of_program(
    signature: Signature,
    probed: Iterable[Shapes],
    *,
    row_symbol: str | None,
    cuts: bool,
    max_batch: int,
    max_values: int = 0,
    max_size: int = 0,
) -> RequestBounds:
    """The bounds of a program that was compared on inputs (and outputs) of the shapes `probed`.

    `cuts`: rows are independent, and so cut into runs. 0: derived.
    """
    largest: dict[str, int] = {}
    for shapes in probed:
        for spec in (*signature.inputs, *signature.outputs):
            for symbol, size in zip(spec.shape, shapes.get(spec.name, ()), strict=False):
                if isinstance(symbol, str):
                    largest[symbol] = max(size, largest.get(symbol, 1))
    record = {**largest, **({} if row_symbol is None else {row_symbol: 1})}
    given = sum(_count(spec, record) for spec in signature.inputs)
    answered = sum(_count(spec, record) for spec in signature.outputs)
    free = [one for one in signature.symbols if one != row_symbol and signature.dims[one].max is None]
    return RequestBounds(
        values=max_values or max(LEAST_VALUES, max_batch * given),
        answer_values=max(max_values or LEAST_VALUES, max_batch * answered),
        rows=None if cuts or row_symbol is None else max(max_batch, largest.get(row_symbol, 1)),
        row_symbol=row_symbol,
        open_answer=any(one not in signature.symbols for spec in signature.outputs for one in spec.symbols),
        sizes={one: max_size or max(LEAST_SIZE, LARGER * largest.get(one, 1)) for one in free},
    )
