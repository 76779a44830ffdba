"""What a user's code keeps from one batch to the next in plain Python: counters, lists, averages, another module.

A worker that joins does not have it. It does no harm where no loss uses it, as with a history that is printed. So it
is looked at after two batches of the same records: what differs is no copy of something in the batch, but memory.
Each such place then gets another value, far from its own, and the one from before the first batch: the batches of the
trial count too, and may have passed a bound. The loss of the same records shows whether it is used.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import torch

from trueline import events
from trueline.errors import UsageError
from trueline.train.rehearsal import contents, places
from trueline.train.rehearsal.contents import CollectionItems
from trueline.train.rehearsal.places import KeptPlace

MOST_PLACES, LONG = 4096, 2048
"""Places that are looked at, and the length of a list that was made longer."""
MOST_TRIED, SAMPLE, FAR = 16, 4096, 1_000_003
JOINS = "a worker that joins receives model, optimizer and scheduler, and nothing that Python code has counted or kept"


Shown = Sequence[float]
"""The loss of some records, and of each gradient that is compared its norm and its largest element."""


class KeptNames:
    """`begin()` before the first batch, and `look()` after each of two batches of the same records; `list_changed()`
    then are the places that differ.

    `spaces` returns names and the namespaces of the user's code.
    """

    def __init__(self, model: torch.nn.Module, spaces: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        self._model, self._spaces = model, spaces
        self._first: dict[str, Any] = {}
        self._looks: list[dict[str, tuple[Any, ...]]] = []

    def begin(self) -> None:
        """Notes what the places have before the first batch."""
        self._first = {place.name: _keep(place.value) for place in self.list_places()}

    def look(self) -> None:
        until = time.monotonic() + contents.LOOK_S
        self._looks.append({
            place.name: _describe(place.value, until) for place in self.list_places()
            if not (isinstance(place.value, CollectionItems) and isinstance(place.value.of, set))  # it grows
        })  # fmt: skip

    def list_changed(self) -> list[KeptPlace]:
        before, after = [{}, {}, *self._looks][-2:]
        return [
            place for place in self.list_places()
            if place.name in before and place.name in after
            and (_differ(before[place.name], after[place.name]) or _has_grown(place.value, after[place.name]))
        ]  # fmt: skip

    def list_changes(self) -> list[tuple[KeptPlace, AbstractContextManager[None]]]:
        """The places that differ, each with a block in which it has another value: one far away; then, of a list from
        which each batch may take one, the same items in another order; and, of those that can, the one from before the
        first batch."""
        changed = self.list_changed()[:MOST_TRIED]
        turned = [(place, _turn(place.value)) for place in changed if type(place.value) in (list, deque)]
        firsts = [(place, self._first.get(place.name)) for place in changed]
        began = [(place, _begin_again(place.value, first, place.put)) for place, first in firsts if first is not None]
        return [*((place, change(place)) for place in changed), *turned, *began]

    def expect_unused(self, compute: Callable[[], Shown]) -> None:
        """Raises UsageError if what the same records show, which `compute` returns, follows from a changed place."""
        changes = self.list_changes()
        usual = compute() if changes else ()
        for place, changed in changes:
            try:
                with changed:
                    found = compute()
            except Exception as error:  # noqa: BLE001  a user's code may raise anything
                events.emit("loop.untried", why=f"{place.name}: {type(error).__name__}: {error}")
                continue
            if not is_same(usual, found):
                raise refuse(place, usual, found)

    def list_places(self) -> list[KeptPlace]:
        """Where the user's code may keep something, as it is now."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        spaces = list(self._spaces())
        seen = {id(one) for one in (*tensors, *self._model.modules(), *(space for _, space in spaces))}
        roots = [(f"the model's {path}." if path else "the model's ", vars(part))
                 for path, part in self._model.named_modules()]  # fmt: skip
        roots += [(f"a hook of {name}: ", value._backward_hooks)
                  for name, value in self._model.named_parameters() if value._backward_hooks]  # fmt: skip
        found = (place for name, room in (*roots, *spaces) for place in places.walk(name, room, seen)
                 if not places.is_generator(place.value))  # fmt: skip
        return list(itertools.islice(found, MOST_PLACES))


def is_same(shown: Shown, other: Shown) -> bool:
    """Whether two losses of the same records, and their gradients, are equal but for rounding, or show nothing."""
    pairs = itertools.zip_longest(shown, other, fillvalue=math.nan)
    close = (
        math.isclose(one, two, rel_tol=1e-6 if not at else 1e-4, abs_tol=1e-12) for at, (one, two) in enumerate(pairs)
    )
    return not all(map(math.isfinite, shown)) or all(close)


def _describe(value: Any, until: float) -> tuple[Any, ...]:
    if isinstance(value, CollectionItems):
        return "items", contents.digest(value, until)
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)[:SAMPLE]
        return "tensor", id(value), value._version, str(flat.tolist())
    if isinstance(value, np.ndarray):
        return "array", value.shape, value.reshape(-1)[:SAMPLE].tobytes()
    if type(value) in places.GROWING:
        return "list", len(value)
    if places.is_iterator(value):
        return "iterator", *([repr(value)] if isinstance(value, itertools.count) else [object()])
    return "number", repr(value)[:SAMPLE]


def _has_grown(value: Any, after: tuple[Any, ...]) -> bool:
    """Whether other records than those of the two batches have made a collection longer: a set of what was seen."""
    return type(value) in places.GROWING and after[0] == "list" and after[1] != len(value)


def _differ(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Of a tensor that is the same object its version counts: an average may begin as what it averages. An iterator
    does not tell whether it has moved."""
    if before[0] == after[0] == "items":
        return not contents.is_same(before[1], after[1])
    if before[0] == after[0] == "tensor" and before[1] != after[1]:
        return bool(before[3] != after[3])
    return before != after


def _keep(value: Any) -> Any:
    """What is needed to give a place this value again: of a collection its length. None: it cannot be done."""
    if isinstance(value, torch.Tensor | np.ndarray):
        small = (value.numel() if isinstance(value, torch.Tensor) else value.size) <= SAMPLE
        return copy.deepcopy(_detach(value)) if small else None
    if type(value) in places.GROWING:
        return len(value)
    if isinstance(value, itertools.count):
        return copy_count(value)
    return value if places.is_number(value) else None


def copy_count(value: Any) -> Any:
    """A count that begins where `value` is; None for one of other than whole numbers."""
    words = repr(value).removeprefix("count(").rstrip(")").split(", ")
    return itertools.count(*map(int, words)) if all(word.lstrip("-").isdecimal() for word in words) else None


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


@contextmanager
def _begin_again(value: Any, first: Any, put: Callable[[Any], object]) -> Iterator[None]:
    """Gives a place the value `first`, as `_keep` has kept it, while the block runs; a collection the items that it had
    then, as far as its order tells."""
    if type(value) in places.GROWING:
        kept = value.copy()
        items = list(kept.items() if isinstance(kept, dict) else kept)[: first if not isinstance(kept, set) else 0]
        _refill(value, items)
        try:
            yield
        finally:
            _refill(value, kept)
    elif isinstance(value, torch.Tensor | np.ndarray) and isinstance(first, type(value)) and first.shape == value.shape:
        kept = copy.deepcopy(_detach(value))
        _detach(value)[...] = first
        try:
            yield
        finally:
            _detach(value)[...] = kept
    else:
        put(copy_count(first) if isinstance(first, itertools.count) else first if places.is_number(value) else value)
        try:
            yield
        finally:
            put(value)


def _refill(room: Any, items: Any) -> None:
    room.clear()
    room.extend(items) if isinstance(room, list | deque) else room.update(items)


@contextmanager
def change(place: KeptPlace, far: int = FAR) -> Iterator[None]:
    """Gives a place another value, far from its own, while the block runs; a number one that differs by `far`."""
    value = place.value
    if isinstance(value, torch.Tensor | np.ndarray):
        with _change_numbers(torch.from_numpy(value) if isinstance(value, np.ndarray) else value):
            yield
    elif isinstance(value, CollectionItems):
        with contents.change(value, lambda one: _far(one, far)):
            yield
    elif type(value) in places.GROWING:
        with _lengthen(value):
            yield
    else:
        place.put(_far(value, far))
        try:
            yield
        finally:
            place.put(value)


@contextmanager
def _change_numbers(value: torch.Tensor) -> Iterator[None]:
    kept, odd = value.detach().clone(), torch.arange(value.numel(), device=value.device).view(value.shape) % 3
    with torch.no_grad():
        # A counter that has become negative reaches nothing: most numbers grow.
        far = torch.where(odd == 2, -1.0, 1.0 + odd) * 1e3 + 0.5
        value.copy_(far if value.is_floating_point() else (value + (odd + 1) * FAR).to(value.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            value.copy_(kept)


@contextmanager
def _lengthen(value: Any) -> Iterator[None]:
    """Gives a collection LONG items."""
    kept = value.copy()
    more = max(0, LONG - len(value))
    if isinstance(value, dict):
        value.update({("more", at): item for at, item in zip(range(more), itertools.cycle(kept.values()))})
    elif isinstance(value, set):
        value.update(range(FAR, FAR + more))
    else:
        value.extend(itertools.islice(itertools.cycle(kept), more))
    try:
        yield
    finally:
        _refill(value, kept)


@contextmanager
def _turn(value: Any) -> Iterator[None]:
    """Gives a list the items of its second half, then those of the first."""
    kept = value.copy()
    items = list(kept)
    _refill(value, items[len(items) // 2 :] + items[: len(items) // 2])
    try:
        yield
    finally:
        _refill(value, kept)


def _far(value: Any, far: int) -> Any:
    if isinstance(value, itertools.count):
        return itertools.count(FAR)
    if places.is_iterator(value):
        return (_far(one, far) for one in value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(_far(one, far) for one in value)
    if isinstance(value, datetime):
        return value + timedelta(seconds=far)
    if isinstance(value, np.integer):
        room = np.iinfo(value.dtype)
        return type(value)(min(max(int(value) + far, room.min), room.max))
    return value + far if places.is_number(value) or isinstance(value, torch.Tensor) else value


def compare(shown: Shown, other: Shown) -> str:
    """What is not the same, in words: the loss, or the gradients."""
    if is_same(shown[:1], other[:1]):
        now, was = (math.hypot(*one[1::2]) for one in (other, shown))
        return f"the gradients of the same records have another direction, or a norm of {now:.7g} instead of {was:.7g}"
    return f"the loss of the same records is {other[0]:.7g} instead of {shown[0]:.7g}"


def refuse(place: KeptPlace, shown: Shown, changed: Shown) -> UsageError:
    """The error for a place that the loss uses."""
    return UsageError(
        f"the loss uses {place.name}, which each batch changes: with another value there {compare(shown, changed)}",
        hint=f"{JOINS}: keep it in a buffer of the model (self.register_buffer), or count with batch.step in a loop "
        "over trueline.Elastic",
    )
