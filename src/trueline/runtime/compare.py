"""Do two answers agree? Pure numpy, with the reason in words.

A number agrees when it is off by no more than its bound, which belongs to its column: the smallest bound along the axes
of the output. A column of timestamps therefore hides nothing in a column of probabilities. There is no absolute
tolerance. The proof derives bounds from the eager model in float64 (`capture/proof/bounds.py`); without them a bound is
a fraction of the largest magnitude in the same column.

Infinities and NaN have to be at the same places. Integers and booleans are equal or not. Where a float output has a
last dimension of two or more, the index of its largest element (the decision) is compared too, unless two candidates
are within the bounds of each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

Floats = npt.NDArray[np.float64]
Bound = Sequence[Floats]
"""For the whole output, then along each of its axes: how far an element at that index may be off. The smallest
counts."""


class ReadByParts(Protocol):
    """An array that is somewhere else, of which parts are read."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, part: Any) -> Array: ...


PIECE = 1 << 19
"""Elements that are compared at once."""
FAR = 16
FEW = 4
"""Elements of a column below which its largest says little: one number near 0 is no scale."""
SOFT = 64.0
"""Such a column has this many times its largest as its scale, at most that of the whole output."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Absolute and relative bound."""

    atol: float
    rtol: float

    def __str__(self) -> str:
        return f"{self.rtol:g} of its column" + (f" + {self.atol:g}" if self.atol else "")


TOLERANCES: dict[np.dtype[np.generic], Tolerance] = {
    np.dtype(np.float16): Tolerance(0.0, 1e-2),
    np.dtype(np.float32): Tolerance(0.0, 1e-4),
    np.dtype(np.float64): Tolerance(0.0, 1e-7),
}
"""Relative to the scale of a column, where no bounds are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Verdict over all outputs. `reason` names the first that disagrees; it is empty when all agree."""

    agrees: bool
    reason: str
    max_abs_error: float
    """Over the finite elements."""
    max_rel_error: float
    """Relative to the scale of each record."""
    decisions_changed: int
    how: str = ""
    """The test, where it was not the tolerance of the dtypes."""
    times: float = 0.0
    """Where numbers alone disagree, how many times its bound the farthest is off."""
    records: tuple[int, ...] = field(default=(), compare=False)
    """Where numbers disagree: indices along the first axis, at most FAR of them."""


def compare(
    expected: Mapping[str, Array] | Mapping[str, ReadByParts],
    found: Mapping[str, Array],
    *,
    bounds: Mapping[str, Bound] | None = None,
    tolerances: Mapping[np.dtype[np.generic], Tolerance] = TOLERANCES,
) -> Comparison:
    """Compares two answers by name, dtype, shape and value; outputs without bounds by the tolerance of their dtype.
    What is expected may be in a file that is read by parts."""
    if list(expected) != list(found):
        return refusal(f"the outputs are {list(found)}, expected {list(expected)}")
    worst_abs = worst_rel = times = 0.0
    changed, reason, records = 0, "", set[int]()
    for name, want in expected.items():
        one = _compare_one(name, want, found[name], (bounds or {}).get(name), tolerances)
        worst_abs, worst_rel = max(worst_abs, one.max_abs_error), max(worst_rel, one.max_rel_error)
        changed += one.decisions_changed
        reason, times = reason or one.reason, max(times, one.times)
        records |= {*one.records}
    return Comparison(
        agrees=not reason, reason=reason, max_abs_error=worst_abs, max_rel_error=worst_rel, decisions_changed=changed,
        times=times, records=tuple(sorted(records)[:FAR]),
    )  # fmt: skip


def refusal(reason: str) -> Comparison:
    """A disagreement without numbers."""
    return Comparison(agrees=False, reason=reason, max_abs_error=0.0, max_rel_error=0.0, decisions_changed=0)


def _compare_one(
    name: str,
    want: Array | ReadByParts,
    got: Array,
    bound: Bound | None,
    tolerances: Mapping[np.dtype[np.generic], Tolerance],
) -> Comparison:
    if got.dtype != want.dtype:
        return refusal(f"output '{name}' has dtype {got.dtype}, expected {want.dtype}")
    if got.shape != want.shape:
        return refusal(f"output '{name}' has shape {list(got.shape)}, expected {list(want.shape)}")
    if all(want[part].tobytes() == got[part].tobytes() for part in split_parts(want.shape)):  # NaN and infinities too
        return Comparison(agrees=True, reason="", max_abs_error=0.0, max_rel_error=0.0, decisions_changed=0)
    if want.dtype not in tolerances:
        return _compare_exact(name, want[...], got)
    scale = column_scale(largest(want), want.shape)
    allowed = bound or default_bound(want, tolerances) or ()
    parts = []
    for part in split_parts(want.shape):
        a, b = (one[part].astype(np.float64) for one in (want, got))
        scales, bounds = (spread(cut_bound(one, part), a.shape) for one in (scale, allowed))
        parts.append(_compare_floats(a, b, scales, bounds, part))
    return _conclude(name, got.size, parts)


Part = tuple[Any, ...]
"""Slices of the first axes, and `...`."""


def split_parts(shape: Sequence[int]) -> list[Part]:
    """Indices of the parts that are compared at once: float64 and its intermediate results would take as much memory as
    a large answer ten times over. The last of several axes stays whole: its largest element is a decision.

    >>> split_parts([2, 3]), split_parts([2, PIECE + 1])
    ([(Ellipsis,)], [(slice(0, 1, None), Ellipsis), (slice(1, 2, None), Ellipsis)])
    """
    if not shape or math.prod(shape) <= PIECE:
        return [(...,)]
    width = math.prod(shape[1:])
    step = max(PIECE // width, 1)
    starts = [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
    inside: list[Part] = split_parts(shape[1:]) if width > PIECE and len(shape) > 2 else [(...,)]
    return [(rows, *rest) for rows in starts for rest in inside]


def cut_bound(bound: Bound, part: Part) -> Bound:
    """The bound of a part."""
    return (bound[0], *(one[rows] for one, rows in zip(bound[1:], part, strict=False)), *bound[len(part) + 1 :])


def default_bound(
    want: Array | ReadByParts, tolerances: Mapping[np.dtype[np.generic], Tolerance] = TOLERANCES
) -> tuple[Floats, ...] | None:
    """The bound of an answer that has none: the tolerance of its dtype, of the scale of each column. None where it has
    to be equal."""
    tolerance = tolerances.get(want.dtype)
    if tolerance is None:
        return None
    scales = column_scale(largest(want), want.shape)
    return tuple(np.asarray(tolerance.atol + tolerance.rtol * one) for one in scales)


def _compare_exact(name: str, want: Array, got: Array) -> Comparison:
    wrong = want != got
    count = int(np.count_nonzero(wrong))
    error = float(np.max(np.abs(want.astype(np.float64) - got.astype(np.float64)), initial=0.0))
    reason = f"output '{name}' differs in {count} of {want.size} elements" if count else ""
    return Comparison(agrees=not count, reason=reason, max_abs_error=error, max_rel_error=0.0, decisions_changed=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartDifference:
    """How some rows of an output differ."""

    misplaced: int
    over: int
    changed: int
    worst: float
    relative: float
    times: float
    """The largest error, relative to its bound."""
    at: str
    """The element that has it."""
    records: tuple[int, ...]


def _compare_floats(a: Floats, b: Floats, scale: Floats, bound: Floats, part: Part) -> _PartDifference:
    finite = np.isfinite(a) & np.isfinite(b)
    misplaced = int(np.count_nonzero(~finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))))
    error = np.abs(np.where(finite, a, 0.0) - np.where(finite, b, 0.0))
    over = error > bound
    times, at, records = 0.0, "", tuple[int, ...]()
    if over.any():
        every = np.divide(error, bound, out=np.where(over, np.inf, 0.0), where=bound > 0)
        place = np.unravel_index(int(np.argmax(every)), a.shape)
        times = float(every[place])
        first = [rows.start for rows in part[:-1]] + [0] * a.ndim
        if place:
            own = np.flatnonzero(over.reshape(len(over), -1).any(axis=1))[:FAR]
            records = tuple(int(index) + first[0] for index in own)
        where = f" at {[int(index) + start for index, start in zip(place, first, strict=False)]}" if place else ""
        at = f"{where} {a[place]:.6g} is off by {error[place]:.3g}, where {bound[place]:.3g} is allowed"
    return _PartDifference(
        misplaced=misplaced,
        over=int(np.count_nonzero(over)),
        changed=_decisions_changed(a, b, bound),
        worst=float(np.max(error, initial=0.0)),
        relative=float(np.max(np.divide(error, scale, out=np.zeros_like(error), where=scale > 0), initial=0.0)),
        times=times,
        at=at,
        records=records,
    )


def _conclude(name: str, size: int, parts: Sequence[_PartDifference]) -> Comparison:
    misplaced, over, changed = (sum(getattr(one, key) for one in parts) for key in ("misplaced", "over", "changed"))
    worst = max((one.worst for one in parts), default=0.0)
    reason = ""
    if misplaced:
        reason = f"output '{name}' has {misplaced} infinities or NaN where the other has none"
    elif over:
        farthest = max(parts, key=lambda one: one.times).at
        reason = f"output '{name}' differs by {worst:.3g} ({over} of {size} elements;{farthest})"
    elif changed:
        reason = f"output '{name}' decides otherwise for {changed} records"
    return Comparison(
        agrees=not reason,
        reason=reason,
        max_abs_error=worst,
        max_rel_error=max((one.relative for one in parts), default=0.0),
        decisions_changed=changed,
        times=0.0 if misplaced else max((one.times for one in parts), default=0.0),
        records=tuple(dict.fromkeys(index for one in parts for index in one.records))[:FAR],
    )


def largest(values: Array | ReadByParts) -> tuple[Floats, ...]:
    """The largest finite magnitude of the whole, then at each index of each axis.

    >>> [one.tolist() for one in largest(np.array([[1.7e9, 0.25], [1.6e9, -0.75]]))]
    [[1700000000.0], [1700000000.0, 1600000000.0], [1700000000.0, 0.75]]
    """
    found: list[Floats] = [np.zeros(size) for size in (1, *values.shape)]
    for part in split_parts(values.shape):
        sizes = np.abs(np.asarray(values[part]))
        if not np.isfinite(np.max(sizes, initial=0.0)):
            sizes = np.where(np.isfinite(sizes), sizes, np.zeros((), sizes.dtype))
        found[0] = np.maximum(found[0], np.max(sizes, initial=0.0))
        for into, most in zip(cut_bound(found, part)[1:], _largest_along(sizes), strict=True):
            np.maximum(into, most, out=into)
    return tuple(found)


def _largest_along(sizes: Array) -> list[Array]:
    """At each index of each axis; the numbers themselves are looked at twice, however many axes there are."""
    if not sizes.ndim:
        return []
    rows, leading = np.max(sizes, axis=-1, initial=0.0), range(sizes.ndim - 1)
    along = [np.max(rows, axis=tuple(one for one in leading if one != axis), initial=0.0) for axis in leading]
    return [*along, np.max(sizes, axis=tuple(leading), initial=0.0)]


def column_scale(
    sizes: Sequence[Floats],
    shape: Sequence[int],
    known: Mapping[int, Floats] | None = None,
    flat: Sequence[Floats] | None = None,
) -> tuple[Floats, ...]:
    """`sizes` as `largest` gives them, raised where a column has too few elements to tell its scale, or is `flat` (its
    elements are equal, as of equal records): to what is `known` of the axis from other answers, or else to SOFT times
    as much; never above the whole."""
    whole, count = sizes[0], int(np.prod(shape))
    scales = [whole]
    for axis, (size, one) in enumerate(zip(shape, sizes[1:], strict=True)):
        raised = np.minimum(one * SOFT, whole)
        if known is not None and axis in known:
            raised = np.maximum(one, known[axis])
        few = bool(size) and count // size < FEW
        scales.append(raised if few else one if flat is None else np.where(flat[axis], raised, one))
    return tuple(scales)


def spread(bound: Bound, shape: Sequence[int]) -> Floats:
    """The bound of each element: the smallest along its axes."""
    every: Floats = np.full(tuple(shape), bound[0][0], dtype=np.float64)
    for axis, one in enumerate(bound[1:]):
        every = np.minimum(every, one.reshape([-1 if axis == at else 1 for at in range(len(shape))]))
    return every


def _decisions_changed(a: Floats, b: Floats, bound: Floats) -> int:
    if a.ndim < 2 or a.shape[-1] < 2 or not a.size or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return 0
    first, other = (np.argmax(one, axis=-1)[..., None] for one in (a, b))
    clear = [np.take_along_axis(one, first, -1) for one in (a, bound)]
    rival = [np.take_along_axis(one, other, -1) for one in (a, bound)]
    return int(np.count_nonzero(clear[0] - rival[0] > clear[1] + rival[1]))
