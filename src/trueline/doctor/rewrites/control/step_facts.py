"""What a step of a loop asks to tell itself from the others, answered where the answer is known.

`t > 0` and `t == n - 1` of the counter, `h is None` of a name that begins with None, `if rows` of a list that begins
empty.
"""

import ast
import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trueline.doctor.rewrites.indices import shift_of
from trueline.doctor.rewrites.scope import Scope, assignments, expression, stored_names

_TURNED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
    ast.Eq: ast.Eq,
    ast.NotEq: ast.NotEq,
}
_VALUES = ast.Call | ast.BinOp | ast.UnaryOp | ast.Subscript | ast.Name
"""What is not None, as far as the proof says."""
UNBOUND = 1 << 62
"""Larger than any counter."""


@dataclass(slots=True, kw_only=True)
class StepFacts:
    """What is known in a step: where its counter lies, from 0 and from the end of the loop, and which names hold
    something (None and an empty list are nothing)."""

    scope: Scope
    counter: str
    end: ast.expr
    from_zero: tuple[int, int]
    from_end: tuple[int, int]
    none: dict[str, bool] = field(default_factory=dict)
    """Name that began with None -> whether it holds something."""
    lists: dict[str, bool] = field(default_factory=dict)
    """List that began empty -> whether it holds something."""
    answered: int = 0
    """How many questions were answered."""

    def answer(self, body: Sequence[ast.stmt]) -> list[ast.stmt] | None:
        """The statements that the step runs; None where one of them ends the loop."""
        block, ended = self.answer_block([copy.deepcopy(one) for one in body])
        return None if ended == "break" else block

    def answer_block(self, block: Sequence[ast.stmt]) -> tuple[list[ast.stmt], str]:
        """The statements, and how they end: with `continue`, `break`, or not."""
        done: list[ast.stmt] = []
        for statement in block:
            if isinstance(statement, ast.Continue | ast.Break):
                return done, type(statement).__name__.lower()
            if isinstance(statement, ast.If):
                statement.test = _Questions(self).ask(statement.test)
                if not isinstance(statement.test, ast.Constant):
                    done.append(self._answer_both(statement))
                    continue
                inner, ended = self.answer_block(statement.body if statement.test.value else statement.orelse)
                done += inner
                if ended:
                    return done, ended
                continue
            if isinstance(statement, ast.For | ast.While | ast.With | ast.Try | ast.Match | ast.FunctionDef):
                self._forget(statement)
            done.append(_Questions(self).visit(statement))
            self._learn(statement)
        return done, ""

    def _answer_both(self, statement: ast.If) -> ast.If:
        """Both ways of an `if` on something else; what they leave is known where both leave it."""
        sides: list[StepFacts] = []
        for name in ("body", "orelse"):
            side = replace(self, none=dict(self.none), lists=dict(self.lists), answered=0)
            block, ended = side.answer_block(getattr(statement, name))
            if ended:
                block.append(ast.Continue() if ended == "continue" else ast.Break())
            setattr(statement, name, block)
            self.answered += side.answered
            sides += [] if ended else [side]
        statement.body = statement.body or [ast.Pass()]
        for held in ("none", "lists"):
            ways = [getattr(side, held) for side in sides] or [{}]
            same = {name: one for name, one in ways[0].items() if all(way.get(name) is one for way in ways)}
            setattr(self, held, same)
        return statement

    def _learn(self, statement: ast.stmt) -> None:
        """What a statement that was run leaves in the names that steps ask for."""
        name = filled_list(statement)
        if name in self.lists:
            self.lists[name] = True
        for stored in stored_names(statement):
            self.lists.pop(stored, None)
            if stored in self.none:
                self.none[stored] = True
            if may_be_none([statement], stored):
                self.none.pop(stored, None)

    def _forget(self, statement: ast.stmt) -> None:
        for node in ast.walk(statement):
            gone = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else filled_list(node)
            self.none.pop(gone, None)
            self.lists.pop(gone, None)

    def decide(self, test: ast.expr) -> bool | None:
        """Whether a condition holds in the step, if it is known."""
        match test:
            case ast.Name(id=name) if name == self.counter:
                return _compare(ast.NotEq(), self.from_zero, 0)
            case ast.Name(id=name):
                return False if self.none.get(name) is False else self.lists.get(name)
            case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]):
                return self.lists.get(name)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._decide_comparison(left, op, right)
        return None

    def _decide_comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool | None:
        match left, op, right:
            case ast.Name(id=name), ast.Is() | ast.IsNot(), ast.Constant(value=None):
                held = self.none.get(name)
                return None if held is None else held is isinstance(op, ast.IsNot)
            case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]), _, ast.Constant(value=int(least)):
                held = self.lists.get(name)
                return None if held is None else _compare(op, (1, UNBOUND) if held else (0, 0), least)
        if shift_of(left, self.counter) is None and type(op) in _TURNED:
            left, right, op = right, left, _TURNED[type(op)]()
        shift = shift_of(left, self.counter)
        if shift is None:
            return None
        base, number = _base_of(spell_size(self.scope, right))
        if not base:
            return _compare(op, self.from_zero, number - shift)
        end, last = _base_of(spell_size(self.scope, self.end))
        return _compare(op, self.from_end, number - last - shift) if base == end else None


class _Questions(ast.NodeTransformer):
    """Conditions with the answers that the step knows; ternaries as the way that is taken."""

    def __init__(self, step: StepFacts) -> None:
        self.step = step

    def ask(self, test: ast.expr) -> ast.expr:
        """A condition, as a constant where it is known."""
        answer = self.step.decide(test)
        if answer is not None:
            self.step.answered += 1
            return ast.Constant(answer)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.ask(test.operand)
            return ast.Constant(not inner.value) if isinstance(inner, ast.Constant) else test
        if not isinstance(test, ast.BoolOp):
            new = self.generic_visit(test)
            assert isinstance(new, ast.expr)
            return new
        decides, left = isinstance(test.op, ast.Or), list[ast.expr]()
        for value in map(self.ask, test.values):
            known = isinstance(value, ast.Constant)
            left += [value] if not known or bool(value.value) is decides else []  # type: ignore[attr-defined]
            if known and left and left[-1] is value:
                break
        if not left:
            return ast.Constant(not decides)
        return left[0] if len(left) == 1 else ast.BoolOp(op=test.op, values=left)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test = self.ask(node.test)
        if isinstance(node.test, ast.Constant):
            return self.visit(node.body if node.test.value else node.orelse)  # type: ignore[no-any-return]
        return self.generic_visit(node)


def filled_list(node: ast.AST) -> str:
    """The list that `rows.append(y)` or `rows.insert(0, y)` fills; no name for anything else."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append" | "insert"))):
            return name
    return ""


def may_be_none(block: Sequence[ast.stmt], name: str) -> bool:
    """Whether a value that the block gives to the name may be None."""
    given = [value for statement in block for stored, value in assignments(statement) if stored == name]
    return not all(isinstance(value, _VALUES) for value in given)


def _compare(op: ast.cmpop, between: tuple[int, int], to: int) -> bool | None:
    """Whether every number in the interval compares so to another, or none does; None where some do."""
    low, high = between
    match op:
        case ast.Eq() | ast.NotEq():
            equal = True if low == high == to else False if not low <= to <= high else None
            return equal if equal is None or isinstance(op, ast.Eq) else not equal
        case ast.Lt():
            return True if high < to else False if low >= to else None
        case ast.LtE():
            return True if high <= to else False if low > to else None
        case ast.Gt():
            return True if low > to else False if high <= to else None
        case ast.GtE():
            return True if low >= to else False if high < to else None
    return None


# ---- sizes


def spell_size(scope: Scope, size: ast.expr) -> ast.expr:
    """A size in one spelling: `n` and `x.size(1)` as `x.shape[1]`."""
    for _ in range(3):
        size = _Spelling(scope).visit(copy.deepcopy(size))
    return size


class _Spelling(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def visit_Name(self, node: ast.Name) -> ast.AST:
        pairs = [*assignments(self.scope.function)]
        made = [value for name, value in pairs if name == node.id]
        if len(made) != 1 or self.scope.depends_on(made[0]) not in ("size", "tensor"):
            return node
        (value,) = made
        if sum(other is value for _, other in pairs) == 1:
            return value if self.scope.depends_on(value) == "size" else node
        for one in ast.walk(self.scope.function):  # `batch, n = x.shape[:2]`
            if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Tuple) and one.value is value:
                names = [ast.unparse(each) for each in one.targets[0].elts]
                shape = re.fullmatch(r"(.+)\.(shape|size\(\))(\[:\d+\])?", ast.unparse(value))
                starred = any(each.startswith("*") for each in names)
                if shape is not None and not starred and len(one.targets) == 1:
                    return expression(f"{shape[1]}.shape[{names.index(node.id)}]")
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Attribute(value=tensor, attr="size"), args=[ast.Constant(value=int(axis))]):
                return expression(f"{ast.unparse(tensor)}.shape[{axis}]")
            case ast.Call(func=ast.Name(id="len"), args=[tensor]):
                return expression(f"{ast.unparse(tensor)}.shape[0]")
        return node


def _base_of(size: ast.expr) -> tuple[str, int]:
    """Of `x.shape[1] - 2` the size as it is written, and -2; of a number no size."""
    match size:
        case ast.Constant(value=int(number)):
            return "", number
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=ast.Constant(value=int(by))):
            base, number = _base_of(left)
            return base, number + (by if isinstance(op, ast.Add) else -by)
    return ast.unparse(size), 0
