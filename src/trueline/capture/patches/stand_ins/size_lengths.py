"""`len` of a tensor, `int`, `float` and `math` of a size, and lists made of a size stay as free as the size in a trace.

Python's own return plain numbers, and torch.export then makes a constant of the size. So the user's modules get a
`len`, `int`, `float`, `min`, `max` and `sum` of their own while the model is traced, the `math` and `bin` of
`size_functions`, the `range`, `list` and `tuple` of `size_lists`, the lists of slices of `size_rows` and the `numpy` of
`numpy_arrays`.
"""

import builtins
import dis
import functools
import numbers
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch

from trueline.capture.model.code_paths import is_users, names_in, users_functions
from trueline.capture.patches import Patch, enter_at_calls
from trueline.capture.patches.stand_ins import numpy_arrays, size_functions, size_numbers, size_rows, size_slices
from trueline.capture.patches.stand_ins.size_lists import SizeList, TensorsOfLists, make_range
from trueline.capture.patches.stand_ins.size_numbers import NumbersOfSizes
from trueline.capture.patches.stand_ins.size_rows import ListsOfRows, SizeNumbers, SizeRows

PATCH = Patch(
    issue="pytorch/pytorch#185804", versions="torch 2.13", cost="a second export", helps=("len(x)", "int(x.shape[1])")
)


def _len(of: Any) -> Any:
    if isinstance(of, SizeList | SizeRows):
        return of.length
    return of.shape[0] if isinstance(of, torch.Tensor | numpy_arrays.ARRAY) and of.ndim else builtins.len(of)


def _extreme(plain: Callable[..., Any], free: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """`min` or `max`: of plain numbers and sizes without a branch on which is which."""

    def function(*of: Any, **named: Any) -> Any:
        given = of[0] if len(of) == 1 else of
        if isinstance(given, SizeNumbers) and not named:
            return getattr(given.tensor, plain.__name__)().item()
        numbers = isinstance(given, tuple | list) and all(isinstance(one, _NUMBERS) for one in given)
        if named or not numbers or not any(isinstance(one, torch.SymInt | torch.SymFloat) for one in given):
            return plain(*of, **named)
        return functools.reduce(free, given)

    return function


NO_METHOD = "'SymInt' object has no attribute"
NO_WORDS = "a condition between sizes that cannot be expressed"
NO_NUMBER = "Could not extract specialized integer from data-dependent expression"
_NUMBERS = (builtins.int, builtins.float, torch.SymInt, torch.SymFloat)


class _Builtin(type):
    """`int`, `float`, `list` or `tuple` as the user's modules see it: the builtin one, except for what a size makes."""

    plain: type
    free: type
    """What it makes of a symbolic size, or of a SizeList."""
    convert: Callable[[Any], Any]

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and isinstance(given[0], _SOURCES[cls.free]):
            return cls.convert(given[0])
        if len(given) == 1 and size_numbers.is_number(given[0]) and not named:
            return given[0] if cls.free is torch.SymFloat else cls._cut_off(given[0])
        return cls.plain(*given, **named)

    def _cut_off(cls, number: torch.Tensor) -> Any:
        whole = size_numbers.round_number(number, int) if cls.free is torch.SymInt else None
        return cls.plain(number) if whole is None else whole

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.plain | cls.free)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.plain)

    def __eq__(cls, other: object) -> bool:
        return other is cls.plain or other is cls

    def __hash__(cls) -> int:
        return hash(cls.plain)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)

    def __getitem__(cls, given: Any) -> Any:
        return cls.plain[given]  # type: ignore[index]  # list[int]


_SOURCES: dict[type, tuple[type, ...]] = {
    torch.SymInt: (torch.SymInt, torch.SymFloat),
    torch.SymFloat: (torch.SymInt, torch.SymFloat),
    SizeList: (SizeList, SizeRows),
}


def _builtin(plain: type, free: type, convert: Callable[[Any], Any]) -> type:
    return _Builtin(plain.__name__, (), {"plain": plain, "free": free, "convert": staticmethod(convert)})


def _copy(of: Any) -> Any:
    return of.copy()


_BUILTINS = {
    "len": _len,
    "min": _extreme(builtins.min, torch.sym_min),
    "max": _extreme(builtins.max, torch.sym_max),
    "sum": size_rows.add_up,
    "bin": size_functions.binary,
    "round": size_numbers.round_any,
    "int": _builtin(int, torch.SymInt, torch.sym_int),
    "float": _builtin(float, torch.SymFloat, torch.sym_float),
    "range": make_range,
    "list": _builtin(list, SizeList, _copy),
    "tuple": _builtin(tuple, SizeList, _copy),
}
_INSTEAD = (*size_functions.INSTEAD, *size_rows.INSTEAD, *numpy_arrays.INSTEAD)
_NAMES = size_functions.NAMES | size_rows.NAMES | numpy_arrays.NAMES | {"len", "int", "float", "min", "max"}

_MODES = (TensorsOfLists, ListsOfRows, numpy_arrays.TensorsOfArrays, NumbersOfSizes, size_slices.FreeSlices)


@contextmanager
def keep_lengths_free(module: torch.nn.Module) -> Iterator[None]:
    """In the block, `len`, `int`, `float` and lists in the user's code of `module` stay functions of sizes."""
    scopes = {id(function.__globals__): function.__globals__ for function in _functions_of(module)}
    imported = [
        (scope, {name: held for name, held in scope.items() if held is theirs}, ours)
        for scope in scopes.values()
        for theirs, ours in _INSTEAD
    ]
    try:
        for scope, names, ours in imported:
            scope |= dict.fromkeys(names, ours)
        for scope in scopes.values():
            scope |= {name: ours for name, ours in _BUILTINS.items() if name not in scope}
        with ExitStack() as stack:
            for mode in _MODES:
                stack.enter_context(enter_at_calls(module, mode()))
            for block in (size_rows.keep_lists, size_functions.add_methods, numpy_arrays.keep_tensors):
                stack.enter_context(block())
            yield
    finally:
        for scope, names, _ in imported:
            scope |= names
        for scope in scopes.values():
            for name, ours in _BUILTINS.items():
                if scope.get(name) is ours:
                    del scope[name]


class _TypeOf(_Builtin):
    """`type` as the user's modules see it: that of a size is their `int`, also where that is a stand-in itself."""

    def __call__(cls, *given: Any, **named: Any) -> Any:
        found = cls.plain(*given, **named)
        if len(given) != 1 or named:
            return found
        plain = _TYPES_OF.get(found, found)
        ours = sys._getframe(1).f_globals.get(getattr(plain, "__name__", ""))
        return ours if isinstance(ours, _Builtin) and ours.plain is plain else plain


_TYPES_OF: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool, SizeList: list}
_TYPES: dict[str, Any] = {
    "int": _builtin(int, torch.SymInt, int),
    "float": _builtin(float, torch.SymFloat, float),
    "type": _TypeOf("type", (), {"plain": type, "free": type, "convert": staticmethod(type)}),
}


def _asks_for_types(code: CodeType) -> bool:
    """Whether `code`, or a function that it makes, asks whether something is an `int`, but by `case int(n)`, which only
    the builtin one can."""
    names = names_in(code)
    if not {"int", "float"} & names:
        return False
    parts = [code, *(one for one in code.co_consts if isinstance(one, CodeType))]
    cases = [one.arg for part in parts for one in dis.get_instructions(part) if one.opname == "MATCH_CLASS"]
    return not any(cases) and (bool(cases) or not {"isinstance", "type"}.isdisjoint(names))


@contextmanager
def keep_types(module: torch.nn.Module) -> Iterator[None]:
    """In the block, `isinstance(n, int)`, `type(n) is int` and `hasattr(n, "to_bytes")` of a size hold in the user's
    code of `module`, and `functools.singledispatch` takes it for an int, as without a trace. `isinstance(n,
    numbers.Integral)` holds in this process from then on."""
    numbers.Integral.register(torch.SymInt)
    numbers.Real.register(torch.SymFloat)
    functions = _functions_of(module)
    asking = [one for one in functions if _asks_for_types(one.__code__)]
    added: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {
        (id(one.__globals__), name): (one.__globals__, ours) for one in asking for name, ours in _TYPES.items()
    }
    for one in functions:
        for name in names_in(one.__code__):
            named = one.__globals__.get(name, hasattr if name == "hasattr" else None)
            if named is hasattr or (hasattr(named, "registry") and hasattr(named, "dispatch")):
                added[id(one.__globals__), name] = (one.__globals__, _has if named is hasattr else _dispatch_by(named))
    before = {key: scope.get(key[1]) for key, (scope, _) in added.items()}
    try:
        for key, (scope, ours) in added.items():
            if before[key] is None or key[1] not in _TYPES:
                scope[key[1]] = ours
        yield
    finally:
        for key, (scope, ours) in added.items():
            if scope.get(key[1]) is ours:
                scope[key[1]] = before[key]
                if before[key] is None:
                    del scope[key[1]]


def _as_plain(thing: Any) -> Any:
    """A number of Python's own for a symbolic one."""
    return 0 if isinstance(thing, torch.SymInt) else 0.0 if isinstance(thing, torch.SymFloat) else thing


def _has(thing: Any, name: str) -> bool:
    return hasattr(_as_plain(thing), name)


def _dispatch_by(generic: Any) -> Any:
    def call(first: Any, *given: Any, **named: Any) -> Any:
        return generic.dispatch(type(_as_plain(first)))(first, *given, **named)

    return functools.wraps(generic)(call)


def is_cause(message: str) -> bool:
    """Whether torch's `message` may be about a method that a symbolic size has not, an array of a traced tensor, a
    number that is taken out of one, or guards of what Python's own functions make of a size."""
    return any(one in message for one in (NO_METHOD, NO_NUMBER, NO_WORDS)) or numpy_arrays.is_cause(message)


def may_help(module: torch.nn.Module) -> bool:
    """Whether the user's code of `module` takes a length, makes a number or an array of something, adds up rows, or
    makes a list of a range."""
    return any(
        not _NAMES.isdisjoint(names) or ("range" in names and not {"list", "tuple"}.isdisjoint(names))
        for names in (names_in(function.__code__) for function in _functions_of(module))
    )


def makes_slices(module: torch.nn.Module) -> bool:
    """Whether the user's code of `module` has a slice, which a free size may end."""
    return any(size_slices.makes_slice(function.__code__) for function in _functions_of(module))


def _functions_of(module: torch.nn.Module) -> list[FunctionType]:
    """The methods of the user's modules, and the users' functions that these name."""
    found = {id(function): function for function in users_functions(module)}
    waiting = [*found.values()]
    while waiting:
        function = waiting.pop()
        for name in names_in(function.__code__):
            named = function.__globals__.get(name)
            if isinstance(named, FunctionType) and id(named) not in found and is_users(named.__code__.co_filename):
                found[id(named)] = named
                waiting.append(named)
    return [*found.values()]
