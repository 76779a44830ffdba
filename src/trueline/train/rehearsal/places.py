"""Where a user's code keeps what it keeps: names, items and attributes, each of which can be given another value."""

from __future__ import annotations

import argparse
import copy
import ctypes
import functools
import gc
import inspect
import os
import random
import sys
import threading
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from types import FrameType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from trueline.train.rehearsal.contents import CollectionItems

MOST_ITEMS, DEEP = 256, 4
"""Items of a list that are looked at one by one (`contents.py`: those of a longer one), and levels below a name."""
GROWING = (list, deque, set, dict, OrderedDict, Counter, defaultdict)
"""Collections whose length is looked at."""
_OF_MODULES = ("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
HOLDERS = (SimpleNamespace, argparse.Namespace, threading.local, UserDict, UserList)
"""Objects of the standard library with attributes of the user's."""
MOST_FIELDS = 8
"""Of a tuple, that are looked at one by one."""
PlacedItem = tuple[Any, Any, Callable[[Any], object]]
"""A name, a value, and what puts another one there."""
_INSTALLED = ("site-packages", "dist-packages", os.path.dirname(os.__file__))


@dataclass(frozen=True, slots=True)
class KeptPlace:
    name: str
    value: Any
    put: Callable[[Any], object]
    root: str = ""
    """The name in the user's code from which it is reached."""


def walk(name: str, room: Any, seen: set[int], depth: int = 0, root: str = "") -> Iterator[KeptPlace]:
    """The places in `room` and below; `seen`: ids of what is left out."""
    ours = package_of(room) == "trueline"  # which may hold a data set of the user's
    for key, value, put in map(_look_inside, _list_items(room)):
        if isinstance(key, str) and (key.startswith("__") or key.rpartition(".")[2] in _OF_MODULES):
            continue
        place = KeptPlace(f"{name}{key}", value, put, root or f"{name}{key}")
        if is_number(value) or is_iterator(value) or (type(value) is tuple and all(map(is_number, value))):
            if not ours:
                yield place
                yield from _list_fields(place)
            continue
        if is_record(value) and not type(value).__module__.startswith("trueline."):  # a batch is the next one's
            yield from () if ours else _list_fields(place)
            if not isinstance(value, tuple) and id(value) not in seen and depth < DEEP:
                seen.add(id(value))
                rest = {name: one for name, _, one in _read_fields(value) if not is_number(one)}
                yield from walk(f"{place.name}.", rest, seen, depth + 1, place.root)
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_generator(value):
            yield place
            continue
        if not ours and _changes_inside(value):
            yield place
            if type(value) is set or (type(value) in GROWING and len(value) > MOST_ITEMS):
                yield KeptPlace(f"{place.name}'s items", CollectionItems(value), _leave, place.root)
        inner = _open(value)
        if inner is not None and depth < DEEP:
            dotted = isinstance(value, list | deque | dict)
            yield from walk(f"{place.name}{'/' if dotted else '.'}", inner, seen, depth + 1, place.root)
        if inner is not None and isinstance(value, FunctionType) and id(value.__globals__) not in seen:
            yield from walk(f"{place.name}'s ", GlobalNames(value), seen, depth + 1)


def _look_inside(item: PlacedItem) -> PlacedItem:
    """Of a variable of a context what it is set to, and of a progress bar of tqdm its count."""
    key, value, _ = item
    if isinstance(value, ContextVar):
        return f"{key}'s value", value.get(None), value.set
    if any(base.__module__.partition(".")[0] == "tqdm" for base in type(value).__mro__) and hasattr(value, "n"):
        return f"{key}.n", value.n, functools.partial(setattr, value, "n")
    return item


def is_number(value: Any) -> bool:
    """Whether it is a number or a time."""
    return isinstance(value, bool | int | float | np.integer | np.floating | Fraction | Decimal | datetime)


def is_record(value: Any) -> bool:
    """Whether it is a tuple or a frozen dataclass: to change a field, a loop replaces the whole."""
    return isinstance(value, tuple) or getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)


def _list_fields(place: KeptPlace) -> Iterator[KeptPlace]:
    """The numbers of a record, each put by another record in its place."""
    value = place.value
    if not is_record(value) or len(value if isinstance(value, tuple) else ()) > MOST_FIELDS:
        return
    for name, at, field in _read_fields(value):
        if is_number(field):
            put = functools.partial(_put_field, place, at, name)
            yield KeptPlace(f"{place.name}.{name}", field, put, place.root)


def _read_fields(value: Any) -> list[tuple[str, int, Any]]:
    if isinstance(value, tuple):
        return [(str(name), at, value[at]) for at, name in enumerate(getattr(value, "_fields", range(len(value))))]
    return [(name, at, getattr(value, name, None)) for at, name in enumerate(value.__dataclass_fields__)]


def _put_field(place: KeptPlace, at: int, name: str, field: Any) -> None:
    value = _read_now(place)
    if isinstance(value, tuple):
        fields = (*value[:at], field, *value[at + 1 :])
        place.put(type(value)(*fields) if hasattr(value, "_fields") else fields)
    else:
        other = copy.copy(value)
        object.__setattr__(other, name, field)
        place.put(other)


def _read_now(place: KeptPlace) -> Any:
    """What the place has, which a batch may have replaced since it was listed."""
    put = place.put
    if isinstance(put, functools.partial) and put.func is setattr:
        return getattr(*put.args)
    return put.args[0][put.args[1]] if isinstance(put, functools.partial) and put.func is _put_item else place.value


def is_iterator(value: Any) -> bool:
    """Whether it is a generator, a cycle or the like: the next batch gets the next item."""
    known = type(value).__module__ in ("builtins", "itertools") and not isinstance(value, type)
    return known and hasattr(value, "__next__")


def is_generator(value: Any) -> bool:
    """Whether random numbers are drawn from it, and it is none of the process's own."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
    known = (torch.default_generator, np.random.mtrand._rand, random._inst)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom) and value not in known


def _changes_inside(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not value.is_meta and value.is_leaf and not value.is_inference()
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fiu" and value.flags.writeable
    return type(value) in GROWING


def _open(value: Any) -> Any:
    """What may hold something of the user's code inside `value`: a collection, a module, a function, an object."""
    if isinstance(value, list | deque | dict):
        return value if len(value) <= MOST_ITEMS else None
    if isinstance(value, torch.nn.Module):
        return value
    if isinstance(value, ModuleType):
        return vars(value) if is_users_module(value) else None
    if isinstance(value, MethodType):
        return {"self": value.__self__, "function": value.__func__}
    if isinstance(value, functools.partial):
        return {"function": value.func, "keywords": value.keywords, "arguments": list(value.args)}
    if isinstance(value, FunctionType):
        return value if is_users_function(value) else None
    return value if package_of(value) in ("", "trueline") or type(value) in HOLDERS else None


def is_users_module(module: Any) -> bool:
    """Whether a module is of the user's code: installed packages are not."""
    file, name = getattr(module, "__file__", None), str(getattr(module, "__name__", ""))
    ours = name == "trueline" or name.startswith("trueline.")
    return bool(file) and not ours and not any(part in str(file) for part in _INSTALLED)


def is_users_function(function: FunctionType) -> bool:
    file = function.__code__.co_filename
    return not str(function.__module__).startswith("trueline.") and not any(part in file for part in _INSTALLED)


def package_of(value: Any) -> str | None:
    """Empty: the user's. None: it is of no interest."""
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, dict) or not (hasattr(value, "__dict__") or hasattr(value, "__slots__")):
        return None
    if kind.__module__.startswith("trueline."):
        return "trueline" if kind.__module__.startswith("trueline.data.") and kind is not value else None
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or (kind.__module__ == "__main__" and "-")
    if not file and kind.__module__ not in sys.modules:
        return ""  # a recipe is no module of the interpreter's
    return "" if file and not any(part in str(file) for part in _INSTALLED) else None


def _list_items(room: Any) -> Iterator[PlacedItem]:
    if isinstance(room, dict | MappingProxyType):
        for key, value in list(room.items()):
            yield key, value, functools.partial(_put_item, room, key)
    elif isinstance(room, torch.nn.Module):
        for path, part in room.named_modules():
            for key, value in {**vars(part), **part._parameters, **part._buffers}.items():
                yield f"{path}.{key}" if path else key, value, functools.partial(setattr, part, key)
    elif isinstance(room, list | deque):
        for at, value in enumerate(list(room)):
            yield at, value, functools.partial(_put_item, room, at)
    else:
        if isinstance(room, FunctionType):
            yield from _list_enclosed(room)
        for key, value in {**_read_slots(room), **getattr(room, "__dict__", {})}.items():
            yield key, value, functools.partial(setattr, room, key)


def _read_slots(room: Any) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for kind in reversed(type(room).__mro__):
        known |= vars(kind)
    slots = [name for name, member in known.items() if inspect.ismemberdescriptor(member) and not name.startswith("__")]
    return {name: getattr(room, name) for name in sorted(slots) if hasattr(room, name)}


def _list_enclosed(function: FunctionType) -> Iterator[PlacedItem]:
    """The variables around a function that it uses, and its defaults: a dict among them lasts from call to call."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
        except ValueError:  # not bound yet
            continue
    for key, value in (*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()):
        if not is_number(value):
            yield f"default {key}", value, lambda _: None


def _leave(_: Any) -> None:
    """Its items are changed in place."""


def _put_item(room: Any, key: Any, value: Any) -> None:
    room[key] = value


class GlobalNames(dict[str, Any]):
    """The names of its file that a function uses, which can be set."""

    def __init__(self, function: FunctionType) -> None:
        self._all = function.__globals__
        super().__init__({name: self._all[name] for name in function.__code__.co_names if name in self._all})

    def __setitem__(self, key: str, value: Any) -> None:
        self._all[key] = value


class FrameLocals(dict[str, Any]):
    """The names of a function that runs, which can be set."""

    def __init__(self, frame: FrameType) -> None:
        super().__init__(frame.f_locals)
        self._frame = frame

    def __getitem__(self, key: str) -> Any:
        return self._frame.f_locals[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._frame.f_locals[key] = value
        if sys.version_info < (3, 13):  # later ones write through
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self._frame), ctypes.c_int(0))


def list_enumerates() -> list[KeptPlace]:
    """The numbers that `enumerate` gives to the batches of the user's loop, and which no name of it can change. To be
    called in a process that ends with its trial: objects of the interpreter are written to."""
    if not any("enumerate" in frame.f_code.co_names for frame in list_loops()):
        return []
    found = []
    for one in gc.get_objects():
        if type(one) is enumerate:
            number = ctypes.c_ssize_t.from_address(id(one) + object.__basicsize__)
            if number.value == one.__reduce__()[1][1]:  # else its form is that of another Python
                found.append(
                    KeptPlace("the number of enumerate(...)", number.value, functools.partial(_put_number, one, number))
                )
    return found


def _put_number(_: Any, number: ctypes.c_ssize_t, value: int) -> None:
    """Its object is held by the caller."""
    number.value = value


def list_loops() -> list[FrameType]:
    """The frames of the user's loop: up to the first that is no generator, which passes batches on, and without
    generators of libraries (`tqdm(job)`)."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("trueline."):
        frame = frame.f_back
    found = list[FrameType]()
    while frame is not None and _passes_on(frame):
        found += () if _is_installed(frame) else (frame,)
        frame = frame.f_back
    return found if frame is None or (found and _is_installed(frame)) else [*found, frame]


def end_with_loop() -> None:
    """Ends this process, a fork, where the function with the user's loop ends or raises: what would handle that error
    runs where the loop has it, and not here."""

    def watch(_: FrameType, event: str, __: Any) -> Any:
        return os._exit(0) if event == "return" else watch

    for frame in list_loops()[-1:]:
        frame.f_trace, frame.f_trace_lines = watch, False
        sys.settrace(lambda *_: None)


def _passes_on(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR) or frame.f_code.co_name == "__next__"


def _is_installed(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in _INSTALLED)


def list_caller_spaces() -> list[tuple[str, Any]]:
    """The namespaces of the user's loop, and of what passes batches on to it."""
    found = list_loops()
    frames = [(f"{frame.f_code.co_name}'s ", frame) for frame in found[:-1]]
    frames += [("the loop's ", frame) for frame in found[-1:]]
    spaces: list[tuple[str, Any]] = [
        (name, FrameLocals(frame)) for name, frame in frames if frame.f_locals is not frame.f_globals
    ]
    files = {id(frame.f_globals): (name, frame.f_globals) for name, frame in frames}
    return [*spaces, *files.values()]


def list_caller_code() -> list[tuple[str, Any]]:
    """The code of the user's loop, then the namespaces with what it calls."""
    return [*(("", frame.f_code) for frame in list_loops()), *list_caller_spaces()]
