"""The state that a model keeps in plain Python: in its attributes, in those of its classes, and in the globals and
closures that its functions use.

A table that is made when a size first comes does no harm. A number that is taken from the first input does: with inputs
in another order the model answers differently. To call it in another order, the values before its first call are
copied.
"""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import CellType, CodeType, FunctionType
from typing import Any, final

import numpy as np
import torch

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import users_functions

_OWN = frozenset(vars(torch.nn.Module()))
"""Attributes of every module."""
_DEPTH, _WIDTH = 4, 1000
_LARGEST = 64 << 20
"""Bytes of a tensor above which it is not copied, only looked at."""
_PLAIN = (bool, int, float, str, list, dict, set, deque, tuple, torch.Tensor, np.ndarray)
MISSING = object()


def take_snapshot(module: torch.nn.Module) -> dict[str, object]:
    """A trace of each attribute's value, by its path; parameters, buffers and submodules are no attributes here.

    >>> module = torch.nn.Module()
    >>> module.seen = [1]
    >>> before = take_snapshot(module)
    >>> module.seen.append(2)
    >>> before["seen"] == take_snapshot(module)["seen"]
    False
    """
    return {kept.path: _trace(kept.value, _DEPTH) for kept in attributes(module)}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptValue:
    """A value that is kept under a name."""

    path: str
    holder: Any
    """A class, a cell of a function, or the dict (of an object, of a file) in which it is kept."""
    name: str
    value: Any

    def assign(self, value: Any) -> None:
        """Keeps `value` instead; removes the name where it is `MISSING`."""
        if isinstance(self.holder, type):
            if value is not MISSING:
                setattr(self.holder, self.name, value)
            elif self.name in vars(self.holder):
                delattr(self.holder, self.name)
        elif isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif value is not MISSING:
            self.holder[self.name] = value
        else:
            self.holder.pop(self.name, None)


def attributes(module: torch.nn.Module) -> Iterator[KeptValue]:
    """The values that the parts of `module`, their classes and the files of these keep."""
    for prefix, one in module.named_modules():
        for name, value in vars(one).items():
            if name not in _OWN:
                yield KeptValue(path=f"{prefix}.{name}" if prefix else name, holder=vars(one), name=name, value=value)
    functions = list(users_functions(module))
    users = {function.__globals__.get("__name__") for function in functions}
    for kind in {kind for part in module.modules() for kind in type(part).__mro__ if kind.__module__ in users}:
        for name, value in vars(kind).items():
            if _is_plain(value) and not name.startswith("__"):
                yield KeptValue(path=f"{kind.__qualname__}.{name}", holder=kind, name=name, value=value)
    for function, names in _reach(functions):
        known, file = function.__globals__, function.__globals__.get("__name__", "")
        for name in names:
            if _is_plain(known.get(name, MISSING)):
                yield KeptValue(path=f"{file}.{name}", holder=known, name=name, value=known[name])
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if not _is_empty(cell) and _is_plain(cell.cell_contents):
                path = f"{function.__qualname__}.{name}"
                yield KeptValue(path=path, holder=cell, name=name, value=cell.cell_contents)


def defaults(module: torch.nn.Module) -> Iterator[KeptValue]:
    """Mutable defaults of the functions of `module`, and of the functions that they use."""
    for function, _ in _reach(list(users_functions(module))):
        given = function.__defaults__ or ()
        names = function.__code__.co_varnames[: function.__code__.co_argcount][-len(given) :] if given else ()
        for name, value in zip(names, given, strict=True):
            if type(value) in (list, dict, set):
                yield KeptValue(path=f"{function.__qualname__}.{name}", holder={}, name=name, value=value)


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is MISSING
    except ValueError:
        return True


def _reach(waiting: list[FunctionType]) -> list[tuple[FunctionType, set[str]]]:
    """The functions and the user's functions that they use, each with the names in its code."""
    reached: list[tuple[FunctionType, set[str]]] = []
    seen: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        codes, names = [function.__code__], set[str]()
        while codes:
            code = codes.pop()
            if code in seen:
                continue
            seen.add(code)
            codes += [one for one in code.co_consts if isinstance(one, CodeType)]
            names |= set(code.co_names)
        for name in names:
            value = function.__globals__.get(name, MISSING)
            if isinstance(value, FunctionType) and code_paths.is_users(value.__code__.co_filename):
                waiting.append(value)
        reached.append((function, names))
    return reached


def _is_plain(value: Any) -> bool:
    """Whether it is a number, a tensor, or a collection."""
    return value is None or type(value) in _PLAIN


def _trace(value: Any, depth: int) -> object:
    """Differs after `value` was written to, down to `depth`."""
    if isinstance(value, int | float | str | bytes | None):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), tuple(value.shape), value._version
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes() if value.size <= _WIDTH else id(value)
    if depth and isinstance(value, dict):
        return len(value), [(str(key), _trace(one, depth - 1)) for key, one in islice(value.items(), _WIDTH)]
    if depth and isinstance(value, list | tuple | set | frozenset | deque):
        return len(value), [_trace(one, depth - 1) for one in islice(value, _WIDTH)]
    if depth and _is_object(value):
        return id(value), _trace(vars(value), depth - 1)
    return id(value)


def _is_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module) and not callable(value)


def _copy(value: Any, depth: int) -> Any:
    """A copy of `value` as deep as `_trace` looks."""
    if isinstance(value, torch.Tensor):
        parameter = isinstance(value, torch.nn.Parameter)
        return value if parameter or value.nbytes > _LARGEST else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _LARGEST else value
    if depth and type(value) in (dict, list, set, deque, tuple):
        if len(value) > _WIDTH:
            return value
        if isinstance(value, dict):
            return {key: _copy(one, depth - 1) for key, one in value.items()}
        return type(value)(_copy(one, depth - 1) for one in value)
    if depth and _is_object(value) and type(value).__module__ != "builtins":
        try:
            made = copy.copy(value)
            vars(made).update({name: _copy(one, depth - 1) for name, one in vars(value).items()})
        except Exception:  # noqa: BLE001 - an object of the user's that cannot be copied is left as it is
            return value
        return made
    return value


@final
class Recall:
    """The values of the plain attributes of `module` when this was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._snapshot = take_snapshot(module)
        self._copies = {kept.path: _copy(kept.value, _DEPTH) for kept in attributes(module)}

    def find_changed(self) -> tuple[str, ...]:
        """The attributes that have changed since."""
        now = take_snapshot(self._module)
        return tuple(path for path, trace in now.items() if self._snapshot.get(path, MISSING) != trace)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within the block the model has its values of then; afterwards those of now."""
        names = {*self.find_changed()}
        now = [kept for kept in attributes(self._module) if kept.path in names]
        for kept in now:
            kept.assign(_copy(self._copies.get(kept.path, MISSING), _DEPTH))
        try:
            yield
        finally:
            for kept in now:
                kept.assign(kept.value)
