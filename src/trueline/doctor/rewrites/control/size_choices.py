"""A branch on a size that chooses sizes: they are chosen by arithmetic, and what is made of them is made always.

    if n % 8 != 0:                            more = torch.sym_min(abs(n % 8), 1)
        whole = (n // 8 + 1) * 8     ──▶      whole = n + ((n // 8 + 1) * 8 - n) * more
        x = F.pad(x, (0, whole - n))          x = F.pad(x, (0, whole - n))
    else:
        whole = n

Condition: with the sizes of the other way the body's other statements change nothing. Calls take both ways.
"""

import ast
import copy
from collections.abc import Iterator, Mapping

from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    assign,
    assignments,
    bound_before,
    expression,
    statements,
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
    flag, known = _flag(branch.test), bound_before(spot, scope.function)
    others = {name: value for one in branch.orelse for name, value in assignments(one)}
    name = scope.fresh("more")
    new, chosen = [], False
    for statement in branch.body:
        pairs = [*assignments(statement)] if isinstance(statement, ast.Assign) else []
        if not pairs or any(scope.depends_on(value) != "size" for _, value in pairs):
            new.append(copy.deepcopy(statement))
            continue
        for target, value in pairs:
            if target not in others and target not in known:
                return
            other = ast.unparse(others[target]) if target in others else target
            new.append(assign(target, expression(f"{other} + ({ast.unparse(value)} - ({other})) * {name}")))
            chosen = True
    if chosen and flag:
        words = f"`if {ast.unparse(branch.test)}` chooses sizes by arithmetic"
        lines = branch.test.lineno, branch.body[0].lineno
        yield scope.candidate([branch], [*statements(f"{name} = {flag}"), *new], words, lines)


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
