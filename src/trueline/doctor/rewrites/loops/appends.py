"""A list to which each step of a loop appends, as one tensor with the steps first; and what stands for its uses.

Condition: the list begins empty or with tensors written there, and is only stacked, joined, turned round, counted,
read by its place or gone through afterwards.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.scope import Scope, Spot, expression, statements, stored_names, walk


def appended_by(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """List and value of `list.append(value)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append"):
        return None
    if isinstance(call.func.value, ast.Name) and len(call.args) == 1:
        return call.func.value.id, call.args[0]
    return None


def find_join(spot: Spot, name: str, stacked: str) -> tuple[ast.expr, ast.Call] | None:
    """How the list `name` is joined after the loop, as an expression on `stacked` (time first), and the call that
    joins."""
    for node in _after(spot):
        if isinstance(node, ast.Call) and _joins(node, name):
            found = join(node, stacked)
            return None if found is None else (found, node)
    return None


def _after(spot: Spot) -> Iterator[ast.AST]:
    for statement in spot.block[spot.index + 1 :]:
        yield from walk(statement)


def _joins(node: ast.Call, name: str) -> bool:
    function = ast.unparse(node.func)
    known = ("torch.stack", "torch.cat", "torch.concat")
    return function in known and bool(node.args) and ast.unparse(node.args[0]) == name


def join(node: ast.Call, stacked: str) -> ast.expr | None:
    """What `torch.stack` or `torch.cat` makes of a list, as an expression on `stacked` (time first)."""
    assert isinstance(node.func, ast.Attribute)
    given = [*node.args[1:], *(k.value for k in node.keywords if k.arg in ("dim", "axis"))]
    try:
        axis = int(ast.literal_eval(given[0])) if given else 0
    except (ValueError, TypeError):
        return None
    if node.func.attr == "stack":
        return expression(stacked if axis == 0 else f"{stacked}.movedim(0, {axis})")
    if axis < 0:
        return None
    return expression(f"{stacked}.movedim(0, {axis}).flatten({axis}, {axis + 1})")


def uses(spot: Spot, name: str) -> dict[int, ast.expr | ast.stmt] | None:
    """What stands for each use of the list `name` after the loop (id of the node -> its other form), when `name` is a
    tensor with the steps first; None where it is used in a way that a tensor does not know."""
    found: dict[int, ast.expr | ast.stmt] = {}
    known: set[int] = set()
    for node in _after(spot):
        if isinstance(node, ast.Expr) and ast.unparse(node.value) == f"{name}.reverse()":
            found[id(node)] = statements(f"{name} = {name}.flip(0)")[0]
            known |= {id(one) for one in ast.walk(node)}
        other = _use(node, name) if isinstance(node, ast.expr) else None
        if other is not None:
            found[id(node)] = other
            known |= {id(one) for one in ast.walk(node)}
        known |= _uses_like_a_tensor(node, name)
    names = [node for node in _after(spot) if isinstance(node, ast.Name) and node.id == name]
    return found if all(id(node) in known for node in names) else None


def _use(node: ast.expr, name: str) -> ast.expr | None:
    text = ast.unparse(node)
    if isinstance(node, ast.Call) and _joins(node, name):
        return join(node, name)
    if text in (f"reversed({name})", f"{name}[::-1]", f"list(reversed({name}))"):
        return expression(f"{name}.flip(0)")
    return expression(f"{name}.shape[0]") if text == f"len({name})" else None


def _uses_like_a_tensor(node: ast.AST, name: str) -> set[int]:
    """Uses that mean the same of a list and of a tensor: an element by its place, going through it, one more."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and not isinstance(node.slice, ast.Slice):
        return {id(node.value)}
    if isinstance(node, ast.For) and isinstance(node.iter, ast.Name):
        return {id(node.iter)}
    return set()


def begins(spot: Spot, name: str) -> list[ast.expr] | None:
    """What the list holds when the loop begins, where it is made in the loop's own block; None where that is not
    seen."""
    for statement in reversed(spot.block[: spot.index]):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and name in stored_names(statement):
            one = isinstance(statement, ast.AnnAssign) or isinstance(statement.targets[0], ast.Name)
            return list(statement.value.elts) if one and isinstance(statement.value, ast.List) else None
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement)):
            return None
    return None


def without_list(
    scope: Scope, spot: Spot, names: list[str], new: list[ast.stmt], swaps: dict[int, ast.expr | ast.stmt]
) -> str | None:
    """The file with the loop replaced by `new`, uses by `swaps` (id of the node -> other form), and the lists'
    `name = []` gone."""
    block = spot.block
    start = spot.index
    for index in range(spot.index - 1, -1, -1):
        statement = block[index]
        if isinstance(statement, ast.Assign | ast.AnnAssign) and set(stored_names(statement)) & set(names):
            start = index
    kept = [
        one
        for one in block[start : spot.index]
        if not (isinstance(one, ast.Assign | ast.AnnAssign) and set(stored_names(one)) & set(names))
    ]
    end = spot.index + 1
    tail: list[ast.stmt] = []
    for index in range(spot.index + 1, len(block)):
        if any(id(node) in swaps for node in ast.walk(block[index])):
            tail += [*block[end:index], _swap_nodes(block[index], swaps)]
            end = index + 1
    return scope.replace(block[start:end], [*kept, *new, *tail])


def _swap_nodes(statement: ast.stmt, swaps: dict[int, ast.expr | ast.stmt]) -> ast.stmt:
    """A copy of `statement` with other forms in the place of its nodes."""
    twin = copy.deepcopy(statement)
    pairs = zip(ast.walk(statement), ast.walk(twin), strict=True)
    others = {id(new): swaps[id(old)] for old, new in pairs if id(old) in swaps}

    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return copy.deepcopy(others[id(node)]) if id(node) in others else self.generic_visit(node)

    marked = Swap().visit(twin)
    assert isinstance(marked, ast.stmt)
    return marked
