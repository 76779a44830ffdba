"""What a model does beside computing its answer: it prints, warns, checks its input, raises and catches, caches by size
what it computed, and skips, or drops (`if not mask.any(): mask = None`), what would change nothing.

A program does none of it, and where values or sizes decide about it, it blocks the exporter. Condition: the answers of
all calls stay the same; where a check raises there is no answer, and a lookup that fails takes its place, or nothing
where no tensor that is used later is checked. Of a `try`, what raises
becomes the condition of an `if`, which other rewrites then handle; nothing else in its block may raise:

    try:                                             spread = x.std()
        spread = x.std()                             if spread < 1e-6:
        if spread < 1e-6:                ──▶             y = torch.zeros_like(x)
            raise ValueError("flat")                 else:
        y = x / spread                                   y = x / spread
    except ValueError:
        y = torch.zeros_like(x)

and so a factorisation that does not exist (`torch.linalg.cholesky`), which torch can report by a number as well.
"""

import ast
import builtins
import copy
from collections.abc import Iterator, Sequence

from trueline.doctor.rewrites.control.dropped_masks import is_dropped_mask
from trueline.doctor.rewrites.control.no_change import nothing_where, read_beyond
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    arguments_text,
    expression,
    first_line,
    loaded_names,
    statements,
)

_REPORTING = ("print", "warn", "debug", "info", "warning", "error", "critical", "exception", "log")
_REPORTERS = ("warnings", "logging", "logger", "log", "LOG", "LOGGER")


def leave_out(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The function without the statement at `spot`, where that only reports, checks, skips or caches something."""
    statement = spot.statement
    head = f"`{first_line(statement).rstrip(':')}"
    left_out: list[ast.stmt] = [ast.Pass()] if len(spot.block) == 1 else []
    if _only_reports(statement):
        yield scope.candidate([statement], left_out, f"{head}` only reports: it is left out")
    elif _checks(statement) and not _is_caught(scope.text, scope.function, statement):
        refusing = _refuse_instead(scope, spot)
        if refusing is not None:
            words = f"the check {head}` looks up an entry that does not exist, where it raised: a program refuses that"
            yield scope.candidate([statement], [refusing], words)
        words = f"the check {head}` is left out: a program raises nothing, check requests before it"
        yield scope.candidate([statement], left_out, words)
    elif isinstance(statement, ast.If):
        if not statement.orelse and isinstance(statement.body[0], ast.Continue):
            known = nothing_where(scope, statement.test, holds=True)
            if known.changes_nothing(scope, spot.rest, read_beyond(spot, rest=False)):
                words = f"{head}: continue` is left out: the rest of the step changes nothing there"
                yield scope.candidate([statement], left_out, words)
            if spot.rest:
                test = ast.UnaryOp(op=ast.Not(), operand=statement.test)
                branch = ast.If(test=test, body=copy.deepcopy(spot.rest), orelse=[])
                words = f"{head}: continue` is a condition of the rest of the step"
                yield scope.candidate([statement, *spot.rest], [branch], words)
        elif is_dropped_mask(scope, spot):
            both = (statement.test.lineno, statement.body[0].lineno)
            name = ast.unparse(statement.body[0]).partition(" ")[0]
            words = f"{head}: {name} = None` is left out: `{name}` changes nothing there"
            yield scope.candidate([statement], left_out, words, both) if both[0] != both[1] else None


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


def _refuse_instead(scope: Scope, spot: Spot) -> ast.stmt | None:
    """A tensor that is used later, times 1, which is looked up in a table of one entry; at the second one where the
    check raises. Programs of all formats refuse such an index. None where no test of tensors decides."""
    match spot.statement:
        case ast.If(test=test):
            bad = _as_tensor_test(test)
        case ast.Assert(test=test):
            bad = f"~({_as_tensor_test(test)})"
        case _:
            return None
    if scope.depends_on(test) != "tensor":
        return None
    later = set(loaded_names(spot.rest))
    names = [name for name in loaded_names(test) if name in later]
    held = [name for name in names if scope.depends_on(ast.Name(id=name, ctx=ast.Load())) == "tensor"]
    if not held:
        return None
    table = f"torch.ones(1, dtype={held[0]}.dtype, device={held[0]}.device)"
    factor = f"{table}.index_select(0, torch.as_tensor({bad}).long().reshape(1))[0]"
    return statements(f"{held[0]} = {held[0]} * {factor}")[0]


def _as_tensor_test(test: ast.expr) -> str:
    """A test of Python with the operators of tensors, which ask for no number."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"~({_as_tensor_test(operand)})"
        case ast.BoolOp(op=op, values=values):
            return (" & " if isinstance(op, ast.And) else " | ").join(f"({_as_tensor_test(one)})" for one in values)
    return ast.unparse(test)


_WITH_INFO = {
    "torch.linalg.cholesky": "torch.linalg.cholesky_ex",
    "torch.cholesky": "torch.linalg.cholesky_ex",
    "torch.linalg.inv": "torch.linalg.inv_ex",
    "torch.inverse": "torch.linalg.inv_ex",
    "torch.linalg.solve": "torch.linalg.solve_ex",
}
"""A function that raises -> its variant that returns a number instead, not 0 where the other raises."""
_RAISED = ("torch.linalg.LinAlgError", "torch._C._LinAlgError", "RuntimeError", "Exception", "BaseException")


def catch_by_branch(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
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


def _is_caught(text: str, function: ast.FunctionDef, statement: ast.stmt) -> bool:
    """Whether what `statement` raises may be caught in its file: there is then another answer, not none."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Try) and node.handlers:
            inside = any(one.lineno <= statement.lineno <= (one.end_lineno or one.lineno) for one in node.body)
            if inside or function.name in _reachable_functions(text, node.body):
                return True
    return False


def _reachable_functions(text: str, block: Sequence[ast.stmt]) -> set[str]:
    """Names of functions that the block may run; `forward` means any function that the file does not define."""
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
            # a call of anything but a builtin may run a `forward`
            module = isinstance(node.func, ast.Subscript) or ast.unparse(node.func).startswith("self.")
            module = module or (isinstance(node.func, ast.Name) and not hasattr(builtins, node.func.id))
            found = called if called in functions else "forward" if module else ""
            if found and found not in names:
                names.add(found)
                waiting += functions.get(found, ())
    return names
