"""What tells a guard that the exporter assumes from one with a reason: it treats 0 and 1 as special in every
expression. Pure.
"""

import ast
import re
from collections.abc import Mapping, Sequence

import numpy as np

from trueline.bundle.guards import Guard
from trueline.bundle.signature import Dim
from trueline.capture.export.guard_changes import SCANNED, SMALL, breaks_at_one_only, breaks_when_small, holding
from trueline.capture.export.guard_search import Undecided, as_condition, is_implied, search

DENSE = 256
"""Smaller sizes are tried one by one."""
HOLES = 8
"""At most this many sizes that a guard leaves out are tried one by one."""
FINITE = 32
"""The same where the user's code decides: a guard that leaves more out, by no remainder, is kept."""
SPREAD = 16
"""At most this many sizes of two symbols that a guard leaves out are tried."""
FARTHEST = 4096
"""The largest size at which what a guard leaves out is tried."""
NEAR = 1024
"""The largest of them."""
REMAINDERS = 4
"""A guard that needs one remainder by at most this number is tried at each other one."""


def comparison(guard: Guard) -> ast.cmpop | None:
    tree = ast.parse(guard.rule, mode="eval").body
    return tree.ops[0] if isinstance(tree, ast.Compare) and len(tree.ops) == 1 else None


def may_be_tried(guard: Guard, dims: Mapping[str, Dim]) -> bool:
    """Whether probes try what a guard leaves out: the sizes of `list_holes`, or those of a remainder, of which some are
    tried over the whole range of probes."""
    period = _period(guard) if len(guard.symbols) == 1 else 0
    if isinstance(comparison(guard), ast.Eq):  # multiples stay multiples
        return 1 < period <= REMAINDERS and not guard.holds({guard.symbols[0]: period})
    return period > 0 or bool(list_holes(guard, dims))


def list_holes(guard: Guard, dims: Mapping[str, Dim]) -> list[tuple[int, ...]]:
    """Sizes that a guard of one or two symbols leaves out: all of one symbol, or none if they are too many or too far;
    of two some that are spread over the near ones, and some at which both are equal."""
    each = [dims[symbol] for symbol in guard.symbols]
    if len(each) == 1:
        return [(size,) for size in _list_finite(guard, each[0])]
    if len(each) > 2:
        return []
    found: list[tuple[int, ...]] = []
    for ends in ((NEAR, NEAR), (2 * FINITE, FARTHEST), (FARTHEST, 2 * FINITE)):
        one, two = (
            np.array([size for size in range(1, end + 1) if dim.allows(size)], np.int64)
            for end, dim in zip(ends, each, strict=True)
        )
        columns = (np.repeat(one, len(two)), np.tile(two, len(one)))
        if len(columns[0]):
            out = ~holding(guard, dict(zip(guard.symbols, columns, strict=True)))
            found += zip(*(column[out].tolist() for column in columns), strict=True)
    found = sorted({*found})
    return [*_spread(found, SPREAD), *_spread([sizes for sizes in found if len({*sizes}) == 1], HOLES)]


def _list_finite(guard: Guard, dim: Dim) -> list[int]:
    """The sizes that it leaves out; none where they are more than `FINITE`, or far."""
    out: list[int] = []
    try:
        for ((low, high),) in search(as_condition(guard.rule), [dim]):
            out += range(low * dim.multiple_of, (high + 1) * dim.multiple_of, dim.multiple_of)[: FINITE + 1]
            if len(out) > FINITE or out[-1] > FARTHEST:
                return []
    except Undecided:
        return []
    return sorted(out)


def _spread(sizes: Sequence[tuple[int, ...]], most: int) -> list[tuple[int, ...]]:
    """At most `most` of them, the first and the last included."""
    places = np.linspace(0, len(sizes) - 1, min(most, len(sizes))).round()
    return [sizes[int(place)] for place in places]


def is_assumption(guard: Guard, *, decided: bool) -> bool:
    """Whether the exporter's way with 0 and 1 explains it; small sizes break such a guard, and no others do if the
    user's code decides by it."""
    tree = ast.parse(guard.rule, mode="eval").body
    found = (assumes(tree) and breaks_when_small(guard)) or (_orders(tree) and breaks_at_one_only(guard))
    return found and (not decided or is_implied(guard.rule, (Dim(min=SMALL + 1),) * len(guard.symbols)))


def _orders(tree: ast.expr) -> bool:
    """`4 * n < batch * (4 * n)`: the exporter orders steps between elements, of which a size of 1 makes two equal."""
    orders = ast.Lt | ast.LtE | ast.Gt | ast.GtE | ast.NotEq
    return isinstance(tree, ast.Compare) and len(tree.ops) == 1 and isinstance(tree.ops[0], orders)


def assumes(tree: ast.expr) -> bool:
    """`expression != 0`, `!= 1`, `> 1`, `>= 2`, `6 * expression > 6`: the exporter treats 0 and 1 as special in all.
    What a remainder is compared with stands in the model, but for the length of what is filled up to a multiple."""
    match tree:
        case ast.Compare(
            left=ast.BinOp(left=ast.Constant(value=1), op=ast.Mod()),
            ops=[ast.NotEq()],
            comparators=[ast.Constant(value=0)],
        ):  # the expression that divides is not 1
            return True
    if _is_remainder(tree):
        return False
    match tree:
        case ast.Compare(
            left=ast.BinOp(left=ast.Constant(value=int(factor)), op=ast.Mult()),
            ops=[ast.NotEq() | ast.Gt()],
            comparators=[ast.Constant(value=int(other))],
        ) if factor == other:  # a step between elements
            return True
        case ast.Compare(ops=[ast.NotEq() | ast.Gt()], comparators=[ast.Constant(value=0 | 1)]):
            return True
        case ast.Compare(left=ast.Constant(value=0 | 1), ops=[ast.NotEq() | ast.Lt()]):
            return True
        case ast.Compare(ops=[ast.GtE()], comparators=[ast.Constant(value=1 | 2)]):
            return True
        case ast.Compare(left=ast.Constant(value=1 | 2), ops=[ast.LtE()]):
            return True
    return False


def _period(guard: Guard) -> int:
    """The small number by which a remainder decides an equality or its opposite, as 48 in `length % 48 != 0` and 2 in
    `2 * (length // 2) != length`: it holds, or is broken, for all sizes of a remainder. 0 where none does."""
    found = holding(guard, {guard.symbols[0]: np.arange(1, SCANNED + 1)})
    period = next((one for one in range(1, DENSE + 1) if (found[one:] == found[:-one]).all()), 0)
    for rest in range(period):
        rule = re.sub(r"\bd0\b", f"({period} * d0 + {rest})", guard.rule)
        opposite = rule.replace("!=", "==") if "!=" in rule else rule.replace("==", "!=")
        if not is_implied(rule if found[2 * period + rest - 1] else opposite, (Dim(min=1),)):
            return 0
    return period


def _is_remainder(tree: ast.expr) -> bool:
    """Whether it is a remainder, up to factors and constants, or compares one."""
    match tree:
        case ast.Compare(left=left, comparators=others):
            return any(map(_is_remainder, (left, *others)))
        case ast.BinOp(op=ast.Mod()):
            return True
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            sides = [one for one in (left, right) if not isinstance(one, ast.Constant)]
            return bool(sides) and all(map(_is_remainder, sides))
        case ast.BinOp(left=left, right=right):
            return _is_remainder(left) or _is_remainder(right)
        case ast.UnaryOp(operand=operand):
            return _is_remainder(operand)
        case ast.Call(args=given):
            return any(map(_is_remainder, given))
        case ast.BoolOp(values=values):
            return any(map(_is_remainder, values))
    return False
