"""How far the wall clock of a joined host is from the master's.

Nothing is decided by a wall clock. One that is off labels files and logs with wrong times, and makes certificates and
credentials look expired, so it is reported. A host measures it by its pulses: the master answers each with its own
time, and an answer that took long says nothing.
"""

import time
from collections.abc import Callable

from trueline.engine.hosts.messages import Pulse

OFF_S = 30.0
"""A smaller difference is not reported: clocks without a time service drift by as much within weeks."""
ROUND_TRIP_S = 2.0
"""An answer that took longer came to, or from, a process that was stopped."""


class ClockNotice:
    """Notes how far a clock is off; `note` returns what the user has to hear, or an empty text."""

    def __init__(self) -> None:
        self.off_s = 0.0
        """As it was reported last; 0: it is right."""

    def note(self, off_s: float) -> str:
        """
        >>> notice = ClockNotice()
        >>> [notice.note(off_s) for off_s in (0.2, 3600.4, 3601.0, -90.0, 1.0, 0.0)]
        ['', '1 h 0 min ahead', '', '1 min 30 s behind', 'right', '']
        """
        if abs(off_s - self.off_s) <= OFF_S:
            return ""
        self.off_s = round(off_s, 1) if abs(off_s) > OFF_S else 0.0
        return describe_offset(self.off_s)

    @property
    def words(self) -> str:
        """For a table; empty: it is right."""
        return f"clock {describe_offset(self.off_s)}" if self.off_s else ""


def describe_offset(off_s: float) -> str:
    """
    >>> [describe_offset(off_s) for off_s in (-4e5, 3600.0, 45.2)]
    ['4 d 15 h behind', '1 h 0 min ahead', '0 min 45 s ahead']
    """
    if not off_s:
        return "right"
    exactly = 60 if abs(off_s) > 600 else 1
    seconds = exactly * round(abs(off_s) / exactly)
    for whole, part, names in ((86400, 3600, "d h"), (3600, 60, "h min"), (60, 1, "min s")):
        if seconds >= whole or part == 1:
            large, small = names.split()
            return f"{seconds // whole} {large} {seconds % whole // part} {small} {'ahead' if off_s > 0 else 'behind'}"
    raise AssertionError("the last unit takes every number")


class OwnClock:
    """The pulses of a joined host. `wall` and `now`: its clock, and one that never jumps."""

    def __init__(self, wall: Callable[[], float] = time.time, now: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._now = wall, now
        self._off_s = 0.0
        self._notice = ClockNotice()

    def make_pulse(self, load: float) -> Pulse:
        return Pulse(load=load, sent_at=self._now(), off_s=self._off_s)

    def take_answer(self, answer: Pulse) -> str:
        """Measures by the master's answer; returns what the user of this host has to hear."""
        if not answer.clock or self._now() - answer.sent_at > ROUND_TRIP_S:
            return ""
        self._off_s = self._wall() - answer.clock
        return self._notice.note(self._off_s)
