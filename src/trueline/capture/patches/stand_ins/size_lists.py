"""Lists of numbers that user code makes of a size (`list(range(length))`) stay functions of the size in a trace.

Python's `range` wants a number, and torch.export then makes a constant of the size. So the user's modules get a
`range`, `list` and `tuple` of their own while the model is traced (`size_lengths`), which know a list of symbolic
length: runs of numbers in equal steps. It can be sliced, joined, indexed and made a tensor. A loop over it fixes the
size.
Source: the data model of Python ("Emulating container types").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found", versions="torch 2.13", cost="a second export", helps=("funnel", "list(range(x.shape[1]))")
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
    """A list of numbers whose length is a symbolic size.

    >>> numbers = SizeList.of(range(9))
    >>> list([-1] + numbers[1:-1][::2]), (numbers[2:])[-1]
    ([-1, 1, 3, 5, 7], 8)
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = [run for run in runs if run.length > 0]

    @classmethod
    def of(cls, numbers: Iterable[Any]) -> SizeList:
        """The same numbers. Raises TypeError for other elements."""
        if isinstance(numbers, SizeList):
            return cls(numbers.runs)
        if isinstance(numbers, range):
            return cls([Run(numbers.start, len(numbers), numbers.step)])
        if not isinstance(numbers, list | tuple) or not all(isinstance(one, int | torch.SymInt) for one in numbers):
            raise TypeError(f"a list made of a size holds whole numbers, not what is in a {type(numbers).__name__}")
        return cls(Run(number, 1, 1) for number in numbers)

    @property
    def length(self) -> Int:
        """The number of elements, which may be a symbolic size."""
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
            return self._slice(place)
        for run in self.runs if place >= 0 else reversed(self.runs):
            if -run.length <= place < run.length:
                return run.at(place if place >= 0 else run.length + place)
            place = place - run.length if place >= 0 else place + run.length
        raise IndexError("list index out of range")

    def _slice(self, place: slice) -> SizeList:
        step = 1 if place.step is None else place.step
        if step < 0:
            return self._reverse(place.start, place.stop, step)
        total = self.length
        start, stop = _slice_end(place.start, 0, total), _slice_end(place.stop, total, total)
        return SizeList(self._take(start, stop, step))

    def _take(self, start: Int, stop: Int, step: Int) -> Iterator[Run]:
        """The elements at `start`, `start + step`, … below `stop`."""
        before: Int = 0
        for run in self.runs:
            first = start - before if start >= before else (start - before) % step
            last = stop - before if stop <= before + run.length else run.length
            if first < last:
                yield Run(run.at(first), (last - first + step - 1) // step, run.step * step)
            before = before + run.length

    def _reverse(self, start: Int | None, stop: Int | None, step: Int) -> SizeList:
        total = self.length
        turned = SizeList(Run(run.at(run.length - 1), run.length, -run.step) for run in reversed(self.runs))
        first = 0 if start is None else total - 1 - _clip(start + total if start < 0 else start, -1, total - 1)
        last = total if stop is None else total - 1 - _clip(stop + total if stop < 0 else stop, -1, total - 1)
        return SizeList(turned._take(first, last, -step))

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
        """As `torch.tensor` of a list."""
        dtype = dtype or torch.int64
        runs: list[torch.Tensor] = [run.start + run.step * torch.arange(run.length, device=device) for run in self.runs]
        whole = torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)
        return whole.to(dtype)


def _slice_end(end: Int | None, otherwise: Int, total: Int) -> Int:
    """An end of a slice, by Python's rules."""
    if end is None:
        return otherwise
    return _clip(end + total if end < 0 else end, 0, total)


def _clip(end: Int, low: Int, high: Int) -> Int:
    return low if end < low else high if end > high else end


def make_range(*given: Any) -> Any:
    """`range`, or a SizeList where one of its arguments is a symbolic size."""
    if not any(isinstance(one, torch.SymInt) for one in given):
        return range(*given)
    start, stop, step = (0, given[0], 1) if len(given) == 1 else (*given, 1)[:3]
    if step == 0:
        raise ValueError("range() arg 3 must not be zero")
    length = (stop - start + step - 1) // step if step > 0 else (start - stop - step - 1) // -step
    return SizeList([Run(start, length, step)])


class TensorsOfLists(TorchFunctionMode):
    """`torch.tensor` of a SizeList. An index that is a SizeList fixes its size: torch reads its length first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], SizeList):
            return args[0].tensor(kwargs.get("dtype"), kwargs.get("device"))
        return func(*args, **kwargs)
