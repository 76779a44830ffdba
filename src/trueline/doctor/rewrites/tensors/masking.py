"""Masked selection and ragged rows: weights and torch.where instead of a result whose size the values decide.

Conditions: the selection is reduced at once (`x[mask].sum()`), or written back under the same mask
(`y[mask] = f(x[mask])`) by an f that treats rows by themselves, or is a row's first n steps, reduced over them.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

import torch

from trueline.doctor.rewrites.loops.appends import appended_by, find_join, without_list
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, expression, statements, value_of

_NEUTRAL = {
    "sum": "0",
    "amax": "float('-inf')",
    "max": "float('-inf')",
    "amin": "float('inf')",
    "min": "float('inf')",
    "prod": "1",
}


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """Candidates for the statement at `spot`."""
    statement = spot.statement
    if isinstance(statement, ast.For):
        ragged = _ragged_loop(scope, spot)
        if ragged is not None:
            yield ragged
        return
    if isinstance(statement, ast.While | ast.If | ast.With | ast.Try):
        return
    for new in (mask_store(scope, statement), _mask_reduction(scope, statement), _mask_ragged(scope, statement)):
        if new is not None:
            text = scope.replace([statement], [new])
            if text:
                yield Candidate(text=text, words=f"`{ast.unparse(statement)}` weighs with the mask")


def _mask_of(scope: Scope, node: ast.expr) -> ast.expr | None:
    """The mask of `x[mask]`: a name of a boolean tensor, or a comparison."""
    if not isinstance(node, ast.Subscript):
        return None
    value = value_of(node.slice, scope.seen)
    boolean = isinstance(value, torch.Tensor) and value.dtype is torch.bool
    compared = isinstance(node.slice, ast.Compare) and scope.worth(node.slice) == "tensor"
    return node.slice if boolean or compared else None


def _widen(scope: Scope, mask: ast.expr, like: ast.expr) -> str:
    """The mask with the dimensions that `like` has and it has not."""
    text = ast.unparse(mask) if isinstance(mask, ast.Name | ast.Attribute) else f"({ast.unparse(mask)})"
    mask_rank = scope.rank(mask) if not isinstance(mask, ast.Compare) else scope.rank(mask.left)
    rank = scope.rank(like)
    missing = rank - mask_rank if rank is not None and mask_rank is not None else 0
    return text + f"[..., {', '.join(['None'] * missing)}]" if missing > 0 else text


def mask_store(scope: Scope, statement: ast.stmt) -> ast.stmt | None:
    """`y[mask] = f(x[mask])` as `y = torch.where(mask, f(x), y)`; also `+=`."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    if not isinstance(statement, ast.Assign | ast.AugAssign) or not isinstance(target, ast.Subscript):
        return None
    mask = _mask_of(scope, target)
    if mask is None or not isinstance(target.value, ast.Name):
        return None

    masked = ast.dump(mask)

    class Whole(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            return node.value if ast.dump(node.slice) == masked else self.generic_visit(node)

    value = Whole().visit(copy.deepcopy(statement.value))
    name = target.value.id
    if isinstance(statement, ast.AugAssign):
        value = ast.BinOp(left=ast.Name(id=name, ctx=ast.Load()), op=statement.op, right=value)
    return statements(f"{name} = torch.where({_widen(scope, mask, target.value)}, {ast.unparse(value)}, {name})")[0]


def _mask_reduction(scope: Scope, statement: ast.stmt) -> ast.stmt | None:
    """`x[mask].sum()` and its kin."""
    changed = False

    class Weigh(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            nonlocal changed
            self.generic_visit(node)
            function = node.func
            if not isinstance(function, ast.Attribute) or function.attr not in (*_NEUTRAL, "mean"):
                return node
            mask = _mask_of(scope, function.value)
            if mask is None or not isinstance(function.value, ast.Subscript):
                return node
            text = _weighted(scope, function.value.value, mask, function.attr, node)
            changed = changed or text is not None
            return expression(text) if text else node

    new = Weigh().visit(copy.deepcopy(statement))
    return new if changed and isinstance(new, ast.stmt) else None


def _weighted(scope: Scope, tensor: ast.expr, mask: ast.expr, reduce: str, call: ast.Call) -> str | None:
    x, wide = ast.unparse(tensor), _widen(scope, mask, tensor)
    whole = not call.args and not call.keywords
    rank = scope.rank(mask) if not isinstance(mask, ast.Compare) else scope.rank(mask.left)
    over = ", ".join(str(i) for i in range(rank or 1))
    if not whole and not (ast.unparse(call).endswith(("(0)", "(dim=0)"))):
        return None
    dims = "" if whole else f"({over},)" if (rank or 1) > 1 else "0"
    if reduce == "mean":
        count = f"({wide}).expand_as({x}).sum({dims})" if whole else f"({wide}).sum({dims})"
        return f"(torch.where({wide}, {x}, 0).sum({dims}) / {count})"
    name = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    return f"torch.where({wide}, {x}, {_NEUTRAL[reduce]}).{name}({dims})"


def _mask_ragged(scope: Scope, statement: ast.stmt) -> ast.stmt | None:
    """`torch.stack([x[i, :n].mean(0) for i, n in enumerate(lengths)])` with a mask of the first n steps."""
    changed = False

    class Weigh(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            nonlocal changed
            self.generic_visit(node)
            listing = node.args[0] if ast.unparse(node.func) == "torch.stack" and len(node.args) == 1 else None
            if isinstance(listing, ast.ListComp) and len(listing.generators) == 1 and not node.keywords:
                rows = listing.generators[0]
                found = _rows(listing.elt, rows.target, rows.iter) if not rows.ifs else None
                changed = changed or found is not None
                return expression(found) if found else node
            return node

    new = Weigh().visit(copy.deepcopy(statement))
    return new if changed and isinstance(new, ast.stmt) else None


def _ragged_loop(scope: Scope, spot: Spot) -> Candidate | None:
    """`for i, n in enumerate(lengths): rows.append(x[i, :n].mean(0))` and `torch.stack(rows)` after it."""
    loop = spot.statement
    assert isinstance(loop, ast.For)
    local: dict[str, ast.expr] = {}
    for one in loop.body[:-1]:
        if not (isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)):
            return None
        local[one.targets[0].id] = _replace_names(one.value, local)
    appended = appended_by(loop.body[-1])
    if appended is None:
        return None
    found = _rows(_replace_names(appended[1], local), loop.target, loop.iter)
    join = find_join(spot, appended[0], appended[0])
    if found is None or join is None:
        return None
    new = statements(f"{appended[0]} = {found}")
    text = without_list(scope, spot, [appended[0]], new, {id(join[1]): join[0]})
    words = f"`{ast.unparse(loop).splitlines()[0]}` weighs the first steps of each row with a mask"
    return Candidate(text=text, words=words) if text else None


def _replace_names(node: ast.expr, values: dict[str, ast.expr]) -> ast.expr:
    class Put(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.AST:
            return copy.deepcopy(values[name.id]) if name.id in values else name

    return Put().visit(copy.deepcopy(node))  # type: ignore[no-any-return]


def _rows(element: ast.expr, target: ast.expr, source: ast.expr) -> str | None:
    """The reduction of row i's first n steps for all rows at once; None when `element` is something else."""
    if not (isinstance(element, ast.Call) and isinstance(element.func, ast.Attribute)):
        return None
    reduce, part = element.func.attr, element.func.value
    if reduce not in ("sum", "mean", "amax", "amin") or ast.unparse(element).rpartition("(")[2] not in ("0)", "dim=0)"):
        return None
    if not (isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Tuple) and len(part.slice.elts) == 2):
        return None
    row, steps = part.slice.elts
    lengths = _lengths(target, source, row, steps)
    if lengths is None:
        return None
    x = ast.unparse(part.value)
    mask = f"(torch.arange({x}.shape[1], device={x}.device) < {lengths}[:, None])[..., None]"
    if reduce == "mean":
        return f"torch.where({mask}, {x}, 0).sum(1) / {mask}.sum(1)"
    return f"torch.where({mask}, {x}, {_NEUTRAL[reduce]}).{reduce}(1)"


def _lengths(target: ast.expr, source: ast.expr, row: ast.expr, steps: ast.expr) -> str | None:
    """The tensor of lengths that `for i, n in enumerate(lengths)` or `for i in range(len(x))` takes n from."""
    if not (isinstance(steps, ast.Slice) and steps.lower is None and steps.upper is not None and steps.step is None):
        return None
    end = _bare(steps.upper)
    if isinstance(target, ast.Tuple) and isinstance(source, ast.Call) and ast.unparse(source.func) == "enumerate":
        index, length = (ast.unparse(one) for one in target.elts)
        if ast.unparse(row) == index and ast.unparse(end) == length:
            return ast.unparse(_bare(source.args[0]))
    if isinstance(end, ast.Subscript) and ast.unparse(end.slice) == ast.unparse(row) == ast.unparse(target):
        return ast.unparse(end.value)
    return None


def _bare(node: ast.expr) -> ast.expr:
    """Without `.item()`, `.tolist()` and `int(…)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("item", "tolist"):
        return _bare(node.func.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "int" and node.args:
        return _bare(node.args[0])
    return node
