"""Sizes that Python turns into numbers: `len(x)` and `int(x.shape[1])` fix a size that varies, `x.shape[0]` does not.

Condition: none for `len`; `int` of a size by itself goes, and of arithmetic that rounds becomes torch's own.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, expression

FREED = "a size that stays free"
"""Stands in the words of an edit."""


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The simple statement at `spot`; then every simple statement of the function, one at a time."""
    statements = [spot.statement, *(one for one in ast.walk(scope.function) if isinstance(one, ast.stmt))]
    seen: set[int] = set()
    for statement in statements:
        compound = isinstance(statement, ast.For | ast.While | ast.If | ast.With | ast.Try | ast.FunctionDef)
        if compound or statement.lineno in seen:
            continue
        seen.add(statement.lineno)
        kept = _Kept(scope)
        new = kept.visit(copy.deepcopy(statement))
        text = scope.replace([statement], [new]) if kept.words else None
        if text:
            yield Candidate(text=text, words="; ".join(dict.fromkeys(kept.words)), frees=True)


class _Kept(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.words: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        free = free_size(self.scope, node)
        if free is None:
            return node
        self.words.append(f"`{ast.unparse(node)}` is `{ast.unparse(free)}`, {FREED}")
        return free


def free_size(scope: Scope, node: ast.AST) -> ast.expr | None:
    """What `node` says with a size that stays free; None where it is no call that fixes one."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1):
        return None
    given = node.args[0]
    if node.func.id == "len" and scope.is_tensor(given):
        return expression(f"{ast.unparse(given)}.shape[0]")
    if node.func.id == "int" and scope.worth(given) == "size":
        return expression(f"torch.sym_int({ast.unparse(given)})") if _rounds(given) else given
    return None


def fixes_size(statement: ast.stmt) -> bool:
    """Whether a statement calls `int`, which may fix a size that varies."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "int"
        for node in ast.walk(statement)
    )


def _rounds(node: ast.expr) -> bool:
    """Whether `node` may be no whole number: a division, or a number with a point."""
    return any(
        isinstance(one, ast.Div | ast.Pow) or (isinstance(one, ast.Constant) and isinstance(one.value, float))
        for one in ast.walk(node)
    )
