"""Guards: what must hold between the sizes of one request, beyond the range of each.

A guard is a comparison in integer arithmetic, `2 * length == x.1` or `batch % 4 != 0`. It travels in two forms: `text`
for people, with the symbols' own names, and `rule`, the same with `d0`, `d1`, ... for the symbols in `symbols` (a name
such as `x.1` is none in any grammar). A rule is read with Python's parser and held against a list of what may stand in
it; it is turned into plain function calls and never evaluated as code. Pure and torch-free.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import msgspec

Sizes = Sequence[int]
Term = Callable[[Sizes], int]

MAX_CHARS = 1000
"""A longer rule is not read: no guard that torch.export finds and that says something is as long."""

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_MIN_MAX: dict[str, Callable[..., int]] = {"min": min, "max": max}


class Guard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A relation between sizes that the program needs.

    >>> Guard(text="2 * length == x.1", rule="2 * d0 == d1", symbols=("length", "x.1")).holds({"length": 3, "x.1": 6})
    True
    """

    text: str
    rule: str
    symbols: tuple[str, ...]

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the sizes by symbol keep it. A division by zero keeps nothing."""
        try:
            return bool(read(self.rule)([sizes[symbol] for symbol in self.symbols]))
        except ZeroDivisionError:
            return False


@cache
def read(rule: str) -> Term:
    """The function of the sizes that `rule` stands for. Raises ValueError that names what it may not hold.

    >>> read("d0 % 4 == 0")([8])
    True
    """
    if len(rule) > MAX_CHARS:
        raise ValueError(f"a guard of {len(rule)} characters is longer than {MAX_CHARS}: {rule[:60]!r}…")
    try:
        tree = ast.parse(rule, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{rule!r} is no guard: {error}") from error
    if not isinstance(tree, ast.Compare | ast.BoolOp):
        raise ValueError(f"{rule!r} is no guard: it compares nothing")
    return _term(tree, rule)


def check(guard: Guard, known: Mapping[str, object]) -> None:
    """Raises ValueError when the rule cannot be read or speaks of a symbol that is not in `known`."""
    read(guard.rule)
    highest = max((place(node.id) for node in ast.walk(ast.parse(guard.rule)) if _is_symbol(node)), default=-1)
    strange = [symbol for symbol in guard.symbols if symbol not in known]
    if strange or highest >= len(guard.symbols):
        raise ValueError(f"guard {guard.text!r} speaks of {strange or f'd{highest}'}, which is no symbol")


def _is_symbol(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id not in _MIN_MAX


def place(name: str) -> int:
    """Which symbol `d3` stands for."""
    if name[:1] != "d" or not name[1:].isdecimal():
        raise ValueError(f"{name!r} is no symbol of a guard")
    return int(name[1:])


def _term(node: ast.expr, rule: str) -> Term:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool) and abs(number) < 2**63:
            return lambda sizes: number
        case ast.Name(id=name):
            return operator.itemgetter(place(name))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _term(operand, rule)
            return lambda sizes: -inner(sizes)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            apply, a, b = _ARITHMETIC[type(op)], _term(left, rule), _term(right, rule)
            return lambda sizes: apply(a(sizes), b(sizes))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            test, a, b = _COMPARED[type(op)], _term(left, rule), _term(right, rule)
            return lambda sizes: test(a(sizes), b(sizes))
        case ast.BoolOp(op=op, values=values):
            parts, decide = [_term(value, rule) for value in values], all if isinstance(op, ast.And) else any
            return lambda sizes: decide(part(sizes) for part in parts)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _MIN_MAX and len(args) > 1:
            choose, terms = _MIN_MAX[name], [_term(arg, rule) for arg in args]
            return lambda sizes: choose(term(sizes) for term in terms)
    raise ValueError(f"a guard may not hold {ast.unparse(node)[:60]!r}: {rule[:200]!r}")
