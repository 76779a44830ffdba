"""Guards with fractions (`trunc(0.6 * length) == 3`) in whole numbers, so that every reader of a bundle decides alike.

A guard becomes the sizes that it excludes, if they are few, or the range around the example: narrower than the guard
where it has holes, never wider. What it leaves is found by trying sizes. Pure.
"""

import ast
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from trueline.bundle.guards import Guard
from trueline.bundle.signature import Dim
from trueline.capture.export import whole_parts
from trueline.capture.export.guard_search import END, Condition, Undecided, search

TRIED = 20_000
"""Sizes that a guard with fractions is tried with, one by one; above them powers of two."""
FAR = tuple(2**power for power in range(15, 31))
HOLES = 8
"""At most this many sizes are excluded one by one."""
SEVERAL = (*range(1, 33), *(2**power for power in range(6, 17)))
"""Sizes that a guard between several symbols is tried with."""
SQUARE = 160
"""Up to here one between two symbols is tried at all sizes of both: `abs(height / width - 2**0.5) < 1e-4` has few."""
SEARCHES = 40
"""Boxes around the example that are searched."""
LARGEST = 1 << 16
"""Of what a size is multiplied with and divided by, so that a float holds the product."""
EXACT = 1_000_000
"""Denominators up to this one tell a quotient of two sizes from a fraction as Python's own numbers do."""

_NAMES = {
    "__builtins__": {},
    "math": math,
    "torch": SimpleNamespace(
        sym_float=float,
        sym_int=int,
        sym_max=max,
        sym_min=min,
        sym_ite=lambda b, t, f: t if b else f,
        **{
            f"_sym_{name}": getattr(math, name)
            for name in ("sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "log2")
        },
    ),
    "max": max,
    "min": min,
    "round": round,
    "abs": abs,
    "int": int,
    "float": float,
}
UNREADABLE = (SyntaxError, ValueError, KeyError, AttributeError, TypeError, NameError)
FUNCTIONS = frozenset(_NAMES) - {"__builtins__"}
Test = Callable[..., bool]


class WholeDivisions(ast.NodeTransformer):
    """Writes `math.ceil(length / 8)` as `-(-length // 8)`, and `math.trunc(0.5 * length)` in whole numbers, too. Both
    are exact up to 2**53."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="math"), attr="ceil" | "floor" | "trunc" as how), args=[given]
            ):
                parts = _as_quotient(given)
                if parts is not None:
                    return _divide(*parts, how)
        return node


def _as_quotient(given: ast.expr) -> tuple[ast.expr, int] | None:
    """A whole number and what divides it: None for another fraction than one of them, or one that floats round."""
    match given:
        case ast.BinOp(left=above, op=ast.Div(), right=ast.Constant(value=int() | float() as below)) if below > 0:
            above = _as_size(above)
            whole = below <= LARGEST and float(below).is_integer()
            return (above, int(below)) if whole and _is_whole(above) else None
        case ast.BinOp(left=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float(factor))), right=above):
            return _as_quotient(ast.BinOp(ast.Constant(-factor), given.op, above))
        case ast.BinOp(left=ast.Constant(value=float(factor)), op=ast.Mult(), right=above):
            above = _as_size(above)
            top, below = factor.as_integer_ratio()  # below is a power of two
            exact = below <= LARGEST and abs(top) <= LARGEST and _is_whole(above)
            return (ast.BinOp(ast.Constant(top), ast.Mult(), above), below) if exact else None
    return None


def _as_size(tree: ast.expr) -> ast.expr:
    """`length` of `torch.sym_float(length)`."""
    match tree:
        case ast.Call(func=ast.Attribute(attr="sym_float"), args=[size]):
            return size
    return tree


def _is_whole(tree: ast.expr) -> bool:
    """Whether a sum, product or whole quotient of sizes is computed without fractions."""
    return not any(
        isinstance(node, ast.Div | ast.Pow)
        or (isinstance(node, ast.Constant) and isinstance(node.value, float))
        or (isinstance(node, ast.Call) and not _is_of_sizes(node))
        for node in ast.walk(tree)
    )


def _is_of_sizes(call: ast.Call) -> bool:
    """`L['x'].size()`, `max(…)`."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    return name in ("min", "max", "abs", "size")


def _divide(above: ast.expr, below: int, how: str) -> ast.expr:
    """The quotient, rounded down, up or towards zero."""

    def floor(number: ast.expr) -> ast.expr:
        return ast.BinOp(number, ast.FloorDiv(), ast.Constant(below))

    def negative(number: ast.expr) -> ast.expr:
        return ast.UnaryOp(ast.USub(), number)

    def positive(number: ast.expr) -> ast.expr:
        return ast.Call(ast.Name("max", ast.Load()), [number, ast.Constant(0)], [])

    if how == "floor":
        return floor(above)
    if how == "ceil":
        return negative(floor(negative(above)))
    return ast.BinOp(floor(positive(above)), ast.Sub(), floor(positive(negative(above))))


class WholeNumbers(ast.NodeTransformer):
    """Writes `d0 / d1 != 1.3333333333333333` as `3 * d0 != 4 * d1`, and `abs(d0)` as `max(d0, -d0)`."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id="abs"), args=[given], keywords=[]):
                return ast.Call(ast.Name("max", ast.Load()), [given, ast.UnaryOp(ast.USub(), given)], [])
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Compare(left=ast.BinOp(left=above, op=ast.Div(), right=below), comparators=[value]):
                return self._multiply_out(node, above, below, value, swapped=False)
            case ast.Compare(left=value, comparators=[ast.BinOp(left=above, op=ast.Div(), right=below)]):
                return self._multiply_out(node, above, below, value, swapped=True)
        return node

    def _multiply_out(
        self, node: ast.Compare, above: ast.expr, below: ast.expr, value: ast.expr, *, swapped: bool
    ) -> ast.expr:
        number = value.value if isinstance(value, ast.Constant) else None
        if not isinstance(number, int | float) or not math.isfinite(number) or len(node.ops) != 1:
            return node
        given = Fraction(number).limit_denominator(EXACT)
        if float(given) != number or not isinstance(below, ast.Name):
            return node  # a size is never below 1; what else divides may be
        sides = [
            ast.BinOp(ast.Constant(given.denominator), ast.Mult(), above),
            ast.BinOp(ast.Constant(given.numerator), ast.Mult(), below),
        ]
        left, right = reversed(sides) if swapped else sides
        return ast.Compare(left, node.ops, [right])


def in_whole_numbers(
    tree: ast.expr,
    symbols: Sequence[str],
    example: Mapping[str, int],
    steps: Mapping[str, int] = MappingProxyType({}),
    *,
    decided: bool = False,
) -> tuple[Guard, ...]:
    """What the condition `tree` on d0, d1, ... leaves of the sizes of `symbols`; it holds for `example`. A symbol in
    `steps` is tried in multiples of that number. Where the user's code has `decided` by it, what is left has no sizes
    that break it, however large. Raises ValueError for a condition that cannot be computed, or holds nowhere around the
    example."""
    test = compile_test(tree, len(symbols))
    if not test(*(example[symbol] for symbol in symbols)):
        raise ValueError(f"{ast.unparse(tree)} does not hold for the example")
    each = [steps.get(symbol, 1) for symbol in symbols]
    if len(symbols) == 1:
        return _guards_of_one(Condition(tree, test), symbols[0], example, each[0], decided=decided)
    if isinstance(tree, ast.Compare) and isinstance(tree.ops[0], ast.NotEq):
        if not decided:
            return ()  # sizes that the exporter takes for different, where they differ in the example: values decide
        apart = whole_parts.keep_apart(tree.left, tree.comparators[0], symbols)
        if apart is not None and apart.holds(example):
            return (apart,)
    return _guards_of_several(Condition(tree, test), symbols, example, each, decided=decided)


def compile_test(tree: ast.expr, count: int) -> Test:
    names = ", ".join(f"d{i}" for i in range(count))
    function = ast.parse(f"lambda {names}: 0", mode="eval")
    assert isinstance(function.body, ast.Lambda)
    function.body.body = tree
    code = compile(ast.fix_missing_locations(function), "<guard>", "eval")
    computed: Any = eval(code, dict(_NAMES))  # torch's own words, of the model that is being exported

    def holds(*sizes: int) -> bool:
        try:
            return bool(computed(*sizes))
        except (ArithmeticError, ValueError):
            return False

    holds(*[4] * count)  # what is no arithmetic raises here
    return holds


def _guards_of_one(
    condition: Condition, symbol: str, example: Mapping[str, int], step: int, *, decided: bool
) -> tuple[Guard, ...]:
    here, test = example[symbol], condition.exact
    tried = [*range(step, max(TRIED, 2 * here) + 1, step), *(step * size for size in FAR if step * size > 2 * here)]
    holds = [test(size) for size in tried]
    out = [size for size, fine in zip(tried, holds, strict=True) if not fine]
    if len(out) <= HOLES:
        far = _find_far_holes(condition, symbol, step, max(TRIED, 2 * here) + 1) if decided else ()
        return (*(_guard(symbol, "!=", size) for size in out if size <= max(TRIED, 2 * here) or not decided), *far)
    low = max((size for size in out if size < here), default=0) + 1
    above = min((size for size in out if size > here), default=None)
    if above is None:
        far = _find_far_holes(condition, symbol, step, max(TRIED, 2 * here) + 1) if decided else ()
        return (_guard(symbol, ">=", low), *far)
    high = max(size for size, fine in zip(tried, holds, strict=True) if fine and size < above)
    return (*((_guard(symbol, ">=", low),) if low > 1 else ()), _guard(symbol, "<=", high))


def _find_far_holes(condition: Condition, symbol: str, step: int, start: int) -> tuple[Guard, ...]:
    """The ranges from `start` on that break the condition, or an end before the first that is not known."""
    found: list[Guard] = []
    known = start - 1
    try:
        for ((low, high),) in search(condition, [Dim(min=start, multiple_of=step)]):
            if len(found) == HOLES:
                return (*found, _guard(symbol, "<=", step * low - 1))
            found.append(_leave_out(symbol, step * low, step * high))
            known = step * high
    except Undecided:
        return (*found, _guard(symbol, "<=", known))
    return tuple(found)


def _leave_out(symbol: str, low: int, high: int) -> Guard:
    if low == high:
        return _guard(symbol, "!=", low)
    text = f"{symbol} < {low} or {symbol} > {high}"
    return Guard(text=text, rule=f"max({low} - d0, d0 - {high}) > 0", symbols=(symbol,))


def _guard(symbol: str, operator: str, size: int) -> Guard:
    return Guard(text=f"{symbol} {operator} {size}", rule=f"d0 {operator} {size}", symbols=(symbol,))


def _guards_of_several(
    condition: Condition, symbols: Sequence[str], example: Mapping[str, int], steps: Sequence[int], *, decided: bool
) -> tuple[Guard, ...]:
    """The box around the example within which it always holds, up to one bound for all symbols and then down as far as
    can be; none where it holds everywhere. Where the user's code has `decided` by it, the box is searched for sizes
    that break it."""
    few = SEVERAL if len(symbols) == 2 else tuple(size for size in SEVERAL if size < 9 or size in (32, 1024, 65536))
    sizes = [tuple(step * size for size in few) for step in steps]
    tried = [*itertools.product(*sizes)]
    if len(symbols) == 2:
        tried += itertools.product(*(range(step, SQUARE + 1, step) for step in steps))
    known = [given for given in tried if not condition.exact(*given)]
    here = [example[symbol] for symbol in symbols]
    most = math.inf
    for _ in range(SEARCHES):
        lows, high = _find_box(known, here, sizes, most)
        if not high or high in lows:
            break
        box = [
            Dim(min=low, max=None if high == math.inf else int(high), multiple_of=step)
            for low, step in zip(lows, steps, strict=True)
        ]
        try:
            broken = next(search(condition, box), None) if decided else None
        except Undecided:
            most = high if high != math.inf else END
            most -= 1
            continue
        if broken is None:
            found = [
                _guard(symbol, ">=", low) for symbol, low, step in zip(symbols, lows, steps, strict=True) if low > step
            ]
            return (*found, *(_guard(symbol, "<=", int(high)) for symbol in symbols if high != math.inf))
        known.append(tuple(step * low for step, (low, _) in zip(steps, broken, strict=True)))
    raise ValueError("it leaves sizes out in more than one direction")


def _find_box(
    known: Sequence[tuple[int, ...]], here: Sequence[int], sizes: Sequence[Sequence[int]], most: float
) -> tuple[list[int], float]:
    """The least size of each symbol and one bound for all, `most` at most, so that none of `known` is inside."""
    out = np.array(known).reshape(-1, len(here))

    def clear(lows: Sequence[int], high: float) -> bool:
        return not ((np.array(lows) <= out) & (out <= high)).all(1).any()

    bounds = sorted({size for each in sizes for size in each if size >= max(here)}, reverse=True)
    high = next((bound for bound in (math.inf, *bounds) if bound <= most and clear(here, bound)), 0.0)
    lows = list(here)
    for at, each in enumerate(sizes):
        lower = (size for size in each if size < here[at])
        lows[at] = next((size for size in lower if clear([*lows[:at], size, *lows[at + 1 :]], high)), here[at])
    return lows, high
