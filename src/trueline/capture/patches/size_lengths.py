"""`len` of a tensor, and `int` and `float` of a size, stay as free as the size in a trace.

Python's own return plain numbers, and torch.export then makes a constant of the size. So the user's modules get a
`len`, `int` and `float` of their own while the model is traced.
"""

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trueline.capture.model.code_paths import users_functions
from trueline.capture.patches import Patch

PATCH = Patch(
    issue="pytorch/pytorch#185804", versions="torch 2.13", cost="a second export", helps=("len(x)", "int(x.shape[1])")
)


def _len(of: Any) -> Any:
    return of.shape[0] if isinstance(of, torch.Tensor) and of.ndim else builtins.len(of)


class _Number(type):
    """`int` and `float` as the user's modules see them: the builtin one, except for a symbolic size."""

    plain: type
    free: type
    convert: Callable[[Any], Any]

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and isinstance(given[0], torch.SymInt | torch.SymFloat):
            return cls.convert(given[0])
        return cls.plain(*given, **named)

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


def _number(plain: type, free: type, convert: Callable[[Any], Any]) -> type:
    return _Number(plain.__name__, (), {"plain": plain, "free": free, "convert": staticmethod(convert)})


_BUILTINS = {
    "len": _len,
    "int": _number(int, torch.SymInt, torch.sym_int),
    "float": _number(float, torch.SymFloat, torch.sym_float),
}


@contextmanager
def keep_lengths_free(module: torch.nn.Module) -> Iterator[None]:
    """In the block, `len`, `int` and `float` in the user's code of `module` return sizes where they are given sizes."""
    scopes = {id(function.__globals__): function.__globals__ for function in users_functions(module)}
    try:
        for scope in scopes.values():
            scope |= {name: ours for name, ours in _BUILTINS.items() if name not in scope}
        yield
    finally:
        for scope in scopes.values():
            for name, ours in _BUILTINS.items():
                if scope.get(name) is ours:
                    del scope[name]


def may_help(module: torch.nn.Module) -> bool:
    """Whether the user's code of `module` calls one of the three."""
    return any(not _BUILTINS.keys().isdisjoint(function.__code__.co_names) for function in users_functions(module))
