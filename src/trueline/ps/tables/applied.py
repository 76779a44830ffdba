"""Which minibatches of each epoch a server has applied, as ranges. Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from trueline.ps.messages import Runs


class AppliedRanges:
    """A set of (epoch, minibatch) that takes as much memory as it has gaps."""

    def __init__(self, runs: Mapping[int, Iterable[tuple[int, int]]] | None = None) -> None:
        self._runs: dict[int, list[tuple[int, int]]] = {
            epoch: [(start, stop) for start, stop in of] for epoch, of in (runs or {}).items()
        }

    def __contains__(self, key: tuple[int, int]) -> bool:
        epoch, minibatch = key
        runs = self._runs.get(epoch, ())
        at = bisect_right(runs, (minibatch, 1 << 62)) - 1
        return at >= 0 and minibatch < runs[at][1]

    def add(self, epoch: int, minibatch: int) -> bool:
        """Adds a minibatch; False: it is there already."""
        if (epoch, minibatch) in self:
            return False
        runs = self._runs.setdefault(epoch, [])
        at = bisect_right(runs, (minibatch, 1 << 62))
        start, stop = minibatch, minibatch + 1
        if at < len(runs) and runs[at][0] == stop:
            stop = runs.pop(at)[1]
        if at and runs[at - 1][1] == start:
            start = runs.pop(at - 1)[0]
            at -= 1
        runs.insert(at, (start, stop))
        return True

    def runs(self) -> dict[int, Runs]:
        return {epoch: tuple(runs) for epoch, runs in sorted(self._runs.items()) if runs}


def count(runs: Iterable[tuple[int, int]]) -> int:
    """
    >>> count([(0, 3), (7, 8)])
    4
    """
    return sum(stop - start for start, stop in runs)


def intersect(one: Runs, other: Runs) -> Runs:
    """
    >>> intersect(((0, 5), (8, 9)), ((3, 9),))
    ((3, 5), (8, 9))
    """
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < stop:
            found.append((start, stop))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def find_common(applied: Sequence[Mapping[int, Runs]]) -> dict[int, Runs]:
    """What all of these have, by epoch.

    >>> find_common([{0: ((0, 5),), 1: ((0, 2),)}, {0: ((0, 4),)}])
    {0: ((0, 4),), 1: ()}
    """
    common = dict(applied[0])
    for one in applied[1:]:
        common = {epoch: intersect(runs, one.get(epoch, ())) for epoch, runs in common.items()}
    return common
