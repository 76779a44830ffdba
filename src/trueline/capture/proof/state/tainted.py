"""Numbers that note each decision that depends on them, and take it the other way when told to.

To learn whether a count of calls changes an answer, waiting for call 1,234,567 is no way. The count is replaced by a
number that behaves as it does, notes each comparison, and in one run gives the opposite result of one of them. What is
computed from such a number is such a number too. A comparison that can have one result only (a draw from 0 to 1 with a
probability of 0) is left alone.
"""

import contextlib
import io
import math
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.model.dispatch import OperatorMode

Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)


class Decisions:
    """Those of one run; number `flip` is turned."""

    def __init__(self, flip: int | None = None) -> None:
        self.flip = flip
        self.lines: list[SourceLine | None] = []

    def take(self, result: bool) -> bool:
        self.lines.append(code_paths.current_line())
        return not result if len(self.lines) - 1 == self.flip else result


def mark(value: Any, decisions: Decisions, within: Range = ANY) -> Any:
    """`value` as a number that notes decisions; what is no number is returned as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    marked = TaintedInt(value) if isinstance(value, int) else TaintedFloat(value)
    vars(marked).update(plain=_plain(value), decisions=decisions, within=within)
    return marked


def _plain(value: Any) -> Any:
    if isinstance(value, TaintedInt | TaintedFloat):
        return vars(value)["plain"]
    return value


def _compute(function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    def compute(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, int | float | None) for other in others):
            return NotImplemented
        operands = [_plain(self), *map(_plain, others)]
        result = function(*(reversed(operands) if reflected else operands))
        within = _range_of(function, vars(self)["within"], operands) if not reflected else ANY
        decisions = vars(self)["decisions"]
        return tree_map(lambda one: mark(one, decisions, within), result)

    return compute


def _range_of(function: Callable[..., Any], within: Range, operands: list[Any]) -> Range:
    """Where the result is, of a number that is within a range."""
    low, high = within
    if len(operands) < 2 or not isinstance(operands[1], int | float):
        return ANY
    number, by = operands[:2]
    if function is operator.mod and by > 0:
        return 0, by - 1 if isinstance(number, int) and isinstance(by, int) else math.nextafter(by, 0)
    if function is operator.and_ and by >= 0:
        return 0, by
    if function in (operator.add, operator.sub) or (by > 0 and function in (operator.mul, operator.truediv)):
        return function(low, by), function(high, by)
    return ANY


def _compare(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def compare(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        own, its = vars(self), _plain(other)
        result = function(own["plain"], its)
        low, high = own["within"]
        points = [low, high, its, *((its - 1, its + 1) if isinstance(its, int) else (its - 1e-9, its + 1e-9))]
        open_both_ways = len({function(point, its) for point in points if low <= point <= high}) > 1
        return own["decisions"].take(result) if open_both_ways or function is operator.ne else result

    return compare


class TaintedInt(int):
    """A whole number that notes decisions."""


class TaintedFloat(float):
    """A fraction that notes decisions."""


class _LikeInt(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, int)


class NotingInt(int, metaclass=_LikeInt):
    """In place of `int` in the user's files: of a number that notes decisions it makes one that does, too."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        given = args[0] if len(args) == 1 else None
        if not isinstance(given, TaintedInt | TaintedFloat):
            return int(*args, **options)
        own = vars(given)
        return mark(int(own["plain"]), own["decisions"], own["within"])


_BINARY = "add sub mul truediv floordiv mod pow lshift rshift and or xor divmod"
_UNARY = "neg pos abs invert round floor ceil trunc"
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "and": operator.and_,
    "or": operator.or_,
    "divmod": divmod,
    "pow": pow,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
}


def _equip(kind: Any) -> None:
    """Gives a class of numbers the operators that note decisions."""
    for name in _BINARY.split():
        if hasattr(kind, f"__{name}__"):
            function = _FUNCTIONS.get(name) or getattr(operator, name)
            setattr(kind, f"__{name}__", _compute(function, reflected=False))
            setattr(kind, f"__r{name}__", _compute(function, reflected=True))
    for name in _UNARY.split():
        if hasattr(kind, f"__{name}__"):
            function = _FUNCTIONS.get(name) or getattr(operator, name)
            setattr(kind, f"__{name}__", _compute(function, reflected=False))
    for name in ("lt", "le", "eq", "ne", "gt", "ge"):
        setattr(kind, f"__{name}__", _compare(getattr(operator, name)))
    kind.__bool__ = lambda self: bool(self != 0)
    kind.__hash__ = lambda self: hash(_plain(self))
    kind.__reduce__ = lambda self: (type(_plain(self)), (_plain(self),))
    kind.__copy__ = kind.__deepcopy__ = lambda self, *_: _plain(self)


_equip(TaintedInt)
_equip(TaintedFloat)


class TaintedDraws:
    """A generator of random numbers whose numbers note decisions."""

    def __init__(self, generator: Any, decisions: Decisions) -> None:
        self._generator, self._decisions = generator, decisions

    def __getattr__(self, name: str) -> Any:
        held = getattr(self._generator, name)
        return marking(held, self._decisions, name) if callable(held) else held


class TaintedIterator:
    """An iterator whose numbers note decisions."""

    def __init__(self, iterator: Any, decisions: Decisions) -> None:
        self._iterator, self._decisions = iterator, decisions

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return mark(next(self._iterator), self._decisions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def marking(function: Callable[..., Any], decisions: Decisions, name: str) -> Callable[..., Any]:
    """`function` with a result that notes decisions, within the range of a draw of that name."""

    def call(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        item = result.item() if hasattr(result, "item") and getattr(result, "ndim", 1) == 0 else result
        within: Range = ANY
        if name in ("random", "rand", "random_sample"):
            within = 0.0, math.nextafter(1.0, 0.0)
        elif name in ("uniform", "randint") and len(args) == 2:
            within = args[0], args[1]
        return tree_map(lambda one: mark(one, decisions, within), item)

    return call


class TaintWatch(OperatorMode):  # type: ignore[no-untyped-call]
    """Follows tensors through torch's operators; notes each truth value and each number that is taken from them."""

    def __init__(self, tensor: torch.Tensor, decisions: Decisions) -> None:
        super().__init__()
        self._followed = {id(tensor): tensor}
        self._decisions = decisions

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        followed = any(id(leaf) in self._followed for leaf in tree_leaves((args, kwargs)))
        if not followed:
            return result
        if func is torch.ops.aten._local_scalar_dense.default:
            if isinstance(result, bool):
                return result  # it was turned where it was computed
            taken = self._decisions.take(bool(result))
            return result if taken == bool(result) else type(result)(taken)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._followed[id(leaf)] = leaf
        if isinstance(result, torch.Tensor) and result.dtype == torch.bool:
            turned = not self._decisions.take(True)
            if turned:
                result = result.logical_not()
                self._followed[id(result)] = result
        return result


@contextmanager
def quietly() -> Iterator[None]:
    """What a model prints when its decisions are turned is not shown."""
    nowhere = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        warnings.simplefilter("ignore")
        yield
