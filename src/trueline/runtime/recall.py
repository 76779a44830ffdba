"""What a model keeps in plain Python attributes while it is asked, and what it kept before.

A table that is made for a size when that size first comes is nobody's business. A number that is taken from the
question which came first is: asked in another order, the model answers otherwise. Only who knows what the model held
before it was first called can ask it in another order; so that is copied then.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, final

import numpy as np
import torch

_OWN = frozenset(vars(torch.nn.Module()))
"""What every module has: no user's attribute."""
_DEPTH, _WIDTH = 4, 1000
_LARGEST = 64 << 20
"""Bytes of a tensor in an attribute above which it is not copied, only looked at."""
_MISSING = object()


def held(module: torch.nn.Module) -> dict[str, object]:
    """A trace of what each attribute holds, by its name; parameters, buffers and submodules are no attributes here.

    >>> module = torch.nn.Module()
    >>> module.seen = [1]
    >>> before = held(module)
    >>> module.seen.append(2)
    >>> before["seen"] == held(module)["seen"]
    False
    """
    return {path: _trace(value, _DEPTH) for path, value in _attributes(module)}


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, one in module.named_modules():
        for name, value in vars(one).items():
            if name not in _OWN:
                yield f"{prefix}.{name}" if prefix else name, value


def _trace(value: Any, depth: int) -> object:
    """Something that is another when `value` has been written to, as far as it is looked into."""
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


def _copied(value: Any, depth: int) -> Any:
    """`value`, which nobody who writes into the original writes into, as far as `_trace` looks."""
    if isinstance(value, torch.Tensor):
        parameter = isinstance(value, torch.nn.Parameter)
        return value if parameter or value.nbytes > _LARGEST else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _LARGEST else value
    if depth and type(value) in (dict, list, set, deque, tuple):
        if len(value) > _WIDTH:
            return value
        if isinstance(value, dict):
            return {key: _copied(one, depth - 1) for key, one in value.items()}
        return type(value)(_copied(one, depth - 1) for one in value)
    if depth and _is_object(value) and type(value).__module__ != "builtins":
        return _copied_object(value, depth)
    return value


def _copied_object(value: Any, depth: int) -> Any:
    try:
        made = copy.copy(value)
        vars(made).update({name: _copied(one, depth - 1) for name, one in vars(value).items()})
    except Exception:  # noqa: BLE001 - an object of the user's that is not to be copied is left as it is
        return value
    return made


@final
class Recall:
    """What the plain attributes of `module` held when this was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._held = held(module)
        self._copies = {path: _copied(value, _DEPTH) for path, value in _attributes(module)}

    def changed(self) -> tuple[str, ...]:
        """The attributes that hold something else by now."""
        return tuple(path for path, trace in held(self._module).items() if self._held.get(path, _MISSING) != trace)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within the block the model holds what it held then; afterwards what it holds now."""
        paths = self.changed()
        now = {path: self._put(path, _copied(self._copies.get(path, _MISSING), _DEPTH)) for path in paths}
        try:
            yield
        finally:
            for path, value in now.items():
                self._put(path, value)

    def _put(self, path: str, value: Any) -> Any:
        """Puts `value` at `path`; what was there before."""
        prefix, _, name = path.rpartition(".")
        owner = vars(self._module.get_submodule(prefix))
        before = owner.pop(name, _MISSING)
        if value is not _MISSING:
            owner[name] = value
        return before
