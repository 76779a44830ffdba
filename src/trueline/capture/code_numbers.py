"""Whole numbers with which the user's code may compare a size: those that it holds, and those that it computes.

Sizes around them are tried where no guard tells what the code does with a size. A number may be written nowhere:
`len(rows) % (self.window * self.stride)`, `n > int(math.sqrt(budget))`. So the expressions of the functions that ran
are computed again from the plain numbers in their names and attributes, as these are when the function returns.
"""

import ast
import itertools
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from trueline.bundle.signature import Signature
from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import Event
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.syntax import nodes_of
from trueline.capture.proof.far_sizes import FIRST, LARGEST

NUMBERS = 12
"""Numbers that the user's code holds, around which sizes are tried; as many that it computes."""
LEAST_NUMBER = 10
"""Sizes up to this one are probed anyway."""
SHORT = 16
"""Characters of a text that may be a key of sizes."""
MOST_BITS = 256
"""Of a number that is computed: a power may have no end."""


def numbers_of(eager: EagerSession, ways: Iterable[Sequence[Event]]) -> list[int]:
    """The numbers, the most likely first: in the code that ran, in the globals that it names, in the attributes of the
    user's modules and their classes, the lengths of tables, and what is computed of these."""
    module = eager.module
    codes = dict.fromkeys(code for way in ways for code in dict.fromkeys(code for _, code, _ in way))
    functions = list(code_paths.users_functions(module))
    codes |= dict.fromkeys(function.__code__ for function in functions)
    found = [number for code in codes for number in _numbers(_constants(code))]
    for function in functions:
        named = [function.__globals__.get(name) for name in function.__code__.co_names]
        found += _numbers(value for value in named if not isinstance(value, FunctionType))
    for part in module.modules():
        if code_paths.forward_of(part) is not None:
            holders = [
                vars(part),
                *(vars(kind) for kind in type(part).__mro__ if kind.__module__.split(".")[0] != "torch"),
            ]
            found += _numbers(value for one in holders for name, value in one.items() if not name.startswith("_"))
    tensors = (*module.parameters(), *module.buffers())
    found += [size for tensor in tensors if not torch.nn.parameter.is_lazy(tensor) for size in tensor.shape[:1]]
    held = _choose(found)
    return list(dict.fromkeys((*held, *_choose(_compute_numbers(eager)))))


def _choose(found: Iterable[int]) -> list[int]:
    return [number for number in dict.fromkeys(found) if LEAST_NUMBER < number <= LARGEST][:NUMBERS]


def tables_of(module: torch.nn.Module) -> list[int]:
    """Rows of embeddings, and the first sizes of parameters and buffers that the user's own modules keep: what a length
    may count."""
    tensors = [part.weight for part in module.modules() if isinstance(part, torch.nn.Embedding)]
    for part in module.modules():
        if code_paths.forward_of(part) is not None:
            tensors += [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    sizes = [size for one in tensors if not torch.nn.parameter.is_lazy(one) for size in one.shape[:-1][:2]]
    return sorted({size for size in sizes if FIRST // 4 < size <= LARGEST})


def divide_numbers(numbers: Sequence[int], claim: Signature) -> Iterator[int]:
    """The sizes at which a count of elements is a number of the code, 300 records of 5 are 1,500, and those below."""
    fixed = [[size for size in spec.shape if isinstance(size, int)] for spec in (*claim.inputs, *claim.outputs)]
    units = {2, 3, 4, *(size for sizes in fixed for size in sizes), *map(math.prod, fixed)} - {0, 1}
    for number, unit, step in itertools.product(numbers, units, (0, -1, 1)):
        size, rest = divmod(number + step, unit)
        yield from () if rest else (size - 1, size)


def _constants(code: CodeType) -> Iterator[Any]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        else:
            yield constant


def _numbers(values: Iterable[Any], *, depth: int = 2) -> Iterator[int]:
    """Whole numbers among `values`, those in short texts (`"33x64"`), and inside of plain collections, with their
    lengths; a table by pairs of sizes has them one level deeper."""
    for value in values:
        if type(value) is int:
            yield value
        elif isinstance(value, float) and value.is_integer():
            yield int(value)
        elif isinstance(value, str) and len(value) <= SHORT:
            yield from map(int, re.findall("[0-9]+", value))
        elif depth and type(value) in (list, tuple, dict, set, frozenset, range):
            yield len(value)
            yield from _numbers(list(value)[:NUMBERS], depth=depth - 1)


def _compute_numbers(eager: EagerSession) -> list[int]:
    """What the expressions of the user's functions are in a call with the example."""
    found: dict[int, None] = {}
    sizes = {size for tensor in eager.example.values() for size in tensor.shape}
    done = set[CodeType]()

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        if not code_paths.is_users(frame.f_code.co_filename) or frame.f_code in done:
            return None
        frame.f_trace_lines = False
        return leave

    def leave(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return" and frame.f_code not in done:
            done.add(frame.f_code)
            found.update(dict.fromkeys(_whole(_Expressions(frame).compute_all())))
        return leave

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        eager.run(eager.example)
    finally:
        sys.settrace(before)
    return [number for number in found if number not in sizes]


def _whole(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if type(value) is int or (type(value) is float and value.is_integer()):
            yield int(value)


_ARITHMETIC: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (int, float, round, abs, min, max, sum, len, pow, divmod)
}
_PLAIN = (int, float, str, list, tuple, dict, range)


class _Absent(Exception):
    """An expression is of something else than plain numbers."""


class _Expressions:
    """The arithmetic of the function that `frame` runs, on what its names and attributes hold. Nothing of the user's is
    called."""

    def __init__(self, frame: FrameType) -> None:
        self._locals, self._globals, self._code = dict(frame.f_locals), frame.f_globals, frame.f_code

    def compute_all(self) -> Iterator[Any]:
        """The value of each expression of plain numbers."""
        for node in self._nodes():
            if isinstance(node, ast.BinOp | ast.Call | ast.Name | ast.Attribute | ast.Subscript):
                try:
                    yield self._compute(node)
                except (_Absent, ArithmeticError, TypeError, ValueError, LookupError):
                    continue

    def _nodes(self) -> Iterator[ast.AST]:
        lines = {line for _, _, line in self._code.co_lines() if line}
        for node in nodes_of(self._code.co_filename):
            if getattr(node, "lineno", None) in lines:
                yield node

    def _compute(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._plain(self._locals.get(name, self._globals.get(name)))
            case ast.Attribute():
                return self._plain(self._find(node))
            case ast.Subscript(value=of, slice=key):
                return self._compute(of)[self._compute(key)]
            case ast.UnaryOp(op=op, operand=of) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self._compute(of))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._combine(op, self._compute(left), self._compute(right))
            case ast.Call(func=func, args=args, keywords=[]):
                return self._function(func)(*map(self._compute, args))
        raise _Absent

    def _combine(self, op: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(op, ast.Pow | ast.LShift | ast.Mult):
            bits = [one.bit_length() if type(one) is int else 0 for one in (left, right)]
            large = sum(bits) if isinstance(op, ast.Mult) else max(bits[0], 1) * abs(right)
            if large > MOST_BITS or not isinstance(left, int | float):
                raise _Absent
        return _ARITHMETIC[type(op)](left, right)

    def _function(self, node: ast.AST) -> Callable[..., Any]:
        match node:
            case ast.Name(id=name) if name in _FUNCTIONS and name not in self._locals and name not in self._globals:
                return _FUNCTIONS[name]
            case ast.Name(id=name) if getattr(self._globals.get(name), "__module__", None) == "math":
                return self._globals[name]  # type: ignore[no-any-return]
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if self._globals.get(name) is math:
                return getattr(math, attribute)  # type: ignore[no-any-return]
        raise _Absent

    def _find(self, node: ast.Attribute) -> Any:
        """An attribute as it is stored: a property would be code of the user's."""
        of = node.value
        holder = self._find(of) if isinstance(of, ast.Attribute) else None
        if isinstance(of, ast.Name):
            holder = self._locals.get(of.id, self._globals.get(of.id))
        if holder is None:
            raise _Absent
        if isinstance(holder, torch.nn.Module) and node.attr in holder._modules:
            return holder._modules[node.attr]
        kinds = (holder, *holder.__mro__) if isinstance(holder, type) else (holder, *type(holder).__mro__)
        for one in () if isinstance(holder, torch.Tensor) else kinds:
            held: Mapping[str, Any] = getattr(one, "__dict__", {})
            if node.attr in held:
                return held[node.attr]
        raise _Absent

    def _plain(self, value: Any) -> Any:
        if type(value) not in _PLAIN or isinstance(value, ModuleType):
            raise _Absent
        return value
