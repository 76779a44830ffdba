"""What a model does beside computing its answer: it prints, warns, checks its input, caches by size what it computed,
and skips, or drops (`if not mask.any(): mask = None`), what would change nothing.

A program does none of it, and where values or sizes decide about it, it blocks the exporter. Condition: the answers of
all calls stay the same; where a check raises there is no answer, so removing it changes none.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.control.exceptions import is_caught
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, first_line, loaded_names, parameters, stored_names

_REPORTING = ("print", "warn", "debug", "info", "warning", "error", "critical", "exception", "log")
_REPORTERS = ("warnings", "logging", "logger", "log", "LOG", "LOGGER")


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The function without the statement at `spot`, where that only reports, checks, skips or caches something."""
    statement = spot.statement
    head = f"`{first_line(statement).rstrip(':')}"
    left_out: list[ast.stmt] = [ast.Pass()] if len(spot.block) == 1 else []
    if _only_reports(statement):
        yield scope.candidate([statement], left_out, f"{head}` only reports: it is left out")
    elif _checks(statement) and not is_caught(scope.text, scope.function, statement):
        words = f"the check {head}` is left out: a program raises nothing, check requests before it"
        yield scope.candidate([statement], left_out, words)
    elif isinstance(statement, ast.If):
        both = (statement.test.lineno, statement.body[0].lineno)
        if _skips(statement):
            words = f"{head}: continue` is left out: the rest of the step changes nothing there"
            if _selects_nothing(statement.test):
                yield scope.candidate([statement], left_out, words)
            elif both[0] != both[1]:
                yield scope.candidate([statement], left_out, words, both)
            if spot.rest:
                test = ast.UnaryOp(op=ast.Not(), operand=statement.test)
                branch = ast.If(test=test, body=copy.deepcopy(spot.rest), orelse=[])
                words = f"{head}: continue` is a condition of the rest of the step"
                yield scope.candidate([statement, *spot.rest], [branch], words)
        elif _drops(scope, statement):
            name = ast.unparse(statement.body[0]).partition(" ")[0]
            words = f"{head}: {name} = None` is left out: `{name}` changes nothing there"
            yield scope.candidate([statement], left_out, words, both) if both[0] != both[1] else None
        elif new := _without_cache(scope, spot, statement):
            words = f"{head}` is left out: the cached value is computed at every call"
            yield scope.candidate(spot.block[spot.index :], new, words)


def _only_reports(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        inside = (*statement.body, *statement.orelse)
        return all(_only_reports(one) or isinstance(one, ast.Pass) for one in inside)
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Name(id="print" | "warn"))):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name), attr=how))):
            return how in _REPORTING and name in _REPORTERS
    return False


def _checks(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], ast.Raise):
        return all(_only_reports(one) for one in statement.body[:-1])
    return isinstance(statement, ast.Assert)


def _skips(statement: ast.If) -> bool:
    """Whether it leaves out the rest of a loop's step: usually where nothing was selected."""
    return not statement.orelse and isinstance(statement.body[0], ast.Continue)


def _selects_nothing(test: ast.expr) -> bool:
    """Whether it asks if there is anything to do: operations on nothing change nothing, at any values."""
    match test:
        case ast.Compare(left=count, ops=[ast.Eq()], comparators=[ast.Constant(value=0)]):
            return _counts(count)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call(func=ast.Attribute(attr="any"), args=[])):
            return True
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as count):
            return _counts(count)
    return False


def _counts(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="len") | ast.Attribute(attr="numel" | "nelement" | "size")):
            return True
        case ast.Subscript(value=ast.Attribute(attr="shape")):
            return True
    return False


def _drops(scope: Scope, statement: ast.If) -> bool:
    """Whether it only drops a tensor, where values decide so: `if not mask.any(): mask = None`."""
    match statement:
        case ast.If(body=[ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=None))], orelse=[]):
            return scope.depends_on(statement.test) == "tensor" and name in loaded_names(statement.test)
    return False


def _without_cache(scope: Scope, spot: Spot, statement: ast.If) -> list[ast.stmt] | None:
    """From `if key not in self.kept: self.kept[key] = value` on: the value under a name of its own.

    And of `if key in self.kept: return self.kept[key]` the statements that follow.
    """
    match statement.test:
        case ast.Compare(left=key, ops=[ast.NotIn() | ast.In() as operator], comparators=[kept]) if _keeps(scope, kept):
            cell = ast.Subscript(value=kept, slice=key, ctx=ast.Load())
        case _:
            return None
    if isinstance(operator, ast.In):
        returns = len(statement.body) == 1 and isinstance(statement.body[0], ast.Return)
        rest = [copy.deepcopy(one) for one in spot.rest if not ast.unparse(one).startswith(f"{ast.unparse(cell)} = ")]
        return rest if returns and rest else None
    if statement.orelse:
        return None
    name = scope.fresh(f"{ast.unparse(kept).rpartition('.')[2].strip('_').lower()}_here")
    new = [_Named(ast.dump(cell), name).visit(copy.deepcopy(one)) for one in (*statement.body, *spot.rest)]
    stores = [
        target
        for one in new
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name) and target.id == name
    ]
    return new if stores else None


def _keeps(scope: Scope, node: ast.expr) -> bool:
    """Whether it may keep something from call to call: an attribute, or a name of the file."""
    own = parameters(scope.function) | set(stored_names(scope.function))
    return isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and node.id not in own)


class _Named(ast.NodeTransformer):
    """Replaces an element of a cache by a name."""

    def __init__(self, cell: str, name: str) -> None:
        self.cell, self.name = cell, name

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        same = ast.dump(ast.Subscript(value=node.value, slice=node.slice, ctx=ast.Load())) == self.cell
        return ast.Name(id=self.name, ctx=node.ctx) if same else node
