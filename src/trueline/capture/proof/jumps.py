"""Where the answers of a model jump: a rounded number decides (`h.mean() > 0.5`, `round`, `argmax`, a fake-quantized
value), so that a runtime that rounds otherwise gives another answer, which no bound of a distance can hold.

The eager model runs on inputs between two probes on which such an operator decides otherwise; their halves are taken
until the two differ by a rounding. Where the answers still differ, they jump, and the bundle says so. Where they do not
(`torch.where(h > 0, h, 0.1 * h)`), nothing is said. A number that an operator decides on has been *rounded* if some
operator on its way gives other last digits in another runtime: a sum, a product of matrices, an exponential. A copy, an
extreme, and one addition, product or quotient are the same in all (IEEE 754).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from trueline.bundle.signature import Array
from trueline.capture.model import code_paths
from trueline.capture.model.allowance import Allowance
from trueline.capture.model.dispatch import OperatorMode
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.observe import Observation
from trueline.runtime.compare import Tolerance, compare
from trueline.runtime.tensors import to_array

BUDGET_S, CHEAP_CALLS = 2.0, 500
"""Of this thread, and cheap calls beside them; lines that are left then are named as not tried."""
HALVES = 26
OTHERS, TRIES = 16, 4
"""Probes whose way to the example is walked, and the ways on which one line is looked at."""
NAMED = 3
STEEP, STEADY = (
    {np.dtype(kind): Tolerance(0.0, part * rtol) for kind, rtol in (("f2", 1e-2), ("f4", 1e-5), ("f8", 1e-8))}
    for part in (1.0, 0.25)
)
"""Answers that differ by more jump, where those of inputs that are as near to each other differ by less than STEADY."""
_EXACT = frozenset(
    """
    abs add amax amin cat ceil clamp clamp_max clamp_min clone constant_pad_nd copy div embedding expand fill flip floor
    full gather index index_put index_select leaky_relu lift_fresh masked_fill masked_select max max_pool2d_with_indices
    maximum min minimum mul nan_to_num neg new_full new_zeros ones_like relu repeat roll round scatter sign sort sqrt
    stack sub topk trunc where zeros_like _to_copy
    """.split()  # noqa: SIM905 - as prose they take four lines
)
"""Operators that give the same number in each runtime, of the same operands."""
Values = npt.NDArray[Any]
Decide = Callable[..., Any]


def _first(found: Any, *args: Any) -> Any:
    return found


def _places(found: Any, *args: Any) -> Any:
    return found[1] if isinstance(found, tuple | list) else found != found  # `max` of all has no place


def _steps(found: Any, *args: Any) -> Any:
    return found[0]


def _quotient(found: Any, value: Any, other: Any = 1.0, *args: Any) -> Any:
    return torch.floor(value / other)


_DECIDE: Mapping[str, Decide] = {
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne", "sign", "sgn", "heaviside", "round", "floor", "ceil"), _first),
    **dict.fromkeys(("trunc", "floor_divide", "argmax", "argmin", "bucketize", "searchsorted", "histc"), _first),
    **dict.fromkeys(("topk", "sort", "max", "min", "median", "nanmedian", "kthvalue", "mode"), _places),
    **dict.fromkeys(("cummax", "cummin"), _places),
    **dict.fromkeys(("frac", "fmod", "remainder"), _quotient),
    "fake_quantize_per_tensor_affine_cachemask": _steps,
    "fake_quantize_per_channel_affine_cachemask": _steps,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _steps,
    "hardshrink": lambda found, *args: found != 0,
    "threshold": lambda found, value, border, *args: value > border,
    "atan2": lambda found, value, *args: value < 0,
}
"""What an operator that jumps decides, from its results and arguments."""
_WHOLE = frozenset({"round", "floor", "ceil", "trunc", "sign", "sgn", "heaviside", "floor_divide", "histc"})
"""Their results are the same in each runtime once it is decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A line of the user's at which a rounded number decides an answer."""

    place: code_paths.SourceLine
    seen: bool
    """Whether the answers were seen to jump; else there was no time to try."""

    def __str__(self) -> str:
        return f"{Path(self.place.file).name}:{self.place.line}"  # a bundle holds no source, and names no folder


def describe(jumps: Sequence[Jump]) -> str:
    """For the notes of a program; empty where there are none."""
    parts = []
    for seen, what in ((True, "answers jump"), (False, "answers may jump (not tried)")):
        places = [f"{jump}" for jump in jumps if jump.seen is seen]
        if places:
            more = f" and {len(places) - NAMED} more lines" if len(places) > NAMED else ""
            parts.append(f"{what} where a rounded number decides: {', '.join(places[:NAMED])}{more}")
    return "; ".join(parts)


def find_jumps(eager: EagerSession, observations: Sequence[Observation]) -> tuple[Jump, ...]:
    """The lines where a rounded number decides the answer, each once. The model is called between the first of
    `observations`, the user's example, and others of its sizes, for BUDGET_S."""
    allowance = Allowance(BUDGET_S, CHEAP_CALLS)
    left: dict[code_paths.SourceLine, bool] = {}
    tries: Counter[code_paths.SourceLine] = Counter()
    for other in _others(observations):
        walk = _Walk(eager, allowance, observations[0].probe.inputs, other)
        for at in walk.find_parting():
            place = walk.base.decided[at].place
            left.setdefault(place, False)
            if not left[place] and tries[place] < TRIES and allowance.allows():
                tries[place] += 1
                left |= dict.fromkeys(walk.find_jump(at), True)
        if not walk.base.decided or not allowance.allows():
            break
    return tuple(Jump(place=place, seen=seen) for place, seen in left.items() if seen or not tries[place])


def _others(observations: Sequence[Observation]) -> list[Mapping[str, Array]]:
    """Of the example's sizes; those that are one number last, since what decides there seldom decides elsewhere."""
    first = observations[0].probe.inputs
    found = [
        seen.probe.inputs
        for seen in observations[1:]
        if seen.outputs is not None and not seen.probe.wild
        and all(array.shape == first[name].shape for name, array in seen.probe.inputs.items())
    ]  # fmt: skip
    return sorted(found, key=_is_flat)[:OTHERS]


def _is_flat(inputs: Mapping[str, Array]) -> bool:
    return any(array.dtype.kind == "f" and np.ptp(array) == 0 for array in inputs.values() if array.size)


@dataclass(frozen=True, slots=True)
class _Decision:
    place: code_paths.SourceLine
    values: Values

    def differs(self, other: Sequence[_Decision], at: int) -> bool:
        """Whether decision number `at` of another call is not this one."""
        same = at < len(other) and other[at].place == self.place
        return not same or not np.array_equal(other[at].values, self.values)


@dataclass(frozen=True, slots=True)
class _Call:
    """What the model answered on one input, and decided on its way. Without outputs where it raised."""

    outputs: dict[str, Array] | None
    decided: Sequence[_Decision]
    looked_up: Sequence[torch.Tensor]


class _Walk:
    """Calls of the model between two inputs: floats and vectors of embeddings are mixed, other values stay."""

    def __init__(
        self, eager: EagerSession, allowance: Allowance, start: Mapping[str, Array], end: Mapping[str, Array]
    ) -> None:
        self._eager, self._allowance, self._start, self._end = eager, allowance, start, end
        self.base, last = self._call(start, ()), self._call(end, ())
        self._looked_up = list(zip(self.base.looked_up, last.looked_up, strict=False))

    def find_parting(self) -> list[int]:
        """The decisions that the end of the way takes otherwise, the first of each line."""
        last, places = self._at(1.0).decided, dict[code_paths.SourceLine, int]()
        for at, one in enumerate(self.base.decided):
            if one.differs(last, at):
                places.setdefault(one.place, at)
        return list(places.values())

    def find_jump(self, at: int) -> list[code_paths.SourceLine]:
        """The line at which the answers jump where decision `at` changes for the first time, if they do."""
        low, high = 0.0, 1.0
        before, after = self.base, self._at(high)
        for _ in range(HALVES):
            middle = (low + high) / 2
            call = self._at(middle)
            if self.base.decided[at].differs(call.decided, at):
                high, after = middle, call
            else:
                low, before = middle, call
        below = self._at(2 * low - high)
        if before.outputs is None or after.outputs is None or below.outputs is None:
            return []
        jump = not compare(before.outputs, after.outputs, tolerances=STEEP).agrees
        steady = compare(below.outputs, before.outputs, tolerances=STEADY).agrees
        first = (one.place for i, one in enumerate(before.decided) if one.differs(after.decided, i))
        return list(first)[:1] if jump and steady else []

    def _at(self, part: float) -> _Call:
        inputs = {
            name: _mix(array, self._end[name], part) if array.dtype.kind == "f" else array
            for name, array in self._start.items()
        }
        return self._call(inputs, [torch.lerp(*pair, part) for pair in self._looked_up])

    def _call(self, inputs: Mapping[str, Array], looked_up: Sequence[torch.Tensor]) -> _Call:
        watch = _DecisionWatch(looked_up)
        try:
            with self._allowance.charging(), watch:
                outputs = self._eager.run(inputs)
        except Exception:  # noqa: BLE001 - the user's forward on made-up values may raise anything
            return _Call(None, watch.decided, watch.looked_up)
        return _Call(outputs, watch.decided, watch.looked_up)


def _mix(one: Array, other: Array, part: float) -> Array:
    start = one.astype(np.float64)
    return np.asarray(start + (other.astype(np.float64) - start) * part).astype(one.dtype)


class _DecisionWatch(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes what is decided by rounded numbers; looks up `given` in place of the vectors of embeddings."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.decided: list[_Decision] = []
        self.looked_up: list[torch.Tensor] = []
        self._given = given
        self._rounded = WeakTensorKeyDictionary()

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("aten::")
        given = [one for one in tree_leaves((args, kwargs)) if _is_float(one)]
        rounded = any(one in self._rounded for one in given)
        found = func(*args, **kwargs)
        if name == "embedding":
            found = self._look_up(found)
        decide = _find_decision(name, kwargs)
        place = code_paths.current_line() if rounded and decide else None
        if place is not None and decide is not None:
            self.decided.append(_Decision(place, to_array(decide(found, *args)).copy()))
        exact = func.is_view or (name in _EXACT and kwargs.get("alpha", 1) == 1)
        if given and name not in _WHOLE and (rounded or not exact):
            for one in tree_leaves(found):
                if _is_float(one):
                    self._rounded[one] = True
        return found

    def _look_up(self, found: torch.Tensor) -> torch.Tensor:
        at = len(self.looked_up)
        if at < len(self._given) and self._given[at].shape == found.shape:
            found = self._given[at].to(found.dtype)
        self.looked_up.append(found)
        return found


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _find_decision(name: str, kwargs: Mapping[str, Any]) -> Decide | None:
    if name == "div":
        return _first if kwargs.get("rounding_mode") is not None else None
    if name == "_to_copy":
        dtype = kwargs.get("dtype")
        return None if dtype is None or dtype.is_floating_point or dtype.is_complex else _first
    return _DECIDE.get(name)
