"""The numbers that a user's code changes in each batch, each of which a trial can give another value."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trueline.errors import join_names
from trueline.train.rehearsal import kept
from trueline.train.rehearsal.places import KeptPlace

_KEYED = (set, dict, OrderedDict, defaultdict)
_COLLECTIONS = (list, deque, *_KEYED)


@dataclass(frozen=True, slots=True)
class CountedNumber:
    """A place that each batch changes, and the number from which each batch of the trial begins there: of a tensor or
    an array its one element, of an iterator what comes next, of a collection its length."""

    place: KeptPlace
    first: Any

    @classmethod
    def of(cls, place: KeptPlace) -> CountedNumber | None:
        """None: the place has no number."""
        value = place.value
        if isinstance(value, itertools.count):
            first = kept.copy_count(value)
            return None if first is None else cls(place, first)
        if isinstance(value, torch.Tensor | np.ndarray):
            number = value.item() if math.prod(value.shape) == 1 else None
            return cls(place, number) if type(number) in (int, float) else None
        if type(value) in _COLLECTIONS:
            return cls(place, len(value)) if value else None
        return cls(place, value) if type(value) in (int, float) or isinstance(value, np.integer) else None

    @property
    def traced(self) -> bool:
        """Whether it can note what it is compared with."""
        return type(self.place.value) in (int, float)

    def write(self, number: Any) -> None:
        value = self.place.value
        if isinstance(value, torch.Tensor):
            value.detach().fill_(number)
        elif isinstance(value, np.ndarray):
            value.fill(number)
        elif type(value) in _COLLECTIONS:
            _lengthen(value, max(int(number), 1))
        elif isinstance(value, np.integer):
            self.place.put(type(value)(number))
        else:
            self.place.put(itertools.count(number) if isinstance(value, itertools.count) else number)

    def reset(self) -> None:
        if isinstance(self.first, itertools.count):
            self.place.put(kept.copy_count(self.first))
        else:
            self.write(self.first)


def _lengthen(value: Any, length: int) -> None:
    """Gives a collection `length` items: more of those that it has, under keys that no code asks for."""
    items = list(value.items() if isinstance(value, dict) else value)
    more = max(length - len(items), 0)
    if not isinstance(value, _KEYED):
        items += itertools.islice(itertools.cycle(items), more)
    elif isinstance(value, dict):
        items += ((("more", at), item) for at, (_, item) in zip(range(more), itertools.cycle(items), strict=False))
    else:
        items += (("more", at) for at in range(more))
    value.clear()
    value.update(items[:length]) if isinstance(value, _KEYED) else value.extend(items[:length])


def list_counts(memory: kept.KeptNames) -> list[CountedNumber]:
    """The places that each batch changes and that have one number each."""
    return [count for place in memory.list_changed() if (count := CountedNumber.of(place)) is not None]


def describe(counts: Sequence[CountedNumber], number: Any) -> str:
    """Where `counts` have `number`, in words.

    >>> place = KeptPlace("the loop's seen", 3, print)
    >>> describe([CountedNumber(place, 3)], 1000)
    "where the loop's seen is 1000"
    """
    names = list(dict.fromkeys(count.place.name for count in counts))
    return f"where {'one of ' if len(names) > 1 else ''}{join_names(names[:4])} is {number:.7g}"
