"""A branch on a size that chooses sizes: they are chosen by arithmetic, and what is made of them is made always.

    if n % 8 != 0:                            more = torch.sym_min(abs(n % 8), 1)
        whole = (n // 8 + 1) * 8     ──▶      whole = n + ((n // 8 + 1) * 8 - n) * more
        x = F.pad(x, (0, whole - n))          x = F.pad(x, (0, whole - n))
    else:
        whole = n

Condition: with the sizes of the other way the body's other statements change nothing, at any values. Calls take both
ways.
"""

import ast
import copy
from collections.abc import Iterator, Mapping

from trueline.doctor.rewrites.control.no_change import Nothing, read_beyond
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    assign,
    assignments,
    expression,
    loaded_names,
    named_value,
    statements,
    stored_names,
)

_COMPARED: Mapping[type[ast.cmpop], str] = {
    ast.NotEq: "torch.sym_min(abs({a} - ({b})), 1)",
    ast.Eq: "1 - torch.sym_min(abs({a} - ({b})), 1)",
    ast.Gt: "torch.sym_min(torch.sym_max({a} - ({b}), 0), 1)",
    ast.GtE: "torch.sym_min(torch.sym_max({a} - ({b}) + 1, 0), 1)",
    ast.Lt: "torch.sym_min(torch.sym_max({b} - ({a}), 0), 1)",
    ast.LtE: "torch.sym_min(torch.sym_max({b} - ({a}) + 1, 0), 1)",
}
"""1 where whole numbers compare so, else 0."""


def choose_sizes(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The `if` at `spot` without a branch, where its body assigns a size."""
    branch = spot.statement
    if not isinstance(branch, ast.If) or scope.depends_on(branch.test) != "size":
        return
    flag, before = _flag(branch.test), _numbers_before(spot)
    others = {name: value for one in branch.orelse for name, value in assignments(one)}
    name = scope.fresh("more")
    new, kept, nothing = [], list[ast.stmt](), Nothing(zero=frozenset([name]))
    for statement in branch.body:
        pairs = [*assignments(statement)] if isinstance(statement, ast.Assign) else []
        if not pairs or any(scope.depends_on(value) != "size" for _, value in pairs):
            new.append(copy.deepcopy(statement))
            kept.append(statement)
            continue
        for target, value in pairs:
            if kept or (target not in others and target not in before):
                return
            other = others.get(target) or before[target]
            nothing = nothing.join(Nothing(values={target: other}))
            shown = ast.unparse(other) if target in others else target
            new.append(assign(target, expression(f"{shown} + ({ast.unparse(value)} - ({shown})) * {name}")))
    same = {_same_in_both(one, others, nothing) for one in kept}
    kept = [one for one in kept if not _same_in_both(one, others, nothing)]
    chosen = {*nothing.values} | same
    # what the other way does beside choosing these sizes would be lost
    alone = all(isinstance(one, ast.Assign) and {*stored_names(one)} <= chosen for one in branch.orelse)
    if not (nothing.values and flag and alone) or not nothing.changes_nothing(scope, kept, read_beyond(spot)):
        return
    words = f"`if {ast.unparse(branch.test)}` chooses sizes by arithmetic"
    lines = branch.test.lineno, branch.body[0].lineno
    yield scope.candidate([branch], [*statements(f"{name} = {flag}"), *new], words, lines)


def _same_in_both(statement: ast.stmt, others: Mapping[str, ast.expr], nothing: Nothing) -> str:
    """The name that the statement gives what the other way gives it, with the sizes of that way."""
    named = named_value(statement) if isinstance(statement, ast.Assign) else None
    other = None if named is None else others.get(named[0])
    if named is None or not isinstance(other, ast.Name):
        return ""
    return named[0] if nothing.is_same(other.id, named[1]) else ""


def _numbers_before(spot: Spot) -> dict[str, ast.expr]:
    """What names were given last before the statement, in its block, as far as that has not changed since."""
    given: dict[str, ast.expr] = {}
    for statement in spot.block[: spot.index]:
        stored = {*stored_names(statement)}
        given = {name: value for name, value in given.items() if not stored & {name, *loaded_names(value)}}
        named = named_value(statement) if isinstance(statement, ast.Assign) else None
        if named is not None and named[0] not in loaded_names(named[1]):
            given[named[0]] = named[1]
    return given


def _flag(test: ast.expr) -> str:
    """1 where the test of sizes holds, else 0; empty for another form of test."""
    match test:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            form = _COMPARED.get(type(operator), "")
            return form.format(a=ast.unparse(left), b=ast.unparse(right))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _flag(operand)
            return f"1 - ({inner})" if inner else ""
        case ast.BoolOp(op=operator, values=values):
            flags = [_flag(one) for one in values]
            joined = flags[0]
            for flag in flags[1:]:
                joined = f"torch.sym_{'min' if isinstance(operator, ast.And) else 'max'}({joined}, {flag})"
            return joined if all(flags) else ""
        case ast.Name() | ast.BinOp() | ast.Subscript() | ast.Call():
            return f"torch.sym_min(abs({ast.unparse(test)}), 1)"
    return ""
