"""Sizes and values that Python turns into numbers: `len(x)` and `int(x.shape[1])` fix a size that varies, `.item()`
takes a number out of a tensor.

Condition: none for `len` and `.item()`; `int` of a size is removed, and of arithmetic that rounds it becomes torch's.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.predicate import without_numbers
from trueline.doctor.rewrites.scope import Candidate, Compound, Scope, Spot, expression

FREED = "a size that stays free"
"""Part of the description of an edit that frees a size."""


def keep_sizes(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The simple statement at `spot`, then every simple statement of the function, one at a time, with free sizes."""
    seen: set[int] = set()
    for statement in (spot.statement, *ast.walk(scope.function)):
        if not isinstance(statement, ast.stmt) or isinstance(statement, Compound | ast.FunctionDef):
            continue
        if statement.lineno in seen:
            continue
        seen.add(statement.lineno)
        kept = _Sizes(scope)
        new = kept.visit(copy.deepcopy(statement))
        text = scope.replace([statement], [new]) if kept.words else None
        if text:
            yield Candidate(text=text, words="; ".join(dict.fromkeys(kept.words)), frees=True)


class _Sizes(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.words: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        free = free_size(self.scope, node)
        if free is not None:
            self.words.append(f"`{ast.unparse(node)}` is `{ast.unparse(free)}`, {FREED}")
        return free or node


def free_size(scope: Scope, node: ast.AST) -> ast.expr | None:
    """`node` with a size that stays free; None where it is no call that fixes one."""
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[given]) if scope.is_tensor(given):
            return expression(f"{ast.unparse(given)}.shape[0]")
        case ast.Call(func=ast.Name(id="int"), args=[given]) if scope.depends_on(given) == "size":
            return expression(f"torch.sym_int({ast.unparse(given)})") if _rounds(given) else given
    return None


def fixes_size(statement: ast.stmt) -> bool:
    """Whether a statement calls `int`, which may fix a size that varies."""
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Name) and called.id == "int" for called in calls)


def _rounds(node: ast.expr) -> bool:
    """Whether `node` may be a fraction: it has a division or a number with a point."""
    return any(
        isinstance(one, ast.Div | ast.Pow) or (isinstance(one, ast.Constant) and isinstance(one.value, float))
        for one in ast.walk(node)
    )


def keep_scalars(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The statement at `spot` without `.item()`; then each assignment of the function."""
    others = [one for one in ast.walk(scope.function) if isinstance(one, ast.Assign | ast.AugAssign)]
    for statement in (spot.statement, *(one for one in others if one is not spot.statement)):
        if not isinstance(statement, Compound):
            new = without_numbers(statement, scope)
            if ast.unparse(new) != ast.unparse(statement):
                yield scope.candidate([statement], [new], f"`{ast.unparse(statement)}` stays a tensor")
