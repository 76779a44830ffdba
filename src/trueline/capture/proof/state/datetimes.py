"""`datetime` and `date` with a clock that is moved."""

import datetime
from typing import Any, Protocol

from trueline.capture.proof.state.tainted import Decisions, mark


class Clock(Protocol):
    """Where the time comes from."""

    decisions: Decisions
    shift_s: float
    plain: bool

    def note(self, name: str) -> None: ...
    def hold(self, name: str, value: Any) -> Any: ...


def make_datetimes(readings: Clock) -> tuple[type, type]:
    """`datetime` and `date` with a clock that is moved, and fields that note decisions."""
    plain, plain_date = datetime.datetime, datetime.date

    class AsBefore(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, plain if issubclass(cls, plain) else plain_date)

    def fields(kind: Any, names: str) -> dict[str, Any]:
        def field(name: str) -> Any:
            if readings.plain:
                return getattr(kind, name)
            return property(lambda self: mark(getattr(kind, name).__get__(self), readings.decisions, (0, 9999)))

        return {name: field(name) for name in names.split()}

    def now(cls: Any, tz: Any = None) -> Any:
        readings.note("datetime")
        at = readings.hold(f"now{tz}", plain.now(tz)) + datetime.timedelta(seconds=min(readings.shift_s, 1e9))
        return cls.combine(at.date(), at.timetz())

    def today(cls: Any) -> Any:
        readings.note("date")
        return cls.fromordinal((plain.now() + datetime.timedelta(seconds=min(readings.shift_s, 1e9))).toordinal())

    clock = {"now": classmethod(now), "today": classmethod(now), "utcnow": classmethod(now)}
    times = "year month day hour minute second microsecond"
    moved = AsBefore("datetime", (plain,), {**fields(plain, times), **clock})
    day = AsBefore("date", (plain_date,), {**fields(plain_date, "year month day"), "today": classmethod(today)})
    return moved, day
