"""What a search of the proof may cost: its dear calls by their time, its cheap ones by their number.

What is found becomes a claim, so a busy machine, on which each call takes longer, must not end a search that costs
little earlier. Time is that of the thread which calls: other threads, torch's waiting ones among them, do not count.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

Result = TypeVar("Result")

CHEAP_S = 0.01
"""Of this thread. A call on a small example takes a tenth of it, so it is cheap on a machine ten times slower too."""
LAST = 3
"""Calls of which the shortest tells what the next one takes: one alone may have been interrupted."""


@dataclass(slots=True)
class Allowance:
    """Seconds of this thread for calls; once they are spent, cheap calls continue up to a number of them."""

    seconds: float
    cheap: int
    """This many cheap calls are made in any case."""
    spent_s: float = 0.0
    counted: int = 0
    """The cheap ones so far."""
    _last: deque[float] = field(default_factory=lambda: deque([0.0], LAST))

    def allows(self, seconds: float | None = None, *, share: float = 1.0) -> bool:
        """Whether a call that will take so long may be made, within `share` of the time. None: as the last ones."""
        left, expected = self.find_left(share), min(self._last) if seconds is None else seconds
        in_time = left > 0 and (seconds is None or seconds <= left)
        return in_time or (expected <= CHEAP_S and self.counted < self.cheap)

    def find_left(self, share: float = 1.0) -> float:
        """Seconds for calls that are dear."""
        return share * self.seconds - self.spent_s

    def charge(self, seconds: float) -> None:
        self.spent_s += seconds
        self.counted += seconds <= CHEAP_S
        self._last.append(seconds)

    @contextmanager
    def charging(self) -> Iterator[None]:
        """What runs in the block is one call."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.charge(time.thread_time() - started)

    def charge_each(self, calls: Iterable[Result]) -> Iterator[Result]:
        """`calls`, each made when the one before was used, as long as they are allowed; the first one is."""
        waiting = iter(calls)
        while True:
            with self.charging():
                found = list(islice(waiting, 1))
            yield from found
            if not found or not self.allows():
                return
