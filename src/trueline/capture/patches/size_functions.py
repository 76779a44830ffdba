"""Functions of the module `math`, `bin` and methods of whole numbers, of a size that is free.

Python's own want a number, and torch.export then makes a constant of the size, or has no such method. Here each is
written in what a symbolic size knows: //, %, min and a root. Sources: Python's documentation of each; for the greatest
common divisor, Gauss: n is the sum of Euler's function over its divisors.
"""

import builtins
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="pytorch/pytorch#185804",
    versions="torch 2.13",
    cost="a second export",
    helps=("x / math.sqrt(n)", "math.gcd(n, 12)", "n.bit_length()"),
)

BITS = 31
"""No dimension has 2 ** 31 elements."""
MOST_DIVISORS, MOST_CHOSEN = 64, 6
Size = Any
"""An int or a torch.SymInt."""


def _is_free(*of: Any) -> bool:
    return any(isinstance(one, torch.SymInt | torch.SymFloat) for one in of)


def sqrt(of: Any) -> Any:
    return of**0.5 if _is_free(of) else math.sqrt(of)


def isqrt(of: Size) -> Size:
    """Exact below 2 ** 52: a root is rounded to the nearest float."""
    return torch.sym_int(of**0.5) if _is_free(of) else math.isqrt(of)  # type: ignore[no-untyped-call]


def gcd(*of: Size) -> Size:
    """Of one size and whole numbers with few divisors; for others torch fixes the size."""
    number = math.gcd(*(one for one in of if not _is_free(one)))
    sizes = [one for one in of if _is_free(one)]
    divisors = [one for one in range(1, number + 1) if not number % one] if number < 10**5 else []
    if len(sizes) != 1 or not 0 < len(divisors) <= MOST_DIVISORS:
        return math.gcd(*of)
    found: Size = 0
    for divisor in divisors:
        found = found + _count_coprime(divisor) * (1 - _at_most_one(sizes[0] % divisor))
    return found


def lcm(*of: Size) -> Size:
    """Of a size and a whole number."""
    return of[0] * of[1] // gcd(*of) if len(of) == 2 and _is_free(*of) else math.lcm(*of)


def comb(n: Size, k: Size) -> Size:
    """Ways to choose a few of a free number."""
    if not _is_free(n) or not isinstance(k, int) or not 0 <= k <= MOST_CHOSEN:
        return math.comb(n, k)
    found: Size = 1
    for at in range(k):
        found = found * (n - at) // (at + 1)
    return found


def count_bits(size: Size) -> Size:
    """The bits that are 1."""
    return sum((size // 2**at) % 2 for at in range(BITS))


def bit_length(size: Size) -> Size:
    """The bits of `size` without leading zeros."""
    return sum(_at_most_one(size // 2**at) for at in range(BITS))


class Binary:
    """`bin` of a free size: its bits can be counted; anything else fixes the size."""

    def __init__(self, size: Size) -> None:
        self._size = size

    def count(self, bit: str, *part: int) -> Size:
        if bit == "1" and not part:
            return count_bits(self._size)
        if bit == "0" and not part:
            return bit_length(self._size) - count_bits(self._size) + 1
        return str(self).count(bit, *part)

    def __str__(self) -> str:
        return builtins.bin(self._size)

    def __getattr__(self, name: str) -> Any:
        return getattr(str(self), name)

    def __getitem__(self, place: Any) -> str:
        return str(self)[place]

    def __len__(self) -> int:
        return len(str(self))


def binary(of: Size) -> Any:
    return Binary(of) if _is_free(of) else builtins.bin(of)


class FreeMath:
    """The module `math`, with functions that leave a size free."""

    sqrt, isqrt, gcd, lcm, comb = map(staticmethod, (sqrt, isqrt, gcd, lcm, comb))

    def __getattr__(self, name: str) -> Any:
        return getattr(math, name)


INSTEAD: tuple[tuple[Any, Any], ...] = (
    (math, FreeMath()), (math.sqrt, sqrt), (math.isqrt, isqrt), (math.gcd, gcd), (math.lcm, lcm), (math.comb, comb),
)  # fmt: skip
"""What a user's module imports, and what it has while the model is traced."""
NAMES = frozenset({"sqrt", "isqrt", "gcd", "lcm", "comb", "bin", "bit_length", "bit_count"})


@contextmanager
def add_methods() -> Iterator[None]:
    """In the block, a symbolic size has the methods of a whole number that count its bits."""
    kind: Any = torch.SymInt
    kind.bit_length, kind.bit_count = bit_length, count_bits
    try:
        yield
    finally:
        del kind.bit_length, kind.bit_count


def _at_most_one(size: Size) -> Size:
    return torch.sym_min(size, 1)  # type: ignore[no-untyped-call]


def _count_coprime(number: int) -> int:
    """Euler's function."""
    return sum(math.gcd(number, one) == 1 for one in range(1, number + 1))
