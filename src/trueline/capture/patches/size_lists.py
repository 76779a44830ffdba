"""Lists of numbers that user code makes of a size (`list(range(length))`) stay functions of the size while traced.

Python's own `range` and `len` want a number, and the size becomes a constant. While a model is traced in the block,
`range`, `len`, `list` and `tuple` of the user's modules know a list of which only the length is unknown: so many
numbers in equal steps, several of these one after the other. It can be cut, joined, indexed and made a tensor. Whoever
walks through it one by one fixes the size, as with a range. The `len` of a tensor is its first size, `int` of a size is
the size, and `float` of it a number that is as free.
Source: the data model of Python ("Emulating container types").
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trueline.capture.model.code_paths import users_functions
from trueline.capture.patches import Patch

PATCH = Patch(
    issue="https://github.com/pytorch/pytorch/pull/185804",
    versions="torch 2.13",
    cost="a second export, after the first one failed",
    helps=("funnel", "models of other libraries that call len(x)"),
)

Int = Any
"""An int, or a torch.SymInt, which torch types for some operators only."""


@dataclass(frozen=True, slots=True)
class Run:
    """`length` numbers from `start` in steps of `step`."""

    start: Int
    length: Int
    step: Int

    def at(self, index: Int) -> Int:
        return self.start + index * self.step


class SizeList:
    """A list of numbers whose length is a size that is not known yet.

    >>> numbers = SizeList.of(range(9))
    >>> list([-1] + numbers[1:-1][::2]), (numbers[2:])[-1]
    ([-1, 1, 3, 5, 7], 8)
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = [run for run in runs if run.length > 0]

    @classmethod
    def of(cls, numbers: Iterable[Any]) -> SizeList:
        """The same numbers. Raises TypeError for what holds anything else."""
        if isinstance(numbers, SizeList):
            return cls(numbers.runs)
        if isinstance(numbers, range):
            return cls([Run(numbers.start, len(numbers), numbers.step)])
        if not isinstance(numbers, list | tuple) or not all(isinstance(one, int | torch.SymInt) for one in numbers):
            raise TypeError(f"a list made of a size holds whole numbers, not what is in a {type(numbers).__name__}")
        return cls(Run(number, 1, 1) for number in numbers)

    @property
    def length(self) -> Int:
        """How many there are, while that may still be a size."""
        total: Int = 0
        for run in self.runs:
            total = total + run.length
        return total

    def __len__(self) -> int:
        return int(self.length)

    def __bool__(self) -> bool:
        return bool(self.length > 0)

    def __iter__(self) -> Iterator[Int]:
        for run in self.runs:
            for index in range(int(run.length)):
                yield run.at(index)

    def __reversed__(self) -> Iterator[Int]:
        return iter(self[::-1])

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return self._cut(place)
        for run in self.runs if place >= 0 else reversed(self.runs):
            if -run.length <= place < run.length:
                return run.at(place if place >= 0 else run.length + place)
            place = place - run.length if place >= 0 else place + run.length
        raise IndexError("list index out of range")

    def _cut(self, place: slice) -> SizeList:
        step = 1 if place.step is None else place.step
        if step < 0:
            return self._backwards(place.start, place.stop, step)
        total = self.length
        start, stop = _within(place.start, 0, total), _within(place.stop, total, total)
        return SizeList(self._picked(start, stop, step))

    def _picked(self, start: Int, stop: Int, step: Int) -> Iterator[Run]:
        """What lies at `start`, `start + step`, … below `stop`."""
        before: Int = 0
        for run in self.runs:
            first = start - before if start >= before else (start - before) % step
            last = stop - before if stop <= before + run.length else run.length
            if first < last:
                yield Run(run.at(first), (last - first + step - 1) // step, run.step * step)
            before = before + run.length

    def _backwards(self, start: Int | None, stop: Int | None, step: Int) -> SizeList:
        total = self.length
        turned = SizeList(Run(run.at(run.length - 1), run.length, -run.step) for run in reversed(self.runs))
        first = 0 if start is None else total - 1 - _clipped(start + total if start < 0 else start, -1, total - 1)
        last = total if stop is None else total - 1 - _clipped(stop + total if stop < 0 else stop, -1, total - 1)
        return SizeList(turned._picked(first, last, -step))

    def __add__(self, other: Any) -> SizeList:
        return SizeList([*self.runs, *SizeList.of(other).runs])

    def __radd__(self, other: Any) -> SizeList:
        return SizeList([*SizeList.of(other).runs, *self.runs])

    def __iadd__(self, other: Any) -> SizeList:
        self.extend(other)
        return self

    def extend(self, other: Any) -> None:
        self.runs = (self + other).runs

    def append(self, number: Int) -> None:
        self.runs = [*self.runs, Run(number, 1, 1)]

    def copy(self) -> SizeList:
        return SizeList(self.runs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SizeList | list | tuple | range):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment] # as of a list

    def tensor(self, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        """As torch.tensor makes it of a list."""
        dtype = dtype or torch.int64
        runs: list[torch.Tensor] = [run.start + run.step * torch.arange(run.length, device=device) for run in self.runs]
        whole = torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)
        return whole.to(dtype)


def _within(end: Int | None, otherwise: Int, total: Int) -> Int:
    """An end of a slice as Python reads it."""
    if end is None:
        return otherwise
    return _clipped(end + total if end < 0 else end, 0, total)


def _clipped(end: Int, low: Int, high: Int) -> Int:
    return low if end < low else high if end > high else end


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.SymInt)


def _range(*given: Any) -> Any:
    if not any(_is_size(one) for one in given):
        return range(*given)
    start, stop, step = (0, given[0], 1) if len(given) == 1 else (*given, 1)[:3]
    if step == 0:
        raise ValueError("range() arg 3 must not be zero")
    length = (stop - start + step - 1) // step if step > 0 else (start - stop - step - 1) // -step
    return SizeList([Run(start, length, step)])


def _len(of: Any) -> Any:
    if isinstance(of, torch.Tensor) and of.ndim:
        return of.shape[0]  # which torch's own len makes a number
    return of.length if isinstance(of, SizeList) else builtins.len(of)


class _Kind(type):
    """`list` and `tuple` as the user's modules have them: the builtin one, but for what is made of a SizeList."""

    plain: type

    def __call__(cls, *given: Any) -> Any:
        if len(given) == 1 and isinstance(given[0], SizeList):
            return given[0].copy()
        return cls.plain(*given)

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, cls.plain | SizeList)

    def __subclasscheck__(cls, one: type) -> bool:
        return issubclass(one, cls.plain)

    def __eq__(cls, other: object) -> bool:
        return other is cls.plain or other is cls

    def __hash__(cls) -> int:
        return hash(cls.plain)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)

    def __getitem__(cls, given: Any) -> Any:
        return cls.plain[given]  # type: ignore[index] # list[int]


class _Number(_Kind):
    """`int` and `float` as the user's modules have them: the builtin one, but for what is made of a size."""

    free: type
    converted: Callable[[Any], Any]

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and isinstance(given[0], torch.SymInt | torch.SymFloat):
            return cls.converted(given[0])
        return cls.plain(*given, **named)

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, cls.plain | cls.free)


def _kind(plain: type) -> type:
    return _Kind(plain.__name__, (), {"plain": plain})


def _number(plain: type, free: type, converted: Callable[[Any], Any]) -> type:
    return _Number(plain.__name__, (), {"plain": plain, "free": free, "converted": staticmethod(converted)})


_KNOWN = {
    "range": _range,
    "len": _len,
    "list": _kind(list),
    "tuple": _kind(tuple),
    "int": _number(int, torch.SymInt, torch.sym_int),
    "float": _number(float, torch.SymFloat, torch.sym_float),
}


class _Tensors(TorchFunctionMode):
    """`torch.tensor` of a SizeList. As an index it fixes its size: torch asks how long it is before anybody else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], SizeList):
            return args[0].tensor(kwargs.get("dtype"), kwargs.get("device"))
        return func(*args, **kwargs)


@contextmanager
def kept(module: torch.nn.Module) -> Iterator[None]:
    """While `module` is traced in the block, lists of numbers in its own code stay functions of the sizes."""
    scopes = {id(function.__globals__): function.__globals__ for function in users_functions(module)}
    try:
        for scope in scopes.values():
            scope |= {name: known for name, known in _KNOWN.items() if name not in scope}
        with within(module, _Tensors()):  # an exporter's own modes would take the lists apart
            yield
    finally:
        for scope in scopes.values():
            for name, known in _KNOWN.items():
                if scope.get(name) is known:
                    del scope[name]


def may_help(module: torch.nn.Module) -> bool:
    """Whether code of the users that `module` is made of takes a range for more than to walk through it."""
    return any(
        "range" in names and not names.isdisjoint({"list", "len", "tuple"})
        for names in (set(function.__code__.co_names) for function in users_functions(module))
    )


def counts(module: torch.nn.Module) -> bool:
    """Whether code of the users that `module` is made of takes the length of anything, or makes a number of it."""
    named = {"len", "int", "float"}
    return any(not named.isdisjoint(function.__code__.co_names) for function in users_functions(module))


@contextmanager
def within(module: torch.nn.Module, mode: Any) -> Iterator[None]:
    """In the block each call of `module` enters `mode`, after the exporter has entered its own modes: the last mode
    that was entered sees a call first."""
    hooks = (
        module.register_forward_pre_hook(lambda *_: mode.__enter__() and None),
        module.register_forward_hook(lambda *_: mode.__exit__(None, None, None), always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
