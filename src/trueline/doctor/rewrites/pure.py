"""Writes into a tensor as new values of its name: `x[i] = v` as `index_put`, `x[m] = v` as a mask, `x.exp_()` as
`x = x.exp()`; and whether a block does more than compute names.

A structured loop, or a branch of which both ways are computed, may not write into its inputs. Condition: no other name
that is read later holds the same tensor; the proof notices when one does.
"""

import ast
import copy
from collections.abc import Iterator, Sequence

import torch

from trueline.doctor.rewrites.appends import appended_by
from trueline.doctor.rewrites.indices import is_full, is_whole, parts_of
from trueline.doctor.rewrites.rowwise import selected_rows, treats_rows_alike
from trueline.doctor.rewrites.scope import (
    Scope,
    arguments_text,
    element_value,
    expression,
    indices_of,
    loaded_names,
    statements,
    stored_names,
    tensor_of,
    value_of,
    walk,
)

_NO_METHODS = ("requires_grad_", "retain_grad_", "share_memory_", "resize_")


def pure(scope: Scope, statement: ast.stmt) -> ast.stmt:
    """A copy of `statement` that assigns to a name, where it writes into a tensor of that name; else a copy of it."""
    new = mask_store(scope, statement) or _put_elements(scope, statement) or _call_without_writing(scope, statement)
    return new or copy.deepcopy(statement)


def _call_without_writing(scope: Scope, statement: ast.stmt) -> ast.stmt | None:
    """`x.clamp_(0)` as `x = x.clamp(0)`; `x.fill_(v)`, which has no such twin, as `torch.full_like(x, v)`."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name) as owner, attr=method)) as call):
            pass
        case _:
            return None
    if not method.endswith("_") or method.endswith("__") or method in _NO_METHODS or not scope.is_tensor(owner):
        return None
    given = arguments_text(call)
    new = {
        "zero_": f"torch.zeros_like({name})",
        "fill_": f"torch.full_like({name}, {given})",
        "copy_": f"({given}).expand_as({name}).to({name}.dtype)",
    }.get(method, f"{name}.{method.removesuffix('_')}({given})")
    return statements(f"{name} = {new}")[0]


def _put_elements(scope: Scope, statement: ast.stmt) -> ast.stmt | None:
    """`x[i, j] = v`, where every index is an integer or a tensor of integers, as `x.index_put((i, j), v)`."""
    written = element_value(statement)
    if written is None or (isinstance(statement, ast.Assign) and len(statement.targets) != 1):
        return None
    target, value = written
    held = tensor_of(target.value, scope)
    if held is None or not isinstance(target.value, ast.Name):
        return None
    parts = indices_of(target)
    if any(isinstance(part, ast.Slice | ast.Starred) and not is_full(part) for part in parts):
        return None
    if any(isinstance(part, ast.Constant) and not isinstance(part.value, int) for part in parts):
        return None
    name, axes = target.value.id, [axis for axis, part in enumerate(parts) if not is_full(part)]
    first = [*range(len(axes))]
    if not axes:  # `x[()]`, `x[:]`
        return None
    if axes != first and not all(is_whole(scope, parts[axis]) for axis in axes):
        return None
    there = back = ""
    if axes != first:  # these dimensions to the front, and back
        one, two = (str(tuple(each)) if len(axes) > 1 else str(each[0]) for each in (axes, first))
        there, back = f".movedim({one}, {two})", f".movedim({two}, {one})"
    at = ", ".join(_tensor(parts[axis]) for axis in axes)
    added = _tensor(expression(ast.unparse(value)), f", dtype={held.dtype}")
    return statements(f"{name} = {name}{there}.index_put(({at},), {added}){back}")[0]


def _tensor(value: ast.expr, dtype: str = "") -> str:
    """A value as a tensor. torch loses track of a constant tensor that is made while it traces a step; `full` makes it
    where the program runs."""
    made = "full((), " if isinstance(value, ast.Constant) else "as_tensor("
    return f"torch.{made}{ast.unparse(value)}{dtype})"


def mask_of(scope: Scope, node: ast.expr) -> ast.expr | None:
    """The mask of `x[mask]`: a name of a boolean tensor, or a comparison."""
    if not isinstance(node, ast.Subscript):
        return None
    held = tensor_of(node.slice, scope)
    boolean = held is not None and held.dtype is torch.bool
    compared = isinstance(node.slice, ast.Compare) and scope.depends_on(node.slice) == "tensor"
    return node.slice if boolean or compared else None


def widen(scope: Scope, mask: ast.expr, like: ast.expr) -> str:
    """The mask with the dimensions that only `like` has."""
    text = ast.unparse(mask) if isinstance(mask, ast.Name | ast.Attribute) else f"({ast.unparse(mask)})"
    mask_rank = scope.rank(mask) if not isinstance(mask, ast.Compare) else scope.rank(mask.left)
    rank = scope.rank(like)
    missing = rank - mask_rank if rank is not None and mask_rank is not None else 0
    return text + f"[..., {', '.join(['None'] * missing)}]" if missing > 0 else text


def mask_store(scope: Scope, statement: ast.stmt) -> ast.stmt | None:
    """`y[mask] = f(x[mask])` as `y = torch.where(mask, f(x), y)`; also `+=`. None where f sees more than one place."""
    written = element_value(statement)
    mask = mask_of(scope, written[0]) if written is not None else None
    if written is None or mask is None or not isinstance(written[0].value, ast.Name):
        return None
    masked, name = ast.dump(mask), written[0].value.id
    over = scope.rank(mask.left if isinstance(mask, ast.Compare) else mask)
    if not treats_rows_alike(scope, written[1], selected_rows(scope, mask, over)):
        return None

    class Whole(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            return node.value if ast.dump(node.slice) == masked else self.generic_visit(node)

    value = ast.unparse(Whole().visit(copy.deepcopy(written[1])))
    return statements(f"{name} = torch.where({widen(scope, mask, written[0].value)}, {value}, {name})")[0]


def has_effects(block: Sequence[ast.stmt]) -> bool:
    """Whether `block` does more than compute names: jumps, writes into objects that it has not made, calls for their
    effect."""
    own = set(stored_names(block))
    for node in (node for statement in block for node in _run(statement)):
        if isinstance(node, ast.Break | ast.Continue | ast.Return | ast.Yield | ast.Global | ast.Nonlocal | ast.Delete):
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _created_in(node, block) not in own:
            return True
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            appended = appended_by(node)
            if appended is None:
                return True
            name = appended[0]
            first = next((one for one in block if name in (*stored_names(one), *loaded_names(one))), None)
            if not (isinstance(first, ast.Assign) and ast.unparse(first.value) in ("[]", "list()")):
                return True  # the block does not make the list itself, in each step
    return False


def _created_in(node: ast.Subscript, block: Sequence[ast.stmt]) -> str:
    """The name of the tensor that `node` writes into, where an earlier call in the block made it; else no name."""
    root, _ = parts_of(node)
    name = root.id if isinstance(root, ast.Name) else ""
    for statement in block:
        if node in ast.walk(statement):
            return ""
        called = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
        if called and stored_names(statement) == [name]:
            return name
    return ""


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when `node` does, without the bodies of functions that it defines."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _run(child)


_MUTATE = (
    "append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault", "sort", "reverse", "write", "add",
    "discard", "popleft", "appendleft", "load_state_dict", "register_buffer", "backward",
)  # fmt: skip
"""Methods that change an object which is no tensor."""
_BUILTINS = ("int", "float", "bool", "len", "min", "max", "abs", "range", "round", "sum", "zip", "enumerate", "tuple")


def writes_by_call(scope: Scope, statement: ast.stmt) -> bool:
    """Whether evaluating what the statement itself evaluates may write into something, by a call that is not known to
    compute only. Of a call for its effect its arguments count."""
    match statement:
        case ast.Expr(value=ast.Call(args=args, keywords=keywords)):
            evaluated: list[ast.AST] = [*args, *keywords]
        case _:
            evaluated = [one for one in ast.iter_child_nodes(statement) if not isinstance(one, ast.stmt)]
    return not all(_computes(scope, one) for one in walk(evaluated))


def _computes(scope: Scope, node: ast.AST) -> bool:
    if isinstance(node, ast.NamedExpr | ast.Yield | ast.YieldFrom | ast.Await | ast.Lambda):
        return False
    if not isinstance(node, ast.Call) or isinstance(value_of(node.func, scope.seen), torch.nn.Module):
        return True
    match node.func:
        case ast.Name(id=name):
            return name in _BUILTINS
        case ast.Attribute(value=owner, attr=how):
            unknown = tensor_of(owner, scope) is None and (_root(owner) == "self" or how in _MUTATE)
            return not unknown and not (how.endswith("_") and not how.endswith("__"))
        case ast.Subscript(value=parts):
            return isinstance(value_of(parts, scope.seen), torch.nn.ModuleList | torch.nn.ModuleDict)
    return False


def _root(node: ast.expr) -> str:
    """The name that an expression of attributes, elements and calls begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
