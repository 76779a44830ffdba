"""A tensor that a loop fills from what it filled before: a recurrence, a table of dynamic programming.

    for t in range(1, n):                                  a step is given row t of out and of x,
        out[:, t] = f(out[:, t - 1], x[:, t])      ──▶     carries the row before, and gives row t anew;
                                                           out = torch.cat([out[:, :1], rows, out[:, n:]], 1)

Of two loops the inner one goes first: in it `d[:, i]` is the tensor that is filled, and `d[:, i - 1]` one that is read.
Condition: each step writes row t only, and reads rows by their distance from it. A tensor that is written or read
otherwise is carried as a whole (`pure`). Each holds only if the proof says so.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from trueline.doctor.rewrites.scope import Scope, expression, loaded_names, statements, value_of, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineIndex:
    """What a subscript names, seen from the counter of a loop: row `t + shift` of `base`, and of that row `rest`."""

    root: str
    """The tensor, as it is written."""
    fixed: tuple[tuple[int, str], ...]
    """Dimensions of the tensor that numbers fix which the loop does not change, and the numbers."""
    axis: int
    """The dimension of `base` that the counter goes along."""
    shift: int
    rest: tuple[ast.expr, ...]

    @property
    def base(self) -> str:
        """The tensor without its fixed dimensions.

        >>> AffineIndex(root="d", fixed=((1, "i - 1"),), axis=1, shift=0, rest=()).base
        'd[:, i - 1]'
        """
        if not self.fixed:
            return self.root
        at = dict(self.fixed)
        return f"{self.root}[{', '.join(at.get(axis, ':') for axis in range(max(at) + 1))}]"

    def row(self, index: str) -> str:
        """The row under a name of its own: `x_t_less_1` of `x[:, t - 1]`."""
        words = [self.root.split(".")[-1], *(text for _, text in self.fixed), index]
        if self.shift:
            words.append(f"{'less' if self.shift < 0 else 'plus'} {abs(self.shift)}")
        spelt = " ".join(words).replace("-", " less ").replace("+", " plus ")
        return re.sub(r"\W+", "_", spelt).strip("_")

    def within(self, row: str, context: ast.expr_context) -> ast.expr:
        """The same of the row under its name."""
        if not self.rest:
            return ast.Name(id=row, ctx=context)
        inner = self.rest[0] if len(self.rest) == 1 else ast.Tuple(elts=list(self.rest), ctx=ast.Load())
        return ast.Subscript(value=ast.Name(id=row, ctx=ast.Load()), slice=inner, ctx=context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A tensor of which each step fills one row."""

    place: AffineIndex
    """That of row t, without what is named inside the row."""
    row: str
    """Row t, as a name in the step."""
    depth: int
    """How many of the rows that were filled before it a step reads."""

    def earlier(self, by: int) -> str:
        """The name of the row that was filled `by` steps ago."""
        return f"{self.row}_{by}_ago"


def shift_of(node: ast.expr, index: str) -> int | None:
    """How far `t`, `t - 1` or `t + 1` is from the counter; None for anything else."""
    match node:
        case ast.Name(id=name) if name == index:
            return 0
        case ast.BinOp(left=ast.Name(id=name), op=ast.Add() | ast.Sub() as op, right=ast.Constant(value=int(by))):
            return None if name != index else by if isinstance(op, ast.Add) else -by
    return None


def parts_of(node: ast.Subscript) -> tuple[ast.expr, list[ast.expr]]:
    """The tensor and its indices; `dp[i][j]` says what `dp[i, j]` does, of numbers."""
    inner, parts = node.value, list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if isinstance(inner, ast.Subscript):
        root, before = parts_of(inner)
        if not any(isinstance(part, ast.Slice | ast.Starred | ast.Constant) for part in before):
            return root, [*before, *parts]
    return inner, parts


def full(part: ast.expr) -> bool:
    """Whether it is `:`."""
    return isinstance(part, ast.Slice) and part.lower is None and part.upper is None and part.step is None


def locate(scope: Scope, node: ast.Subscript, index: str, moving: set[str]) -> AffineIndex | None:
    """Where `node` lies, seen from the counter `index`, while the loop changes the names `moving`; None where that
    cannot be said: of masks, of tensors as indices, of more dimensions that follow the counter."""
    root, parts = parts_of(node)
    if not (isinstance(root, ast.Name | ast.Attribute) and scope.is_tensor(root)):
        return None
    fixed: list[tuple[int, str]] = []
    rest: list[ast.expr] = []
    at: list[tuple[int, int]] = []
    axis = -1
    for part in parts:
        shift = shift_of(part, index)
        names = set(loaded_names(part))
        if ast.unparse(part) == "None":
            rest.append(part)
            continue
        axis += 1
        if shift is not None:
            at.append((axis - len(fixed), shift))
        elif index in names:
            return None
        elif isinstance(part, ast.Slice):
            rest.append(part)
        elif not whole(scope, part):
            return None
        elif names & moving:
            rest.append(part)
        else:
            fixed.append((axis, ast.unparse(part)))
    if len(at) != 1:
        return None
    while rest and full(rest[-1]):
        rest.pop()
    (axis, shift), *_ = at
    return AffineIndex(root=ast.unparse(root), fixed=tuple(fixed), axis=axis, shift=shift, rest=tuple(rest))


def whole(scope: Scope, node: ast.expr) -> bool:
    """Whether an index is one whole number."""
    match node:
        case ast.Constant(value=value):
            return type(value) is int
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return whole(scope, operand)
        case ast.BinOp(left=left, right=right):
            return whole(scope, left) and whole(scope, right)
        case ast.Name(id=name):
            held = scope.seen.get(name)
            return type(held) is int or (isinstance(held, torch.Tensor) and held.ndim == 0 and _counts(held))
        case ast.Call() | ast.Subscript():
            return scope.worth(node) in ("static", "size") and not scope.is_tensor(node)
    return False


def _counts(held: torch.Tensor) -> bool:
    return not (held.is_floating_point() or held.is_complex() or held.dtype is torch.bool)


def tables(scope: Scope, loop: ast.For, index: str, *, start: str, backwards: bool) -> dict[str, Table]:
    """The tensors that the loop fills row by row, by their names."""
    moving = {index, *(node.id for node in _nodes(loop) if isinstance(node, ast.Name) and _is_stored(node))}
    found: dict[str, Table] = {}
    for name in dict.fromkeys(_written_tensors(loop)):
        places = _places(scope, loop, name, index, moving)
        if places is not None and not (len(places) == 1 and not start and not places[0][0].fixed and not _adds(loop)):
            table = _table(scope, name, places, index, backwards=backwards)
            if table is not None:
                found[name] = table
    return found


def _nodes(loop: ast.For) -> Iterator[ast.AST]:
    for statement in loop.body:
        yield from walk(statement)


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _adds(loop: ast.For) -> bool:
    return any(isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript) for node in _nodes(loop))


def _written_tensors(loop: ast.For) -> Iterator[str]:
    """Names of the tensors into which the loop writes by an index."""
    for node in _nodes(loop):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            root, _ = parts_of(node)
            if isinstance(root, ast.Name):
                yield root.id


def _places(
    scope: Scope, loop: ast.For, name: str, index: str, moving: set[str]
) -> list[tuple[AffineIndex, ast.expr_context]] | None:
    """Every mention of the tensor in the loop; None where one of them is not a row of it."""
    found: list[tuple[AffineIndex, ast.expr_context]] = []
    covered: set[int] = set()
    for node in _nodes(loop):
        if not isinstance(node, ast.Subscript) or id(node) in covered:
            continue
        root, _ = parts_of(node)
        if isinstance(root, ast.Name) and root.id == name:
            place = locate(scope, node, index, moving)
            if place is None:
                return None
            found.append((place, node.ctx))
            inner: ast.expr = node
            while isinstance(inner, ast.Subscript):
                covered.add(id(inner))
                inner = inner.value
            covered.add(id(root))
    mentions = [node for node in _nodes(loop) if isinstance(node, ast.Name) and node.id == name]
    return found if all(id(node) in covered for node in mentions) else None


def _table(
    scope: Scope, name: str, places: Sequence[tuple[AffineIndex, ast.expr_context]], index: str, *, backwards: bool
) -> Table | None:
    stores = [place for place, context in places if isinstance(context, ast.Store)]
    first = stores[0]
    if any(one.base != first.base or one.axis != first.axis or one.shift for one in stores):
        return None
    depth = 0
    for place, _ in places:
        if place.base == first.base and place.axis == first.axis:
            ago = place.shift if backwards else -place.shift
            depth = max(depth, ago)
        elif not _apart(place, first):
            return None
    plain = AffineIndex(root=name, fixed=first.fixed, axis=first.axis, shift=0, rest=())
    return Table(place=plain, row=scope.fresh(plain.row(index)), depth=depth)


def _apart(one: AffineIndex, other: AffineIndex) -> bool:
    """Whether they are of rows of the tensor that have nothing in common: `d[:, i]` and `d[:, i - 1]`."""
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
    """A tensor of the form of a row, for who asks what a name in the step holds."""
    held = value_of(expression(table.place.root), scope.seen)
    if not isinstance(held, torch.Tensor):
        return None
    gone = {axis for axis, _ in table.place.fixed}
    left = [size for axis, size in enumerate(held.shape) if axis not in gone]
    del left[table.place.axis]
    return held.new_empty(left)


def filled_again(scope: Scope, table: Table, rows: str, start: str, end: ast.expr | None) -> list[ast.stmt]:
    """Puts the new rows in the place of the old ones; what lies before and after them stays. No `end`: they are all."""
    base, axis = table.place.base, table.place.axis
    moved = f"{rows}.movedim(0, {axis})" if axis else rows
    if end is None:
        return statements(f"{base} = {moved}")
    along = ":, " * axis
    parts = [f"{base}[{along}:{start}]"] if start not in ("", "0") else []
    parts.append(moved)
    last = number(scope, end)
    if last is None or size_of(scope, base, axis) != last:
        parts.append(f"{base}[{along}{ast.unparse(end)}:]")
    joined = ", ".join(parts)
    return statements(f"{base} = {moved if len(parts) == 1 else f'torch.cat([{joined}], {axis})'}")


def size_of(scope: Scope, base: str, axis: int) -> int | None:
    """How large a dimension of a tensor, or of a part of it that numbers fix, was on the call that was seen."""
    node = expression(base)
    root, parts = parts_of(node) if isinstance(node, ast.Subscript) else (node, [])
    held = value_of(root, scope.seen)
    if not isinstance(held, torch.Tensor):
        return None
    left = [size for at, size in enumerate(held.shape) if at >= len(parts) or full(parts[at])]
    return left[axis] if axis < len(left) else None


def number(scope: Scope, node: ast.expr) -> int | None:
    """What a whole number was on the call that was seen; None when that is not known."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            one, two = number(scope, left), number(scope, right)
            return None if one is None or two is None else one + two if isinstance(op, ast.Add) else one - two
        case ast.Subscript(value=ast.Attribute(value=tensor, attr="shape"), slice=ast.Constant(value=int(axis))):
            held = value_of(tensor, scope.seen)
            return held.shape[axis] if isinstance(held, torch.Tensor) else None
        case ast.Call(func=ast.Attribute(value=tensor, attr="size"), args=[ast.Constant(value=int(axis))]):
            held = value_of(tensor, scope.seen)
            return held.shape[axis] if isinstance(held, torch.Tensor) else None
        case ast.Call(func=ast.Name(id="len"), args=[tensor]):
            held = value_of(tensor, scope.seen)
            return held.shape[0] if isinstance(held, torch.Tensor) else None
    held = value_of(node, scope.seen)
    return held if type(held) is int else None


def under_mask(scope: Scope, statement: ast.stmt, index: str) -> ast.stmt:
    """`x[gone, t] = x[gone, t - 1]`, of a mask of the records, as `x[:, t] = torch.where(gone, x[:, t - 1], x[:, t])`;
    any other statement as it is."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    if not (isinstance(statement, ast.Assign | ast.AugAssign) and isinstance(target, ast.Subscript)):
        return statement
    root, parts = parts_of(target)
    held, masks = value_of(root, scope.seen), [part for part in parts if _is_mask(scope, part)]
    if not isinstance(held, torch.Tensor) or len(masks) != 1 or parts[0] is not masks[0]:
        return statement
    if any(part is not masks[0] and shift_of(part, index) is None and not full(part) for part in parts):
        return statement
    masked = ast.dump(masks[0])

    class Whole(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            found = parts_of(node)[1]
            if ast.dump(found[0]) != masked:
                return self.generic_visit(node)
            return ast.Subscript(value=node.value, slice=_rest(found), ctx=node.ctx)

    place = Whole().visit(copy.deepcopy(target))
    row = ast.unparse(place)
    missing = held.ndim - sum(1 for part in parts if not full(part))
    mask = ast.unparse(masks[0]) if isinstance(masks[0], ast.Name) else f"({ast.unparse(masks[0])})"
    mask += f"[:, {', '.join(['None'] * missing)}]" if missing else ""
    value = Whole().visit(copy.deepcopy(statement.value))
    if isinstance(statement, ast.AugAssign):
        value = ast.BinOp(left=expression(row), op=statement.op, right=value)
    return statements(f"{row} = torch.where({mask}, {ast.unparse(value)}, {row})")[0]


def _is_mask(scope: Scope, part: ast.expr) -> bool:
    held = value_of(part, scope.seen)
    if isinstance(held, torch.Tensor):
        return held.dtype is torch.bool and held.ndim == 1
    says = isinstance(part, ast.Compare) or (isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Invert))
    return says and scope.worth(part) == "tensor"


def _rest(parts: Sequence[ast.expr]) -> ast.expr:
    """The indices with all records in the place of some."""
    return ast.Tuple(elts=[ast.Slice(), *copy.deepcopy(list(parts[1:]))], ctx=ast.Load())
