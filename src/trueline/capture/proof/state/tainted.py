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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.model.dispatch import OperatorMode
from trueline.capture.proof.state import picks

Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)


MOST_TOGETHER = 4
"""Decisions of one line that are turned together: of `a and b` Python evaluates the second where the first holds."""


class Decisions:
    """Those of one run; number `flip` is turned, and as many after it as are turned `together`."""

    def __init__(self, flip: int | None = None, together: int = 1) -> None:
        self.flip, self.together = flip, together
        self.lines: list[SourceLine | None] = []

    def take(self, result: bool) -> bool:
        self.lines.append(code_paths.current_line())
        turned = self.flip is not None and 0 <= len(self.lines) - 1 - self.flip < self.together
        return not result if turned else result

    def lose(self) -> None:
        """A text or a key is made of a number: what becomes of it is not seen."""

    def goes_on(self) -> bool:
        """Whether the line of the last one that was turned asked once more."""
        if self.flip is None or self.together == MOST_TOGETHER:
            return False
        last = self.flip + self.together
        return len(self.lines) > last and self.lines[last] == self.lines[last - 1]


def mark(value: Any, decisions: Decisions, within: Range = ANY) -> Any:
    """`value` as a number that notes decisions; what is no number is returned as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    marked = TaintedInt(value) if isinstance(value, int) else TaintedFloat(value)
    vars(marked).update(plain=plain_of(value), decisions=decisions, within=within)
    return marked


def plain_of(value: Any) -> Any:
    """Python's own number for a marked one; returns any other value unchanged."""
    if isinstance(value, TaintedInt | TaintedFloat):
        return vars(value)["plain"]
    return value


def _compute(function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    def compute(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, int | float | None) for other in others):
            return NotImplemented
        operands = [plain_of(self), *map(plain_of, others)]
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
        own, its = vars(self), plain_of(other)
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


class _LikeNumber(type):
    """Of a class that stands in for the one below its last base: all numbers of that are instances of it."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.__mro__[-2])

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.__mro__[-2])


class NotingInt(int, metaclass=_LikeNumber):
    """In place of `int` in the user's files: of a number that notes decisions it makes one that does, too."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return _cast(int, *args, **options)

    @classmethod
    def from_bytes(cls, *args: Any, **options: Any) -> Any:
        return _cast(int.from_bytes, *args, **options)


class NotingFloat(float, metaclass=_LikeNumber):
    """The same in place of `float`."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return _cast(float, *args, **options)


def _cast(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Of a number or text that notes decisions a number that does, too."""
    own = getattr(args[0], "__dict__", {}) if args else {}
    if "decisions" not in own:
        return function(*args, **options)
    return mark(function(own["plain"], *args[1:], **options), own["decisions"], own.get("within", ANY))


@contextmanager
def noting_casts(functions: Iterable[FunctionType]) -> Iterator[None]:
    """Within the block `int` and `float` in the files of these functions keep what notes decisions."""
    with ExitStack() as stack:
        for function in functions:
            names = function.__globals__
            for name, stand in (("int", NotingInt), ("float", NotingFloat)):
                if name in function.__code__.co_names and name not in names:
                    names[name] = stand
                    stack.callback(names.pop, name, None)
        yield


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


_LOST = "__hash__ __str__ __repr__ __format__ hex to_bytes as_integer_ratio"
"""Methods that make something else than a number."""


def _lose(name: str) -> Callable[..., Any]:
    def lose(self: Any, *given: Any, **named: Any) -> Any:
        vars(self)["decisions"].lose()
        return getattr(plain_of(self), name)(*given, **named)

    return lose


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
    for name in _LOST.split():
        if hasattr(kind, name):
            setattr(kind, name, _lose(name))
    kind.__bool__ = lambda self: bool(self != 0)
    kind.__reduce__ = lambda self: (type(plain_of(self)), (plain_of(self),))
    kind.__copy__ = kind.__deepcopy__ = lambda self, *_: plain_of(self)


_equip(TaintedInt)
_equip(TaintedFloat)


class TaintedDraws:
    """A generator of random numbers whose numbers note decisions; with `pick` one that draws that element."""

    def __init__(self, generator: Any, decisions: Decisions, pick: int | None = None) -> None:
        self._generator, self._decisions, self._pick = generator, decisions, pick

    def __getattr__(self, name: str) -> Any:
        held = getattr(self._generator, name)
        if self._pick is not None and name in picks.NAMES:
            return picks.pick(held, name, self._pick)
        return marking(held, self._decisions, name) if callable(held) else held


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
