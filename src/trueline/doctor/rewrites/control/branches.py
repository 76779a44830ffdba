"""`if` on a value or a size: both ways are computed and one is chosen (torch.where), or one is run (torch.cond).

Conditions: each way is straight code, assignments to names and perhaps a return, and both give tensors that
broadcast to one shape (where) or have the same shape and dtype (cond). After an early `return`, the rest of the block
is the other way.
"""

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trueline.doctor.rewrites.appends import appended_by
from trueline.doctor.rewrites.control.no_change import Nothing, is_remainder, nothing_where, read_beyond
from trueline.doctor.rewrites.control.same_form import check_forms
from trueline.doctor.rewrites.predicate import predicate, without_numbers
from trueline.doctor.rewrites.pure import pure
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    assign,
    bound_before,
    define,
    expression,
    loaded_names,
    named_value,
    read_later,
    statements,
    stored_names,
    substitute,
    walk,
)


class NotStraight(Exception):
    """A way holds something that cannot be computed on both ways: a loop, a write into an object, a call for effect."""


@dataclass(slots=True)
class Branch:
    """One way as straight code: its statements with renamed targets, the values of its names, its return value."""

    lines: list[ast.stmt] = field(default_factory=list)
    values: dict[str, ast.expr] = field(default_factory=dict)
    returns: ast.expr | None = None
    ends: bool = False


Ways = tuple[list[ast.stmt], list[ast.stmt], int]
"""The two ways, and the index in the block at which both have ended."""


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """Candidates for the statement at `spot`: a ternary inside it, or itself an `if`."""
    statement = spot.statement
    if not isinstance(statement, ast.If):
        yield _ternaries(scope, spot)
        return
    ways = _ways(statement, spot.rest, spot.index + 1)
    calls = [node for way in ways[:2] for node in walk(way) if isinstance(node, ast.Call)]
    yield _one_place(scope, statement)
    yield _one_append(scope, statement)
    where, always = _select_by_where(scope, spot, statement, ways), _run_always(scope, spot, statement)
    cond = _run_one_branch(scope, spot, statement, ways)
    heavy = cond is not None and any(ast.unparse(call.func).startswith("self.") for call in calls)
    yield from (cond, where, always) if heavy else (where, always, cond)


def _where_words(test: ast.expr) -> str:
    return f"`if {ast.unparse(test)}` chooses with torch.where"


def _one_place(scope: Scope, statement: ast.If) -> Candidate | None:
    """`if c: out[i] = a else: out[i] = b` as `out[i] = torch.where(c, a, b)`; without the other way it stays."""
    stores: list[tuple[str, ast.expr]] = []
    for way in (statement.body, statement.orelse):
        match way:
            case [ast.Assign(targets=[ast.Subscript() as target], value=value)]:
                stores.append((ast.unparse(target), without_numbers(value, scope)))
    places = {place for place, _ in stores}
    if len(places) != 1 or len(stores) != (2 if statement.orelse else 1):
        return None
    (place,) = places
    other = stores[1][1] if statement.orelse else expression(place)
    chosen = ast.unparse(_select(predicate(statement.test, scope), stores[0][1], other))
    return scope.candidate([statement], statements(f"{place} = {chosen}"), _where_words(statement.test))


def _one_append(scope: Scope, statement: ast.If) -> Candidate | None:
    """`if c: rows.append(a) else: rows.append(b)` as `rows.append(torch.where(c, a, b))`."""
    found = _choose_appended(scope, statement)
    if found is None:
        return None
    name, value = found
    new = statements(f"{name}.append({ast.unparse(value)})")
    return check_forms(scope, [statement], new, _where_words(statement.test), _lines(statement))


def _choose_appended(scope: Scope, statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """List and value of an `append`, or of one in each way of an `if`, with `elif` too."""
    if not isinstance(statement, ast.If):
        appended = appended_by(statement)
        return None if appended is None else (appended[0], without_numbers(appended[1], scope))
    one, two = (
        _choose_appended(scope, way[0]) if len(way) == 1 else None for way in (statement.body, statement.orelse)
    )
    if one is None or two is None or one[0] != two[0]:
        return None
    return one[0], _select(predicate(statement.test, scope), one[1], two[1])


def _ways(statement: ast.If, rest: list[ast.stmt], end: int) -> Ways:
    """The two ways of an `if` which `rest` follows in its block, from the index `end` on. After `if c: return`, the
    rest is the other way."""
    body, other, returns = statement.body, statement.orelse, _returns(statement.body)
    if rest and returns != _returns(other):
        return (body, [*other, *rest], end + len(rest)) if returns else ([*body, *rest], other, end + len(rest))
    return body, other, end


def _returns(block: Sequence[ast.stmt]) -> bool:
    last = block[-1] if block else None
    return isinstance(last, ast.Return) or (isinstance(last, ast.If) and _returns(last.body) and _returns(last.orelse))


def _select_by_where(scope: Scope, spot: Spot, statement: ast.If, ways: Ways) -> Candidate | None:
    """Both ways computed, `torch.where` chooses."""
    body, other, end = ways
    known = bound_before(spot, scope.function)
    try:
        new = _where(scope, statement.test, body, other, known, read_later(spot, end))
    except NotStraight:
        return None
    block = spot.block[spot.index : end]
    return check_forms(scope, block, new, _where_words(statement.test), _lines(statement))


def _lines(statement: ast.If) -> tuple[int, int]:
    return statement.test.lineno, statement.body[0].lineno


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
        values = [way.values.get(name) or (_value_before(scope, name) if name in known else None) for way in (one, two)]
        if values[0] is None or values[1] is None:
            raise NotStraight(f"'{name}' has no value on one of the ways")
        chosen.append(assign(name, _select(pred, values[0], values[1])))
    if not chosen:
        raise NotStraight("neither way changes a name that is read later")
    return [*named, *one.lines, *two.lines, *chosen]


def _name_predicate(scope: Scope, pred: ast.expr, uses: int) -> tuple[list[ast.stmt], ast.expr]:
    """The predicate under a name of its own where it is used more than once."""
    if uses < 2 or isinstance(pred, ast.Name):
        return [], pred
    name = scope.fresh("chosen")
    return [assign(name, pred)], expression(name)


def _select(pred: ast.expr, one: ast.expr, two: ast.expr) -> ast.expr:
    if ast.dump(one) == ast.dump(two):
        return one
    if isinstance(one, ast.Tuple) and isinstance(two, ast.Tuple) and len(one.elts) == len(two.elts):
        return ast.Tuple(elts=[_select(pred, a, b) for a, b in zip(one.elts, two.elts, strict=True)], ctx=ast.Load())
    if isinstance(one, ast.Dict) and isinstance(two, ast.Dict) and ast.dump(_keys(one)) == ast.dump(_keys(two)):
        values = [_select(pred, a, b) for a, b in zip(one.values, two.values, strict=True)]
        return ast.Dict(keys=one.keys, values=values)
    return ast.Call(func=expression("torch.where"), args=[copy.deepcopy(pred), one, two], keywords=[])


def _keys(node: ast.Dict) -> ast.Dict:
    return ast.Dict(keys=node.keys, values=[])


def _straight(scope: Scope, block: list[ast.stmt], suffix: str, known: set[str], later: set[str]) -> Branch:
    way, current = Branch(), dict[str, ast.expr]()
    known = set(known)
    for index, statement in enumerate(block):
        if isinstance(statement, ast.If):
            rest = block[index + 1 :]
            body, other, done = _ways(statement, rest, 0)
            nested = _where(scope, statement.test, body, other, known, later | set(loaded_names(rest)))
            found = _straight(scope, nested if done else [*nested, *rest], suffix, known, later)
            return _join_branches(way, found, current)
        if isinstance(statement, ast.Return):
            if statement.value is None:
                raise NotStraight("a bare return")
            way.returns, way.ends = substitute(without_numbers(statement.value, scope), current), True
            break
        match statement:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                continue
        last = index == len(block) - 1
        assigned = _assignments(pure(scope, statement))
        pairs = [(name, substitute(_plain(scope, name, value), current)) for name, value in assigned]
        for name, value in pairs:
            if last and len(pairs) == 1:
                current[name] = value
            else:
                fresh = scope.fresh(name + suffix)
                way.lines.append(assign(fresh, value))
                current[name] = expression(fresh)
            known.add(name)
    way.values = current
    return way


def _plain(scope: Scope, name: str, value: ast.expr) -> ast.expr:
    """`value` without numbers that are taken out of tensors; a fraction that a size makes as a tensor in the precision
    of Python's own."""
    fraction = _is_fraction(scope, name) and scope.depends_on(value) == "size"
    edit: Any = _Fractions(scope).visit(copy.deepcopy(value)) if fraction else without_numbers(value, scope)
    plain: ast.expr = edit
    return plain


def _value_before(scope: Scope, name: str) -> ast.expr:
    """The value from before the branch; that of a fraction as a tensor like the other's."""
    return expression(f"torch.full((), {name}, dtype=torch.float64)" if _is_fraction(scope, name) else name)


def _is_fraction(scope: Scope, name: str) -> bool:
    """Whether the name holds a fraction that a size makes."""
    return isinstance(scope.seen.get(name), float) and scope.depends_on(expression(name)) == "size"


class _Fractions(ast.NodeTransformer):
    """Arithmetic of sizes and functions of `math` on tensors of no dimension."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def visit(self, node: ast.AST) -> ast.AST:
        sizes = isinstance(node, ast.Name | ast.Subscript | ast.Call) and self.scope.depends_on(node) == "size"
        match node:
            case ast.Name() | ast.Subscript(value=ast.Attribute(attr="shape")) if sizes:
                return expression(f"torch.full((), {ast.unparse(node)}, dtype=torch.float64)")
            case ast.Call(func=ast.Attribute(attr="size") | ast.Name(id="len")) if sizes:
                return expression(f"torch.full((), {ast.unparse(node)}, dtype=torch.float64)")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr=name)) if sizes:
                node.func = expression(f"torch.{name}")
                node.args = [self.visit(one) for one in node.args]  # type: ignore[misc]
                return node
        return self.generic_visit(node)


def _join_branches(way: Branch, rest: Branch, current: dict[str, ast.expr]) -> Branch:
    """`way` up to a nested `if`, then what that became."""
    for line in rest.lines:
        assert isinstance(line, ast.Assign)
        line.value = substitute(line.value, current)
    values = {**current, **{name: substitute(value, current) for name, value in rest.values.items()}}
    returns = None if rest.returns is None else substitute(rest.returns, current)
    return replace(rest, lines=[*way.lines, *rest.lines], values=values, returns=returns)


def _assignments(statement: ast.stmt) -> list[tuple[str, ast.expr]]:
    """Names and their values, all of which are computed before the first name changes."""
    named = named_value(statement)
    if named is not None:
        return [named]
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return [(name, value)]
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(values):
            names = [one.id for one in targets if isinstance(one, ast.Name)]
            if len(set(names)) == len(targets):
                return list(zip(names, values, strict=True))
    raise NotStraight(f"`{ast.unparse(statement).splitlines()[0]}` is not an assignment to a name")


def _run_always(scope: Scope, spot: Spot, statement: ast.If) -> Candidate | None:
    """The body without its condition, where it changes nothing when the condition is false: at all values, as the
    statements say. Calls have to take both ways, since the body may raise there."""
    both = _lines(statement)
    if statement.orelse or _returns(statement.body) or both[0] == both[1]:
        return None
    padding = _Padding(scope, statement.test)
    body = [padding.visit(copy.deepcopy(one)) for one in statement.body]
    known = nothing_where(scope, statement.test, holds=False).join(Nothing(zero=padding.zero))
    if not known.changes_nothing(scope, body, read_beyond(spot)):
        return None
    words = f"the body of `if {ast.unparse(statement.test)}` changes nothing where it is false, and runs always"
    return scope.candidate([statement], body, words, both)


class _Padding(ast.NodeTransformer):
    """`k - n % k`, the distance to the next multiple, as `-n % k`, which is 0 where n is a multiple; under
    `if n < k`, `k - n` as 0 where n is above, and so a size `m` under `if m > 0`."""

    def __init__(self, scope: Scope, test: ast.expr) -> None:
        self.distance = ""
        match test:
            case ast.Compare(left=ast.Name(id=size), ops=[ast.Gt() | ast.GtE()], comparators=[ast.Constant()]):
                self.distance = "" if is_remainder(scope, size) else size
            case ast.Compare(left=size, ops=[ast.Lt() | ast.LtE()], comparators=[least]):
                self.distance = ast.unparse(ast.BinOp(left=least, op=ast.Sub(), right=size))
            case ast.Compare(left=least, ops=[ast.Gt() | ast.GtE()], comparators=[size]):
                self.distance = ast.unparse(ast.BinOp(left=least, op=ast.Sub(), right=size))

    @property
    def zero(self) -> frozenset[str]:
        """The distances that are 0 where the test is false."""
        return frozenset([f"torch.sym_max({self.distance}, 0)"] if self.distance else [])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        named = node.id == self.distance and isinstance(node.ctx, ast.Load)
        return expression(f"torch.sym_max({self.distance}, 0)") if named else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node) == self.distance:
            return expression(f"torch.sym_max({self.distance}, 0)")
        match node:
            case ast.BinOp(left=left, op=ast.Sub(), right=ast.BinOp(left=size, op=ast.Mod(), right=unit)):
                if ast.dump(left) == ast.dump(unit):
                    return ast.BinOp(left=ast.UnaryOp(op=ast.USub(), operand=size), op=ast.Mod(), right=unit)
        return node


def _run_one_branch(scope: Scope, spot: Spot, statement: ast.If, ways: Ways) -> Candidate | None:
    """One way run: torch.cond over two functions of the names that they read."""
    body, other, end = ways
    known, later = bound_before(spot, scope.function), read_later(spot, end)
    ends = _returns(body)
    writes = any(
        isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)
        for node in walk([*body, *other])
    )
    one, two = stored_names(body), stored_names(other)
    names = [name for name in dict.fromkeys([*one, *two]) if name in later]
    unknown = [name for name in names if name not in known and not (name in one and name in two)]
    if writes or ends != _returns(other) or (not ends and (not names or unknown)):
        return None
    read = dict.fromkeys([*loaded_names(body), *loaded_names(other), *names])
    operands = [name for name in read if name in known and scope.is_tensor(expression(name))]
    then, otherwise = scope.fresh("one_way"), scope.fresh("other_way")
    functions = [_way(name, operands, part, names, ends) for name, part in ((then, body), (otherwise, other))]
    tail = ", ".join(operands) + ("," if operands else "")
    call = f"torch.cond({ast.unparse(predicate(statement.test, scope))}, {then}, {otherwise}, ({tail}))"
    head = "return " if ends else f"{', '.join(names)} = "
    words = f"`if {ast.unparse(statement.test)}` runs one way with torch.cond"
    return scope.candidate(spot.block[spot.index : end], [*functions, *statements(head + call)], words)


def _way(name: str, operands: list[str], block: list[ast.stmt], names: list[str], ends: bool) -> ast.stmt:
    body = [copy.deepcopy(one) for one in block]
    last = body[-1] if ends else None
    if isinstance(last, ast.Return) and isinstance(last.value, ast.Name):
        last.value = expression(f"{last.value.id}.clone()")
    values = ", ".join(one if one in stored_names(block) else f"{one}.clone()" for one in names)
    return define(name, ", ".join(operands), body, "" if ends else values)


def _ternaries(scope: Scope, spot: Spot) -> Candidate | None:
    if isinstance(spot.statement, ast.For | ast.While | ast.With | ast.Try):
        return None
    tests: list[str] = []

    class Choose(ast.NodeTransformer):
        def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
            if scope.depends_on(node.test) == "static":
                return self.generic_visit(node)
            tests.append(ast.unparse(node.test))
            pred = predicate(node.test, scope)
            self.generic_visit(node)
            return _select(pred, without_numbers(node.body, scope), without_numbers(node.orelse, scope))

    new = Choose().visit(copy.deepcopy(spot.statement))
    words = f"`… if {tests[0]} else …` chooses with torch.where" if tests else ""
    return check_forms(scope, [spot.statement], [new], words) if tests else None
