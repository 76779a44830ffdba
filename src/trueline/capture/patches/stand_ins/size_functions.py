"""Functions of the module `math`, `bin` and methods of whole numbers, of a size that is free.

Python's own want a number, and torch.export then makes a constant of the size, or has no such method. Here each is
written in what a symbolic size knows: //, %, min and a root; logarithms and their like are tensors of no dimension in
float64, which count as numbers beside another tensor. Sources: Python's documentation of each; for the greatest
common divisor, Gauss: n is the sum of Euler's function over its divisors.
"""

import builtins
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trueline.capture.patches import Patch
from trueline.capture.patches.stand_ins import size_numbers

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


def perm(n: Size, k: Size = None) -> Size:
    """Ways to arrange a few of a free number."""
    if not _is_free(n) or not isinstance(k, int) or not 0 <= k <= MOST_CHOSEN:
        return math.perm(n, k)
    found: Size = 1
    for at in range(k):
        found = found * (n - at)
    return found


def dist(p: Any, q: Any) -> Any:
    if not _is_free(*p, *q) or len(p) != len(q):
        return math.dist(p, q)
    return sum((one - other) ** 2 for one, other in zip(p, q, strict=True)) ** 0.5


def fsum(of: Any) -> Any:
    """In the order of `of`, which rounds otherwise than Python in the last digit."""
    given = list(of)
    return sum(given) * 1.0 if _is_free(*given) else math.fsum(given)


def trunc(of: Any) -> Any:
    whole = size_numbers.round_number(of, int)
    if whole is not None:
        return whole
    return torch.sym_int(of) if _is_free(of) else math.trunc(of)  # type: ignore[no-untyped-call]


def remainder(of: Any, by: Any) -> Any:
    """To the nearest multiple."""
    return of - round(of / by) * (by * 1.0) if _is_free(of, by) else math.remainder(of, by)


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


def bits_of_both(size: Size, number: Any) -> Size:
    """`size & number`, for a whole number of at most 31 bits; for others torch fixes the size."""
    if _is_free(number) or not 0 <= number < 2**BITS:
        return int(size) & number
    return sum((size // 2**at) % 2 * 2**at for at in range(BITS) if number >> at & 1)


def _bits_of_either(size: Size, number: Any) -> Size:
    return size + number - bits_of_both(size, number)


def _bits_of_one(size: Size, number: Any) -> Size:
    return size + number - 2 * bits_of_both(size, number)


_power: Any = vars(torch.SymInt)["__pow__"]
_floor: Any = vars(torch.SymInt)["__floordiv__"]


def floor_division(size: Size, by: Any) -> Any:
    """Python's, which is exact: 9 // 0.9 is 9.0, since 0.9 is a bit more than nine tenths. torch rounds the quotient
    first, to 10. Exact for sizes below 2 ** 29, of which a product with half of the digits of `by` is."""
    if not isinstance(by, float) or not math.isfinite(by) or not by:
        return _floor(size, by)
    digits, exponent = math.frexp(by)
    high = math.ldexp(round(math.ldexp(digits, 24)), exponent - 24)
    number: Any = torch.sym_float(size)  # type: ignore[no-untyped-call]
    quotient: Any = torch.sym_float(math.floor(number / by))  # type: ignore[no-untyped-call]
    rest = (number - quotient * high) - quotient * (by - high)
    return quotient + torch.sym_float(math.floor(rest / by))  # type: ignore[no-untyped-call]


def round_off(size: Size, digits: int | None = None) -> Size:
    """Python's: to tens for -1, of two that are as near to the even one. torch leaves the size as it is."""
    if digits is None or digits >= 0:
        return size
    unit = 10**-digits
    whole, rest = size // unit, size % unit
    more = torch.sym_max(2 * rest - unit, 0)  # type: ignore[no-untyped-call]
    less = torch.sym_max(unit - 2 * rest, 0)  # type: ignore[no-untyped-call]
    return (whole + _at_most_one(more) + (1 - _at_most_one(more + less)) * (whole % 2)) * unit


_OPERATORS: dict[str, Any] = {
    "round": round_off,
    "and": bits_of_both, "or": _bits_of_either, "xor": _bits_of_one,
    "rand": bits_of_both, "ror": _bits_of_either, "rxor": _bits_of_one,
    "lshift": lambda size, by: size * 2**by, "rshift": lambda size, by: size // 2**by, "invert": lambda size: -size - 1,
    "rlshift": lambda size, of: of * 2**size, "rrshift": lambda size, of: of // 2**size,
    "divmod": lambda size, by: (size // by, size % by), "rdivmod": lambda size, of: (of // size, of % size),
    "floordiv": floor_division,
    "pow": lambda size, by, of=None: _power(size, by) if of is None else _power(size, by) % of,
}  # fmt: skip
_TENSOR_FUNCTIONS: dict[str, Any] = {
    name: getattr(torch, name)
    for name in """
    log2 log10 log1p exp exp2 expm1 sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh erf erfc lgamma hypot
    atan2 fmod copysign pow
    """.split()  # noqa: SIM905 - as prose they take two lines
}


def _cube_root(of: torch.Tensor) -> torch.Tensor:
    """Exact for cubes, by a step of Newton's."""
    size = of.abs()
    root = size ** (1 / 3)
    return torch.copysign(root - (root**3 - size) / (3 * root**2).clamp(min=1e-300), of)


_TENSOR_FUNCTIONS |= {"fabs": torch.abs, "degrees": torch.rad2deg, "radians": torch.deg2rad, "cbrt": _cube_root}
_TENSOR_FUNCTIONS["log"] = lambda of, base=None: of.log() if base is None else of.log() / base.log()


def _of_tensors(name: str) -> Any:
    plain, free = getattr(math, name), _TENSOR_FUNCTIONS[name]

    def function(*of: Any) -> Any:
        if not any(_is_free(one) or isinstance(one, torch.Tensor) for one in of):
            return plain(*of)
        found = free(
            *(one if isinstance(one, torch.Tensor) else torch.full((), one, dtype=torch.float64) for one in of)
        )
        size_numbers.note_number(found, of[0], size_numbers.plain_of(name, of[1:]))
        return found

    return function


def ceil(of: Any) -> Any:
    whole = size_numbers.round_number(of, math.ceil)
    return math.ceil(of) if whole is None else whole


def floor(of: Any) -> Any:
    whole = size_numbers.round_number(of, math.floor)
    return math.floor(of) if whole is None else whole


_OF_SIZES: dict[str, Any] = {
    one.__name__: one for one in (sqrt, isqrt, gcd, lcm, comb, perm, dist, fsum, trunc, remainder, ceil, floor)
}


class FreeMath:
    """The module `math`, with functions that leave a size free."""

    def __init__(self) -> None:
        self.__dict__ |= {name: _of_tensors(name) for name in _TENSOR_FUNCTIONS} | _OF_SIZES

    def __getattr__(self, name: str) -> Any:
        return getattr(math, name)


_FREE = FreeMath()
INSTEAD: tuple[tuple[Any, Any], ...] = (
    (math, _FREE),
    *((getattr(math, name), getattr(_FREE, name)) for name in {**_OF_SIZES, **_TENSOR_FUNCTIONS}),
)
"""What a user's module imports, and what it has while the model is traced."""
OF_NUMBERS = {name: getattr(_FREE, name) for name in _TENSOR_FUNCTIONS}
"""Functions of `math`, by name, that are tensors of no dimension for a size."""
NAMES = frozenset({"bin", "bit_length", "bit_count", "round", *_OF_SIZES, *_TENSOR_FUNCTIONS})


@contextmanager
def add_methods() -> Iterator[None]:
    """In the block, a symbolic size has the methods of a whole number that count its bits."""
    with _set_on(torch.SymInt, {"bit_length": bit_length, "bit_count": count_bits}), size_numbers.add_methods():
        yield


@contextmanager
def add_operators() -> Iterator[None]:
    """In the block, the operators on the bits of a symbolic size are ones that every format can hold."""
    rounding = {"__round__": size_numbers.round_fraction}
    with (
        _set_on(torch.SymInt, {f"__{name}__": one for name, one in _OPERATORS.items()}),
        _set_on(torch.SymFloat, rounding),
    ):
        yield


@contextmanager
def _set_on(kind: Any, ours: dict[str, Any]) -> Iterator[None]:
    before = {name: vars(kind)[name] for name in ours if name in vars(kind)}
    try:
        for name, function in ours.items():
            setattr(kind, name, function)
        yield
    finally:
        for name in ours:
            delattr(kind, name)
        for name, function in before.items():
            setattr(kind, name, function)


def _at_most_one(size: Size) -> Size:
    return torch.sym_min(size, 1)  # type: ignore[no-untyped-call]


def _count_coprime(number: int) -> int:
    """Euler's function."""
    return sum(math.gcd(number, one) == 1 for one in range(1, number + 1))
