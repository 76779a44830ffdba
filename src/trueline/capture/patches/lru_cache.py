"""A user's function that keeps its answers by what it was asked (functools.lru_cache): asked anew while it is traced.

What it is asked is a size, as a rule, and a size that varies is no number that a table could look up: the trace would
fail there, or keep a tensor of its own in the user's table. Its answer is computed where the trace is instead.

Source: the documentation of functools.lru_cache (`__wrapped__`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import users_functions

_Kept = functools._lru_cache_wrapper


@contextmanager
def uncached(module: torch.nn.Module) -> Iterator[None]:
    """Within the block what the user's functions keep by what they were asked is computed."""
    found = list(_kept_by(module))
    try:
        for holder, name, kept in found:
            _put(holder, name, kept.__wrapped__)
        yield
    finally:
        for holder, name, kept in found:
            _put(holder, name, kept)


def _put(holder: Any, name: str, value: object) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _kept_by(module: torch.nn.Module) -> Iterator[tuple[Any, str, _Kept[Any]]]:
    """Where such functions are found: in the classes of the module, and among what its functions name."""
    for kind in {kind for part in module.modules() for kind in type(part).__mro__}:
        for name, one in vars(kind).items():
            if isinstance(one, _Kept) and _is_users(one):
                yield kind, name, one
    seen: set[FunctionType] = set()
    waiting = list(users_functions(module))
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        for name in function.__code__.co_names:
            found = function.__globals__.get(name)
            if isinstance(found, _Kept) and _is_users(found):
                yield function.__globals__, name, found
            if isinstance(found, FunctionType) and code_paths.is_users(found.__code__.co_filename):
                waiting.append(found)


def _is_users(kept: _Kept[Any]) -> bool:
    code = getattr(kept.__wrapped__, "__code__", None)
    return code is not None and code_paths.is_users(code.co_filename)
