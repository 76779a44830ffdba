"""A tensor that a loop fills from its own earlier rows: a recurrence, a table of dynamic programming.

    for t in range(1, n):                                  a step receives row t of out and of x,
        out[:, t] = f(out[:, t - 1], x[:, t])      ──▶     carries the row before, and returns row t;
                                                           out = torch.cat([out[:, :1], rows, out[:, n:]], 1)

Of two loops the inner one goes first: in it `d[:, i]` is the tensor that is filled, and `d[:, i - 1]` one that is read.
Condition: each step writes row t only, and reads rows by their distance from it. A tensor that is written or read
otherwise is carried as a whole (`pure`). Each holds only if the proof says so.
"""

import ast
import copy
from dataclasses import dataclass

import torch

from trueline.doctor.rewrites.indices import AffineIndex, is_full, locate, parts_of, shift_of, size_of
from trueline.doctor.rewrites.scope import (
    Scope,
    element_value,
    expression,
    loaded_names,
    statements,
    stored_names,
    tensor_of,
    value_of,
    walk,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A tensor of which each step fills one row."""

    place: AffineIndex
    """That of row t, without the indices inside the row."""
    row: str
    """Row t, as a name in the step."""
    depth: int
    """How many of the earlier rows a step reads."""

    def earlier(self, by: int) -> str:
        """The name of the row that was filled `by` steps ago."""
        return f"{self.row}_{by}_ago"


def tables(scope: Scope, loop: ast.For, index: str, *, start: str, backwards: bool) -> dict[str, Table]:
    """The tensors that the loop fills row by row, by their names."""
    moving = {index, *stored_names(loop.body)}
    adds = any(isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Subscript) for one in walk(loop.body))
    found: dict[str, Table] = {}
    stores = (one for one in walk(loop.body) if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store))
    roots = (parts_of(store)[0] for store in stores)
    for name in dict.fromkeys(root.id for root in roots if isinstance(root, ast.Name)):
        places = _places(scope, loop, name, index, moving)
        if places is None or (len(places) == 1 and not start and not places[0][0].fixed and not adds):
            continue
        table = _table(scope, name, places, index, backwards=backwards)
        if table is not None:
            found[name] = table
    return found


Places = list[tuple[AffineIndex, ast.expr_context]]


def _places(scope: Scope, loop: ast.For, name: str, index: str, moving: set[str]) -> Places | None:
    """Every mention of the tensor in the loop; None where one of them is not a row of it."""
    places: Places = []
    covered: set[int] = set()
    for node in walk(loop.body):
        if not isinstance(node, ast.Subscript) or id(node) in covered:
            continue
        root, _ = parts_of(node)
        if isinstance(root, ast.Name) and root.id == name:
            place = locate(scope, node, index, moving)
            if place is None:
                return None
            places.append((place, node.ctx))
            inner: ast.expr = node
            while isinstance(inner, ast.Subscript):
                covered.add(id(inner))
                inner = inner.value
            covered.add(id(root))
    mentions = [node for node in walk(loop.body) if isinstance(node, ast.Name) and node.id == name]
    return places if all(id(node) in covered for node in mentions) else None


def _table(scope: Scope, name: str, places: Places, index: str, *, backwards: bool) -> Table | None:
    stores = [place for place, context in places if isinstance(context, ast.Store)]
    first = stores[0]
    if any(one.base != first.base or one.axis != first.axis or one.shift for one in stores):
        return None
    depth = 0
    for place, _ in places:
        if place.base == first.base and place.axis == first.axis:
            depth = max(depth, place.shift if backwards else -place.shift)
        elif not _are_apart(place, first):
            return None
    plain = AffineIndex(root=name, fixed=first.fixed, axis=first.axis, shift=0, rest=())
    return Table(place=plain, row=scope.fresh(plain.row(index)), depth=depth)


def _are_apart(one: AffineIndex, other: AffineIndex) -> bool:
    """Whether their rows of the tensor have nothing in common: `d[:, i]` and `d[:, i - 1]`."""
    if [axis for axis, _ in one.fixed] != [axis for axis, _ in other.fixed]:
        return False
    for (_, a), (_, b) in zip(one.fixed, other.fixed, strict=True):
        names = loaded_names(expression(a))
        if len(names) == 1 and loaded_names(expression(b)) == names:
            shifts = shift_of(expression(a), names[0]), shift_of(expression(b), names[0])
            if None not in shifts and shifts[0] != shifts[1]:
                return True
    return False


def like_row(scope: Scope, table: Table) -> torch.Tensor | None:
    """An empty tensor with the shape and dtype of a row."""
    held = tensor_of(expression(table.place.root), scope)
    if held is None:
        return None
    gone = {axis for axis, _ in table.place.fixed}
    left = [size for axis, size in enumerate(held.shape) if axis not in gone]
    del left[table.place.axis]
    return held.new_empty(left)


def fill_again(scope: Scope, table: Table, rows: str, start: str, end: ast.expr | None) -> list[ast.stmt]:
    """Puts the new rows in the place of the old ones; rows before and after stay. Without `end` they are all."""
    base, axis = table.place.base, table.place.axis
    moved = f"{rows}.movedim(0, {axis})" if axis else rows
    along = ":, " * axis
    parts = [f"{base}[{along}:{start}]"] if start not in ("", "0") and end is not None else []
    parts.append(moved)
    last = _number(scope, end) if end is not None else None
    if end is not None and (last is None or size_of(scope, base, axis) != last):
        parts.append(f"{base}[{along}{ast.unparse(end)}:]")
    joined = ", ".join(parts)
    return statements(f"{base} = {moved if len(parts) == 1 else f'torch.cat([{joined}], {axis})'}")


def _number(scope: Scope, node: ast.expr) -> int | None:
    """The value of an integer in the call that was seen; None when it is not known."""
    size: tuple[ast.expr, int] | None = None
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            one, two = _number(scope, left), _number(scope, right)
            return None if one is None or two is None else one + two if isinstance(op, ast.Add) else one - two
        case ast.Subscript(value=ast.Attribute(value=tensor, attr="shape"), slice=ast.Constant(value=int(axis))):
            size = tensor, axis
        case ast.Call(func=ast.Attribute(value=tensor, attr="size"), args=[ast.Constant(value=int(axis))]):
            size = tensor, axis
        case ast.Call(func=ast.Name(id="len"), args=[tensor]):
            size = tensor, 0
    if size is not None:
        held = tensor_of(size[0], scope)
        return None if held is None else held.shape[size[1]]
    number = value_of(node, scope.seen)
    return number if type(number) is int else None


def under_mask(scope: Scope, statement: ast.stmt, index: str) -> ast.stmt:
    """`x[gone, t] = x[gone, t - 1]`, of a mask of the records, as `x[:, t] = torch.where(gone, x[:, t - 1], x[:, t])`;
    any other statement as it is."""
    written = element_value(statement)
    if written is None:
        return statement
    root, parts = parts_of(written[0])
    held = tensor_of(root, scope)
    if held is None or not parts:  # `x[()]` has none
        return statement
    mask, *others = parts
    if not _is_mask(scope, mask) or any(_is_mask(scope, part) for part in others):
        return statement
    if any(shift_of(part, index) is None and not is_full(part) for part in others):
        return statement
    masked = ast.dump(mask)

    class Whole(ast.NodeTransformer):
        """All records in the place of some."""

        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            inner = parts_of(node)[1]
            if not inner or ast.dump(inner[0]) != masked:
                return self.generic_visit(node)
            every = ast.Tuple(elts=[ast.Slice(), *copy.deepcopy(inner[1:])], ctx=ast.Load())
            return ast.Subscript(value=node.value, slice=every, ctx=node.ctx)

    row, value = (ast.unparse(Whole().visit(copy.deepcopy(one))) for one in written)
    missing = held.ndim - sum(1 for part in parts if not is_full(part))
    where = ast.unparse(mask) if isinstance(mask, ast.Name) else f"({ast.unparse(mask)})"
    where += f"[:, {', '.join(['None'] * missing)}]" if missing else ""
    return statements(f"{row} = torch.where({where}, {value}, {row})")[0]


def _is_mask(scope: Scope, part: ast.expr) -> bool:
    held = tensor_of(part, scope)
    if held is not None:
        return held.dtype is torch.bool and held.ndim == 1
    tests = isinstance(part, ast.Compare) or (isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Invert))
    return tests and scope.depends_on(part) == "tensor"
