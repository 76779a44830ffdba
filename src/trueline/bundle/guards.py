"""Guards: conditions between the sizes of one request, beyond the range of each. Pure.

A guard is a comparison in integer arithmetic, `2 * length == x.1` or `batch % 4 != 0`. It has two forms: `text` for
people, with the symbols' own names, and `rule`, the same with `d0`, `d1`, ... for the symbols in `symbols` (`x.1` is no
name in Python). Python's parser reads a rule; only listed nodes may occur in it, and they become function calls: it is
never evaluated as code.
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import msgspec

Sizes = Sequence[int]
Term = Callable[[Sizes], int]

MAX_CHARS = 1000
"""A longer rule is an error: no useful guard of torch.export is that long."""

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
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
        """Whether the sizes by symbol satisfy it. A division by zero does not."""
        try:
            return bool(read(self.rule)([sizes[symbol] for symbol in self.symbols]))
        except ZeroDivisionError:
            return False


@cache
def read(rule: str) -> Term:
    """`rule` as a function of the sizes. Raises ValueError that names what is not allowed.

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
    """Raises ValueError if the rule cannot be read or has a symbol that is not in `known`."""
    read(guard.rule)
    names = [node.id for node in ast.walk(ast.parse(guard.rule)) if isinstance(node, ast.Name)]
    highest = max((place(name) for name in names if name not in _MIN_MAX), default=-1)
    unknown = [symbol for symbol in guard.symbols if symbol not in known]
    if unknown or highest >= len(guard.symbols):
        raise ValueError(f"guard {guard.text!r} has {unknown or f'd{highest}'}, which is no symbol")


def place(name: str) -> int:
    """The index of `d3` in the symbols."""
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
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            test, a, b = _COMPARISONS[type(op)], _term(left, rule), _term(right, rule)
            return lambda sizes: test(a(sizes), b(sizes))
        case ast.BoolOp(op=op, values=values):
            parts, decide = [_term(value, rule) for value in values], all if isinstance(op, ast.And) else any
            return lambda sizes: decide(part(sizes) for part in parts)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _MIN_MAX and len(args) > 1:
            choose, terms = _MIN_MAX[name], [_term(arg, rule) for arg in args]
            return lambda sizes: choose(term(sizes) for term in terms)
    raise ValueError(f"a guard may not hold {ast.unparse(node)[:60]!r}: {rule[:200]!r}")
