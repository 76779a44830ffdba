"""The whole numbers that stand in a user's code: at these a count may mean something that no comparison shows.

EVERY = 64                                  a name of the file
DROPS = {300: 0.1, 600: 0.01}               keys of a dict, items of a list
if self.calls[0] % 100 == 0: ...            a constant of a function, here beside an array of NumPy
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch

from trueline.train.rehearsal import places

MOST = 12
_COLLECTIONS = (tuple, list, set, frozenset, dict)


def list_constants(spaces: Iterable[tuple[str, Any]], total: int, *, keys: bool = False) -> list[int]:
    """Of the functions, classes and names in the namespaces and the code in `spaces`, those from 3 to below `total`,
    each after the number before it: a count may be compared before or after it grows. `keys`: it is looked up, so keys
    of dicts and items of lists come first."""
    values = [value for _, room in spaces for value in (room.values() if isinstance(room, Mapping) else (room,))]
    values += [inner for value in values if places.package_of(value) == "" for inner in _read_attributes(value)]
    named = [number for value in values if type(value) not in _COLLECTIONS for number in _list_in(value)]
    listed = [number for value in values if type(value) in _COLLECTIONS for number in _list_numbers(value)]
    found = dict.fromkeys((*listed, *named) if keys else (*named, *listed))
    wanted = [number for number in found if 3 <= number < total][:MOST]
    return list(dict.fromkeys(at for number in wanted for at in (number - 1, number)))


def _read_attributes(value: Any) -> list[Any]:
    return [] if isinstance(value, type | torch.nn.Module) else list(getattr(value, "__dict__", {}).values())


def _list_in(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
        return
    if isinstance(value, CodeType):
        yield from _list_in_code(value)
        return
    kind = value if isinstance(value, type) else type(value)
    functions = [value] if isinstance(value, FunctionType) and places.is_users_function(value) else []
    if places.package_of(kind) == "":
        functions += [one for one in vars(kind).values() if isinstance(one, FunctionType)]
    for function in functions:
        yield from _list_in_code(function.__code__)


def _list_in_code(code: CodeType) -> Iterator[int]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_in_code(constant)
        else:
            yield from _list_numbers(constant)


def _list_numbers(value: Any) -> Iterator[int]:
    """A number, or those of a collection and the keys of a dict (`{300: 0.1, 600: 0.01}`)."""
    given = itertools.islice(value, MOST) if type(value) in _COLLECTIONS else (value,)
    yield from (one for one in given if type(one) is int)
