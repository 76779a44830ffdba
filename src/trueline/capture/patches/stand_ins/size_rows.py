"""`sum`, `itertools.accumulate` and `functools.reduce` over the slices of a tensor along a free dimension.

Python's own take one slice after the other, and torch.export then makes a constant of the size. So the user's modules
get a `sum` and modules of their own while the model is traced (`size_lengths`), and `unbind` along a free dimension
returns a list whose length is the size. It can be sliced, reversed, indexed, stacked, concatenated, added up and
reduced by functions that torch has for a whole dimension; a loop over it fixes the size.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found", versions="torch 2.13", cost="a second export", helps=("sum(x)", "itertools.accumulate(x)")
)


class SizeRows:
    """The slices of a tensor along dimension `dim`, in order."""

    def __init__(self, tensor: torch.Tensor, dim: int) -> None:
        self.tensor, self.dim = tensor, dim

    @classmethod
    def of(cls, rows: Any) -> SizeRows | None:
        """`rows`, or the rows of a tensor; None where their number is no free size."""
        if isinstance(rows, torch.Tensor) and rows.ndim and isinstance(rows.shape[0], torch.SymInt):
            return cls(rows, 0)
        return rows if isinstance(rows, SizeRows) else None

    @property
    def length(self) -> Any:
        return self.tensor.shape[self.dim]

    def __len__(self) -> int:
        return int(self.length)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([self.tensor.select(self.dim, at) for at in range(len(self))])

    def __reversed__(self) -> SizeRows:
        return SizeRows(self.tensor.flip(self.dim), self.dim)

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, slice):
            return self.tensor.select(self.dim, place)
        if place.step == -1 and place.start is None and place.stop is None:
            return reversed(self)
        return SizeRows(self.tensor[(*(slice(None),) * self.dim, place)], self.dim)

    def copy(self) -> SizeRows:
        return SizeRows(self.tensor, self.dim)

    def join(self, dim: int, *, stacked: bool) -> torch.Tensor:
        """As `torch.stack` or `torch.cat` of the slices."""
        rank = self.tensor.ndim
        if stacked:
            return self.tensor.movedim(self.dim, dim % rank)
        at = dim % (rank - 1)
        return self.tensor.movedim(self.dim, at).flatten(at, at + 1)


class SizeNumbers(SizeRows):
    """What `tolist` gives of a vector of free length: numbers that are read when they are looked at. As a tensor again
    (`pack_padded_sequence(x, lengths.tolist())`) they are that vector."""

    def __iter__(self) -> Iterator[Any]:
        return iter([self.tensor[at].item() for at in range(len(self))])

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return SizeNumbers(found.tensor, 0) if isinstance(found, SizeRows) else found.item()

    def __reversed__(self) -> SizeNumbers:
        return SizeNumbers(self.tensor.flip(0), 0)

    def copy(self) -> SizeNumbers:
        return SizeNumbers(self.tensor, 0)


def add_up(rows: Any, /, start: Any = 0) -> Any:
    """`sum`."""
    own = SizeRows.of(rows)
    if own is None:
        return builtins.sum(rows, start)
    total: Any = own.tensor.sum(own.dim, dtype=_dtype_of_sums(own.tensor.dtype))
    total = total.item() if isinstance(own, SizeNumbers) else total
    return total if isinstance(start, int | float) and not start else start + total


def _dtype_of_sums(dtype: torch.dtype) -> torch.dtype:
    """Of `0 + x`: torch.sum adds whole numbers in int64."""
    return torch.int64 if dtype is torch.bool else dtype


_TOTALS: dict[Any, Callable[[torch.Tensor, int], torch.Tensor]] = {
    **dict.fromkeys((operator.add, torch.add, torch.Tensor.add), lambda x, dim: x.sum(dim, dtype=x.dtype)),
    **dict.fromkeys((operator.mul, torch.mul, torch.Tensor.mul), lambda x, dim: x.prod(dim, dtype=x.dtype)),
    **dict.fromkeys((torch.maximum, torch.max, torch.Tensor.maximum), lambda x, dim: x.amax(dim)),
    **dict.fromkeys((torch.minimum, torch.min, torch.Tensor.minimum), lambda x, dim: x.amin(dim)),
}
_RUNNING: dict[Any, Callable[[torch.Tensor, int], torch.Tensor]] = {
    **dict.fromkeys((None, operator.add, torch.add), lambda x, dim: x.cumsum(dim, dtype=x.dtype)),
    **dict.fromkeys((operator.mul, torch.mul), lambda x, dim: x.cumprod(dim, dtype=x.dtype)),
    **dict.fromkeys((torch.maximum, torch.max), lambda x, dim: x.cummax(dim).values),
    **dict.fromkeys((torch.minimum, torch.min), lambda x, dim: x.cummin(dim).values),
}
"""A function of two -> the same along a whole dimension."""


def reduce(function: Any, rows: Any, /, *start: Any) -> Any:
    """`functools.reduce`."""
    own = SizeRows.of(rows)
    whole = None if own is None or own.tensor.dtype is torch.bool else _find(_TOTALS, function)
    if own is None or whole is None:
        return functools.reduce(function, rows, *start)
    total = whole(own.tensor, own.dim)
    return function(start[0], total) if start else total


def accumulate(rows: Any, func: Any = None, *, initial: Any = None) -> Any:
    """`itertools.accumulate`, as a list."""
    own = SizeRows.of(rows)
    whole = None if own is None or own.tensor.dtype is torch.bool or initial is not None else _find(_RUNNING, func)
    if own is None or whole is None:
        return itertools.accumulate(rows, func, initial=initial)
    return SizeRows(whole(own.tensor, own.dim), own.dim)


def _find(table: dict[Any, Any], function: Any) -> Any:
    try:
        return table.get(function)
    except TypeError:  # a callable without a hash
        return None


class _Module:
    """A module with one function of its own."""

    def __init__(self, plain: ModuleType, **own: Any) -> None:
        self._plain = plain
        self.__dict__ |= own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


INSTEAD: tuple[tuple[Any, Any], ...] = (
    (itertools, _Module(itertools, accumulate=accumulate)),
    (functools, _Module(functools, reduce=reduce)),
    (itertools.accumulate, accumulate),
    (functools.reduce, reduce),
)
"""What a user's module imports, and what it has while the model is traced."""
NAMES = frozenset({"sum", "accumulate", "reduce", "tolist"})


class ListsOfRows(TorchFunctionMode):
    """`unbind` along a free dimension, and tensors of lists of numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.unbind, torch.Tensor.unbind) and isinstance(args[0], torch.Tensor):
            tensor, dim = args[0], (*args[1:], kwargs.get("dim", 0))[0] % max(args[0].ndim, 1)
            if tensor.ndim and isinstance(tensor.shape[dim], torch.SymInt):
                return SizeRows(tensor, dim)
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], SizeNumbers):
            given = {name: one for name, one in kwargs.items() if name in ("dtype", "device") and one is not None}
            return args[0].tensor.to(**{"dtype": torch.int64, **given})
        return func(*args, **kwargs)


def _is_free_vector(tensor: Any) -> bool:
    whole = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool
    return tensor.ndim == 1 and whole and isinstance(tensor.shape[0], torch.SymInt)


@contextmanager
def keep_lists() -> Iterator[None]:
    """In the block `torch.stack` and `torch.cat` take such lists, and `tolist` returns one: torch asks no mode here."""
    before: list[tuple[Any, str]] = [(torch, name) for name in ("stack", "cat", "concat", "concatenate")]
    kept = [(holder, name, getattr(holder, name)) for holder, name in (*before, *((one, "tolist") for one in _TRACED))]
    try:
        for holder, name, original in kept:
            joins = _join_rows(original, stacked=name == "stack")
            setattr(holder, name, joins if holder is torch else _list_numbers(original))
        yield
    finally:
        for holder, name, original in kept:
            setattr(holder, name, original)


_TRACED = (FakeTensor, FunctionalTensor)


def _list_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    def tolist(tensor: torch.Tensor) -> Any:
        return SizeNumbers(tensor, 0) if _is_free_vector(tensor) else original(tensor)

    return tolist


def _join_rows(original: Callable[..., torch.Tensor], *, stacked: bool) -> Callable[..., torch.Tensor]:
    def join(tensors: Any, dim: int = 0, **options: Any) -> torch.Tensor:
        dim = options.pop("axis", dim)  # torch takes both names
        own = isinstance(tensors, SizeRows) and not options
        return tensors.join(dim, stacked=stacked) if own else original(tensors, dim, **options)

    return join
