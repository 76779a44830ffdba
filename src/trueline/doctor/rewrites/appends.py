"""A list that each step of a loop appends to, as one tensor with the steps first, and the new form of its uses.

Condition: the list begins empty or with tensors written there. After the loop it is only stacked, concatenated,
reversed, counted, indexed or iterated.
"""

import ast
import copy
from typing import Any, TypeVar

from trueline.doctor.rewrites.scope import (
    Scope,
    Spot,
    assignments,
    expression,
    loaded_names,
    statements,
    stored_names,
    walk,
)

_Node = TypeVar("_Node", ast.stmt, ast.expr)
Swaps = dict[int, ast.expr | ast.stmt]
"""The id of a node -> what replaces it."""


def appended_by(statement: ast.AST) -> tuple[str, ast.expr] | None:
    """List and value of `list.append(value)`."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value])):
            return name, value
    return None


def find_join(spot: Spot, name: str, stacked: str) -> tuple[ast.expr, ast.Call] | None:
    """How the list `name` is joined after the loop, as an expression on `stacked` (time first), and that call."""
    for node in walk(spot.rest):
        if isinstance(node, ast.Call) and _joins(node, name):
            joined = join(node, stacked)
            return None if joined is None else (joined, node)
    return None


def _joins(node: ast.Call, name: str) -> bool:
    known = ("torch.stack", "torch.cat", "torch.concat")
    return ast.unparse(node.func) in known and bool(node.args) and ast.unparse(node.args[0]) == name


def _write_turned(name: str) -> tuple[str, ...]:
    """How Python writes the list `name` from its end."""
    return f"reversed({name})", f"{name}[::-1]", f"list(reversed({name}))"


def join(node: ast.Call, stacked: str) -> ast.expr | None:
    """The result of `torch.stack` or `torch.cat` of a list, as an expression on `stacked` (time first)."""
    assert isinstance(node.func, ast.Attribute)
    given = [*node.args[1:], *(k.value for k in node.keywords if k.arg in ("dim", "axis"))]
    try:
        axis = int(ast.literal_eval(given[0])) if given else 0
    except (ValueError, TypeError):
        return None
    if node.func.attr == "stack":
        return expression(stacked if axis == 0 else f"{stacked}.movedim(0, {axis})")
    return None if axis < 0 else expression(f"{stacked}.movedim(0, {axis}).flatten({axis}, {axis + 1})")


def uses(spot: Spot, names: list[str]) -> Swaps | None:
    """What replaces each use of the lists `names` after the loop, when each is a tensor with the steps first; None
    where one is used in a way that tensors do not have."""
    swaps: Swaps = {}
    for name in names:
        known: set[int] = set()
        rest = _until_anew(spot.rest, name)
        for node in walk(rest):
            other = _tensor_use(node, name)
            if other is not None:
                swaps[id(node)] = other
                known |= {id(inner) for inner in ast.walk(node)}
            match node:  # these mean the same for a list and a tensor
                case ast.Subscript(value=ast.Name() as used, slice=index) if not isinstance(index, ast.Slice):
                    known.add(id(used))
                case ast.For(iter=ast.Name() as used):
                    known.add(id(used))
                case ast.Assign(targets=[ast.Name() as used]) if rest and node is rest[-1]:
                    known.add(id(used))
        if any(isinstance(node, ast.Name) and node.id == name and id(node) not in known for node in walk(rest)):
            return None
    return swaps


def _until_anew(block: list[ast.stmt], name: str) -> list[ast.stmt]:
    """The statements up to the one that gives `name` another value, as in `rows = torch.stack(rows)`."""
    for at, statement in enumerate(block):
        if isinstance(statement, ast.Assign) and [ast.unparse(one) for one in statement.targets] == [name]:
            return block[: at + 1]
    return block


def _tensor_use(node: ast.AST, name: str) -> ast.expr | ast.stmt | None:
    if isinstance(node, ast.Expr) and ast.unparse(node.value) == f"{name}.reverse()":
        return statements(f"{name} = {name}.flip(0)")[0]
    match node:  # what some steps appended
        case ast.Assign(
            targets=[ast.Subscript(value=ast.Name(id=written), slice=ast.Slice(lower=None, upper=None))],
            value=ast.Subscript(value=ast.Name(id=read), slice=ast.Slice() as part),
        ) if written == read == name and (part.step is None or isinstance(part.step, ast.Constant)):
            return statements(f"{name} = {ast.unparse(node.value)}")[0]
    appended = appended_by(node)
    if appended is not None and appended[0] == name and name not in loaded_names(appended[1]):
        return statements(f"{name} = torch.cat([{name}, torch.stack([{ast.unparse(appended[1])}])])")[0]
    if not isinstance(node, ast.expr):
        return None
    for written, tensor in ((name, name), *((one, f"{name}.flip(0)") for one in _write_turned(name))):
        if isinstance(node, ast.Call) and _joins(node, written):
            return join(node, tensor)
        match node:  # of numbers, which are tensors without dimensions now
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="tensor" | "as_tensor"), args=[given]):
                if ast.unparse(given) == written:
                    options = ", ".join(ast.unparse(one) for one in node.keywords)
                    return expression(f"{tensor}.to({options})" if options else tensor)
    text = ast.unparse(node)
    if isinstance(node, ast.IfExp) and ast.unparse(node.test) in (name, f"len({name})", f"len({name}) > 0"):
        inner = {id(one): swap for one in ast.walk(node.body) if (swap := _tensor_use(one, name)) is not None}
        return swap_nodes(node.body, inner) if inner else None  # the proof compares where there are no steps
    if text in _write_turned(name):
        return expression(f"{name}.flip(0)")
    return expression(f"{name}.shape[0]") if text == f"len({name})" else None


def begins(spot: Spot, name: str) -> list[ast.expr] | None:
    """The list's elements when the loop begins, where it is made in the loop's own block; None where that is not
    seen."""
    for statement in reversed(spot.block[: spot.index]):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and name in stored_names(statement):
            given = [value for target, value in assignments(statement) if target == name]
            one = isinstance(statement, ast.AnnAssign) or len(statement.targets) == 1
            return list(given[0].elts) if one and given and isinstance(given[0], ast.List) else None
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement)):
            return None
    return None


def without_list(scope: Scope, spot: Spot, names: list[str], new: list[ast.stmt], swaps: Swaps) -> str | None:
    """The file with the loop replaced by `new`, the uses of the lists by `swaps`, and their `name = []` gone."""

    def makes_list(statement: ast.stmt) -> bool:
        return isinstance(statement, ast.Assign | ast.AnnAssign) and bool(set(stored_names(statement)) & set(names))

    block, end = spot.block, spot.index + 1
    start = next((index for index in range(spot.index) if makes_list(block[index])), spot.index)
    kept = [_without_names(one, names) if makes_list(one) else one for one in block[start : spot.index]]
    tail: list[ast.stmt] = []
    for index in range(spot.index + 1, len(block)):
        if any(id(node) in swaps for node in ast.walk(block[index])):
            tail += [*block[end:index], swap_nodes(block[index], swaps)]
            end = index + 1
    return scope.replace(block[start:end], [*(one for one in kept if one is not None), *new, *tail])


def _without_names(statement: ast.stmt, names: list[str]) -> ast.stmt | None:
    """`h, rows = x, []` without the lists; None where nothing is left."""
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(values):
            pairs = zip(targets, values, strict=True)
            left = [
                f"{ast.unparse(one)} = {ast.unparse(value)}" for one, value in pairs if ast.unparse(one) not in names
            ]
            apart = [one.split(" = ", 1) for one in left]
            made = ", ".join(one for one, _ in apart) + " = " + ", ".join(value for _, value in apart)
            return statements(made)[0] if left else None
    return None


def swap_nodes(statement: _Node, swaps: Swaps) -> _Node:
    """A copy of `statement` with the nodes of `swaps` replaced."""
    twin = copy.deepcopy(statement)
    pairs = zip(ast.walk(statement), ast.walk(twin), strict=True)
    others = {id(new): swaps[id(old)] for old, new in pairs if id(old) in swaps}

    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return copy.deepcopy(others[id(node)]) if id(node) in others else self.generic_visit(node)

    return Swap().visit(twin)  # type: ignore[no-any-return]
