"""Time as an argument: code that decides takes `now`, code that waits takes a `Clock`.

`monotonic_s` is for durations and leases, `utc_now` for people and other machines.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], float]
"""Returns seconds on a clock that never goes back."""

monotonic_s: Clock = time.monotonic


def utc_now() -> str:
    """This moment as an ISO 8601 string in UTC with whole seconds, e.g. `2026-01-31T09:30:00+00:00`."""
    return datetime.now(UTC).replace(microsecond=0).isoformat()
