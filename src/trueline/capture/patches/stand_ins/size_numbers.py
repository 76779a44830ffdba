"""Numbers that code makes of a size by a logarithm or its like, and whole numbers that it makes of these.

`math.log(n)` of a free size is a tensor of no dimension in float64 (`size_functions`). Here Python's operators keep it
a number, and `int(2 * math.log(n))` becomes a sum of steps: each is 1 from the size on at which Python's own function
reaches the next whole number. Bisection finds these sizes, since the function only rises or only falls.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="a second export",
    helps=("autoformer", "informer", "round(1 / n, 2)"),
)

LARGEST = 2**31 - 1
"""No dimension has 2 ** 31 elements."""
MOST_STEPS = 64
DENSE = 4096
Size = Any
"""An int or a torch.SymInt."""


@dataclass(frozen=True, slots=True)
class _Made:
    """What a number is made of: a size, and the function that Python computes of it."""

    size: torch.SymInt
    plain: Callable[[int], float]


_numbers = WeakTensorKeyDictionary()
"""Tensors of no dimension that Python has as numbers (`float` of one is itself) -> a _Made, or None."""


def is_number(of: Any) -> bool:
    return isinstance(of, torch.Tensor) and of in _numbers


def note_number(found: torch.Tensor, of: Any = None, plain: Callable[[Any], float] | None = None) -> None:
    """`found` is a number from now on: `plain` of a size, or of another number."""
    before = _numbers[of] if is_number(of) else None
    if plain is None:
        _numbers[found] = None
    elif isinstance(before, _Made):
        inner = before.plain
        _numbers[found] = _Made(before.size, lambda size: plain(inner(size)))
    else:
        _numbers[found] = _Made(of, plain) if isinstance(of, torch.SymInt) else None


def round_number(of: Any, rounding: Callable[[float], int]) -> Size | None:
    """`rounding` (`int`, `math.ceil`, `math.floor`, `round`) of a number, exactly; None where its steps are unknown."""
    made = _numbers[of] if is_number(of) else None
    if made is None:
        return None
    plain = made.plain
    found = find_steps(lambda size: rounding(plain(size)))
    if found is None:
        return None
    total, sign, sizes = found
    for size in sizes:
        total = total + sign * torch.sym_min(made.size // size, 1)  # type: ignore[no-untyped-call]
    return total


def find_steps(function: Callable[[int], int]) -> tuple[Size, int, Sequence[int]] | None:
    """The value at size 1, whether values rise (1) or fall (-1), and the size of each step by one; None of a function
    that does both, has no value somewhere, or takes more than MOST_STEPS.

    >>> find_steps(lambda size: int(size.bit_length() / 8))
    (0, 1, [128, 32768, 8388608])
    """
    powers = (2**power + step for power in range(12, 31) for step in (-1, 0, 1))
    tried = [*range(1, DENSE + 1), *(size for size in powers if size > DENSE), LARGEST]
    try:
        values = [function(size) for size in tried]
    except (ArithmeticError, ValueError):
        return None
    sign = 1 if values[-1] >= values[0] else -1
    count = abs(values[-1] - values[0])
    if count > MOST_STEPS or any(sign * (after - before) < 0 for before, after in pairwise(values)):
        return None
    levels = (sign * values[0] + step for step in range(1, count + 1))
    every = range(LARGEST + 1)
    return (
        values[0],
        sign,
        [bisect_left(every, level, lo=1, key=lambda size: sign * function(size)) for level in levels],
    )


def round_to_digits(of: Any, digits: int) -> torch.Tensor:
    """`round(x, digits)` for digits after the point, exactly: whether `of` is above or below the middle between two
    decimals may show only in what its product with a power of ten loses."""
    number = of if isinstance(of, torch.Tensor) else torch.full((), of, dtype=torch.float64)
    unit = 10.0**digits
    product = number * unit
    low = torch.floor(product)
    rest, lost = product - low, _find_lost(number, unit, product)
    odd = low - 2 * torch.floor(low / 2)
    above = (rest > 0.5) | ((rest == 0.5) & ((lost > 0) | ((lost == 0) & (odd == 1))))
    found: torch.Tensor = (low + above.to(torch.float64)) / unit
    note_number(found, of, lambda plain: round(plain, digits))
    return found


def _find_lost(one: torch.Tensor, other: float, product: torch.Tensor) -> torch.Tensor:
    """What rounding took from the product of two. Source: Dekker, A floating-point technique, 1971."""
    high = one * _SPLIT - (one * _SPLIT - one)
    other_high = other * _SPLIT - (other * _SPLIT - other)
    low, other_low = one - high, other - other_high
    return low * other_low - (((product - high * other_high) - low * other_high) - high * other_low)


_SPLIT = 2.0**27 + 1
_ROUND: Any = vars(torch.SymFloat).get("__round__")


def round_fraction(of: torch.SymFloat, digits: int | None = None) -> Any:
    """Python's `round` of a fraction that is made of a size. torch traces it, and no format holds it."""
    if digits is None or not 0 < digits <= 9:
        return _ROUND(of, digits)
    return round_to_digits(of, digits)


def round_any(of: Any, digits: int | None = None) -> Any:
    """`round` as the user's modules see it."""
    if not is_number(of):
        return round(of) if digits is None else round(of, digits)
    if digits is not None:
        return round_to_digits(of, digits)
    whole = round_number(of, round)
    return round(float(of)) if whole is None else whole


@contextmanager
def add_methods() -> Iterator[None]:
    """In the block, sizes and numbers have what numpy's numbers have."""
    kinds: tuple[Any, ...] = (torch.SymInt, torch.SymFloat, torch.Tensor)
    try:
        for kind in kinds:
            kind.astype = _as_type
        for kind in kinds[:2]:
            kind.item = lambda size: size
        yield
    finally:
        for kind in kinds:
            del kind.astype
        for kind in kinds[:2]:
            del kind.item


def _as_type(of: Any, kind: Any) -> Any:
    """`numpy.float64.astype`, of a number."""
    if isinstance(of, torch.Tensor) and not is_number(of):
        raise AttributeError("'Tensor' object has no attribute 'astype'")
    is_whole = kind in (int, "int", "int64", "int32", "long") or getattr(kind, "__name__", "") in ("int64", "int32")
    if isinstance(of, torch.Tensor):
        whole = round_number(of, int) if is_whole else of
        return of.to(torch.int64) if whole is None else whole
    return torch.sym_int(of) if is_whole else torch.sym_float(of)  # type: ignore[no-untyped-call]


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "radd": operator.add,
    "sub": operator.sub,
    "rsub": lambda one, other: other - one,
    "mul": operator.mul,
    "rmul": operator.mul,
    "truediv": operator.truediv,
    "div": operator.truediv,
}
"""Of a number and a plain one: the result rises or falls as the number does."""
_OTHERS = frozenset({"rtruediv", "rdiv", "pow", "rpow", "neg", "abs"})


class NumbersOfSizes(TorchFunctionMode):
    """Python's operators of such numbers give numbers, and `item` of one is itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        if kwargs or not args or not (name in _OPERATORS or name in _OTHERS or name == "item"):
            return func(*args, **(kwargs or {}))
        if name == "item" and is_number(args[0]):
            return args[0]
        found = func(*args)
        if any(map(is_number, args)) and all(is_number(one) or isinstance(one, _PLAIN) for one in args):
            _note_result(found, name, args)
        return found


def _note_result(found: torch.Tensor, name: str, args: Sequence[Any]) -> None:
    plain = _OPERATORS.get(name)
    if plain is None or len(args) != 2 or not isinstance(args[1], int | float):
        at = next((at for at, one in enumerate(args) if is_number(one)), 0)
        if plain is None or at != 1 or not isinstance(args[0], int | float):
            note_number(found)
            return
        note_number(found, args[1], lambda number: plain(args[0], number))
        return
    note_number(found, args[0], lambda number: plain(number, args[1]))


_PLAIN = (int, float, torch.SymInt, torch.SymFloat)
RISING = frozenset({"log", "log2", "log10", "log1p", "cbrt", "asinh", "atan"})
"""Functions of `math` of which the whole part of a size goes in steps."""


def plain_of(name: str, further: Sequence[Any]) -> Callable[[Any], float] | None:
    """`math`'s own function of a size alone; None where another size is in it, or it does not only rise."""
    if name not in RISING or not all(isinstance(one, int | float) for one in further):
        return None
    function = getattr(math, name)
    return lambda size: float(function(size, *further))
