"""Sizes that a model takes in multiples: `if height % 2 == 0` along a stack of strides holds for 64 and fixes 64.

torch.export follows the one way that the example takes and, where it cannot say for which sizes that is so, fixes the
size. Told that a height is so many units of 32, it finds the same way for all of them. So a program that works for one
size only is exported again in units of powers of two, the smallest that do.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from trueline.bundle.signature import Dim
from trueline.capture.export.exported import Exported, Fixed
from trueline.capture.model.signature import BATCH
from trueline.errors import CaptureError

MOST = 32
"""Networks of vision halve a size five times."""


def tried(error: Fixed, export: Callable[[dict[str, int]], Exported]) -> Exported | None:
    """The program in the smallest units that free what `error` says is fixed; None when none do."""
    steps: dict[str, int] = {}
    found = None
    while found is None:
        step = largest(error.size)
        if error.symbol == BATCH or error.symbol in steps or step < 2:
            return None
        steps[error.symbol] = step
        found, again = _attempt(export, steps)
        if found is None and again is None:
            return None
        error = again or error
    low, high = 1, max(steps.values())  # `low` is known to fail, `high` to do
    while high > 2 * low:
        middle = low
        while middle * middle < low * high:
            middle *= 2
        smaller, _ = _attempt(export, {symbol: min(step, middle) for symbol, step in steps.items()})
        if smaller is None:
            low = middle
        else:
            found, high = smaller, middle
    return found


def largest(size: int) -> int:
    """The largest power of two of which `size` is two or more, up to MOST."""
    step = 1
    while step < MOST and not size % (2 * step) and size > 2 * step:
        step *= 2
    return step


def _attempt(
    export: Callable[[dict[str, int]], Exported], steps: dict[str, int]
) -> tuple[Exported | None, Fixed | None]:
    try:
        return export(steps), None
    except Fixed as error:
        return None, error
    except CaptureError:
        return None, None


def of(dim: Dim, units: Dim | None, step: int) -> Dim:
    """`dim` in multiples of `step`, so many as `units` allows."""
    most = None if units is None or units.max is None else units.max * step
    upper = min((bound for bound in (dim.max, most) if bound is not None), default=None)
    return msgspec.structs.replace(dim, min=step, max=upper, multiple_of=step)
