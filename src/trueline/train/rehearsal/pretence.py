"""Which other time, entropy, process and host code of the user's gets, and what of them it asks for.

There is a sequence of them, as one other value need not take a branch that few take: `number` 0 is for the fork that
has computed nothing, further ones for what the loss reads (`fresh.py`).

    number       0          1          2 to 255                256 and more
    entropy      zeros      0xFF       each other byte         digests
    time         +11 days   +23 days   each second of a minute, each hour of a day ...
    process, rank, names    one more each time
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from types import FrameType

from trueline.errors import UsageError

TIME, HOST = "the time", "the name of its host or worker (a rank, a number of workers, TRUELINE_REF)"
ENTROPY = "os.urandom (or secrets, uuid, a generator without a seed)"
PROCESS = "the number of its process or thread"
KINDS = (ENTROPY, TIME, PROCESS, HOST)
"""Entropy first: it is the system's own while others are tried."""
AWAY_S = 1_000_003
"""How far the clocks go ahead, in seconds: another hour, minute and second, and a prime."""
SAME_CALLS = 64
"""After this number of calls bytes are no longer equal: a draw that rejects some numbers ends."""
_BYTES = (0, 255, *sorted(range(1, 255), key=lambda byte: f"{byte:08b}"[::-1]))
DIGESTS = len(_BYTES)
"""The first number whose bytes differ within a draw."""
_PASSING_ON = frozenset(("", "os", "_collections_abc", "random", "secrets", "uuid", "platform", "datetime", "pathlib"))
_OURS = frozenset(f"trueline.train.rehearsal.{name}" for name in ("pretence", "elsewhere", "entropy", "steps.ranks"))
_NOT_USERS = frozenset(("trueline", "torch", "logging", "threading", "multiprocessing", "concurrent", "tempfile"))


class Pretence:
    """`read` has the kinds that code of the user's has asked for."""

    def __init__(self) -> None:
        self.read = set[str]()
        self.refusal: UsageError | None = None
        """Of what the user's code calls, and may not."""
        self.choose(0)

    def choose(self, number: int) -> None:
        self.number, self._calls = number, itertools.count()

    def note(self, kind: str) -> None:
        """Enters `kind`, unless a library asks for itself: a log line has a time."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _name_package(frame) in _PASSING_ON:
            frame = frame.f_back
        if frame is not None and _name_package(frame) not in _NOT_USERS:
            self.read.add(kind)

    @property
    def away_s(self) -> float:
        return float(AWAY_S * (self.number + 1))

    def draw(self, count: int) -> bytes:
        """
        >>> one = Pretence()
        >>> one.draw(2), one.choose(1), one.draw(2)
        (b'\\x00\\x00', None, b'\\xff\\xff')
        """
        call = next(self._calls)
        if self.number < DIGESTS and call < SAME_CALLS:
            return bytes(_BYTES[self.number : self.number + 1]) * count
        return hashlib.shake_128(f"{self.number} {call}".encode()).digest(count)

    def name_host(self) -> str:
        return f"elsewhere-{self.number}" if self.number else "elsewhere"

    def rename(self, name: str, value: str) -> str:
        """What the variable `name` of the environment is in another worker."""
        number = self.number or 7
        if value.isdigit():
            return str(number)
        return f"worker-{number}.{number}" if name == "TRUELINE_REF" else self.name_host()


def _name_package(frame: FrameType) -> str:
    """Empty: of a replacement of ours."""
    name = str(frame.f_globals.get("__name__", ""))
    return "" if name in _OURS else name.partition(".")[0]
