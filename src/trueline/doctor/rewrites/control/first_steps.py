"""The first step of a loop, or the last one, by itself, where it takes another way than the others.

    for t in range(n):                          torch._check(n >= 1)
        if t == 0:                              h = f(x[:, 0])
            h = f(x[:, t])             ──▶      hs = [h]
        else:                                   for t in range(1, n):
            h = g(h, x[:, t])                       h = g(h, x[:, t])
        hs.append(h)                                hs.append(h)

    for t in range(n):                          for t in range(n):
        h = g(h, x[:, t])              ──▶          h = g(h, x[:, t])
        if t >= 2:                                  hs.append(h)
            hs.append(h)                        hs[:] = hs[2:]

What tells the steps apart: the counter (`t > 0`, `t == n - 1`), a name that holds None before the loop, a list that is
empty there. Condition: there is a first step, which the rewritten model checks.
"""

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from trueline.doctor.rewrites.appends import appended_by, begins, find_join
from trueline.doctor.rewrites.control.folds import rows_of
from trueline.doctor.rewrites.control.step_facts import UNBOUND, StepFacts, filled_list, may_be_none
from trueline.doctor.rewrites.indices import shift_of
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    assignments,
    expression,
    first_line,
    loaded_names,
    statements,
    stored_names,
    substitute,
)

_SHORTEN = ("pop", "clear", "remove")
"""Methods that take something out of a list."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """A loop as `for counter in range(start, end)`."""

    counter: str
    start: int
    end: ast.expr
    body: list[ast.stmt]
    before: list[ast.stmt]


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The loop at `spot` without its first step, or without its last one."""
    loop = spot.statement
    if not isinstance(loop, ast.For) or loop.orelse:
        return
    counted = _count(scope, loop)
    if counted is None or set(loaded_names(counted.end)) & set(stored_names(counted.body)):
        return
    if counted.counter in stored_names(counted.body) or _read_elsewhere(scope.function, stored_names(loop.target)):
        return
    yield _append_always(scope, spot, counted)
    yield _first(scope, spot, counted)
    yield _last(scope, spot, counted)


def _read_elsewhere(function: ast.FunctionDef, names: Sequence[str]) -> bool:
    """Whether one of the names is read where no loop gives it a value."""
    given: set[int] = set()
    for node in ast.walk(function):
        made = [node.target] if isinstance(node, ast.For) else [one.target for one in getattr(node, "generators", ())]
        if any(name in stored_names(target) for target in made for name in names):
            given |= {id(one) for one in ast.walk(node)}
    reads = (one for one in ast.walk(function) if isinstance(one, ast.Name) and id(one) not in given)
    return any(one.id in names and isinstance(one.ctx, ast.Load) for one in reads)


def _count(scope: Scope, loop: ast.For) -> _Counted | None:
    """The loop with a counter: over a range, or over the rows of tensors of one length."""
    match loop.target, loop.iter:
        case ast.Name(id=counter), ast.Call(func=ast.Name(id="range"), args=given, keywords=[]) if len(given) < 3:
            start = 0 if len(given) == 1 else given[0].value if isinstance(given[0], ast.Constant) else None
            if type(start) is not int or start < 0 or scope.depends_on(given[-1]) != "size":
                return None
            return _Counted(counter, start, given[-1], copy.deepcopy(loop.body), [])
        case _:
            pass
    target, source, counter = loop.target, loop.iter, scope.fresh("t")
    match target, source:
        case (
            ast.Tuple(elts=[ast.Name(id=counter), target]),
            ast.Call(func=ast.Name(id="enumerate"), args=[source], keywords=[]),
        ):
            pass
    pairs = [(target, source)]
    match target, source:
        case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=given) if len(targets) == len(given):
            pairs = [*zip(targets, given, strict=True)]
    before: list[ast.stmt] = []
    sizes: list[str] = []
    values: dict[str, ast.expr] = {}
    for one, rows in pairs:
        found = rows_of(scope, rows) if isinstance(one, ast.Name) else None
        if found is None or not isinstance(one, ast.Name) or one.id in stored_names(loop.body):
            return None
        whole, axis = found
        if not whole.isidentifier():
            name = scope.fresh(f"{one.id}_rows")
            before, whole = [*before, *statements(f"{name} = {whole}")], name
        values[one.id] = expression(f"{whole}[{':, ' * axis}{counter}]")
        sizes.append(f"{whole}.shape[{axis}]")
    before += [each for size in sizes[1:] for each in statements(f"torch._check({sizes[0]} == {size})")]
    body = [substitute(one, values) for one in loop.body]
    return _Counted(counter, 0, expression(sizes[0]), body, before)


def _append_always(scope: Scope, spot: Spot, loop: _Counted) -> Candidate | None:
    """The loop with every step appending what only some append, which are then taken out of the list."""
    body, new, kept = list[ast.stmt](), [*loop.body], dict[str, str]()
    while new:
        statement, *new = new
        match statement:
            case ast.If(test=test, body=[ast.Continue()], orelse=[]):
                steps, rows = _steps_with(loop, ast.UnaryOp(op=ast.Not(), operand=test)), new
            case ast.If(test=test, body=rows, orelse=[]):
                steps = _steps_with(loop, test)
            case _:
                steps, rows = "", []
        names = [_appended_name(one) for one in rows]
        if not steps or not names or not all(begins(spot, name) == [] for name in names):
            body.append(statement)
            continue
        body += rows
        kept |= dict.fromkeys(names, steps)
        new = [] if rows is new else new
    appended = [filled_list(node) for one in body for node in ast.walk(one)]
    if not kept or any(appended.count(name) != 1 for name in kept):
        return None
    after = [one for name, steps in kept.items() for one in statements(f"{name}[:] = {name}[{steps}]")]
    firsts = [int(steps.partition(":")[0]) for name, steps in kept.items() if find_join(spot, name, name)]
    least = 1 + max(firsts, default=-1)
    before = _check_steps(loop, least) if least else loop.before  # torch joins no empty list
    bounds = f"{loop.start}, {ast.unparse(loop.end)}" if loop.start else ast.unparse(loop.end)
    words = f"each step of `{first_line(spot.statement)}` appends, and only some are kept"
    return scope.candidate([spot.statement], [*before, _for(loop, f"range({bounds})", body), *after], words)


def _appended_name(statement: ast.stmt) -> str:
    found = appended_by(statement)
    return "" if found is None else found[0]


def _steps_with(loop: _Counted, test: ast.expr) -> str:
    """The steps for which a condition on the counter holds, as a slice of all: from one on, or every third, say."""
    match test:
        case ast.UnaryOp(
            op=ast.Not(), operand=ast.Compare(left=left, ops=[ast.Lt() | ast.LtE() as op], comparators=[to])
        ):
            turned = ast.GtE() if isinstance(op, ast.Lt) else ast.Gt()
            return _steps_with(loop, ast.Compare(left=left, ops=[turned], comparators=[to]))
        case ast.UnaryOp(op=ast.Not(), operand=ast.UnaryOp(op=ast.Not(), operand=inner)):
            return _steps_with(loop, inner)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Compare(left=left, ops=[ast.Eq()], comparators=[to])):
            return _steps_with(loop, ast.Compare(left=left, ops=[ast.NotEq()], comparators=[to]))
        case ast.Name(id=name) if name == loop.counter and loop.start == 0:
            return "1:"
        case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=int(to))]):
            shift = shift_of(left, loop.counter)
            first = to - (shift or 0) + isinstance(op, ast.Gt)
            if shift is not None and isinstance(op, ast.Gt | ast.GtE) and first >= loop.start:
                return f"{first - loop.start}:"
            if shift is not None and isinstance(op, ast.NotEq) and first == loop.start:
                return "1:"
            match left:
                case ast.BinOp(left=counter, op=ast.Mod(), right=ast.Constant(value=int(every))) if every > 0:
                    shift = shift_of(counter, loop.counter)
                    if shift is not None and isinstance(op, ast.Eq) and 0 <= to < every:
                        return f"{(to - shift - loop.start) % every}::{every}"
    return ""


def _first(scope: Scope, spot: Spot, loop: _Counted) -> Candidate | None:
    start, (none, lists) = loop.start, _nothing_before(spot, loop.body)
    facts = partial(StepFacts, scope=scope, counter=loop.counter, end=loop.end, from_end=(-UNBOUND, -1))
    alone = facts(from_zero=(start, start), none=none, lists=lists)
    first = alone.answer(loop.body)
    none, lists = ({name: True for name, holds in held.items() if holds} for held in (alone.none, alone.lists))
    for _ in range(2):
        others = facts(from_zero=(start + 1, UNBOUND), none=dict(none), lists=dict(lists))
        rest = others.answer(loop.body)
        none = {name: True for name in none if not may_be_none(rest or (), name)}  # in a later step
    if first is None or rest is None or not (alone.answered and others.answered) or _jumps(first):
        return None
    appended = [filled_list(node) for one in first for node in ast.walk(one)]
    first = [
        each for one in first for each in (_begin_list(scope, one) if _begins_empty(spot, one, appended) else [one])
    ]
    first = [substitute(one, {loop.counter: ast.Constant(start)}) for one in first]
    new = [*_check_steps(loop), *first, _for(loop, f"range({start + 1}, {ast.unparse(loop.end)})", rest)]
    words = f"the first step of `{first_line(spot.statement)}` stands by itself"
    return scope.candidate([spot.statement], new, words)


def _last(scope: Scope, spot: Spot, loop: _Counted) -> Candidate | None:
    facts = partial(StepFacts, scope=scope, counter=loop.counter, end=loop.end, from_zero=(loop.start, UNBOUND))
    alone, others = facts(from_end=(-1, -1)), facts(from_end=(-UNBOUND, -2))
    last, rest = alone.answer(loop.body), others.answer(loop.body)
    if last is None or rest is None or not (alone.answered and others.answered) or _jumps(last):
        return None
    until = f"{ast.unparse(loop.end)} - 1"
    last = [substitute(one, {loop.counter: expression(f"({until})")}) for one in last]
    bounds = f"{loop.start}, {until}" if loop.start else until
    new = [*_check_steps(loop), _for(loop, f"range({bounds})", rest), *last]
    words = f"the last step of `{first_line(spot.statement)}` stands by itself"
    return scope.candidate([spot.statement], new, words)


def _check_steps(loop: _Counted, least: int = 1) -> list[ast.stmt]:
    return [*loop.before, *statements(f"torch._check({ast.unparse(loop.end)} >= {loop.start + least})")]


def _for(loop: _Counted, source: str, body: list[ast.stmt]) -> ast.For:
    target = ast.Name(id=loop.counter, ctx=ast.Store())
    return ast.For(target=target, iter=expression(source), body=body or [ast.Pass()], orelse=[])


def _begins_empty(spot: Spot, statement: ast.stmt, appended: Sequence[str]) -> bool:
    """Whether it is the only `append` of a list that begins empty."""
    found = appended_by(statement)
    return found is not None and appended.count(found[0]) == 1 and begins(spot, found[0]) == []


def _begin_list(scope: Scope, statement: ast.stmt) -> list[ast.stmt]:
    """`rows.append(y)`, of an empty list, as `rows = [y]`, with a name for y."""
    appended = appended_by(statement)
    assert appended is not None
    name, value = appended
    first = scope.fresh(f"{name}_first")
    return statements(f"{first} = {ast.unparse(value)}\n{name} = [{first}]")


def _jumps(block: Sequence[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Break | ast.Continue | ast.Return) for one in block for node in ast.walk(one))


def _nothing_before(spot: Spot, body: Sequence[ast.stmt]) -> tuple[dict[str, bool], dict[str, bool]]:
    """Names that hold None when the loop begins, and those that hold an empty list, which nothing but the loop's own
    `append` and `insert` changes."""
    none: dict[str, bool] = {}
    lists: dict[str, bool] = {}
    for statement in spot.block[: spot.index]:
        for name in {*stored_names(statement), *loaded_names(statement)}:
            none.pop(name, None)
            lists.pop(name, None)
        plain = isinstance(statement, ast.AnnAssign) or (
            isinstance(statement, ast.Assign) and len(statement.targets) == 1
        )
        for name, value in assignments(statement) if plain else ():
            text = ast.unparse(value)
            (none if text == "None" else lists if text in ("[]", "list()") else {})[name] = False
    nodes = [node for one in body for node in ast.walk(one)]
    shorter = {ast.unparse(one.value) for one in nodes if isinstance(one, ast.Attribute) and one.attr in _SHORTEN}
    shorter |= {
        ast.unparse(one.value) for one in nodes if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Del)
    }
    return none, {n: False for n in lists if n not in shorter | set(stored_names([*body]))}
