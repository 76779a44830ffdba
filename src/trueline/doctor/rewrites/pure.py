"""Writes into a tensor as new values of its name: `x[i] = v` as `index_put`, `x[m] = v` as a mask, `x.exp_()` as
`x = x.exp()`.

A structured loop and a branch that is computed on both ways may not write into what they were given. Condition: nobody
else holds the tensor and looks at it again (`y = x` before, and `y` read after); the proof sees whether that is so.
"""

from __future__ import annotations

import ast
import copy

import torch

from trueline.doctor.rewrites.loops.recurrences import full, whole
from trueline.doctor.rewrites.scope import Scope, expression, statements, value_of
from trueline.doctor.rewrites.tensors.masking import mask_store

_NO_METHODS = ("requires_grad_", "retain_grad_", "share_memory_", "resize_")


def pure(scope: Scope, statement: ast.stmt) -> ast.stmt:
    """A copy of `statement` that assigns to a name, where it writes into a tensor of that name; else a copy of it."""
    if isinstance(statement, ast.Expr):
        return _method(scope, statement) or copy.deepcopy(statement)
    if isinstance(statement, ast.Assign | ast.AugAssign):
        return mask_store(scope, statement) or _element(scope, statement) or copy.deepcopy(statement)
    return copy.deepcopy(statement)


def _method(scope: Scope, statement: ast.Expr) -> ast.stmt | None:
    """`x.clamp_(0)` as `x = x.clamp(0)`; `x.fill_(v)`, which has no such twin, as `torch.full_like(x, v)`."""
    call = statement.value
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return None
    method, owner = call.func.attr, call.func.value
    if not method.endswith("_") or method.endswith("__") or method in _NO_METHODS:
        return None
    if not (isinstance(owner, ast.Name) and scope.is_tensor(owner)):
        return None
    given = ", ".join(ast.unparse(one) for one in (*call.args, *call.keywords))
    if method == "zero_":
        return statements(f"{owner.id} = torch.zeros_like({owner.id})")[0]
    if method == "fill_":
        return statements(f"{owner.id} = torch.full_like({owner.id}, {given})")[0]
    if method == "copy_":
        return statements(f"{owner.id} = ({given}).expand_as({owner.id}).to({owner.id}.dtype)")[0]
    return statements(f"{owner.id} = {owner.id}.{method.removesuffix('_')}({given})")[0]


def _element(scope: Scope, statement: ast.Assign | ast.AugAssign) -> ast.stmt | None:
    """`x[i, j] = v`, where every index is a whole number or a tensor of such, as `x.index_put((i, j), v)`."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    if isinstance(statement, ast.Assign) and len(statement.targets) != 1:
        return None
    if not (isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)):
        return None
    held = value_of(target.value, scope.seen)
    if not isinstance(held, torch.Tensor):
        return None
    places = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    if any((isinstance(one, ast.Slice) and not full(one)) or _no_index(one) for one in places):
        return None
    name, dtype = target.value.id, held.dtype
    axes = [axis for axis, one in enumerate(places) if not full(one)]
    if axes != [*range(len(axes))] and not all(whole(scope, places[axis]) for axis in axes):
        return None
    at = ", ".join(_tensor(places[axis]) for axis in axes)
    there, back = _to_front(axes)
    read = copy.deepcopy(target)
    read.ctx = ast.Load()
    value = ast.unparse(statement.value)
    if isinstance(statement, ast.AugAssign):
        value = ast.unparse(ast.BinOp(left=read, op=statement.op, right=statement.value))
    put = _tensor(expression(value), f", dtype={dtype}")
    return statements(f"{name} = {name}{there}.index_put(({at},), {put}){back}")[0]


def _tensor(value: ast.expr, dtype: str = "") -> str:
    """A value as a tensor. A number is made one where the program runs: torch loses its hold of one that is made while
    it follows a step."""
    made = "full((), " if isinstance(value, ast.Constant) else "as_tensor("
    return f"torch.{made}{ast.unparse(value)}{dtype})"


def _to_front(axes: list[int]) -> tuple[str, str]:
    """What moves these dimensions to the front, and what moves them back."""
    first = [*range(len(axes))]
    if axes == first:
        return "", ""
    one, two = (str(tuple(each)) if len(axes) > 1 else str(each[0]) for each in (axes, first))
    return f".movedim({one}, {two})", f".movedim({two}, {one})"


def _no_index(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred) or (isinstance(node, ast.Constant) and not isinstance(node.value, int))
