"""Conditions on the values of an input: finite numbers only, a range. They travel in the signature. Pure.

A condition belongs to a program (`ProgramEntry.values`), or, where the model itself refuses values, to the signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from trueline.errors import RequestError

Array = np.ndarray[tuple[Any, ...], np.dtype[np.generic]]
Number = int | float
Holds = Callable[[Array], bool]


class Values(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What every value of an input has to be. The default accepts all."""

    finite: bool = False
    """No NaN and no infinity. A range leaves NaN out by itself."""
    low: Number | None = None
    high: Number | None = None
    """Inclusive."""
    size: str = ""
    """Symbol that `high` is relative to: with `high=-1` an index into that dimension, with 0 a length in it."""

    def __bool__(self) -> bool:
        return self != ANY

    @property
    def text(self) -> str:
        """In words, to follow "is": `from 0 to 19`, `finite`.

        >>> Values(low=0, high=-1, size="length").text
        'at least 0 and less than length'
        """
        low, high = self.low, self.high
        if low is not None and high is not None and not self.size:
            return f"from {_show(low)} to {_show(high)}" if low != high else _show(low)
        upper = "" if high is None else _upper(high, self.size)
        lower = "" if low is None else f"at least {_show(low)}"
        return " and ".join(part for part in ("finite" if self.finite else "", lower, upper) if part)

    def refusal(self, name: str, array: Array, sizes: Mapping[str, int]) -> RequestError | None:
        """The error for the first value of `array` that breaks the condition; None where all keep it."""
        low, high = self.bounds(sizes)
        given: Any = array
        with np.errstate(all="ignore"):
            kept = np.isfinite(array) if self.finite else np.ones(array.shape, bool)
            if low is not None:
                kept &= given >= low
            if high is not None:
                kept &= given <= high
        if kept.all():
            return None
        at = [int(one) for one in np.argwhere(~kept)[0]]
        place = f" at {at}" if at else ""
        return RequestError(
            f"input '{name}' has {given[tuple(at)].item()}{place}, proven only for values that are {self.text}",
            hint="`trueline bundle inspect` has the ranges of each program" if self.finite or self.size else "",
        )

    def bounds(self, sizes: Mapping[str, int]) -> tuple[Number | None, Number | None]:
        """Low and high at these sizes."""
        return self.low, self.high if self.high is None or not self.size else self.high + sizes[self.size]

    def both(self, other: Values) -> Values:
        """The condition that holds where both do. Bounds that are relative to a size are kept from `self`."""
        low = max((one for one in (self.low, other.low) if one is not None), default=None)
        if self.size or other.size:
            ends = self if self.size else other
            return Values(finite=self.finite or other.finite, low=low, high=ends.high, size=ends.size)
        high = min((one for one in (self.high, other.high) if one is not None), default=None)
        is_range = low is not None and high is not None  # which leaves out what is not finite
        return Values(finite=(self.finite or other.finite) and not is_range, low=low, high=high)

    def fast_check(self, dtype: np.dtype[np.generic]) -> Holds | None:
        """A test of one array in a microsecond or two; None where the bounds depend on a size. False may be wrong: then
        `refusal` decides."""
        if self.size:
            return None
        low, high = self.low, self.high
        smallest, largest = np.minimum.reduce, np.maximum.reduce
        if low == 0 and high is not None and dtype.kind == "i":
            unsigned = np.dtype(f"u{dtype.itemsize}")  # a negative number is a huge one
            return lambda array: not array.size or int(largest(array.view(unsigned), None)) <= high
        if low is not None or high is not None:
            least, most = -np.inf if low is None else low, np.inf if high is None else high
            return lambda array: (
                not array.size
                or (smallest(array, None).item() >= least and (high is None or largest(array, None).item() <= most))
            )
        return lambda array: b"\0" not in np.isfinite(array).tobytes()


ANY = Values()


def _upper(high: Number, size: str) -> str:
    if not size:
        return f"at most {_show(high)}"
    if high == -1:
        return f"less than {size}"
    return f"at most {size}" + (f" {'+' if high > 0 else '-'} {abs(high)}" if high else "")


def _show(number: Number) -> str:
    return f"{number}" if isinstance(number, int) else f"{number:.6g}"
