"""The number of a step as a trial hands it out: it notes what a loop's code compares it with.

    if job.steps % 100 == 0: data.strength *= 0.9        notes a multiple of 100
    if batch.step > 0.8 * job.total_steps: ...           notes 0.8 * total_steps
    epoch = batch.step // 40                             notes 40, and where the current epoch begins

So the trial tries batches of these steps, too: what such a line changes for the batches after it, a worker that joins
later does not have.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

Number = int | float
MOST_NOTES = 256


class StepNotes:
    """What steps were compared with, as steps; `trace(step)` returns a number that notes here."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._noted: list[Number] = []
        self.looked_up = False
        """Whether one was a key of a dict or a set, which does not tell the others."""

    def trace(self, step: Any) -> Any:
        """A whole number, or a float, that notes here."""
        return (TracedInt if isinstance(step, int) else TracedFloat).make(step, self, float)

    def note(self, step: Number) -> None:
        if len(self._noted) < MOST_NOTES and math.isfinite(step):
            self._noted.append(step)

    def choose(self, most: int, keys: Iterable[int] = ()) -> list[int]:
        """Up to `most` steps of the job at and beside which a comparison changes, in the order of the notes. `keys`:
        those that come first where one was looked up.

        >>> notes = StepNotes(100)
        >>> notes.trace(97) % 25 == 0, notes.trace(97) > 40, notes.choose(9)
        (False, True, [75, 76, 40, 41])
        """
        near = [at for noted in self._noted for at in (math.floor(noted), math.floor(noted) + 1)]
        near += (*keys, *range(self._total)) if self.looked_up else ()
        return [at for at in dict.fromkeys(near) if 0 <= at < self._total][:most]

    def choose_like(self, first: Any, most: int, keys: Iterable[int] = ()) -> list[Any]:
        """Up to `most` numbers of the kind of `first` at and beside which a comparison changes."""
        return self.choose(most, keys) if isinstance(first, int) else self.choose_floats(most)

    def choose_floats(self, most: int) -> list[float]:
        """Up to `most` numbers at, below and above those of the notes.

        >>> notes = StepNotes(1)
        >>> 0.5 * notes.trace(0.8) < 0.05, notes.choose_floats(9)
        (False, [0.1, 0.099, 0.101])
        """
        near = [at for noted in self._noted for by in [1e-3 * max(1.0, abs(noted))]
                for at in (noted, noted - by, noted + by)]  # fmt: skip
        return list(dict.fromkeys(near))[:most]


class _Traced:
    """A number that follows from a step; `_back` gives the step for which it would have another value."""

    _notes: StepNotes
    _back: Callable[[float], float]
    _period: Number = 0
    """Of a remainder the divisor: it has its value again so much later."""

    @classmethod
    def make(cls, value: Any, notes: StepNotes, back: Callable[[float], float]) -> Any:
        made = cls(value)  # type: ignore[call-arg]
        made._notes, made._back = notes, back
        return made

    def _note(self, wanted: Any) -> None:
        if isinstance(wanted, numbers.Real):
            self._notes.note(self._back(float(wanted)))
            if self._period:
                self._notes.note(self._back(float(wanted) + self._period))

    def _follow(self, value: Any, back: Callable[[float], float]) -> Any:
        """`value`, which follows from this number as `back` says; what is no plain number is left alone."""
        kind = {int: TracedInt, float: TracedFloat}.get(type(value))
        first = self._back
        return value if kind is None else kind.make(value, self._notes, lambda wanted: first(back(wanted)))

    def __reduce__(self) -> Any:
        return _plain_type(self), (_plain(self),)

    def __copy__(self) -> Any:
        return _plain(self)

    def __deepcopy__(self, _: Any) -> Any:
        return _plain(self)


def _plain_type(value: Any) -> type:
    return int if isinstance(value, int) else float


def _plain(value: Any) -> Any:
    return _plain_type(value)(value)


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float)


def _compare(name: str) -> Callable[[Any, Any], Any]:
    def compare(self: Any, other: Any) -> Any:
        self._note(other)
        return getattr(_plain_type(self), name)(self, _plain(other) if isinstance(other, _Traced) else other)

    return compare


def _compute(name: str, back: Callable[[float, float], float]) -> Callable[[Any, Any], Any]:
    """An operation with a number; `back(wanted, other)` is its inverse."""

    def compute(self: Any, other: Any) -> Any:
        other = _plain(other) if isinstance(other, _Traced) else other
        if isinstance(self, int) and isinstance(other, float):
            value = getattr(float, name)(float(self), other)
        else:
            value = getattr(_plain_type(self), name)(self, other)
        return self._follow(value, lambda wanted: back(wanted, other)) if _is_real(other) else value

    return compute


def _divide(self: Any, other: Any) -> Any:
    """`//`: where it is one, and where it has become what it is."""
    value = _compute("__floordiv__", lambda wanted, by: wanted * by)(self, other)
    if _is_real(other) and _is_real(value):
        self._note(other)
        self._note(_plain(value) * other)
    return value


def _remain(self: Any, other: Any) -> Any:
    """`%`: of the multiple at or below this number, and of the next one."""
    below = _plain(self) - _plain(self) % other if _is_real(other) and other else 0
    value = _compute("__mod__", lambda wanted, _: below + wanted)(self, other)
    if isinstance(value, _Traced):
        value._period = _plain(other) if isinstance(other, _Traced) else other
    return value


def _hash(self: Any) -> int:
    self._notes.looked_up = True
    return hash(_plain(self))


def _is_true(self: Any) -> bool:
    self._note(0)
    return bool(_plain(self))


_OPERATIONS: dict[str, Any] = {
    **{name: _compare(name) for name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")},
    **{name: _compute(name, lambda wanted, other: wanted - other) for name in ("__add__", "__radd__")},
    "__sub__": _compute("__sub__", lambda wanted, other: wanted + other),
    "__rsub__": _compute("__rsub__", lambda wanted, other: other - wanted),
    **{
        name: _compute(name, lambda wanted, other: wanted / other if other else math.nan)
        for name in ("__mul__", "__rmul__")
    },
    "__truediv__": _compute("__truediv__", lambda wanted, other: wanted * other),
    "__floordiv__": _divide,
    "__mod__": _remain,
    "__divmod__": lambda self, other: (_divide(self, other), _remain(self, other)),
    "__hash__": _hash,
    "__bool__": _is_true,
}
TracedInt: Any = type("TracedInt", (_Traced, int), dict(_OPERATIONS))
TracedFloat: Any = type("TracedFloat", (_Traced, float), dict(_OPERATIONS))
