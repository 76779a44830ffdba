"""Whether sizes exist that break a guard, however far out: boxes of sizes, halved until interval arithmetic decides.

A box is a range of each symbol. Whole expressions are polynomials in the symbols and in remainders, so that what is
equal cancels (`n - n // 4 * 4` is the remainder that `n % 4` is, too); the range of a polynomial follows from what each
symbol has above its least. Other functions of a size are taken as ranges. What a number of boxes does not decide stays
undecided: a guard that may break is kept. Source: Moore, Kearfott and Cloud, Introduction to Interval Analysis (2009).
Pure.
"""

import ast
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

from trueline.bundle.guards import read
from trueline.bundle.signature import Dim

END = 1 << 40
"""Larger sizes are not searched: no tensor has them."""
BOXES = 600
"""Boxes that are looked at before a guard counts as undecided."""
TERMS = 40
ROUNDING = 1e-12
"""What floats may lose on the way, relative to a number: more than a thousand times the machine's own."""

Box = tuple[tuple[int, int], ...]
"""For each of d0, d1, ... the least and the most number of its steps."""
Poly = dict[tuple[str, ...], Fraction]
Exact = Callable[..., bool]
"""A condition on sizes, computed."""


class Undecided(Exception):
    """The boxes did not suffice."""


@dataclass(frozen=True, slots=True)
class _Number:
    """The range of an expression in a box, and the polynomial that it is, if any."""

    low: float
    high: float
    poly: Poly | None = None


_ANY = _Number(-math.inf, math.inf)


@dataclass(slots=True)
class _Ranges:
    """The expressions of one box."""

    symbols: Mapping[str, tuple[int, int]]
    """In steps."""
    steps: Mapping[str, int]
    atoms: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Remainders and other whole numbers that are no polynomial: name -> range."""

    def read(self, node: ast.expr) -> _Number:
        match node:
            case ast.Constant(value=int(number)):
                return _Number(number, number, {(): Fraction(number)})
            case ast.Constant(value=float(number)):
                return _Number(number, number)
            case ast.Name(id=name) if name in self.symbols:
                (low, high), step = self.symbols[name], self.steps[name]
                return _Number(low * step, high * step, {(name,): Fraction(step)})
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._times(self.read(operand), _Number(-1, -1, {(): Fraction(-1)}))
            case ast.BinOp(left=left, op=op, right=right):
                return self._operate(self.read(left), op, self.read(right), ast.unparse(node))
            case ast.Call(func=called, args=given, keywords=[]):
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                return self._call(name, [self.read(one) for one in given], ast.unparse(node))
        return _ANY

    def _operate(self, one: _Number, op: ast.operator, other: _Number, text: str) -> _Number:
        match op:
            case ast.Add():
                return self._plus(one, other)
            case ast.Sub():
                return self._plus(one, self._times(other, _Number(-1, -1, {(): Fraction(-1)})))
            case ast.Mult():
                return self._times(one, other)
            case ast.FloorDiv() | ast.Mod() if one.poly is not None and other.poly is not None and other.low > 0:
                return self._divide(one, op, other, text)
            case ast.Div() if other.low > 0:
                ends = [a / b for a in (one.low, one.high) for b in (other.low, other.high) if math.isfinite(a)]
                return _ANY if len(ends) < 4 else _round_outward(min(ends), max(ends))
            case ast.Pow() if one.poly is not None and other.low == other.high and other.low in (2, 3, 4):
                return functools.reduce(self._times, [one] * int(other.low))
            case ast.Pow() if one.low >= 0 and other.low == other.high and other.low >= 0:
                return _apply(lambda base: base**other.low, one)
        return _ANY

    def _plus(self, one: _Number, other: _Number) -> _Number:
        if one.poly is None or other.poly is None:
            return _round_outward(one.low + other.low, one.high + other.high)
        found = dict(one.poly)
        for term, factor in other.poly.items():
            found[term] = found.get(term, Fraction(0)) + factor
        return self._of(found, _Number(one.low + other.low, one.high + other.high))

    def _times(self, one: _Number, other: _Number) -> _Number:
        ends = [_product(a, b) for a in (one.low, one.high) for b in (other.low, other.high)]
        if one.poly is None or other.poly is None:
            return _round_outward(min(ends), max(ends))
        found: Poly = {}
        for (first, a), (second, b) in itertools.product(one.poly.items(), other.poly.items()):
            term = tuple(sorted((*first, *second)))
            found[term] = found.get(term, Fraction(0)) + a * b
        return self._of(found, _Number(min(ends), max(ends)))

    def _divide(self, one: _Number, op: ast.operator, by: _Number, text: str) -> _Number:
        """A whole quotient is what is divided less the remainder, divided: remainders have a range of their own."""
        assert one.poly is not None
        if by.low != by.high:
            if one.low >= 0 and one.high < by.low:
                return _Number(0, 0, {}) if isinstance(op, ast.FloorDiv) else one
            if isinstance(op, ast.Mod):
                return self._atom(text, 0, by.high - 1)
            ends = [_quotient(a, int(b)) for a in (one.low, one.high) for b in (by.low, by.high) if math.isfinite(b)]
            return self._atom(text, min(0, *ends), max(0, *ends))
        step = int(by.low)
        left = self._remain(one.poly, step)
        if isinstance(op, ast.Mod):
            return left
        few, many = _quotient(one.low, step), _quotient(one.high, step)
        if few == many and math.isfinite(few):
            return _Number(few, few, {(): Fraction(int(few))})
        rest = self._plus(one, self._times(left, _Number(-1, -1, {(): Fraction(-1)})))
        whole = self._times(rest, _Number(1 / step, 1 / step, {(): Fraction(1, step)}))
        return _Number(max(whole.low, few), min(whole.high, many), whole.poly)

    def _remain(self, poly: Poly, step: int) -> _Number:
        """What is left of `poly`, a whole number, over multiples of `step`; a term that is one leaves nothing."""
        part = {term: factor for term, factor in poly.items() if factor % step}
        one = self._of(part, _ANY)
        few, many = _quotient(one.low, step), _quotient(one.high, step)
        if few == many and math.isfinite(few):
            return self._plus(one, _Number(-step * few, -step * few, {(): Fraction(-step * int(few))}))
        return self._atom(f"{sorted(part.items())} % {step}", 0, step - 1)

    def _call(self, name: str, given: list[_Number], text: str) -> _Number:
        if name in ("max", "sym_max", "min", "sym_min") and len(given) > 1:
            greatest, first = name.endswith("max"), given[0]
            for other in given[1:]:
                first = self._choose(first, other, text, greatest=greatest)
            return first
        if len(given) != 1:
            return _ANY
        (one,) = given
        if name in ("abs", "fabs"):
            if one.low >= 0:
                return one
            minus = self._times(one, _Number(-1, -1, {(): Fraction(-1)}))
            return minus if one.high <= 0 else self._like(one, text, 0, max(-one.low, one.high))
        if name in ("float", "sym_float") or (name in _ROUND and one.poly is not None):
            return one
        if name in _ROUND:
            ends = _apply(_ROUND[name], one, exact=True)
            whole = ends.low == ends.high and math.isfinite(ends.low)
            return (
                _Number(ends.low, ends.high, {(): Fraction(int(ends.low))})
                if whole
                else self._atom(text, ends.low, ends.high)
            )
        return _apply(_RISING[name], one) if name in _RISING else _ANY

    def _choose(self, one: _Number, other: _Number, text: str, *, greatest: bool) -> _Number:
        difference = self._plus(one, self._times(other, _Number(-1, -1, {(): Fraction(-1)})))
        if difference.low >= 0:
            return one if greatest else other
        if difference.high <= 0:
            return other if greatest else one
        pick = max if greatest else min
        both = one if one.poly is not None else other
        return self._like(both, text, pick(one.low, other.low), pick(one.high, other.high))

    def _like(self, one: _Number, text: str, low: float, high: float) -> _Number:
        return _Number(low, high) if one.poly is None else self._atom(text, low, high)

    def _atom(self, text: str, low: float, high: float) -> _Number:
        name = f"({text})"
        self.atoms[name] = (low, high)
        return _Number(low, high, {(name,): Fraction(1)})

    def _of(self, poly: Poly, about: _Number) -> _Number:
        """The polynomial with the narrower of its own range and that of its parts."""
        found = {term: factor for term, factor in poly.items() if factor}
        if len(found) > TERMS:
            return _round_outward(about.low, about.high)
        low, high = self._range(found)
        less, more = math.nextafter(about.low, -math.inf), math.nextafter(about.high, math.inf)
        return _Number(max(low, less), min(high, more), found)

    def _range(self, poly: Poly) -> tuple[float, float]:
        """Of what each symbol has above its least: a term with a factor above 0 is least where it is 0."""
        above: Poly = {}
        spans = {**self.symbols, **self.atoms}
        if not all(math.isfinite(spans[name][0]) for term in poly for name in term):
            return -math.inf, math.inf
        for term, factor in poly.items():
            parts = [{(): Fraction(int(spans[name][0])), (name,): Fraction(1)} for name in term]
            product: Poly = {(): factor}
            for part in parts:
                product = _multiply(product, part)
            for inner, times in product.items():
                above[inner] = above.get(inner, Fraction(0)) + times
        low: float | Fraction = above.pop((), Fraction(0))
        high = low
        for term, factor in above.items():
            wide = [spans[name][1] - spans[name][0] for name in term]
            ends = all(map(math.isfinite, wide))
            most = math.prod(map(Fraction, wide)) * factor if ends else math.copysign(math.inf, factor)
            low, high = low + min(0, most), high + max(0, most)
        return _outside(low, -math.inf), _outside(high, math.inf)


_ROUND: Mapping[str, Callable[[float], float]] = {
    "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "int": math.trunc, "sym_int": math.trunc,
    "round": round,
}  # fmt: skip
_RISING: Mapping[str, Callable[[float], float]] = {
    "sqrt": math.sqrt, "_sym_sqrt": math.sqrt, "log2": math.log2, "_sym_log2": math.log2, "log": math.log,
    "atan": math.atan, "_sym_atan": math.atan, "tanh": math.tanh, "_sym_tanh": math.tanh,
}  # fmt: skip


def _multiply(one: Poly, other: Poly) -> Poly:
    found: Poly = {}
    for (first, a), (second, b) in itertools.product(one.items(), other.items()):
        term = tuple(sorted((*first, *second)))
        found[term] = found.get(term, Fraction(0)) + a * b
    return found


def _product(one: float, other: float) -> float:
    return 0.0 if not one or not other else one * other


def _quotient(number: float, by: int) -> float:
    return math.floor(number) // by if math.isfinite(number) else number


def _outside(number: float | Fraction, way: float) -> float:
    """The float that `number` is, or the next one on the `way`."""
    near = float(number)
    return near if near == number else math.nextafter(near, way)


def _round_outward(low: float, high: float) -> _Number:
    return _Number(low - abs(low) * ROUNDING - ROUNDING, high + abs(high) * ROUNDING + ROUNDING)


def _apply(function: Callable[[float], float], one: _Number, *, exact: bool = False) -> _Number:
    """A function that never falls, at both ends."""
    try:
        low, high = function(one.low), function(one.high)
    except (ArithmeticError, ValueError):
        return _ANY
    return _Number(low, high) if exact else _round_outward(low, high)


def _decide(tree: ast.expr, ranges: _Ranges) -> bool | None:
    """Whether a condition holds all over a box; None where it may do both."""
    match tree:
        case ast.BoolOp(op=op, values=values):
            found = [_decide(one, ranges) for one in values]
            ends = isinstance(op, ast.Or)
            return ends if ends in found else None if None in found else not ends
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _decide(operand, ranges)
            return None if inner is None else not inner
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            one, other = ranges.read(left), ranges.read(right)
            less = ranges._plus(one, ranges._times(other, _Number(-1, -1, {(): Fraction(-1)})))
            return _decide_sign(op, less)
    return None


def _decide_sign(op: ast.cmpop, less: _Number) -> bool | None:
    match op:
        case ast.Lt():
            return True if less.high < 0 else False if less.low >= 0 else None
        case ast.LtE():
            return True if less.high <= 0 else False if less.low > 0 else None
        case ast.Gt():
            return True if less.low > 0 else False if less.high <= 0 else None
        case ast.GtE():
            return True if less.low >= 0 else False if less.high < 0 else None
        case ast.Eq() | ast.NotEq():
            apart = less.low > 0 or less.high < 0
            same = less.low == less.high == 0
            return isinstance(op, ast.NotEq) if apart else isinstance(op, ast.Eq) if same else None
    return None


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on d0, d1, ...: its tree, and what computes it for sizes."""

    tree: ast.expr
    exact: Exact


@cache
def as_condition(rule: str) -> Condition:
    """Of a guard's rule. A division by zero breaks it."""
    holds = read(rule)

    def exact(*sizes: int) -> bool:
        try:
            return bool(holds(sizes))
        except ZeroDivisionError:
            return False

    return Condition(ast.parse(rule, mode="eval").body, exact)


@cache
def is_implied(rule: str, dims: tuple[Dim, ...], among: tuple[str, ...] = ()) -> bool:
    """Whether it is certain that no sizes in `dims` that keep all of `among` break `rule`. All have d0, d1, ... for the
    same symbols."""
    try:
        return next(search(as_condition(rule), dims, [as_condition(one) for one in among]), None) is None
    except Undecided:
        return False


def find_broken(rule: str, dims: tuple[Dim, ...]) -> tuple[int, ...] | None:
    """The first sizes in `dims` that break `rule`; None where none are found."""
    try:
        box = next(search(as_condition(rule), dims), None)
    except Undecided:
        return None
    return None if box is None else tuple(low * dim.multiple_of for (low, _), dim in zip(box, dims, strict=True))


def search(
    condition: Condition, dims: Sequence[Dim], among: Sequence[Condition] = (), *, boxes: int = BOXES
) -> Iterator[Box]:
    """Boxes of sizes, small ones first, in `dims` and where all of `among` hold, all over which `condition` is broken.
    Raises Undecided where `boxes` do not suffice."""
    steps = [dim.multiple_of for dim in dims]
    ends = [END if dim.max is None else dim.max for dim in dims]
    waiting: list[Box] = [
        tuple((-(-dim.min // step), end // step) for dim, step, end in zip(dims, steps, ends, strict=True))
    ]
    while waiting:
        box = waiting.pop()
        if any(low > high for low, high in box):
            continue
        boxes -= 1
        if boxes < 0:
            raise Undecided
        if all(low == high for low, high in box):
            one = [low * step for (low, _), step in zip(box, steps, strict=True)]
            if not condition.exact(*one) and all(other.exact(*one) for other in among):
                yield box
            continue

        def ranges(box: Box = box) -> _Ranges:
            return _Ranges(
                {f"d{at}": one for at, one in enumerate(box)}, {f"d{at}": one for at, one in enumerate(steps)}
            )

        holds = _decide(condition.tree, ranges())
        inside = None if holds is True else _decide_all(among, ranges)
        if holds is False and inside is True:
            yield box
        elif holds is not True and inside is not False:
            waiting += reversed(_halve(box))


def _decide_all(conditions: Sequence[Condition], ranges: Callable[[], _Ranges]) -> bool | None:
    """Whether all hold all over a box, or one of them nowhere; None where neither is known."""
    unknown = False
    for one in conditions:
        holds = _decide(one.tree, ranges())
        if holds is False:
            return False
        unknown = unknown or holds is None
    return None if unknown else True


def _halve(box: Box) -> tuple[Box, Box]:
    """Two boxes, parted where the sizes of one symbol differ most."""
    at = max(range(len(box)), key=lambda place: (box[place][1] + 1) / (box[place][0] + 1))
    low, high = box[at]
    middle = math.isqrt(max(1, low) * high) if high > 8 * low else (low + high) // 2
    middle = min(max(middle, low), high - 1)
    return (*box[:at], (low, middle), *box[at + 1 :]), (*box[:at], (middle + 1, high), *box[at + 1 :])
