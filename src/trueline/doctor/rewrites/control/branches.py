"""`if` on a value or a size: both ways are computed and one is chosen (torch.where), or one is run (torch.cond).

Conditions: each way is straight code, assignments to names and perhaps a return, and both give tensors that
broadcast to one shape (where) or have the same shape and dtype (cond). An early `return` makes what follows
it the other way.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trueline.doctor.rewrites.control.predicate import predicate, without_numbers
from trueline.doctor.rewrites.loops.appends import appended_by
from trueline.doctor.rewrites.pure import pure
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    bound_before,
    expression,
    loaded_names,
    read_later,
    statements,
    stored_names,
)


class NotStraight(Exception):
    """A way holds something that cannot be computed on both ways: a loop, a write into an object, a call for effect."""


@dataclass(slots=True)
class Branch:
    """One branch as straight code: its statements with renamed targets, the values of its names, what it returns."""

    lines: list[ast.stmt] = field(default_factory=list)
    values: dict[str, ast.expr] = field(default_factory=dict)
    returns: ast.expr | None = None
    ends: bool = False


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """Candidates for the statement at `spot`: a ternary inside it, or itself an `if`."""
    statement = spot.statement
    if not isinstance(statement, ast.If):
        yield from _ternaries(scope, spot)
        return
    body, other, end = _ways(spot)
    heavy = any(isinstance(node, ast.Call) and _calls_module(node) for part in (body, other) for node in _nodes(part))
    for one in (_one_place(scope, statement), _one_item(scope, statement)):
        if one is not None:
            yield one
    choices = [
        _select_by_where(scope, spot, body, other, end),
        _run_always(scope, spot),
        *_run_one_branch(scope, spot, body, other, end),
    ]
    order = (2, 0, 1) if heavy and len(choices) > 2 else range(len(choices))
    yield from (one for one in (choices[i] for i in order) if one is not None)


def _one_place(scope: Scope, statement: ast.If) -> Candidate | None:
    """`if c: out[i] = a else: out[i] = b` as `out[i] = torch.where(c, a, b)`; without the other way it stays."""
    found: list[tuple[ast.expr, ast.expr]] = []
    for way in (statement.body, statement.orelse):
        one = way[0] if len(way) == 1 else None
        if isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Subscript):
            found.append((one.targets[0], one.value))
    places = {ast.unparse(place) for place, _ in found}
    if len(places) != 1 or len(found) != (2 if statement.orelse else 1):
        return None
    place = places.pop()
    values = [without_numbers(value, scope) for _, value in found] + ([] if statement.orelse else [expression(place)])
    new = statements(f"{place} = {ast.unparse(_select(predicate(statement.test, scope), values[0], values[1]))}")
    text = scope.replace([statement], new)
    return Candidate(text=text, words=f"`if {ast.unparse(statement.test)}` chooses with torch.where") if text else None


def _one_item(scope: Scope, statement: ast.If) -> Candidate | None:
    """`if c: rows.append(a) else: rows.append(b)` as `rows.append(torch.where(c, a, b))`."""
    found = [appended_by(way[0]) if len(way) == 1 else None for way in (statement.body, statement.orelse)]
    one, two = found
    if one is None or two is None or one[0] != two[0]:
        return None
    values = [without_numbers(value, scope) for _, value in (one, two)]
    chosen = ast.unparse(_select(predicate(statement.test, scope), *values))
    text = scope.replace([statement], statements(f"{one[0]}.append({chosen})"))
    return Candidate(text=text, words=f"`if {ast.unparse(statement.test)}` chooses with torch.where") if text else None


def _nodes(block: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    for statement in block:
        yield from ast.walk(statement)


def _calls_module(node: ast.Call) -> bool:
    return ast.unparse(node.func).startswith("self.")


def _ways(spot: Spot) -> tuple[list[ast.stmt], list[ast.stmt], int]:
    """The two ways, and the index in the block at which both have ended. After `if c: return`, the rest is the other
    way."""
    statement = spot.statement
    assert isinstance(statement, ast.If)
    body, other, end = list(statement.body), list(statement.orelse), spot.index + 1
    rest = list(spot.block[end:])
    if _returns(body) and not _returns(other) and rest:
        return body, [*other, *rest], len(spot.block)
    if _returns(other) and not _returns(body) and rest:
        return [*body, *rest], other, len(spot.block)
    return body, other, end


def _returns(block: Sequence[ast.stmt]) -> bool:
    if not block:
        return False
    last = block[-1]
    return isinstance(last, ast.Return) or (
        isinstance(last, ast.If) and _returns(last.body) and (_returns(last.orelse) or (not last.orelse and False))
    )


def _select_by_where(
    scope: Scope, spot: Spot, body: list[ast.stmt], other: list[ast.stmt], end: int
) -> Candidate | None:
    """Both ways computed, `torch.where` chooses."""
    test = spot.statement.test  # type: ignore[attr-defined]
    known = bound_before(spot, scope.function)
    try:
        new = _where(scope, test, body, other, known, read_later(spot, end))
    except NotStraight:
        return None
    text = scope.replace(spot.block[spot.index : end], new)
    return (text and Candidate(text=text, words=f"`if {ast.unparse(test)}` chooses with torch.where")) or None


def _where(
    scope: Scope, test: ast.expr, body: list[ast.stmt], other: list[ast.stmt], known: set[str], later: set[str]
) -> list[ast.stmt]:
    one = _straight(scope, body, "_then", known, later)
    two = _straight(scope, other, "_else", known, later)
    if one.ends != two.ends:
        raise NotStraight("one way returns and the other does not")
    pred = predicate(test, scope)
    names = [name for name in dict.fromkeys([*one.values, *two.values]) if name in later]
    if one.ends:
        assert one.returns is not None
        assert two.returns is not None
        uses = 2 if isinstance(one.returns, ast.Tuple | ast.Dict) else 1
        named, pred = _name_predicate(scope, pred, uses)
        return [*named, *one.lines, *two.lines, ast.Return(value=_select(pred, one.returns, two.returns))]
    named, pred = _name_predicate(scope, pred, len(names))
    chosen: list[ast.stmt] = []
    for name in names:
        values = [way.values.get(name) or (expression(name) if name in known else None) for way in (one, two)]
        if values[0] is None or values[1] is None:
            raise NotStraight(f"'{name}' has no value on one of the ways")
        target = ast.Name(id=name, ctx=ast.Store())
        chosen.append(ast.Assign(targets=[target], value=_select(pred, values[0], values[1])))
    if not chosen:
        raise NotStraight("neither way changes a name that is read later")
    return [*named, *one.lines, *two.lines, *chosen]


def _name_predicate(scope: Scope, pred: ast.expr, uses: int) -> tuple[list[ast.stmt], ast.expr]:
    """The predicate under a name of its own where it is used more than once."""
    if uses < 2 or isinstance(pred, ast.Name):
        return [], pred
    name = scope.fresh("chosen")
    return [ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=pred)], expression(name)


def _select(pred: ast.expr, one: ast.expr, two: ast.expr) -> ast.expr:
    if ast.dump(one) == ast.dump(two):
        return one
    if isinstance(one, ast.Tuple) and isinstance(two, ast.Tuple) and len(one.elts) == len(two.elts):
        return ast.Tuple(elts=[_select(pred, a, b) for a, b in zip(one.elts, two.elts, strict=True)], ctx=ast.Load())
    if isinstance(one, ast.Dict) and isinstance(two, ast.Dict) and _keys(one) == _keys(two):
        values = [_select(pred, a, b) for a, b in zip(one.values, two.values, strict=True)]
        return ast.Dict(keys=one.keys, values=values)
    return ast.Call(func=expression("torch.where"), args=[copy.deepcopy(pred), one, two], keywords=[])


def _keys(node: ast.Dict) -> list[str]:
    return ["" if key is None else ast.dump(key) for key in node.keys]


def _straight(scope: Scope, block: list[ast.stmt], suffix: str, known: set[str], later: set[str]) -> Branch:
    way, current = Branch(), dict[str, ast.expr]()
    known = set(known)
    for index, statement in enumerate(block):
        if isinstance(statement, ast.If):
            rest = block[index + 1 :]
            body, other, done = _inner_ways(statement, rest)
            inner_later = later | set(loaded_names(rest))
            nested = _where(scope, statement.test, body, other, known, inner_later)
            tail = nested if done else [*nested, *rest]
            found = _straight(scope, tail, suffix, known, later)
            return _join_branches(way, found, current)
        if isinstance(statement, ast.Return):
            if statement.value is None:
                raise NotStraight("a bare return")
            way.returns, way.ends = _substitute(statement.value, current, scope), True
            break
        if isinstance(statement, ast.Pass) or _is_words(statement):
            continue
        last = index == len(block) - 1
        pairs = [(name, _substitute(value, current, scope)) for name, value in _assignments(pure(scope, statement))]
        for name, value in pairs:
            if last and len(pairs) == 1:
                current[name] = value
            else:
                fresh = scope.fresh(name + suffix)
                way.lines.append(ast.Assign(targets=[ast.Name(id=fresh, ctx=ast.Store())], value=value))
                current[name] = expression(fresh)
            known.add(name)
    way.values = current
    return way


def _join_branches(way: Branch, rest: Branch, current: dict[str, ast.expr]) -> Branch:
    """`way` up to a nested `if`, then what that became."""
    for line in rest.lines:
        assert isinstance(line, ast.Assign)
        line.value = _Renaming(current).visit(line.value)
    values = {**current, **{name: _Renaming(current).visit(value) for name, value in rest.values.items()}}
    returns = None if rest.returns is None else _Renaming(current).visit(rest.returns)
    return Branch(lines=[*way.lines, *rest.lines], values=values, returns=returns, ends=rest.ends)


def _inner_ways(statement: ast.If, rest: list[ast.stmt]) -> tuple[list[ast.stmt], list[ast.stmt], bool]:
    spot = Spot(block=[statement, *rest], index=0, outer=())
    body, other, end = _ways(spot)
    return body, other, end > 1


def _is_words(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _assignments(statement: ast.stmt) -> list[tuple[str, ast.expr]]:
    """Names and their values, all of which are computed before the first name changes."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return [(name, value)]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return [(name, value)]
        case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
            return [(name, ast.BinOp(left=ast.Name(id=name, ctx=ast.Load()), op=op, right=value))]
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(values):
            named = [one.id for one in targets if isinstance(one, ast.Name)]
            if len(set(named)) == len(targets):
                return list(zip(named, values, strict=True))
    raise NotStraight(f"`{ast.unparse(statement).splitlines()[0]}` is no assignment to a name")


def _substitute(value: ast.expr, current: dict[str, ast.expr], scope: Scope) -> ast.expr:
    return _Renaming(current).visit(without_numbers(value, scope))  # type: ignore[no-any-return]


class _Renaming(ast.NodeTransformer):
    def __init__(self, current: dict[str, ast.expr]) -> None:
        self.current = current

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self.current.get(node.id, node)) if isinstance(node.ctx, ast.Load) else node


def _run_always(scope: Scope, spot: Spot) -> Candidate | None:
    """The body without its condition, for a body that changes nothing where the condition is false."""
    statement = spot.statement
    assert isinstance(statement, ast.If)
    if statement.orelse or _returns(statement.body):
        return None
    body = [copy.deepcopy(one) for one in statement.body]
    text = scope.replace([statement], [_Padding().visit(one) for one in body])
    words = f"what stands under `if {ast.unparse(statement.test)}` changes nothing where it is false, and runs always"
    both = (statement.test.lineno, statement.body[0].lineno)
    return Candidate(text=text, words=words, both=both) if text and both[0] != both[1] else None


class _Padding(ast.NodeTransformer):
    """`k - n % k`, the distance to the next multiple, as `-n % k`: nought where n is one already."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        right = node.right
        rest = isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mod)
        if isinstance(node.op, ast.Sub) and rest:
            assert isinstance(right, ast.BinOp)
            if ast.dump(node.left) == ast.dump(right.right):
                return ast.BinOp(left=ast.UnaryOp(op=ast.USub(), operand=right.left), op=ast.Mod(), right=right.right)
        return node


def _run_one_branch(
    scope: Scope, spot: Spot, body: list[ast.stmt], other: list[ast.stmt], end: int
) -> Iterator[Candidate]:
    """One way run: torch.cond over two functions of the names that they read."""
    test = spot.statement.test  # type: ignore[attr-defined]
    known, later = bound_before(spot, scope.function), read_later(spot, end)
    ends = _returns(body)
    if ends != _returns(other) or any(
        isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)
        for part in (body, other)
        for node in _nodes(part)
    ):
        return
    names = [name for name in dict.fromkeys([*stored_names(body), *stored_names(other)]) if name in later]
    if not ends and (
        not names
        or any(name not in known and not (name in stored_names(body) and name in stored_names(other)) for name in names)
    ):
        return
    read = [name for name in dict.fromkeys([*loaded_names(body), *loaded_names(other), *names]) if name in known]
    operands = [name for name in read if scope.is_tensor(expression(name))]
    one, two = scope.fresh("one_way"), scope.fresh("other_way")
    ways = [_way(name, operands, part, names, ends) for name, part in ((one, body), (two, other))]
    tail = ", ".join(operands) + ("," if operands else "")
    call = f"torch.cond({ast.unparse(predicate(test, scope))}, {one}, {two}, ({tail}))"
    head = "return " if ends else f"{', '.join(names)} = "
    text = scope.replace(spot.block[spot.index : end], [*ways, *statements(head + call)])
    if text:
        yield Candidate(text=text, words=f"`if {ast.unparse(test)}` runs one way with torch.cond", cheap=False)


def _way(name: str, operands: list[str], block: list[ast.stmt], names: list[str], ends: bool) -> ast.stmt:
    body = [copy.deepcopy(one) for one in block]
    if ends:
        last = body[-1]
        if isinstance(last, ast.Return) and isinstance(last.value, ast.Name):
            last.value = expression(f"{last.value.id}.clone()")
    else:
        assigned = stored_names(block)
        values = ", ".join(one if one in assigned else f"{one}.clone()" for one in names)
        body += statements(f"def _():\n    return {values}")[0].body  # type: ignore[attr-defined]
    function = statements(f"def {name}({', '.join(operands)}):\n    pass")[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = body
    return function


def _ternaries(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    statement = copy.deepcopy(spot.statement)
    if isinstance(statement, ast.For | ast.While | ast.With | ast.Try):
        return
    found: list[str] = []

    class Choose(ast.NodeTransformer):
        def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
            if scope.worth(node.test) == "static":
                return self.generic_visit(node)
            found.append(ast.unparse(node.test))
            pred = predicate(node.test, scope)
            self.generic_visit(node)
            return _select(pred, without_numbers(node.body, scope), without_numbers(node.orelse, scope))

    new = Choose().visit(statement)
    if found:
        text = scope.replace([spot.statement], [new])
        if text:
            yield Candidate(text=text, words=f"`… if {found[0]} else …` chooses with torch.where")
