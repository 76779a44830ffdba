"""A check of values in the user's code (`assert (x >= 0).all()`, `if x.isnan().any(): raise`) is kept in a trace, as an
operator that fails.

torch.export stops at a branch on values. Where the branch decides only whether the model raises, it continues as for
values that pass, and `torch._assert_async`, which every format keeps, refuses the others.
"""

import ast
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from trueline.capture.model.code_paths import current_line
from trueline.capture.model.syntax import decides, nodes_of, spans, tests_of
from trueline.capture.patches import Patch
from trueline.runtime.refusals import REFUSES

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="under 0.1 ms; an operator for each check",
    helps=("assert not torch.isnan(x).any()", "if (ids >= vocabulary).any(): raise"),
)


@contextmanager
def keep_checks() -> Iterator[None]:
    """In the block, a traced tensor on the line of such a check is what it has to be."""
    original = torch.Tensor.__bool__

    @functools.wraps(original)  # modes know it by its name
    def as_bool(tensor: torch.Tensor) -> bool:
        place = None if type(tensor) in _PLAIN else current_line()
        passes = None if place is None else find_passing(place.file, place.line)
        if place is None or passes is None:
            return bool(original(tensor))
        holds = tensor if tensor.dtype is torch.bool else tensor != 0
        torch._assert_async(holds if passes else holds.logical_not(), _find_words(place.file, place.line))
        return passes

    torch.Tensor.__bool__ = as_bool  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del torch.Tensor.__bool__


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OTHERS = ast.Try | ast.IfExp | ast.Lambda | ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp


@functools.lru_cache(maxsize=1024)
def find_passing(file: str, line: int) -> bool | None:
    """What each truth value that is taken on `line` has to be for the model not to raise there; None where the line
    decides anything else, or one of several values is enough.

    Inside of `try` a check decides more than whether the model raises.
    """
    around = [node for node in nodes_of(file) if spans(node, line)]
    if any(isinstance(node, _OTHERS) for node in around):
        return None
    tested = [node for node in around if any(spans(test, line) for test in tests_of(node))]
    if len(tested) != 1 or decides(tested[0], line) or not isinstance(tested[0], ast.If | ast.Assert):
        return None
    wanted = set(_find_wanted(tested[0].test, isinstance(tested[0], ast.Assert)))
    return wanted.pop() if len(wanted) == 1 else None


@functools.lru_cache(maxsize=1024)
def _find_words(file: str, line: int) -> str:
    """The message of the check on `line`: what the model says, where the code has it as a string."""
    for node in nodes_of(file):
        if isinstance(node, ast.If | ast.Assert) and any(spans(test, line) for test in tests_of(node)):
            raised = [node.msg] if isinstance(node, ast.Assert) else _list_arguments(node.body)
            words = [one.value for one in raised if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            return f"{REFUSES}: {words[0]}" if words else REFUSES
    return REFUSES


def _list_arguments(body: Sequence[ast.stmt]) -> list[ast.expr]:
    """Of what `body` raises at once."""
    raised = body[0].exc if body and isinstance(body[0], ast.Raise) else None
    return raised.args if isinstance(raised, ast.Call) else []


def _find_wanted(test: ast.expr, wanted: bool) -> Iterator[bool | None]:
    """For each value in `test`, what it has to be for the whole to be `wanted`; None where others may do."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _find_wanted(operand, not wanted)
        case ast.BoolOp(op=operator, values=values):
            if isinstance(operator, ast.And) is wanted:
                for value in values:
                    yield from _find_wanted(value, wanted)
            elif all(map(_is_plain, values[:-1])):  # `if self.careful and x.isnan().any()`: only the last is a value
                yield from _find_wanted(values[-1], wanted)
            else:
                yield None
        case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
            return
        case ast.Compare(ops=[_, _, *_]):
            yield None
        case _:
            yield wanted


def _is_plain(test: ast.expr) -> bool:
    """Whether it is a setting, or asks whether something is None."""
    match test:
        case ast.Name() | ast.Attribute():
            return True
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _is_plain(operand)
        case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
            return True
    return False
