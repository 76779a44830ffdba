"""A cut: a moment at which all servers have applied the same minibatches. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trueline.ps.messages import Runs

Key = tuple[int, int]
"""Epoch and minibatch."""


@dataclass
class Cut:
    """Until its end, only minibatches of `keys` are applied. It is reached when all of them are."""

    id: int
    keys: Mapping[int, Runs]
    lacking: set[Key] = field(default_factory=set)

    @classmethod
    def begin(
        cls, id: int, keys: Mapping[int, Runs], has: Callable[[int, int], bool], applied: Mapping[int, Runs]
    ) -> "Cut":
        """`has` tells whether a minibatch was applied; `applied` spares the question for whole runs of them."""
        lacking = {
            (epoch, minibatch)
            for epoch, runs in keys.items()
            for start, stop in subtract(runs, applied.get(epoch, ()))
            for minibatch in range(start, stop)
            if not has(epoch, minibatch)
        }
        return cls(id, keys, lacking)

    def admits(self, key: Key) -> bool:
        return any(start <= key[1] < stop for start, stop in self.keys.get(key[0], ()))

    def note(self, key: Key) -> bool:
        """Records that a minibatch was applied; whether the cut is reached by it."""
        before = bool(self.lacking)
        self.lacking.discard(key)
        return before and not self.lacking


def subtract(runs: Runs, taken: Runs) -> Runs:
    """What `runs` have and `taken` do not.

    >>> subtract(((0, 10), (20, 30)), ((2, 4), (8, 22)))
    ((0, 2), (4, 8), (22, 30))
    """
    left = []
    for start, stop in runs:
        for begin, end in taken:
            if begin >= stop:
                break
            if end > start:
                if begin > start:
                    left.append((start, begin))
                start = max(start, end)
        if start < stop:
            left.append((start, stop))
    return tuple(left)
