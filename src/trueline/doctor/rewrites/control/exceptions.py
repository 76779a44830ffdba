"""A `try` that values decide: what raises becomes the condition of an `if`, which other rewrites then handle.

    try:                                             spread = x.std()
        spread = x.std()                             if spread < 1e-6:
        if spread < 1e-6:                ──▶             y = torch.zeros_like(x)
            raise ValueError("flat")                 else:
        y = x / spread                                   y = x / spread
    except ValueError:
        y = torch.zeros_like(x)

and so a factorisation that does not exist (`torch.linalg.cholesky`), which torch can report by a number as well.
Condition: nothing else in the block raises. Also tells which checks a program may leave out: those that are not caught.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterator, Sequence

from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, arguments_text, expression, statements

_WITH_INFO = {
    "torch.linalg.cholesky": "torch.linalg.cholesky_ex",
    "torch.cholesky": "torch.linalg.cholesky_ex",
    "torch.linalg.inv": "torch.linalg.inv_ex",
    "torch.inverse": "torch.linalg.inv_ex",
    "torch.linalg.solve": "torch.linalg.solve_ex",
}
"""A function that raises -> its variant that returns a number instead, not 0 where the other raises."""
_RAISED = ("torch.linalg.LinAlgError", "torch._C._LinAlgError", "RuntimeError", "Exception", "BaseException")


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """A candidate for the `try` at `spot`."""
    statement = spot.statement
    if not isinstance(statement, ast.Try) or len(statement.handlers) != 1 or statement.finalbody:
        return
    new = _as_branch(scope, statement)
    caught = statement.handlers[0].type
    head = f"except {ast.unparse(caught)}" if caught is not None else "except"
    yield scope.candidate([statement], new, f"what `{head}` catches is the condition of an `if`") if new else None


def _as_branch(scope: Scope, statement: ast.Try) -> list[ast.stmt] | None:
    handler = statement.handlers[0]
    if isinstance(handler.body[-1], ast.Raise):
        return None
    for index, one in enumerate(statement.body):
        found = _test_before_raise(scope, one, handler)
        if found is None:
            continue
        before, test, instead = found
        rest = [*instead, *statement.body[index + 1 :], *statement.orelse]
        branch = ast.If(test=test, body=copy.deepcopy(handler.body), orelse=copy.deepcopy(rest))
        kept = [copy.deepcopy(each) for each in statement.body[:index]]
        if isinstance(handler.body[-1], ast.Return):  # as people write it: the rest is the other way
            return [*kept, *before, ast.If(test=test, body=branch.body, orelse=[]), *branch.orelse]
        return [*kept, *before, branch if rest else ast.If(test=test, body=branch.body, orelse=[])]
    return None


_Test = tuple[list[ast.stmt], ast.expr, list[ast.stmt]]


def _test_before_raise(scope: Scope, statement: ast.stmt, handler: ast.ExceptHandler) -> _Test | None:
    """The statements before the test, the test of whether `statement` raises, and the statements when it does not."""
    match statement:
        case ast.If(test=test, body=[ast.Raise(exc=ast.expr() as raised)], orelse=other):
            name = ast.unparse(raised.func if isinstance(raised, ast.Call) else raised)
            return ([], copy.deepcopy(test), other) if _catches(handler, name) else None
        case ast.Assert(test=test):
            found = ast.UnaryOp(op=ast.Not(), operand=copy.deepcopy(test))
            return ([], found, []) if _catches(handler, "AssertionError") else None
        case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Return():
            return _test_factorization(scope, statement, handler)
    return None


def _test_factorization(scope: Scope, statement: ast.stmt, handler: ast.ExceptHandler) -> _Test | None:
    calls = [one for one in ast.walk(statement) if isinstance(one, ast.Call) and ast.unparse(one.func) in _WITH_INFO]
    caught = [ast.unparse(one) for one in _exception_types(handler)]
    if len(calls) != 1 or (caught and not {*caught} & {*_RAISED}):
        return None
    (call,) = calls
    found, failed = scope.fresh("found"), scope.fresh("failed")
    before = statements(f"{found}, {failed} = {_WITH_INFO[ast.unparse(call.func)]}({arguments_text(call)})")
    written = ast.unparse(call)

    class Found(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            return expression(found) if ast.unparse(node) == written else self.generic_visit(node)

    return before, expression(f"({failed} != 0).any()"), [Found().visit(copy.deepcopy(statement))]


def _exception_types(handler: ast.ExceptHandler) -> list[ast.expr]:
    if handler.type is None:
        return []
    return handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]


def _catches(handler: ast.ExceptHandler, name: str) -> bool:
    """Whether the handler catches an error of this name."""
    names = [ast.unparse(one) for one in _exception_types(handler)]
    kind = getattr(builtins, name, None)
    wide = [getattr(builtins, one, None) for one in names]
    is_one = isinstance(kind, type) and any(isinstance(one, type) and issubclass(kind, one) for one in wide)
    return not names or name in names or is_one


def is_caught(text: str, function: ast.FunctionDef, statement: ast.stmt) -> bool:
    """Whether what `statement` raises may be caught in its file: there is then another answer, not none."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Try) and node.handlers:
            inside = any(one.lineno <= statement.lineno <= (one.end_lineno or one.lineno) for one in node.body)
            if inside or function.name in _reachable_functions(text, node.body):
                return True
    return False


def _reachable_functions(text: str, block: Sequence[ast.stmt]) -> set[str]:
    """Names of functions that the block may run; `forward` stands for all that the file does not define."""
    functions: dict[str, list[ast.FunctionDef]] = {}
    for one in ast.walk(ast.parse(text)):
        if isinstance(one, ast.FunctionDef):
            functions.setdefault(one.name, []).append(one)
    names: set[str] = set()
    waiting: list[ast.AST] = list(block)
    while waiting:
        for node in ast.walk(waiting.pop()):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            found = called if called in functions else "forward" if _may_be_a_module(node.func) else ""
            if found and found not in names:
                names.add(found)
                waiting += functions.get(found, ())
    return names


def _may_be_a_module(called: ast.expr) -> bool:
    """Whether calling it may run a `forward`."""
    if isinstance(called, ast.Name):
        return not hasattr(builtins, called.id)
    return isinstance(called, ast.Subscript) or ast.unparse(called).startswith("self.")
