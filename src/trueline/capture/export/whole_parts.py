"""Sums, products and roundings of sizes and fractions as whole numbers over a whole number, with what rounding may err.

    round(0.7 * height) != width      |(14 * height + 10) // 20 - width| > 1

A rule in whole numbers is the same for every reader of a bundle. Pure.
"""

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from trueline.bundle.guards import Guard

PARTS = 10_000
"""Denominators of the numbers that code has: 0.0625, 1.3333333333333333."""


@dataclass(frozen=True, slots=True)
class Quotient:
    """A whole number `above`, over `below` and the sizes `sizes`. Computed in floats it differs by `error` at most, and
    by what floats lose if it is not `exact`."""

    above: ast.expr
    below: int = 1
    error: int = 0
    exact: bool = True
    sizes: tuple[ast.expr, ...] = ()

    def times(self, other: "Quotient") -> ast.expr:
        """`above` times what `other` is divided by."""
        above = _scale(self.above, other.below)
        for size in other.sizes:
            above = ast.BinOp(above, ast.Mult(), size)
        return above


def keep_apart(one: ast.expr, other: ast.expr, symbols: Sequence[str]) -> Guard | None:
    """A guard that leaves out all sizes, up to 2**40, for which `one` and `other` may be equal, and perhaps some more;
    None for parts that are no such quotients."""
    first, second = _read(one), _read(other)
    if first is None or second is None:
        return None
    left, right = first.times(second), second.times(first)
    slack = (first.error + second.error) * first.below * second.below
    if slack and (first.sizes or second.sizes):
        return None
    if not slack:
        tree = ast.Compare(left, [ast.NotEq()], [right])
    else:
        apart = ast.Call(ast.Name("max", ast.Load()), [_minus(left, right), _minus(right, left)], [])
        tree = ast.Compare(apart, [ast.Gt()], [ast.Constant(slack)])
    rule = ast.unparse(ast.fix_missing_locations(tree))
    text = re.sub(r"\bd(\d+)\b", lambda match: symbols[int(match[1])], rule)
    return Guard(text=text, rule=rule, symbols=tuple(symbols))


def _read(node: ast.expr) -> Quotient | None:
    match node:
        case ast.Constant(value=int()) | ast.Name():
            return Quotient(node)
        case ast.Constant(value=float(number)):
            return _read_number(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _read(operand)
            return inner and replace(inner, above=ast.UnaryOp(ast.USub(), inner.above))
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _read(left), _read(right)
            return None if one is None or other is None else _combine(one, op, other)
        case ast.Call(func=called, args=given, keywords=[]):
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            all_read = [inner for one in given if (inner := _read(one)) is not None]
            if len(all_read) < len(given):
                return None
            return _round(name, all_read[0]) if len(given) == 1 else _choose(name.removeprefix("sym_"), all_read)
    return None


def _choose(name: str, given: Sequence[Quotient]) -> Quotient | None:
    """The largest or the smallest, over what all are divided by."""
    if name not in ("max", "min") or any(one.sizes for one in given):
        return None
    below = math.prod(one.below for one in given)
    above = ast.Call(ast.Name(name, ast.Load()), [_scale(one.above, below // one.below) for one in given], [])
    return Quotient(above, below, max(one.error for one in given), all(one.exact for one in given))


def _read_number(number: float) -> Quotient | None:
    near = Fraction(number).limit_denominator(PARTS)
    exact = near == Fraction(number)
    return Quotient(ast.Constant(near.numerator), near.denominator, exact=exact) if float(near) == number else None


def _combine(one: Quotient, op: ast.operator, other: Quotient) -> Quotient | None:
    exact = one.exact and other.exact
    match op:
        case ast.Add() | ast.Sub():
            above = ast.BinOp(one.times(other), op, other.times(one))
            sizes, error = one.sizes + other.sizes, one.error + other.error
            return None if error and sizes else Quotient(above, one.below * other.below, error, exact, sizes)
        case ast.Mult() if not one.error and not other.error:
            above = ast.BinOp(one.above, ast.Mult(), other.above)
            return Quotient(above, one.below * other.below, 0, exact, one.sizes + other.sizes)
        case ast.Div() if not one.error and not other.sizes:
            match other.above:
                case ast.Constant(value=int(number)) if number > 0:
                    more = _scale(one.above, other.below)
                    return Quotient(more, one.below * number, 0, exact=False, sizes=one.sizes)
                case ast.Name() if not other.error:  # a size is never below 1; what else divides may be
                    more = _scale(one.above, other.below)
                    return Quotient(more, one.below, 0, exact=False, sizes=(*one.sizes, other.above))
        case ast.FloorDiv() | ast.Mod() if one.below == other.below == 1 and not (
            one.error or other.error or one.sizes or other.sizes
        ):
            return Quotient(ast.BinOp(one.above, op, other.above), 1, 0, exact)
    return None


def _round(name: str, given: Quotient) -> Quotient | None:
    """A whole number; what floats lose before it is rounded may make it another one."""
    if name in ("sym_float", "float"):
        return given
    if name == "abs":
        return _choose("max", [given, replace(given, above=ast.UnaryOp(ast.USub(), given.above))])
    if given.sizes or name not in ("floor", "ceil", "trunc", "int", "sym_int", "round"):
        return None
    above, below = given.above, given.below
    if below == 1 and given.exact:
        return Quotient(above, 1, given.error)
    if name == "round":
        twice = ast.BinOp(_scale(above, 2), ast.Add(), ast.Constant(below))
        return Quotient(_divide(twice, 2 * below), 1, given.error + 1)  # a half goes to an even number
    if name == "ceil":
        return Quotient(ast.UnaryOp(ast.USub(), _divide(ast.UnaryOp(ast.USub(), above), below)), 1,
                        given.error + (not given.exact))  # fmt: skip
    downwards = name == "floor" and given.exact  # towards zero it may be one more
    return Quotient(_divide(above, below), 1, given.error + (not downwards))


def _divide(above: ast.expr, below: int) -> ast.expr:
    return ast.BinOp(above, ast.FloorDiv(), ast.Constant(below))


def _scale(above: ast.expr, by: int) -> ast.expr:
    return above if by == 1 else ast.BinOp(ast.Constant(by), ast.Mult(), above)


def _minus(one: ast.expr, other: ast.expr) -> ast.expr:
    return ast.BinOp(one, ast.Sub(), other)
