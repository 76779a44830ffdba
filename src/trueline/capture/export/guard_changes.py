"""Where a guard changes its answer, however far out: `5 * length != 1500` breaks at 300 alone.

Guards of one symbol are tried at every size up to SCANNED, and beside the real roots of both sides' difference where
that is a polynomial. Guards between several are tried along lines: one symbol at every size, the others at a few. Pure.
"""

import ast
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from typing import Any

import numpy as np
from numpy.polynomial import Polynomial

from trueline.bundle.guards import Guard, place, read
from trueline.bundle.signature import Dim

SCANNED = 1 << 16
ONE_BY_ONE = 32
"""Combinations of which each is tried alone, where one divides by zero."""
MOST = 8
"""How many changes are listed: of a guard that changes more often, the first are enough to keep it."""
LINES = (1, 2, 3, 5, 7, 16, 64, 224, 1000)
"""What the other symbols of a guard are held at."""
SMALL = 4

Columns = dict[str, "np.ndarray[tuple[int], np.dtype[Any]]"]
"""By symbol, the sizes of many combinations."""


def holding(guard: Guard, sizes: Columns) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of the combinations keep `guard`: all at once, or one by one where it divides by zero or chooses."""
    count = max(len(column) for column in sizes.values())
    given = [np.broadcast_to(sizes[symbol], (count,)) for symbol in guard.symbols]
    return _holding(guard, given if _fits(guard.rule, given) else [column.astype(object) for column in given])


def _holding(guard: Guard, columns: Sequence[Any]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    count = len(columns[0])
    found: Any
    try:
        with np.errstate(divide="raise", invalid="raise"):
            found = _of_columns(guard.rule)(*columns)
    except (ArithmeticError, ValueError) as error:
        if count > ONE_BY_ONE and isinstance(error, ArithmeticError):  # mostly at few places: where a size is another
            parts = ([column[start : start + count // 2 + 1] for column in columns] for start in (0, count // 2 + 1))
            return np.concatenate([_holding(guard, part) for part in parts])
        rows = zip(*columns, strict=True)
        found = [guard.holds(dict(zip(guard.symbols, map(int, one), strict=True))) for one in rows]
    return np.broadcast_to(np.asarray(found, dtype=np.bool_), (count,))


@cache
def _of_columns(rule: str) -> Callable[..., Any]:
    """`rule` as a function of whole columns; raises ValueError for a rule that the reader of guards refuses."""
    read(rule)
    names = sorted(set(re.findall(r"\bd\d+", rule)), key=place)
    extremes = {"max": lambda *all: reduce(np.maximum, all), "min": lambda *all: reduce(np.minimum, all)}
    whole = ast.unparse(ast.fix_missing_locations(_Elementwise().visit(ast.parse(rule, mode="eval"))))
    function: Callable[..., Any] = eval(f"lambda {', '.join(names)}, *_: {whole}", {"__builtins__": {}, **extremes})
    return function


class _Elementwise(ast.NodeTransformer):
    """`a > 1 and b > 2` as what numpy computes of whole columns."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        operator = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        return reduce(lambda one, other: ast.BinOp(left=one, op=operator, right=other), node.values)


def _fits(rule: str, columns: Sequence[Any]) -> bool:
    """Whether no number on the way to the answer leaves 64 bits, whatever the signs."""
    most = [int(column.max(initial=0)) for column in columns]
    return _count_bits(rule, tuple(most)) < 62


@cache
def _count_bits(rule: str, most: tuple[int, ...]) -> int:
    """Of the largest number that `rule` may compute from sizes up to `most`."""
    numbers: list[int] = []

    def measure(node: ast.expr) -> int:
        numbers.append(found := _measure(node, most, measure))
        return found

    measure(ast.parse(rule, mode="eval").body)
    return max(numbers).bit_length()


def _measure(node: ast.expr, most: Sequence[int], measure: Callable[[ast.expr], int]) -> int:
    """How far from zero a part of a guard may be; `measure` tells it of its own parts."""
    match node:
        case ast.Constant(value=int(number)):
            return abs(number)
        case ast.Name(id=name):
            return most[place(name)]
        case ast.UnaryOp(operand=operand):
            return measure(operand)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = measure(left), measure(right)
            if isinstance(op, ast.Mult):
                return a * b
            return a if isinstance(op, ast.FloorDiv) else b if isinstance(op, ast.Mod) else a + b
        case ast.Compare(left=left, comparators=[right]):
            return max(measure(left), measure(right))
        case ast.BoolOp(values=parts) | ast.Call(args=parts):
            return max(map(measure, parts))
    raise ValueError(f"a guard may not hold {ast.unparse(node)[:60]!r}")


@cache
def changes(guard: Guard) -> tuple[int, ...]:
    """Sizes after which a guard of one symbol changes its answer, the first few."""
    found = holding(guard, {guard.symbols[0]: np.arange(1, SCANNED + 1)})
    near = np.flatnonzero(found[1:] != found[:-1])[:MOST] + 1
    return *(int(size) for size in near), *(size for size in _roots(guard.rule) if size > SCANNED)


def _roots(rule: str) -> list[int]:
    """The whole numbers before and at the real roots of a rule that compares polynomials of one symbol."""
    tree = ast.parse(rule, mode="eval").body
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1:
        return []
    try:
        roots = (_polynomial(tree.left) - _polynomial(tree.comparators[0])).roots()
    except (ValueError, np.linalg.LinAlgError):
        return []
    real = [float(root.real) for root in roots if abs(root.imag) <= 1e-6 * max(1.0, abs(root.real))]
    return sorted({int(root) + step for root in real if 1 <= root < 2**31 for step in (-1, 0, 1)})


def _polynomial(node: ast.expr) -> Polynomial:
    """Raises ValueError for what is none."""
    match node:
        case ast.Constant(value=int(number)):
            return Polynomial([float(number)])
        case ast.Name(id=name):
            place(name)
            return Polynomial([0.0, 1.0])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_polynomial(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
            a, b = _polynomial(left), _polynomial(right)
            return a * b if isinstance(op, ast.Mult) else a + b if isinstance(op, ast.Add) else a - b
    raise ValueError(f"{ast.unparse(node)} is no polynomial")


@cache
def breaks_when_small(guard: Guard) -> bool:
    """Whether sizes of at most SMALL break it, as they do an assumption on 0 and 1."""
    grid = np.array(list(itertools.product(range(1, SMALL + 1), repeat=len(guard.symbols)))).T
    return not bool(holding(guard, dict(zip(guard.symbols, grid, strict=True))).all())


@cache
def breaks_at_one_only(guard: Guard) -> bool:
    """Whether it is broken by combinations with a size of 1, and by no other on the lines.

    >>> rules = ("4 * d0 < d0 * (4 * d1)", "d0 < 5 * d1", "4 < d0 * d1")
    >>> [breaks_at_one_only(Guard(text=rule, rule=rule, symbols=("length", "batch"))) for rule in rules]
    [True, False, False]
    """
    if len(guard.symbols) < 2:
        return False
    ones = combinations([(1, *LINES) if len(guard.symbols) < 4 else (1, 2, 7)] * len(guard.symbols), guard.symbols)
    broken = ~holding(guard, ones)
    with_one = np.any([column == 1 for column in ones.values()], axis=0)
    above = {symbol: Dim(min=2) for symbol in guard.symbols}
    return bool(broken.any()) and not bool((broken & ~with_one).any()) and not breaks_far(guard, above)


def breaks_far(guard: Guard, dims: Mapping[str, Dim]) -> bool:
    """Whether a guard between several symbols is broken on one of the lines, inside `dims`."""
    return _breaks_far(guard, tuple((symbol, dims[symbol]) for symbol in guard.symbols))


@cache
def _breaks_far(guard: Guard, inside: tuple[tuple[str, Dim], ...]) -> bool:
    dims = dict(inside)
    few = LINES if len(guard.symbols) == 2 else LINES[2::3]
    for symbol in guard.symbols:
        others = [one for one in guard.symbols if one != symbol]
        line = _inside(np.arange(1, SCANNED + 1), dims[symbol])
        for held in itertools.product(*([size for size in few if dims[one].allows(size)] for one in others)):
            fixed = {one: np.array([size]) for one, size in zip(others, held, strict=True)}
            if line.size and not holding(guard, {symbol: line, **fixed}).all():
                return True
    return False


def is_certain(guard: Guard, dims: Mapping[str, Dim]) -> bool:
    """Whether polynomials show that it holds for all sizes from the least on: written in what each size has above its
    least, a difference without a negative term is never below 0. Also of quotients that are compared with a number."""
    tree = ast.parse(guard.rule, mode="eval").body
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1:
        return False
    least = {f"d{at}": dims[symbol].min for at, symbol in enumerate(guard.symbols)}
    one, other = tree.left, tree.comparators[0]
    try:
        match tree.ops[0], other:
            case ast.NotEq(), ast.Constant(value=0) if _find_least(one, least) > 0:
                return True
            case ast.NotEq(), ast.Constant(value=0) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod):
                return _is_part(one.left, one.right, least)
            case ((ast.NotEq() | ast.Gt()), ast.Constant(value=int(number))) if _is_more(one, number, least):
                return True
            case ast.GtE(), ast.Constant(value=int(number)) if _is_more(one, number - 1, least):
                return True
        match tree.ops[0]:
            case ast.NotEq():
                pairs = (one, other), (other, one)
                return any(_is_part(*pair, least) for pair in pairs) or any(_is_above(*pair, least) for pair in pairs)
            case ast.Gt():
                return _is_above(one, other, least)
            case ast.Lt():
                return _is_above(other, one, least)
            case ast.GtE():
                return _is_least(_add(_expand(one, least), _expand(other, least), -1))
            case ast.LtE():
                return _is_least(_add(_expand(other, least), _expand(one, least), -1))
    except ValueError:
        return False
    return False


def _is_part(part: ast.expr, whole: ast.expr, least: Mapping[str, int]) -> bool:
    """Whether `whole` is a product of what `part` is one of and of factors that make more of it: `n` and `n * (m // 4)`
    from `m` of 8 on."""
    few, many = _factors(part), _factors(whole)
    for factor in few:
        if factor not in many:
            return False
        many.remove(factor)
    more = [_find_least(ast.parse(factor, mode="eval").body, least) for factor in many]
    return _find_least(part, least) > 0 and all(one > 0 for one in more) and math.prod(more) > 1


def _factors(node: ast.expr) -> list[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _factors(node.left) + _factors(node.right)
    return [ast.unparse(node)]


Terms = Mapping[tuple[str, ...], int]
"""A polynomial: the symbols of each term, each as often as its power, and the term's factor."""


def _find_least(node: ast.expr, least: Mapping[str, int]) -> int:
    """A number that `node`, made of sizes, is never below; 0 where none is known. A size that is filled up to a
    multiple is at least that multiple, and a size divided by its own part at least the number of parts."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return least.get(name, 0)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return max(0, _find_least(left, least)) * max(0, _find_least(right, least))
        case ast.BinOp(
            left=left, op=ast.Add(), right=ast.BinOp(left=minus, op=ast.Mod(), right=ast.Constant(value=int(by)))
        ):
            start, of_all = _find_least(left, least), ast.unparse(minus) == f"-1 * {ast.unparse(left)}"
            return -(-start // by) * by if of_all and start > 0 else max(0, start)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = _find_least(left, least), _find_least(right, least)
            return sum(parts) if min(parts) > 0 else 0
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=ast.Constant(value=int(by))) if by > 0:
            return max(0, _find_least(left, least)) // by
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=ast.BinOp(op=ast.FloorDiv(), right=ast.Constant()) as part):
            same = ast.unparse(part.left) == ast.unparse(left) and _find_least(part, least) > 0
            return _find_least(part.right, least) if same else 0
    return 0


def _is_more(node: ast.expr, number: int, least: Mapping[str, int]) -> bool:
    """Whether sums, products and quotients of what the sizes are at least are more than `number`."""
    bound = _bound_below(node, least)
    return bound is not None and bound > number


def _bound_below(node: ast.expr, least: Mapping[str, int]) -> int | None:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return -number
        case ast.Name(id=name):
            return least.get(name)
        case ast.BinOp(op=ast.Mod(), right=ast.Constant(value=int(by))) if by > 0:
            return 0
        case ast.BinOp(left=left, op=ast.Sub(), right=ast.Constant(value=int(number))):
            bound = _bound_below(left, least)
            return None if bound is None else bound - number
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=ast.Constant(value=int(by))) if by > 0:
            bound = _bound_below(left, least)
            return None if bound is None else bound // by
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as op, right=right):
            one, other = _bound_below(left, least), _bound_below(right, least)
            if one is None or other is None:
                return None
            if isinstance(op, ast.Add):
                return one + other
            return one * other if min(one, other) >= 0 else None
    return None


def _is_above(one: ast.expr, other: ast.expr, least: Mapping[str, int]) -> bool:
    """Whether `one` is more than `other`. Raises ValueError where one of them is no polynomial."""
    match one, other:
        case ast.BinOp(left=over, op=ast.FloorDiv(), right=under), ast.Constant(value=0):
            divisor = _expand(under, least)
            return _is_least(_add(divisor, {(): 1}, -1)) and _is_least(_add(_expand(over, least), divisor, -1))
    return _is_least(_add(_add(_expand(one, least), _expand(other, least), -1), {(): 1}, -1))


def _is_least(terms: Terms) -> bool:
    """Whether a polynomial of what is 0 or more is never below 0, as no term of it is."""
    return all(factor >= 0 for factor in terms.values())


def _expand(node: ast.expr, least: Mapping[str, int]) -> Terms:
    """The polynomial in what each symbol has above its least. Raises ValueError for what is none."""
    match node:
        case ast.Constant(value=int(number)):
            return {(): number}
        case ast.Name(id=name) if name in least:
            return {(name,): 1, (): least[name]}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _add({}, _expand(operand, least), -1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            return _add(_expand(left, least), _expand(right, least), 1 if isinstance(op, ast.Add) else -1)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            found: dict[tuple[str, ...], int] = {}
            for (one, a), (other, b) in itertools.product(_expand(left, least).items(), _expand(right, least).items()):
                term = tuple(sorted((*one, *other)))
                found[term] = found.get(term, 0) + a * b
            return found
    raise ValueError(f"{ast.unparse(node)} is no polynomial")


def _add(one: Terms, other: Terms, times: int) -> Terms:
    return {term: one.get(term, 0) + times * other.get(term, 0) for term in {*one, *other}}


def _inside(sizes: Any, dim: Dim) -> Any:
    most = sizes[-1] if dim.max is None else dim.max
    return sizes[(sizes >= dim.min) & (sizes <= most) & (sizes % dim.multiple_of == 0)]


def combinations(choices: Sequence[Sequence[int]], symbols: Sequence[str]) -> Columns:
    """All combinations of the `choices` for each of the `symbols`, as Python's own numbers: these are exact."""
    columns = np.array(list(itertools.product(*choices)), dtype=object).reshape(-1, len(symbols)).T
    return dict(zip(symbols, columns, strict=True))
