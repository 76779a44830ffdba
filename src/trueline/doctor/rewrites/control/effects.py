"""What a model does beside its answer: it prints, warns, checks its input, keeps by size what it has computed once, and
skips, or forgets (`if not mask.any(): mask = None`), what would change nothing.

A program does none of it, and where values or sizes decide about it, it blocks the exporter. Condition: the answers on
all calls stay the same; a check raises where there is no answer, so leaving it out changes none.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence

from trueline.doctor.rewrites.control.exceptions import is_caught
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, loaded_names, stored_names

_SAYING = ("print", "warn", "debug", "info", "warning", "error", "critical", "exception", "log")
_SPEAKERS = ("warnings", "logging", "logger", "log", "LOG", "LOGGER")


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The function without the statement at `spot`, where that only says, checks or remembers something."""
    statement = spot.statement
    text: str | None = None
    both: tuple[int, int] | None = None
    if _says(statement):
        text = scope.replace([statement], _instead(spot))
        words = f"`{_first(statement)}` says something and changes no answer: it is left out"
    elif _checks(statement) and not is_caught(scope.text, scope.function, statement):
        text = scope.replace([statement], _instead(spot))
        words = f"the check `{_first(statement)}` is left out: a program raises nothing, check requests before it"
    elif _skips(statement):
        text = scope.replace([statement], _instead(spot))
        words = f"`{_first(statement)}: continue` is left out: the rest of the step changes nothing there"
        if isinstance(statement, ast.If) and not _selects_nothing(statement.test):
            both = (statement.test.lineno, statement.body[0].lineno)
            text = text if both[0] != both[1] else None
    elif isinstance(statement, ast.If) and _drops(scope, statement):
        text = scope.replace([statement], _instead(spot))
        both = (statement.test.lineno, statement.body[0].lineno)
        name = ast.unparse(statement.body[0]).partition(" ")[0]
        words = f"`{_first(statement)}: {name} = None` is left out: `{name}` changes nothing there"
        text = text if both[0] != both[1] else None
    elif isinstance(statement, ast.If):
        new = _without_cache(scope, spot)
        text = scope.replace(spot.block[spot.index :], new) if new else None
        words = f"`{_first(statement)}` is left out: what it keeps is computed at every call"
    if text:
        yield Candidate(text=text, words=words, both=both)
    rest = spot.block[spot.index + 1 :]
    if isinstance(statement, ast.If) and _skips(statement) and rest:
        test = ast.UnaryOp(op=ast.Not(), operand=statement.test)
        text = scope.replace([statement, *rest], [ast.If(test=test, body=copy.deepcopy(rest), orelse=[])])
        if text:
            yield Candidate(text=text, words=f"`{_first(statement)}: continue` is a condition of the rest of the step")


def _first(statement: ast.stmt) -> str:
    return ast.unparse(statement).splitlines()[0].rstrip(":")


def _instead(spot: Spot) -> list[ast.stmt]:
    return [ast.Pass()] if len(spot.block) == 1 else []


def _says(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return all(_says(one) or isinstance(one, ast.Pass) for one in (*statement.body, *statement.orelse))
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    function = statement.value.func
    if isinstance(function, ast.Name):
        return function.id in ("print", "warn")
    if not (isinstance(function, ast.Attribute) and function.attr in _SAYING):
        return False
    speaker = function.value
    name = speaker.id if isinstance(speaker, ast.Name) else speaker.attr if isinstance(speaker, ast.Attribute) else ""
    return name in _SPEAKERS


def _checks(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assert):
        return True
    return (
        isinstance(statement, ast.If)
        and not statement.orelse
        and all(_says(one) for one in statement.body[:-1])
        and isinstance(statement.body[-1], ast.Raise)
    )


def _skips(statement: ast.stmt) -> bool:
    """Whether it leaves out the rest of a loop's step: where nothing was selected, as a rule."""
    return isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[0], ast.Continue)


def _selects_nothing(test: ast.expr) -> bool:
    """Whether it asks if there is anything to do: what is done with nothing changes nothing, at any values."""
    match test:
        case ast.Compare(
            left=ast.Call() | ast.Subscript() as count, ops=[ast.Eq()], comparators=[ast.Constant(value=0)]
        ):
            return _counts(count)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call(func=ast.Attribute(attr="any"), args=[])):
            return True
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as count):
            return _counts(count)
    return False


def _counts(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="len")) | ast.Subscript(value=ast.Attribute(attr="shape")):
            return True
        case ast.Call(func=ast.Attribute(attr="numel" | "nelement" | "size")):
            return True
    return False


def _drops(scope: Scope, statement: ast.If) -> bool:
    """Whether all that it does is to forget a tensor, where values say so: `if not mask.any(): mask = None`."""
    if statement.orelse or scope.worth(statement.test) != "tensor" or len(statement.body) != 1:
        return False
    match statement.body[0]:
        case ast.Assign(targets=[ast.Name() as name], value=ast.Constant(value=None)):
            return name.id in loaded_names(statement.test)
    return False


def _without_cache(scope: Scope, spot: Spot) -> list[ast.stmt] | None:
    """From `if key not in self.kept: self.kept[key] = value` on: the value under a name of its own.

    And of `if key in self.kept: return self.kept[key]` what follows.
    """
    statement = spot.statement
    assert isinstance(statement, ast.If)
    match statement.test:
        case ast.Compare(left=key, ops=[ast.NotIn()], comparators=[kept]) if (
            _keeps(scope, kept) and not statement.orelse
        ):
            cell = ast.dump(ast.Subscript(value=kept, slice=key, ctx=ast.Load()))
            name = scope.fresh(f"{ast.unparse(kept).rpartition('.')[2].strip('_').lower()}_here")
            new = [_Named(cell, name).visit(copy.deepcopy(one)) for one in (*statement.body, *_rest(spot))]
            stores = [one for one in new if isinstance(one, ast.Assign) and _is(one.targets, name)]
            return new if stores else None
        case ast.Compare(left=key, ops=[ast.In()], comparators=[kept]) if _keeps(scope, kept):
            returns = len(statement.body) == 1 and isinstance(statement.body[0], ast.Return)
            cell = ast.unparse(ast.Subscript(value=kept, slice=key, ctx=ast.Load()))
            rest = [one for one in _rest(spot) if not ast.unparse(one).startswith(f"{cell} = ")]
            return [copy.deepcopy(one) for one in rest] if returns and rest else None
    return None


def _keeps(scope: Scope, node: ast.expr) -> bool:
    """Whether it is where something may be kept from call to call: an attribute, or a name of the file."""
    if isinstance(node, ast.Name):
        given = scope.function.args
        own = {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)} | set(
            stored_names(scope.function)
        )
        return node.id not in own
    return isinstance(node, ast.Attribute)


def _rest(spot: Spot) -> Sequence[ast.stmt]:
    return spot.block[spot.index + 1 :]


def _is(targets: Sequence[ast.expr], name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


class _Named(ast.NodeTransformer):
    """Puts a name where an element of what is kept stands."""

    def __init__(self, cell: str, name: str) -> None:
        self.cell, self.name = cell, name

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        same = ast.dump(ast.Subscript(value=node.value, slice=node.slice, ctx=ast.Load())) == self.cell
        return ast.Name(id=self.name, ctx=node.ctx) if same else node
