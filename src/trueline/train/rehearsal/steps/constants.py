"""The whole numbers that stand in a user's code: at these a count may mean something that no comparison shows.

EVERY = 64                                  a name of the file
if self.calls[0] % 100 == 0: ...            a constant of a function, here beside an array of NumPy
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from trueline.train.rehearsal import places

MOST = 12


def list_constants(spaces: Iterable[tuple[str, Any]], total: int) -> list[int]:
    """Of the functions, classes and names in the namespaces and the code in `spaces`, those from 3 to below `total`,
    each after the number before it: a count may be compared before or after it grows."""
    found: dict[int, None] = {}
    for _, room in spaces:
        values = list(room.values()) if isinstance(room, Mapping) else [room]
        for value in values:
            found |= dict.fromkeys(_list_in(value))
    wanted = [number for number in found if 3 <= number < total][:MOST]
    return list(dict.fromkeys(at for number in wanted for at in (number - 1, number)))


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
        if type(constant) is int:
            yield constant
        elif isinstance(constant, CodeType):
            yield from _list_in_code(constant)
