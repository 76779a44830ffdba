"""Guards in words: `w * h == w * min(w, h)` is "h is at most w". Pure.

A guard's rule is what the exporter derived, often far from simple. What it leaves of small and of some large sizes is
compared with simple relations; the first that leaves the same is said. Where none does, the rule is read out. Only the
words are found by trial: the rule itself decides on a request.
"""

import ast
import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from trueline.bundle.guards import Guard

SMALL = {1: 300, 2: 24, 3: 10, 4: 6}
"""By the number of symbols: each size up to this is tried."""
LARGE = (31, 32, 33, 63, 64, 65, 100, 128, 1000, 4096)
FAR = (8192, 2**16, 2**20)
SCANNED = 5000
FEW_HOLES = 3
MAX_FACTOR = 64
_TIMES = {2: "twice {}", 3: "three times {}", 4: "four times {}"}
_RANGE = re.compile(r"max\((\d+) - d0, d0 - (\d+)\) > 0")
"""What leaves out the sizes between two numbers."""
_PARTS = {2: "half of {}", 3: "a third of {}", 4: "a quarter of {}"}
Table = Mapping[tuple[int, ...], bool]
"""Sizes of the symbols -> whether the guard holds."""


class SizeRange(Protocol):
    """The range of one symbol."""

    def allows(self, size: int) -> bool: ...


def describe_guard(guard: Guard, dims: Mapping[str, SizeRange] | None = None) -> str:
    """The guard in words, for sizes in the ranges `dims`.

    >>> rule = "d0 * d1 == d0 * min(d0, d1)"
    >>> describe_guard(Guard(text="w * h == w * min(w, h)", rule=rule, symbols=("w", "h")))
    'h is at most w'
    >>> describe_guard(Guard(text="", rule="d1 == (1 + d0) // 2", symbols=("length", "half.1")))
    'half.1 is half of length, rounded up'
    >>> describe_guard(Guard(text="", rule="max(23984 - d0, d0 - 24015) > 0", symbols=("length",)))
    'length is below 23984 or above 24015'
    """
    ranges = tuple((dims or {}).get(symbol) for symbol in guard.symbols)
    return _describe(guard, ranges)


@lru_cache(256)
def _describe(guard: Guard, ranges: Sequence[SizeRange | None]) -> str:
    """Cached: a server says it of every request that it refuses."""
    if (left_out := _RANGE.fullmatch(guard.rule)) is not None:
        return f"{guard.symbols[0]} is below {left_out[1]} or above {left_out[2]}"
    table = _tabulate(guard, ranges)
    for count in (1, 2):
        for chosen in itertools.combinations(range(len(guard.symbols)), count):
            few = _project(table, chosen)
            names = [guard.symbols[at] for at in chosen]
            if few is None:
                continue
            said = (
                _of_one(names[0], few, _alone(guard, names[0], table))
                if count == 1
                else _of_two(names[0], names[1], few)
            )
            if said:
                return said
    return _read_out(guard)


def _tabulate(guard: Guard, ranges: Sequence[SizeRange | None]) -> Table:
    small = SMALL.get(len(guard.symbols), 3)
    large = LARGE if len(guard.symbols) < 3 else LARGE[-2:]
    numbers = {int(number) for number in re.findall(r"(?<!d)\b\d{1,7}\b", guard.rule)}
    near = {number + step for number in numbers for step in (-1, 0, 1)}
    more = {*near, *FAR} if len(guard.symbols) == 1 else set()
    sizes = sorted(size for size in {*range(1, small + 1), *large, *more} if size > 0)
    each = [[size for size in sizes if one is None or one.allows(size)] or sizes for one in ranges]
    return {one: guard.holds(dict(zip(guard.symbols, one, strict=True))) for one in itertools.product(*each)}


def _project(table: Table, chosen: Sequence[int]) -> Table | None:
    """The table by the chosen symbols alone; None where the others matter, or nothing is said."""
    found: dict[tuple[int, ...], bool] = {}
    for sizes, holds in table.items():
        if found.setdefault(tuple(sizes[at] for at in chosen), holds) != holds:
            return None
    return found if len(set(found.values())) == 2 else None


# ---- one size


def _alone(guard: Guard, name: str, table: Table) -> Callable[[int], bool]:
    """Whether the guard holds for a size of `name`; the others do not matter."""
    others = dict(zip(guard.symbols, next(iter(table)), strict=True))
    return lambda size: guard.holds({**others, name: size})


def _of_one(name: str, table: Table, allows: Callable[[int], bool]) -> str:
    tried = [size for (size,) in table]
    holds = [size for (size,), fine in table.items() if fine]
    holes = [size for size in tried if size not in set(holds)]
    if [size for size in tried if holds[0] <= size <= holds[-1]] == holds:
        below = max((size for size in holes if size < holds[0]), default=0)
        low = below + 1 + bisect_left(range(below + 1, holds[0]), True, key=allows) if below else 0
        above = next((size for size in holes if size > holds[-1]), 0)
        high = holds[-1] + bisect_left(range(holds[-1] + 1, above), True, key=lambda s: not allows(s)) if above else 0
        if low and high:
            return f"{name} is {low}" if low == high else f"{name} is from {low} to {high}"
        return f"{name} is at most {high}" if high else f"{name} is at least {low}"
    if len(holes) <= FEW_HOLES and all(allows(size) for size in range(1, SCANNED) if size not in holes):
        return f"{name} is {'not' if len(holes) == 1 else 'neither'} {' nor '.join(map(str, holes))}"
    for step in range(2, MAX_FACTOR + 1):
        rests = {size % step for size in holds}
        if len(rests) == 1 and all((size % step in rests) == table[(size,)] for size in tried):
            rest = rests.pop()
            return f"{name} is {f'{rest} more than ' if rest else ''}a multiple of {step}"
        if all((size % step == 0) != table[(size,)] for size in tried):
            return f"{name} is not a multiple of {step}"
    return ""


# ---- two sizes


def _of_two(one: str, other: str, table: Table) -> str:
    turned: Table = {(second, first): holds for (first, second), holds in table.items()}
    for test, words in _PAIRS:
        if _same(table, test):
            return f"{one} {words} {other}"
        if _same(turned, test):
            return f"{other} {words} {one}"
    of_each = [*_lines(one, other, table), *_lines(other, one, turned)]
    return min(of_each, key=len, default="")


_PAIRS: tuple[tuple[Callable[[int, int], bool], str], ...] = (
    (lambda a, b: a == b, "equals"),
    (lambda a, b: a != b, "differs from"),
    (lambda a, b: a <= b, "is at most"),
    (lambda a, b: a < b, "is less than"),
    (lambda a, b: not a % b, "is a multiple of"),
)


def _same(table: Table, test: Callable[[int, int], bool]) -> bool:
    return all(test(*sizes) == holds for sizes, holds in table.items())


def _lines(one: str, other: str, table: Table) -> Iterator[str]:
    """`one is twice other plus 1`, `one is half of other, rounded up`, `one is at most other plus 3`."""
    by_other: dict[int, list[int]] = {}
    for (size, given), holds in table.items():
        if holds:
            by_other.setdefault(given, []).append(size)
    if len(by_other) < 3:
        return
    for words, choose in (("is", min), ("is at most", max), ("is at least", min)):
        ends = {given: choose(sizes) for given, sizes in by_other.items()}
        for expression, compute in _fits(other, ends):

            def test(size: int, given: int, words: str = words, compute: Callable[[int], int] = compute) -> bool:
                end = compute(given)
                return size == end if words == "is" else size <= end if words == "is at most" else size >= end

            if _same(table, test):
                yield f"{one} {words} {expression}"
                break


def _fits(name: str, ends: Mapping[int, int]) -> Iterator[tuple[str, Callable[[int], int]]]:
    """Expressions of the size `name` that give these ends: a line, or a quotient that is rounded. The ends that the
    tried sizes cut off differ; the caller compares all."""
    given = sorted(ends)
    for first, second in itertools.pairwise(given):
        slope, rest = divmod(ends[second] - ends[first], second - first)
        if not rest and 0 < slope <= MAX_FACTOR:
            start = ends[first] - slope * first
            times = name if slope == 1 else _TIMES.get(slope, f"{slope} times {{}}").format(name)
            yield times + _plus(start), lambda size, slope=slope, start=start: slope * size + start  # type: ignore[misc]
            break
    some = given[: len(given) // 2]
    for by in range(2, MAX_FACTOR + 1):
        more = max(ends[size] * by - size for size in some)
        if all(0 <= size + more - ends[size] * by < by for size in some):
            yield _quotient(name, by, more), lambda size, by=by, more=more: (size + more) // by  # type: ignore[misc]


def _plus(number: int) -> str:
    return "" if not number else f" plus {number}" if number > 0 else f" minus {-number}"


def _quotient(name: str, by: int, more: int) -> str:
    whole, rest = divmod(more, by)
    part = _PARTS.get(by, f"1/{by} of {{}}")
    beside = f"{abs(whole)} {'more' if whole > 0 else 'less'} than " if whole else ""
    if rest == 0:
        return f"{beside}{part.format(name)}, rounded down"
    if rest == by - 1:
        return f"{beside}{part.format(name)}, rounded up"
    return f"{part.format(f'({name}{_plus(more)})')}, rounded down"


# ---- any other


def _read_out(guard: Guard) -> str:
    return _read_aloud(ast.parse(guard.rule, mode="eval").body, guard.symbols)


_WORDS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "is", ast.NotEq: "is not", ast.Lt: "is less than", ast.LtE: "is at most", ast.Gt: "is more than",
    ast.GtE: "is at least",
}  # fmt: skip


def _read_aloud(node: ast.expr, symbols: Sequence[str]) -> str:
    def read(inner: ast.expr) -> str:
        said = _read_aloud(inner, symbols)
        plain = isinstance(inner, ast.BinOp) and isinstance(node, ast.BinOp) and type(inner.op) is type(node.op)
        return f"({said})" if isinstance(inner, ast.BinOp | ast.Call) and not plain else said

    match node:
        case ast.BoolOp(op=op, values=values):
            return (" and " if isinstance(op, ast.And) else " or ").join(_read_aloud(one, symbols) for one in values)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"{_read_aloud(left, symbols)} {_WORDS[type(op)]} {_read_aloud(right, symbols)}"
        case ast.Call(func=ast.Name(id=name), args=args):
            which = "smallest" if name == "min" else "largest"
            return f"the {which} of {' and '.join(read(one) for one in args)}"
        case ast.UnaryOp(
            op=ast.USub(), operand=ast.BinOp(left=ast.UnaryOp(op=ast.USub(), operand=up), op=ast.FloorDiv(), right=by)
        ):
            return f"({read(up)} / {read(by)} rounded up)"
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return f"{read(left)} / {read(right)} rounded down"
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            return f"the rest of {read(left)} / {read(right)}"
        case ast.BinOp(left=left, op=op, right=right):
            sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}[type(op)]
            return f"{read(left)} {sign} {read(right)}"
        case ast.UnaryOp(operand=operand):
            return f"-{read(operand)}"
        case ast.Name(id=name):
            return symbols[int(name[1:])]
    return ast.unparse(node)
