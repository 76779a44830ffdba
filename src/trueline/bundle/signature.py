"""The signature: names, dtypes and symbolic shapes of inputs and outputs, and the check of a request. Pure.

Every Session and the server run the same check. Dtypes have the names of the Open Inference Protocol (BOOL,
INT8..INT64, UINT8..UINT64, FP16, FP32, FP64). A dimension is a number or the name of a symbol; a symbol has a proven
range, and all dimensions with one name are equal within a request. Guards are further conditions between sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
import numpy as np

from trueline.bundle.guard_words import describe_guard
from trueline.bundle.guards import Guard
from trueline.bundle.values import ANY, Values
from trueline.bundle.values import Array as Array
from trueline.errors import RequestError, closest, join_names

NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"INT{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
}
DATATYPES: dict[np.dtype[np.generic], str] = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
_MANY = 256
"""Shapes that are cached; with more, the cache is emptied."""
_Expected = tuple[
    str, np.dtype[np.generic], int, tuple[tuple[int, int], ...], tuple[tuple[int, str, int, int, int], ...]
]
"""Of one input: name, datatype, number of dimensions; axis and size of the fixed ones; axis, symbol, least, most and
step of the others."""


class Dim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The proven range of one symbol: `min` <= size <= `max` (None: no upper bound), a multiple of `multiple_of`."""

    min: int = 1
    max: int | None = None
    multiple_of: int = 1
    probed: bool = False
    """Whether `max` is the largest size that was compared with the model, not a limit of the model or a guard."""

    def allows(self, size: int) -> bool:
        """Whether `size` lies in the range."""
        return self.min <= size and (self.max is None or size <= self.max) and not size % self.multiple_of


PROBED_HINT = (
    "that is the largest size that capture compared with the model: send less in one request, or capture with an "
    "example of the size that is needed"
)
Rows = Literal["any", "some", "first"]
"""A condition on each row of a mask, along its last dimension: `some`: it has a value other than 0, `first`: it begins
with one (padding comes after it)."""
NEEDS: dict[Rows, str] = {"some": "has a value other than 0", "first": "begins with a value other than 0"}


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One input or output. `shape` holds numbers and symbol names, e.g. `("batch", 8, 8)`."""

    name: str
    datatype: str
    shape: tuple[int | str, ...]
    role: Literal["data", "state"] = "data"
    """`state`: the model's memory. The caller sends `next.x` of one answer back as `state.x` of its next request."""
    rows: Rows = "any"
    """Other than `any` for a mask, if the program was proven only for rows that are not hidden."""
    fill: int = 0
    """The value that pads a sequence: for a mask, the one that hides."""
    values: Values = ANY
    """What every value has to be, if the program was proven only for such."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return NUMPY_DTYPES[self.datatype]

    @property
    def symbols(self) -> tuple[str, ...]:
        """The dimensions that have no fixed size."""
        return tuple(size for size in self.shape if isinstance(size, str))

    @property
    def needs(self) -> str:
        """The conditions on the values, in words; empty if there is none."""
        rows = f"each row of {self.name} {NEEDS[self.rows]}" if self.rows != "any" else ""
        values = f"{self.name} is {self.values.text}" if self.values else ""
        return " and ".join(part for part in (values, rows) if part)

    @property
    def is_conditional(self) -> bool:
        """Whether a request's values have to be looked at."""
        return self.rows != "any" or bool(self.values)


class Signature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Inputs, outputs, the proven range of every symbol in their shapes, and the guards between them."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: dict[str, Dim]
    guards: tuple[Guard, ...] = ()
    padded: tuple[str, ...] = ()
    """Symbols whose dimensions may be padded at their end without changing an answer; see `bundle.padding`."""
    random: bool = False
    """Whether the model draws random numbers: equal requests then get different answers, of one distribution."""

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Raises RequestError, which names input, value and expectation, for inputs outside the proven range."""
        expected = {spec.name for spec in self.inputs}
        if inputs.keys() != expected:
            self._refuse_names(set(inputs), expected)
        sizes: dict[str, tuple[int, str]] = {}
        for spec in self.inputs:
            self._check_one(spec, inputs[spec.name], sizes)
        found = {symbol: size for symbol, (size, _) in sizes.items()}
        for guard in self.guards:
            if not guard.holds(found):
                have = ", ".join(f"{symbol} = {found[symbol]}" for symbol in guard.symbols)
                needs = describe_guard(guard, self.dims)
                raise RequestError(f"the sizes {have} are outside the proven range, in which {needs}")
        self.check_values(inputs)

    def allows(self, sizes: Mapping[str, int]) -> bool:
        """Whether the size of every symbol lies in its range and all guards hold."""
        return all(self.dims[symbol].allows(size) for symbol, size in sizes.items() if symbol in self.dims) and all(
            guard.holds(sizes) for guard in self.guards
        )

    def with_rows(self, rows: Mapping[str, Rows]) -> Signature:
        """The same with the conditions `rows` on masks; `any` for all others."""
        inputs = tuple(msgspec.structs.replace(spec, rows=rows.get(spec.name, "any")) for spec in self.inputs)
        return msgspec.structs.replace(self, inputs=inputs)

    def with_values(self, values: Mapping[str, Values]) -> Signature:
        """The same with the conditions `values` on inputs; none for all others."""
        inputs = tuple(msgspec.structs.replace(spec, values=values.get(spec.name, ANY)) for spec in self.inputs)
        return msgspec.structs.replace(self, inputs=inputs)

    @property
    def values(self) -> dict[str, Values]:
        """The conditions on values, by input."""
        return {spec.name: spec.values for spec in self.inputs if spec.values}

    @property
    def is_conditional(self) -> bool:
        """Whether a request's values have to be looked at."""
        return any(spec.is_conditional for spec in self.inputs)

    @property
    def rows(self) -> dict[str, Rows]:
        """The conditions on masks, by name."""
        return {spec.name: spec.rows for spec in self.inputs if spec.rows != "any"}

    @property
    def state(self) -> dict[str, str]:
        """Input of a part of the state -> output of its next value. Empty for a model without a memory."""
        given = [spec.name for spec in self.inputs if spec.role == "state"]
        return dict(zip(given, [spec.name for spec in self.outputs if spec.role == "state"], strict=True))

    @property
    def symbols(self) -> dict[str, tuple[str, int]]:
        """The symbols of the inputs, each with the first input and axis that has it, in order."""
        found: dict[str, tuple[str, int]] = {}
        for spec in self.inputs:
            for axis, size in enumerate(spec.shape):
                if isinstance(size, str):
                    found.setdefault(size, (spec.name, axis))
        return found

    def sizes(self, inputs: Mapping[str, Array]) -> dict[str, int]:
        """The size of every symbol in `inputs`."""
        return {symbol: inputs[name].shape[axis] for symbol, (name, axis) in self.symbols.items()}

    def _refuse_names(self, given: set[str], expected: set[str]) -> None:
        takes = f"(the model takes: {join_names(sorted(expected))})"
        for name in sorted(given - expected):
            near = closest(name, expected)
            raise RequestError(f"unexpected input '{name}' {takes}", hint=f"did you mean '{near}'?" if near else "")
        raise RequestError(f"missing input '{min(expected - given)}' {takes}")

    def _check_one(self, spec: TensorSpec, array: Array, sizes: dict[str, tuple[int, str]]) -> None:
        if array.dtype != spec.dtype:
            found = DATATYPES.get(array.dtype, str(array.dtype))
            raise RequestError(f"input '{spec.name}' has datatype {found}, expected {spec.datatype}")
        if array.ndim != len(spec.shape):
            raise RequestError(
                f"input '{spec.name}' has {array.ndim} dimensions {list(array.shape)}, "
                f"expected {len(spec.shape)}: {list(spec.shape)}"
            )
        for axis, (size, want) in enumerate(zip(array.shape, spec.shape, strict=True)):
            if isinstance(want, int):
                if size != want:
                    raise RequestError(f"input '{spec.name}' has size {size} in dimension {axis}, expected {want}")
            else:
                self._check_symbol(spec.name, axis, size, want, sizes)

    def check_values(self, inputs: Mapping[str, Array]) -> None:
        """The part of `check` that reads values: ranges, and the conditions on rows of masks. Raises RequestError."""
        for spec in self.inputs:
            if spec.values:
                refusal = spec.values.refusal(spec.name, inputs[spec.name], self.sizes(inputs))
                if refusal is not None:
                    raise refusal
            if spec.rows != "any":
                self._check_rows(spec, inputs[spec.name])

    def _check_rows(self, spec: TensorSpec, array: Array) -> None:
        if array.shape[-1] and array[..., 0].all():  # the usual mask, quickly
            return
        shown = (array if spec.rows == "some" else array[..., :1]).any(axis=-1)
        if not shown.all():
            row = list(map(int, np.argwhere(~shown)[0]))
            raise RequestError(
                f"input '{spec.name}' hides row {row}: this program was proven only where {spec.needs}",
                hint="leave the row out, or pad after its values; `trueline bundle inspect` has other programs' needs",
            )

    def _check_symbol(self, name: str, axis: int, size: int, symbol: str, sizes: dict[str, tuple[int, str]]) -> None:
        dim = self.dims[symbol]
        if size < dim.min or (dim.max is not None and size > dim.max) or size % dim.multiple_of:
            upper = "" if dim.max is None else f" and at most {dim.max}"
            step = "" if dim.multiple_of == 1 else f" and a multiple of {dim.multiple_of}"
            raise RequestError(
                f"input '{name}' has size {size} in dimension {axis} ({symbol}), "
                f"proven only for sizes of at least {dim.min}{upper}{step}",
                hint=PROBED_HINT if dim.probed and size > (dim.max or size) else "",
            )
        earlier = sizes.setdefault(symbol, (size, name))
        if earlier[0] != size:
            raise RequestError(
                f"input '{name}' has size {size} in dimension {axis} ({symbol}), "
                f"but input '{earlier[1]}' has {earlier[0]}; they must be equal"
            )


class Check:
    """`signature.check` for repeated inputs.

    Datatypes and shapes that have passed are cached; conditions on values are checked each time. New ones are compared
    with a table first, in a few microseconds for all inputs; if they do not fit, `signature.check` raises the error.
    """

    __slots__ = ("_guards", "_more", "_passed", "_signature", "_table", "_values")

    def __init__(
        self, signature: Signature, more: Callable[[Signature, Mapping[str, Array]], None] | None = None
    ) -> None:
        """`more` checks further what depends on datatypes and shapes alone."""
        self._signature = signature
        self._more = more
        self._values = ValuesCheck(signature) if signature.is_conditional else None
        self._passed: set[object] = set()
        self._table = [_plan_check(signature, spec) for spec in signature.inputs]
        self._guards = signature.guards

    def __call__(self, inputs: Mapping[str, Array]) -> None:
        """Raises RequestError that names input, value and expectation."""
        form = tuple([(name, array.dtype, array.shape) for name, array in inputs.items()])
        if form not in self._passed:
            if not self._fits(inputs):
                self._signature.check(inputs)
            if self._more is not None:
                self._more(self._signature, inputs)
            if len(self._passed) >= _MANY:
                self._passed = set()
            self._passed.add(form)
        if self._values is not None:
            self._values(inputs)

    def _fits(self, inputs: Mapping[str, Array]) -> bool:
        """Whether names, datatypes and sizes are inside the range. If False, the signature decides."""
        if len(inputs) != len(self._table):
            return False
        sizes: dict[str, int] = {}
        for name, dtype, num_dims, fixed, free in self._table:
            array = inputs.get(name)
            if array is None or array.dtype != dtype or array.ndim != num_dims:
                return False
            shape = array.shape
            for axis, want in fixed:
                if shape[axis] != want:
                    return False
            for axis, symbol, least, most, step in free:
                size = shape[axis]
                if size < least or size > most or size % step or sizes.setdefault(symbol, size) != size:
                    return False
        return all(guard.holds(sizes) for guard in self._guards)


class ValuesCheck:
    """`signature.check_values` in a microsecond or two for each input that has a condition."""

    __slots__ = ("_always", "_fast", "_signature")

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        fast = {
            spec.name: spec.values.fast_check(spec.dtype)
            for spec in signature.inputs
            if spec.values and spec.rows == "any"
        }
        self._fast = [(name, check) for name, check in fast.items() if check is not None]
        self._always = len(self._fast) < sum(spec.is_conditional for spec in signature.inputs)

    def __call__(self, inputs: Mapping[str, Array]) -> None:
        """Raises RequestError. The inputs have passed the other checks."""
        if not self._always:
            for name, holds in self._fast:
                if not holds(inputs[name]):
                    break
            else:
                return
        self._signature.check_values(inputs)


def _plan_check(signature: Signature, spec: TensorSpec) -> _Expected:
    fixed = tuple((axis, size) for axis, size in enumerate(spec.shape) if isinstance(size, int))
    free = []
    for axis, symbol in enumerate(spec.shape):
        if isinstance(symbol, str):
            dim = signature.dims[symbol]
            free.append((axis, symbol, dim.min, sys.maxsize if dim.max is None else dim.max, dim.multiple_of))
    return spec.name, spec.dtype, len(spec.shape), fixed, tuple(free)
