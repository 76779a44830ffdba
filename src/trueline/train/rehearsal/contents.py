"""What long collections have in them: digests of pieces, which two workers compare, and other items in their place.

A list of weights for each record, a vocabulary, a set of words: each is looked at piece by piece, until the time for
all of them is over, and what both workers have looked at is compared. Of a set, whose order says nothing, the digests
of the items are added.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

PIECE, PIECES = 256, 64
"""The fewest items of a piece, and the most pieces."""
LOOK_S = 0.25
"""How long all collections of a worker are looked at."""
_PLAIN = frozenset((int, float, str, bytes, bool, type(None), complex))


@dataclass(frozen=True, slots=True, eq=False)
class CollectionItems:
    """The items of a list, a deque, a dict or a set."""

    of: Any


def digest(contents: CollectionItems, until: float) -> str:
    """Length, and a digest of each piece that the time `until` lets, by `time.monotonic()`.

    >>> one, same, other = (digest(CollectionItems(items), 1e99) for items in ({2, 1}, {1, 2}, {1, 3}))
    >>> one == same != other
    True
    """
    items, found = _list_items(contents.of), list[str]()
    size = _size_of_pieces(len(contents.of))
    while time.monotonic() < until and (piece := list(itertools.islice(items, size))):
        found.append(_hash_all(piece) if isinstance(contents.of, set) else _hash(piece))
    return f"{type(contents.of).__name__} {len(contents.of)}: {' '.join(found)}"


def is_same(one: str, other: str) -> bool:
    """Whether two descriptions are equal; of digests, as far as both go.

    >>> is_same("list 9: a b", "list 9: a"), is_same("list 9: a b", "list 9: c"), is_same("1", "2")
    (True, False, False)
    """
    if ": " not in one or ": " not in other:
        return one == other
    (what, _, mine), (its, _, theirs) = one.partition(": "), other.partition(": ")
    return what == its and all(a == b for a, b in zip(mine.split(), theirs.split(), strict=False))


@contextmanager
def change(contents: CollectionItems, far: Callable[[Any], Any]) -> Iterator[None]:
    """Gives the collection other items while the block runs: numbers become `far`, others change places, and a set is
    empty."""
    room = contents.of
    kept = room.copy()
    if isinstance(room, set):
        room.clear()
    elif isinstance(room, dict):
        room.update(zip(room, _change_all(list(room.values()), far), strict=True))
    else:
        changed = _change_all(list(room), far)
        room.clear()
        room.extend(changed)
    try:
        yield
    finally:
        room.clear()
        room.update(kept) if isinstance(room, dict | set) else room.extend(kept)


def _change_all(items: list[Any], far: Callable[[Any], Any]) -> list[Any]:
    turned = [*items[1:], *items[:1]]
    return [far(one) if isinstance(one, int | float) else other for one, other in zip(items, turned, strict=True)]


def _list_items(room: Any) -> Iterator[Any]:
    return iter(room.items()) if isinstance(room, dict) else iter(room)


def _size_of_pieces(count: int) -> int:
    size = PIECE
    while size * PIECES < count:
        size *= 2
    return size


def _hash(items: list[Any]) -> str:
    kinds = set(map(type, items))
    if kinds == {float}:
        return hashlib.blake2b(np.array(items).tobytes(), digest_size=4).hexdigest()
    if kinds == {tuple}:
        kinds = set(map(type, itertools.chain.from_iterable(items)))
    words = repr(items) if kinds <= _PLAIN else "".join(map(_name, items))
    return hashlib.blake2b(words.encode(), digest_size=4).hexdigest()


def _hash_all(items: list[Any]) -> str:
    hashes = (hashlib.blake2b(_name(one).encode(), digest_size=4).digest() for one in items)
    return f"{sum(int.from_bytes(one, 'big') for one in hashes) % 2**32:08x}"


def _name(item: Any) -> str:
    """What an item is, without addresses: of an object its type."""
    if type(item) in _PLAIN:
        return repr(item)
    if isinstance(item, tuple | list):
        return f"({' '.join(map(_name, item))})"
    if isinstance(item, np.generic):
        return repr(item)
    if isinstance(item, torch.Tensor | np.ndarray) and len(item.shape) < 3:
        return str(item[:8].tolist() if len(item.shape) else item.tolist())
    return type(item).__name__
