"""The moving averages of a table's rows: those that every step would give all rows, computed when a row changes. Pure.

After step k, counted from 0, the average is d(k) of the one before and 1 - d(k) of the row, with d(k) the smaller of
`ema` and (1 + k) / (10 + k), as for dense parameters. While a row stays as it is, only the product of the d counts.
"""

import math

import numpy as np
import numpy.typing as npt

from trueline.ps.tables.slab import put_rows, reserve, take_rows

Rows = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]
_FIRST = math.log(math.factorial(9))


def decay_between(ema: float, start: Places, stop: int) -> npt.NDArray[np.float64]:
    """The product of d(k) for `start` <= k < `stop`, of each start."""
    return np.exp(_sum_logs(ema, np.array(stop)) - _sum_logs(ema, start))


def _sum_logs(ema: float, steps: Places) -> npt.NDArray[np.float64]:
    """The sum of log d(k) for k < `steps`: of (1 + k) / (10 + k) it telescopes."""
    turn = max(0, math.ceil((10 * ema - 1) / (1 - ema)))
    early = np.minimum(steps, turn).astype(np.float64)
    rising = _FIRST - np.log(early[..., None] + np.arange(1, 10)).sum(axis=-1)
    total: npt.NDArray[np.float64] = rising + (steps - early) * math.log(ema)
    return total


def advance(ema: float, averages: Rows, at: Places, rows: Rows, step: int) -> Rows:
    """The averages after `step` steps, of rows that have not changed since `at`."""
    decay = decay_between(ema, at, step)[:, None].astype(np.float32)
    return rows + (averages - rows) * decay


class RowAverages:
    """Of a table's rows, at the same places."""

    def __init__(self, ema: float, dim: int) -> None:
        self._ema = ema
        self._averages, self._at = reserve(dim, np.float32), reserve(1, np.int64)[:, 0]

    @property
    def arrays(self) -> tuple[Rows, Places]:
        """The averages, and after which number of steps each was computed."""
        return self._averages, self._at

    def begin(self, places: Places, rows: Rows, step: int) -> None:
        """Of new rows, which had these values from the beginning."""
        self._averages[places], self._at[places] = rows, step

    def read(self, places: Places, rows: Rows, step: int) -> Rows:
        """After `step` steps."""
        averages = take_rows(self._averages, places)
        return advance(self._ema, averages, self._at.take(places, mode="clip"), rows, step)

    def take(self, places: Places, before: Rows, after: Rows, step: int) -> None:
        """Step `step` has made `after` of `before`."""
        decay = np.float32(min(self._ema, (1 + step) / (10 + step)))
        averages = self.read(places, before, step)
        put_rows(self._averages, places, after + (averages - after) * decay)
        self._at[places] = step + 1
