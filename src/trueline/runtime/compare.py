"""Do two answers agree? Pure numpy, with the reason in words.

A number agrees when |actual - expected| <= atol + rtol * scale, where scale is the largest |expected| in the same
record: rounding errors of a matrix product grow with its terms, not with their sum. Infinities and NaN have to be at
the same places. Integers and booleans are equal or not. Where a float output has a last dimension of two or more, the
index of its largest element (the decision) is compared too, unless two candidates are within the tolerance of each
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from trueline.bundle.signature import Array

    Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Absolute and relative bound."""

    atol: float
    rtol: float

    def __str__(self) -> str:
        return f"{self.atol:g}+{self.rtol:g}*scale"


TOLERANCES: dict[np.dtype[np.generic], Tolerance] = {
    np.dtype(np.float16): Tolerance(1e-2, 1e-2),
    np.dtype(np.float32): Tolerance(1e-5, 1e-4),
    np.dtype(np.float64): Tolerance(1e-9, 1e-7),
}


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


def compare(
    expected: Mapping[str, Array],
    found: Mapping[str, Array],
    *,
    tolerances: Mapping[np.dtype[np.generic], Tolerance] = TOLERANCES,
) -> Comparison:
    """Compares two answers by name, dtype, shape and value."""
    if list(expected) != list(found):
        return refusal(f"the outputs are {list(found)}, expected {list(expected)}")
    worst_abs = worst_rel = 0.0
    changed, reason = 0, ""
    for name, want in expected.items():
        one = _compare_one(name, want, found[name], tolerances)
        worst_abs, worst_rel = max(worst_abs, one.max_abs_error), max(worst_rel, one.max_rel_error)
        changed += one.decisions_changed
        reason = reason or one.reason
    return Comparison(
        agrees=not reason, reason=reason, max_abs_error=worst_abs, max_rel_error=worst_rel, decisions_changed=changed
    )


def refusal(reason: str) -> Comparison:
    """A disagreement without numbers."""
    return Comparison(agrees=False, reason=reason, max_abs_error=0.0, max_rel_error=0.0, decisions_changed=0)


def _compare_one(
    name: str, want: Array, got: Array, tolerances: Mapping[np.dtype[np.generic], Tolerance]
) -> Comparison:
    if got.dtype != want.dtype:
        return refusal(f"output '{name}' has dtype {got.dtype}, expected {want.dtype}")
    if got.shape != want.shape:
        return refusal(f"output '{name}' has shape {list(got.shape)}, expected {list(want.shape)}")
    if want.dtype not in tolerances:
        return _compare_exact(name, want, got)
    return _compare_floats(name, want, got, tolerances[want.dtype])


def _compare_exact(name: str, want: Array, got: Array) -> Comparison:
    wrong = want != got
    count = int(np.count_nonzero(wrong))
    error = float(np.max(np.abs(want.astype(np.float64) - got.astype(np.float64)), initial=0.0))
    reason = f"output '{name}' differs in {count} of {want.size} elements" if count else ""
    return Comparison(agrees=not count, reason=reason, max_abs_error=error, max_rel_error=0.0, decisions_changed=count)


def _compare_floats(name: str, want: Array, got: Array, tolerance: Tolerance) -> Comparison:
    a, b = want.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    misplaced = int(np.count_nonzero(~finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))))
    error = np.abs(np.where(finite, a, 0.0) - np.where(finite, b, 0.0))
    scale = _scale(np.where(np.isfinite(a), a, 0.0))
    bound = tolerance.atol + tolerance.rtol * scale
    over = int(np.count_nonzero(error > bound))
    worst = float(np.max(error, initial=0.0))
    relative = float(np.max(np.divide(error, scale, out=np.zeros_like(error), where=scale > 0), initial=0.0))
    changed = _decisions_changed(a, b, bound)
    reason = ""
    if misplaced:
        reason = f"output '{name}' has {misplaced} infinities or NaN where the other has none"
    elif over:
        reason = f"output '{name}' differs by {worst:.3g} ({over} of {a.size} elements beyond {tolerance})"
    elif changed:
        reason = f"output '{name}' decides otherwise for {changed} records"
    return Comparison(
        agrees=not reason, reason=reason, max_abs_error=worst, max_rel_error=relative, decisions_changed=changed
    )


def _scale(a: Floats) -> Floats:
    """Largest magnitude of each record, in the shape of `a`."""
    if a.ndim == 0 or a.size == 0:
        return np.abs(a)
    axes = tuple(range(1, a.ndim))
    return np.broadcast_to(np.max(np.abs(a), axis=axes, keepdims=True), a.shape)


def _decisions_changed(a: Floats, b: Floats, bound: Floats) -> int:
    if a.ndim < 2 or a.shape[-1] < 2 or not a.size or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return 0
    top = np.sort(a, axis=-1)
    clear = top[..., -1] - top[..., -2] > 2 * np.max(bound, axis=-1)
    return int(np.count_nonzero(clear & (np.argmax(a, axis=-1) != np.argmax(b, axis=-1))))
