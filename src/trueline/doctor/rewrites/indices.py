"""What a subscript names, seen from the counter of a loop: row `t + shift` of a tensor."""

import ast
import re
from dataclasses import dataclass

import torch

from trueline.doctor.rewrites.scope import Scope, expression, indices_of, loaded_names, statements, tensor_of, value_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineIndex:
    """Row `t + shift` of `base`, and of that row the part that `rest` names."""

    root: str
    """The tensor, as it is written."""
    fixed: tuple[tuple[int, str], ...]
    """Dimensions of the tensor with indices that the loop does not change, and these indices."""
    axis: int
    """The dimension of `base` that the counter runs along."""
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
        """A name for the row: `x_t_less_1` for `x[:, t - 1]`."""
        words = [self.root.split(".")[-1], *(text for _, text in self.fixed), index]
        if self.shift:
            words.append(f"{'less' if self.shift < 0 else 'plus'} {abs(self.shift)}")
        spelt = " ".join(words).replace("-", " less ").replace("+", " plus ")
        return re.sub(r"\W+", "_", spelt).strip("_")

    def within(self, row: str, context: ast.expr_context) -> ast.expr:
        """The same part of the row under its name."""
        if not self.rest:
            return ast.Name(id=row, ctx=context)
        inner = self.rest[0] if len(self.rest) == 1 else ast.Tuple(elts=list(self.rest), ctx=ast.Load())
        return ast.Subscript(value=ast.Name(id=row, ctx=ast.Load()), slice=inner, ctx=context)


def shift_of(node: ast.expr, index: str) -> int | None:
    """How far `t`, `t - 1` or `t + 1` is from the counter; None for anything else."""
    match node:
        case ast.Name(id=name) if name == index:
            return 0
        case ast.BinOp(left=ast.Name(id=name), op=ast.Add() | ast.Sub() as op, right=ast.Constant(value=int(by))):
            return None if name != index else by if isinstance(op, ast.Add) else -by
    return None


def parts_of(node: ast.Subscript) -> tuple[ast.expr, list[ast.expr]]:
    """The tensor and its indices; `dp[i][j]` means `dp[i, j]` where the indices are numbers."""
    inner, parts = node.value, indices_of(node)
    if isinstance(inner, ast.Subscript):
        root, before = parts_of(inner)
        if not any(isinstance(part, ast.Slice | ast.Starred | ast.Constant) for part in before):
            return root, [*before, *parts]
    return inner, parts


def is_full(part: ast.expr) -> bool:
    """Whether it is `:`."""
    return isinstance(part, ast.Slice) and part.lower is None and part.upper is None and part.step is None


def locate(scope: Scope, node: ast.Subscript, index: str, moving: set[str]) -> AffineIndex | None:
    """Where `node` lies, seen from the counter `index`, while the loop changes the names `moving`; None for masks,
    tensors as indices, and more than one dimension that follows the counter."""
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
        elif index in names or not (isinstance(part, ast.Slice) or is_whole(scope, part)):
            return None
        elif isinstance(part, ast.Slice) or names & moving:
            rest.append(part)
        else:
            fixed.append((axis, ast.unparse(part)))
    if len(at) != 1:
        return None
    while rest and is_full(rest[-1]):
        rest.pop()
    (axis, shift), *_ = at
    return AffineIndex(root=ast.unparse(root), fixed=tuple(fixed), axis=axis, shift=shift, rest=tuple(rest))


def is_whole(scope: Scope, node: ast.expr) -> bool:
    """Whether an index is one integer."""
    match node:
        case ast.Constant(value=value):
            return type(value) is int
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return is_whole(scope, operand)
        case ast.BinOp(left=left, right=right):
            return is_whole(scope, left) and is_whole(scope, right)
        case ast.Name():
            held = value_of(node, scope.seen)
            if isinstance(held, torch.Tensor):
                return (
                    held.ndim == 0
                    and not (held.dtype.is_floating_point or held.dtype.is_complex)
                    and held.dtype is not torch.bool
                )
            return type(held) is int
        case ast.Call() | ast.Subscript():
            return scope.depends_on(node) in ("static", "size") and not scope.is_tensor(node)
    return False


def size_of(scope: Scope, base: str, axis: int) -> int | None:
    """The size of a dimension, in the call that was seen, of a tensor or of a part of it that numbers fix."""
    node = expression(base)
    root, parts = parts_of(node) if isinstance(node, ast.Subscript) else (node, [])
    held = tensor_of(root, scope)
    if held is None:
        return None
    left = [size for at, size in enumerate(held.shape) if at >= len(parts) or is_full(parts[at])]
    return left[axis] if axis < len(left) else None


class OneRow(ast.NodeTransformer):
    """What a loop reads and writes at its counter `index`: `x[:, t:t + 1]` as `x[:, t].unsqueeze(1)`, and
    `out[:, t:t + 1] = row` as `out[:, t] = row.squeeze(1)`."""

    def __init__(self, scope: Scope, index: str) -> None:
        self.scope, self.index = scope, index

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        found = self._find(node)
        row = f"{ast.unparse(found[0])}.unsqueeze({found[1]})" if found and isinstance(node.ctx, ast.Load) else ""
        return expression(row) if row else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        found = self._find(node.targets[0]) if len(node.targets) == 1 else None
        if found is None or self.scope.depends_on(node.value) != "tensor":
            return node
        return statements(f"{ast.unparse(found[0])} = ({ast.unparse(node.value)}).squeeze({found[1]})")[0]

    def _find(self, node: ast.expr) -> tuple[ast.Subscript, int] | None:
        """The same with the counter in place of the slice, and the dimension of that, where slices stand before it."""
        parts = indices_of(node) if isinstance(node, ast.Subscript) else []
        at = next((i for i, part in enumerate(parts) if isinstance(part, ast.Slice) and not is_full(part)), None)
        if at is None or not all(isinstance(part, ast.Slice) for part in parts[:at]):
            return None
        assert isinstance(node, ast.Subscript)
        match parts[at]:
            case ast.Slice(lower=ast.expr() as low, upper=ast.expr() as high, step=None):
                first, end = shift_of(low, self.index), shift_of(high, self.index)
                if first is not None and end == first + 1:
                    inside = ", ".join(ast.unparse(one) for one in [*parts[:at], low, *parts[at + 1 :]])
                    picked = expression(f"{ast.unparse(node.value)}[{inside}]")
                    assert isinstance(picked, ast.Subscript)
                    return picked, at
        return None
