"""What tells a guard that the exporter assumes from one with a reason: it treats 0 and 1 as special in every
expression. Pure.
"""

import ast
import re

import numpy as np

from trueline.bundle.guards import Guard
from trueline.bundle.signature import Dim
from trueline.capture.export.guard_changes import SCANNED, SMALL, breaks_at_one_only, breaks_when_small, holding
from trueline.capture.export.guard_search import Undecided, as_condition, is_implied, search

DENSE = 256
"""Smaller sizes are tried one by one."""
HOLES = 8
"""At most this many sizes that a guard leaves out are tried one by one."""
NEAR = 1024
"""The largest of them."""


def comparison(guard: Guard) -> ast.cmpop | None:
    tree = ast.parse(guard.rule, mode="eval").body
    return tree.ops[0] if isinstance(tree, ast.Compare) and len(tree.ops) == 1 else None


def may_be_tried(guard: Guard, dim: Dim) -> bool:
    """Whether probes try what a guard of one symbol leaves out: few near sizes, or those of a remainder, of which some
    are tried over the whole range of probes."""
    if _is_periodic(guard):
        return True
    count = 0
    try:
        for ((low, high),) in search(as_condition(guard.rule), [dim]):
            count += high - low + 1
            if count > HOLES or high * dim.multiple_of > NEAR:
                return False
    except Undecided:
        return False
    return True


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


def _is_periodic(guard: Guard) -> bool:
    """Whether an inequality follows from the remainder by a small number, as `length % 48 != 0` does, and
    `2 * (length // 2) != length`: it holds, or is broken, for all sizes of a remainder."""
    found = holding(guard, {guard.symbols[0]: np.arange(1, SCANNED + 1)})
    period = next((one for one in range(1, DENSE + 1) if (found[one:] == found[:-one]).all()), 0)
    for rest in range(period):
        rule = re.sub(r"\bd0\b", f"({period} * d0 + {rest})", guard.rule)
        holds = found[2 * period + rest - 1]
        if not is_implied(rule if holds else rule.replace("!=", "=="), (Dim(min=1),)):
            return False
    return period > 0


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
