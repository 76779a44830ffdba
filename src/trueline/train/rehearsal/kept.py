"""What a user's code keeps from one batch to the next in plain Python: counters, lists, averages, another module.

A worker that joins does not have it. It does no harm where no loss uses it, as with a history that is printed. So it
is looked at after two batches of the same records: what differs is no copy of something in the batch, but memory.
Each such place then gets another value, far from its own; the loss of the same records shows whether it is used.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from trueline import events
from trueline.errors import UsageError

MOST_PLACES, MOST_ITEMS, DEEP, LONG = 4096, 256, 4, 2048
"""Places that are looked at, items of a list, levels below a name, and the length of a list that was made longer."""
MOST_TRIED, SAMPLE, FAR = 8, 4096, 1_000_003
_OF_MODULES = ("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_JOINS = "a worker that joins receives model, optimizer and scheduler, and nothing that Python code has counted or kept"


@dataclass(frozen=True, slots=True)
class KeptPlace:
    name: str
    value: Any
    put: Callable[[Any], None]


class KeptNames:
    """`look()` after each of two batches of the same records; `list_changed()` then are the places that differ.

    `spaces` returns names and the namespaces of the user's code.
    """

    def __init__(self, model: torch.nn.Module, spaces: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        self._model, self._spaces = model, spaces
        self._looks: list[dict[str, tuple[Any, ...]]] = []

    def look(self) -> None:
        self._looks.append({place.name: _describe(place.value) for place in self._list_places()})

    def list_changed(self) -> list[KeptPlace]:
        before, after = [{}, {}, *self._looks][-2:]
        return [
            place for place in self._list_places()
            if place.name in before and place.name in after and _differ(before[place.name], after[place.name])
        ][:MOST_TRIED]  # fmt: skip

    def expect_unused(self, compute: Callable[[], float]) -> None:
        """Raises UsageError if the loss of the same records, which `compute` returns, follows from a changed place."""
        places = self.list_changed()
        usual = compute() if places else math.nan
        for place in places:
            try:
                with change(place):
                    found = compute()
            except Exception as error:  # noqa: BLE001  a user's code may raise anything
                events.emit("loop.untried", why=f"{place.name}: {type(error).__name__}: {error}")
                continue
            if not is_same(usual, found):
                raise refuse(place, usual, found)

    def _list_places(self) -> list[KeptPlace]:
        tensors = (*self._model.parameters(), *self._model.buffers())
        seen = {id(one) for one in (*tensors, *self._model.modules())}
        roots = [(f"the model's {path}." if path else "the model's ", vars(part))
                 for path, part in self._model.named_modules()]  # fmt: skip
        places = (place for name, room in (*roots, *self._spaces()) for place in _walk(name, room, seen, 0))
        return list(itertools.islice(places, MOST_PLACES))


def _walk(name: str, room: Any, seen: set[int], depth: int) -> Iterator[KeptPlace]:
    ours = _package_of(room) == "trueline"  # which may hold a data set of the user's
    for key, value, put in _list_items(room):
        if (isinstance(key, str) and key.startswith("__")) or key in _OF_MODULES:
            continue
        place = KeptPlace(f"{name}{key}", value, put)
        if isinstance(value, bool | int | float | itertools.count):
            if not ours:
                yield place
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta
        if not ours and (isinstance(value, list | deque) or (plain and value.is_leaf and not value.is_inference())):
            yield place
        inner = _open(value)
        if inner is not None and depth < DEEP:
            dotted = isinstance(value, list | deque | dict)
            yield from _walk(f"{place.name}{'/' if dotted else '.'}", inner, seen, depth + 1)


def _open(value: Any) -> Any:
    """What may hold something of the user's code inside `value`: a collection, a module, an object of its own."""
    if isinstance(value, list | deque | dict):
        return value if len(value) <= MOST_ITEMS else None
    if isinstance(value, torch.nn.Module):
        return {**vars(value), **dict(value.named_parameters()), **dict(value.named_buffers())}
    return value if _package_of(value) in ("", "trueline") else None


def _package_of(value: Any) -> str | None:
    """Empty: the user's. None: it is of no interest."""
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, Mapping) or not hasattr(value, "__dict__"):
        return None
    if kind.__module__.startswith("trueline."):
        return "trueline" if kind.__module__.startswith("trueline.data.") and kind is not value else None
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or (kind.__module__ == "__main__" and "-")
    if not file and kind.__module__ not in sys.modules:
        return ""  # a recipe is no module of the interpreter's
    return "" if file and not any(part in str(file) for part in _INSTALLED) else None


_INSTALLED = ("site-packages", "dist-packages", os.path.dirname(os.__file__))


def _list_items(room: Any) -> Iterator[tuple[Any, Any, Callable[[Any], None]]]:
    if isinstance(room, Mapping):
        for key, value in list(room.items()):
            yield key, value, functools.partial(_put_item, room, key)
    elif isinstance(room, list | deque):
        for at, value in enumerate(list(room)):
            yield at, value, functools.partial(_put_item, room, at)
    else:
        for key, value in list(vars(room).items()):
            yield key, value, functools.partial(setattr, room, key)


def _put_item(room: Any, key: Any, value: Any) -> None:
    room[key] = value


def is_same(loss: float, other: float) -> bool:
    """Whether two losses are equal but for rounding, or show nothing."""
    return not math.isfinite(loss) or math.isclose(loss, other, rel_tol=1e-6, abs_tol=1e-12)


class FrameLocals(dict[str, Any]):
    """The names of a function that runs, which can be set."""

    def __init__(self, frame: FrameType) -> None:
        super().__init__(frame.f_locals)
        self._frame = frame

    def __setitem__(self, key: str, value: Any) -> None:
        self._frame.f_locals[key] = value
        if sys.version_info < (3, 13):  # later ones write through
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self._frame), ctypes.c_int(0))


def list_caller_spaces() -> list[tuple[str, Any]]:
    """The namespaces of the first frame that is not Trueline's: of the user's loop."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("trueline."):
        frame = frame.f_back
    if frame is None:
        return []
    spaces: list[tuple[str, Any]] = [("the loop's ", frame.f_globals)]
    return spaces if frame.f_locals is frame.f_globals else [("the loop's ", FrameLocals(frame)), *spaces]


def _describe(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)[:SAMPLE]
        return "tensor", id(value), value._version, str(flat.tolist())
    if isinstance(value, list | deque):
        return "list", len(value)
    return "number", repr(value)


def _differ(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Of a tensor that is the same object its version counts: an average may begin as what it averages."""
    if before[0] == after[0] == "tensor" and before[1] != after[1]:
        return bool(before[3] != after[3])
    return before != after


@contextmanager
def change(place: KeptPlace) -> Iterator[None]:
    """Gives a place another value, far from its own, while the block runs."""
    value = place.value
    if isinstance(value, torch.Tensor):
        kept, odd = value.detach().clone(), torch.arange(value.numel(), device=value.device).view(value.shape) % 3 - 1
        with torch.no_grad():
            value.copy_(odd * 1e3 + 0.5 if value.is_floating_point() else value)
        try:
            yield
        finally:
            with torch.no_grad():
                value.copy_(kept)
    elif isinstance(value, list | deque):
        kept_items = list(value)
        value.extend(itertools.islice(itertools.cycle(kept_items), max(0, LONG - len(value))))
        try:
            yield
        finally:
            value.clear()
            value.extend(kept_items)
    else:
        place.put(_far(value))
        try:
            yield
        finally:
            place.put(value)


def _far(value: Any) -> Any:
    if isinstance(value, itertools.count):
        return itertools.count(FAR)
    return not value if isinstance(value, bool) else value + FAR


def refuse(place: KeptPlace, loss: float, changed: float) -> UsageError:
    """The error for a place that the loss uses."""
    return UsageError(
        f"the loss uses {place.name}, which each batch changes: with another value there the loss of the same records "
        f"is {changed:.7g} instead of {loss:.7g}",
        hint=f"{_JOINS}: keep it in a buffer of the model (self.register_buffer), or count with batch.step in a loop "
        "over trueline.Elastic",
    )
