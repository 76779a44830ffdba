"""The ranges of values that the model itself answers, found by halving.

An embedding of 20 rows refuses 20 and -1, so its ids are "from 0 to 19". Programs need not refuse them (ONNX counts -1
from the end), so the range becomes part of the signature. Only the eager model runs, on two records at a time.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch.nn.parameter import is_lazy

from trueline.bundle.signature import Array, Signature, TensorSpec
from trueline.bundle.values import ANY, Number, Values
from trueline.capture.model import code_paths
from trueline.capture.model.allowance import Allowance
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.signature import BATCH
from trueline.capture.proof import limits
from trueline.capture.proof.careful import Careful
from trueline.capture.proof.narrowing import takes_values
from trueline.capture.proof.probes import fit, resize
from trueline.capture.proof.value_probes import plant

BUDGET_S, CHEAP_CALLS = 5.0, 300
"""Seconds for the ends of one input, and cheap calls beside them; then it ends where the model was last asked."""
ROUNDS = 3
"""Inputs with all values inside the ranges, drawn at random, that the model has to answer."""
Inputs = Mapping[str, Array]


def settle(eager: EagerSession, signature: Signature) -> Signature:
    """`signature` with the ranges of values outside of which the eager model raises.

    A range is claimed where it does not depend on where the value stands or on other values, and where it is fixed or
    ends at a size. Elsewhere the probes decide, and the program has to refuse what the model refuses.
    """
    found = {}
    for spec in signature.inputs:
        array = eager.example[spec.name]
        if array.dtype.kind in "iuf" and array.size:
            values = _Ends(eager, signature, spec).find()
            claim = signature.with_values({spec.name: values})
            if values and all(takes_values(claim, one) for one in eager.examples):
                found[spec.name] = values
    claim = signature.with_values(found)
    if not found or _answers_inside(eager, claim):
        return claim
    alone = {name: signature.with_values({name: values}) for name, values in found.items()}
    kept = {name: found[name] for name, one in alone.items() if _answers_inside(eager, one)}
    claim = signature.with_values(kept)  # offsets of bags have to rise, and the ids beside them have a range
    return claim if kept != found and _answers_inside(eager, claim) else signature.with_values({})


class _Ends:
    """Searches the ends of one input's values by halving."""

    def __init__(self, eager: EagerSession, signature: Signature, spec: TensorSpec) -> None:
        self._eager, self._signature, self._spec = eager, signature, spec
        self._base = signature.sizes(eager.example)
        two = fit(signature, self._base, {BATCH: 2}) if BATCH in self._base else None
        self._sizes: Mapping[str, int] = two or self._base
        self._allowance = Allowance(BUDGET_S, CHEAP_CALLS)
        example = resize(eager.example, signature, self._sizes)
        shown = example[spec.name]
        finite = shown[np.isfinite(shown)] if shown.dtype.kind == "f" else shown
        self._shown = (finite.min().item(), finite.max().item()) if finite.size else None
        enough = (size for size in limits.MEMORY_BYTES if _answers(eager, example, size))
        self._memory = next(enough, None)
        self._lacked_memory = False

    def find(self) -> Values:
        if self._shown is None or self._memory is None:
            return ANY
        dtype = self._spec.dtype
        least, most = self._shown
        ends = _ends_of(dtype)
        low, least_found = self._end(least, ends[0])
        high, most_found = self._end(most, ends[1])
        values = Values(
            low=low if low is not None and self._is_fixed(low, -1, exact=least_found) else None,
            high=high if high is not None and self._is_fixed(high, +1, exact=most_found) else None,
        )
        if high is not None and values.high is None and dtype.kind in "iu":
            values = self._relative(values, int(high))
            if values.high is None and self._lacked_memory and self._is_fixed(int(high) // 2, +1, exact=False):
                return msgspec.structs.replace(values, high=int(high) // 2)  # where memory ends is never exact
        return values

    def _end(self, good: Number, bad: Number) -> tuple[Number | None, bool]:
        """The last value from `good` towards `bad` that the model answers, and whether it refuses the next one; None
        when it answers `bad`. Without the time for it, the last that was answered."""
        if good == bad or not self._answers(good) or self._answers(bad):
            return None, False
        to, back = (_ordinal, _from_ordinal) if self._spec.dtype.kind == "f" else (_same, _same)
        dtype = self._spec.dtype
        inside, outside = to(good, dtype), to(bad, dtype)
        guesses = self._guesses(int(good), int(bad)) if dtype.kind in "iu" else []
        while guesses and self._allowance.allows():
            at = len(guesses) // 2
            if self._answers(guesses[at]):
                inside, guesses = guesses[at], guesses[at + 1 :]
            else:
                outside, guesses = guesses[at], guesses[:at]
        while abs(outside - inside) > 1 and self._allowance.allows():
            middle = (inside + outside) // 2
            if self._answers(back(middle, dtype)):
                inside = middle
            else:
                outside = middle
        return back(inside, dtype), abs(outside - inside) <= 1

    def _guesses(self, good: int, bad: int) -> list[int]:
        """Where the range may end on the way from `good` to `bad`: at 0, and on both sides of the sizes of the example
        and of the model's tables."""
        tables = (one for one in self._eager.module.state_dict(keep_vars=True).values() if torch.is_tensor(one))
        sizes = {0, *self._sizes.values(), *(size for one in tables if not is_lazy(one) for size in one.shape[:1])}
        ends = {end for size in sizes for end in (size, size - 1, -size, -size - 1)}
        inside = [end for end in ends if min(good, bad) < end < max(good, bad)]
        return sorted(inside, reverse=bad < good)

    def _is_fixed(self, end: Number, step: int, *, exact: bool) -> bool:
        """Whether the range ends there at every place and at other sizes too; `exact`: the next value is refused."""
        if not exact:
            return all(self._answers(end, self._other(symbol)) for symbol in self._base)
        beyond = self._beyond(end, step)
        for place in (0, -1):
            if not self._answers(end, place=place) or self._answers(beyond, place=place):
                return False
        return all(
            self._answers(end, sizes) and not self._answers(beyond, sizes)
            for symbol in self._base if (sizes := self._other(symbol)) is not None
        )  # fmt: skip

    def _relative(self, values: Values, high: int) -> Values:
        """`values` up to a size, where the end moves with that size alone."""
        for symbol, size in self._sizes.items():
            other = self._other(symbol)
            if other is None:
                continue
            moved = high + other[symbol] - size
            if self._answers(moved, other) and not self._answers(moved + 1, other):
                return msgspec.structs.replace(values, high=high - size, size=symbol)
        return values

    def _other(self, symbol: str) -> dict[str, int] | None:
        """Other sizes: a larger one for `symbol`, or a smaller one."""
        step = self._signature.dims[symbol].multiple_of
        for size in (self._sizes[symbol] + 3 * step, self._sizes[symbol] + step, self._sizes[symbol] - step):
            sizes = fit(self._signature, self._sizes, {symbol: size}) if size > 0 else None
            if sizes is not None:
                return sizes
        return None

    def _beyond(self, end: Number, step: int) -> Number:
        if self._spec.dtype.kind == "f":
            return _from_ordinal(_ordinal(end, self._spec.dtype) + step, self._spec.dtype)
        return int(end) + step

    def _answers(self, value: Number, sizes: Mapping[str, int] | None = None, *, place: int | None = None) -> bool:
        least, most = _ends_of(self._spec.dtype)
        if self._spec.dtype.kind in "iu" and not least <= value <= most:
            return False
        inputs = resize(self._eager.example, self._signature, sizes or self._sizes)
        array = inputs[self._spec.name]
        if not array.size:
            return True
        if place is None:
            planted = plant(array, value)
        else:
            planted = array.copy()
            planted.reshape(-1)[place] = value
        with self._allowance.charging():
            error = _error(self._eager, {**inputs, self._spec.name: planted}, self._memory or 0)
        self._lacked_memory |= error is not None and limits.is_lack_of_memory(error)
        return error is None


def _answers(eager: EagerSession, inputs: Inputs, memory: int) -> bool:
    return _error(eager, inputs, memory) is None


def _error(eager: EagerSession, inputs: Inputs, memory: int) -> Exception | None:
    """What the model raises, in bounded memory and without a loop that does not end; None when it answers."""
    try:
        with code_paths.watch(ends=True), Careful(), limits.bounded_memory(memory):
            eager.run(inputs)
    except Exception as error:  # noqa: BLE001 - the user's forward on made-up values may raise anything
        return error.with_traceback(None)
    return None


def _answers_inside(eager: EagerSession, claim: Signature) -> bool:
    """Whether the model answers values that are drawn from the ranges of all inputs at once."""
    random = np.random.default_rng(0)
    base = claim.sizes(eager.example)
    inputs = resize(eager.example, claim, base)
    for _ in range(ROUNDS):
        drawn = {spec.name: _draw(spec, inputs[spec.name], base, random) for spec in claim.inputs}
        if not _answers(eager, drawn, limits.MEMORY_BYTES[-1]):
            return False
    return True


def _draw(spec: TensorSpec, array: Array, sizes: Mapping[str, int], random: np.random.Generator) -> Array:
    low, high = spec.values.bounds(sizes)
    if low is None and high is None:
        return array
    least = low if low is not None else min(array.min().item(), high or 0)
    most = high if high is not None else max(array.max().item(), least)
    if array.dtype.kind == "f":
        first, last = (_ordinal(one, array.dtype) for one in (least, most))
        drawn = random.integers(first, last, array.size, endpoint=True)
        return np.array([_from_ordinal(int(one), array.dtype) for one in drawn], array.dtype).reshape(array.shape)
    kind: Any = array.dtype
    return np.asarray(random.integers(int(least), int(most), array.shape, endpoint=True, dtype=kind))


def _ends_of(dtype: np.dtype[np.generic]) -> tuple[Number, Number]:
    """The ends of a dtype; of floats a quarter of them, so that a sum of two is a number."""
    kind: Any = dtype
    if dtype.kind in "iu":
        return int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    most = float(np.finfo(kind).max) / 4
    return -most, most


def _same(value: Number, dtype: np.dtype[np.generic]) -> int:
    return int(value)


def _ordinal(value: Number, dtype: np.dtype[np.generic]) -> int:
    """Floats of a dtype in their order as whole numbers; both zeros are 0."""
    bits = int(np.asarray(value, dtype).view(f"i{dtype.itemsize}"))
    return bits if bits >= 0 else -(bits & (2 ** (8 * dtype.itemsize - 1) - 1))


def _from_ordinal(ordinal: int, dtype: np.dtype[np.generic]) -> float:
    magnitude = float(np.asarray(abs(ordinal), f"i{dtype.itemsize}").view(dtype))
    return -magnitude if ordinal < 0 else magnitude
