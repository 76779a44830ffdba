"""A part of a tensor, as the whole tensor and a mask: what a mask selects, or what lies between two moving bounds."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from trueline.doctor.rewrites.indices import is_full
from trueline.doctor.rewrites.scope import Scope, indices_of, loaded_names, stored_names, tensor_of, value_of

_LEAST = ("max", "amax", "logsumexp")
_MOST = ("min", "amin")
REDUCTIONS = ("sum", "mean", "prod", "any", "all", *_LEAST, *_MOST)
_LOGIC = (ast.BitAnd, ast.BitOr, ast.BitXor)
_TESTS = ("eq", "ne", "gt", "lt", "ge", "le", "isnan", "isfinite", "isinf", "bool", "logical_and", "logical_or")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPart:
    base: str
    """The whole tensor, as it is written."""
    mask: str
    wide: str
    """The index that makes the mask broadcast to the whole."""
    counts: Mapping[int, str]
    """How long the part is, along the dimensions that are not whole."""
    rank: int
    """Dimensions of the whole."""
    chosen: tuple[tuple[int, ...], ...]
    """For each dimension of the part, the dimensions of the whole that it covers."""
    narrowed: frozenset[int]
    """Dimensions of the whole that are not whole in the part."""
    dtype: torch.dtype
    may_be_none: bool = False
    """Whether a number of a list bounds it, so that nothing asks first whether there is anything in it."""

    def under(self, name: str) -> MaskedPart:
        """The part whose mask has a name."""
        counts = {at: count.replace(f"{self.mask}.", f"{name}.") for at, count in self.counts.items()}
        return replace(self, mask=name, counts=counts)

    def size(self, dim: int) -> str:
        """How long the part is along one of its dimensions."""
        return self.counts.get(dim, f"{self.base}.shape[{self.chosen[dim][0]}]")

    @property
    def where(self) -> str:
        return self.mask + self.wide

    @property
    def number(self) -> str:
        """How many elements the part has."""
        return f"{self.where}.expand_as({self.base}).sum()"

    def reduce(self, how: str, dims: Sequence[int] | None, keep: str) -> str | None:
        """A reduction over dimensions of the part, or over all of it; None where the result would be ragged."""
        axes = {axis for dim in (range(len(self.chosen)) if dims is None else dims) for axis in self.chosen[dim]}
        if not self.narrowed <= axes or (keep and len(axes) > len(dims or ())):
            return None
        over = "" if dims is None else str(next(iter(axes))) if len(axes) == 1 else str(tuple(sorted(axes)))
        how = f"a{how}" if how in ("max", "min") else how
        if self.may_be_none and how in ("amax", "amin"):
            return None  # of nothing torch raises, and the neutral value would be an answer
        given = ", ".join(one for one in (over, keep) if one)
        neutral = _neutral(how, self.dtype)
        if neutral is None or (how == "logsumexp" and dims is None) or (how == "prod" and len(axes) > 1):
            return None
        whole = f"torch.where({self.where}, {self.base}, {neutral})"
        if how != "mean":
            return f"{whole}.{how}({given})"
        return f"({whole}.sum({given}) / {self.where}.expand_as({self.base}).sum({given}))"


def _neutral(how: str, dtype: torch.dtype) -> str | None:
    """The value that does not change a reduction."""
    if how in ("any", "all"):
        return str(how == "all") if dtype is torch.bool else None
    if dtype is torch.bool:
        return "False" if how == "sum" else None
    if how in (*_LEAST, *_MOST):
        if dtype.is_floating_point:
            return "float('-inf')" if how in _LEAST else "float('inf')"
        return str(torch.iinfo(dtype).min if how in _LEAST else torch.iinfo(dtype).max)
    return "1" if how == "prod" else "0"


def part_of(scope: Scope, node: ast.expr) -> MaskedPart | None:
    """`x[mask]` or `x[:, lo:hi]` as a part, where values or the steps of a loop decide how large it is."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name | ast.Attribute | ast.Subscript):
        return None
    root: ast.expr = node.value
    while isinstance(root, ast.Subscript):
        root = root.value
    held, rank = tensor_of(root, scope), rank_of(scope, node.value)
    if held is None or rank is None:
        return None
    over = mask_rank(scope, node.slice)
    if over is None:
        return _between(scope, node, rank, held.dtype)
    mask = ast.unparse(node.slice)
    mask = mask if isinstance(node.slice, ast.Name | ast.Attribute) else f"({mask})"
    return MaskedPart(
        base=ast.unparse(node.value),
        mask=mask,
        wide=f"[..., {', '.join(['None'] * (rank - over))}]" if rank > over else "",
        counts={0: f"{mask}.sum()"},
        rank=rank,
        chosen=(tuple(range(over)), *((axis,) for axis in range(over, rank))),
        narrowed=frozenset(range(over)),
        dtype=held.dtype,
    )


def _between(scope: Scope, node: ast.Subscript, rank: int, dtype: torch.dtype) -> MaskedPart | None:
    kept: list[ast.expr] = []
    bounds: dict[int, ast.Slice] = {}
    axis = 0
    for place in indices_of(node):
        if isinstance(place, ast.Slice) and place.step is None and _moves(scope, place):
            bounds[axis] = place
            kept.append(ast.Slice())
        elif is_full(place):
            kept.append(place)
        elif isinstance(place, ast.Name | ast.Constant) and _is_one_index(scope, place):
            kept.append(place)
            rank, axis = rank - 1, axis - 1
        else:
            return None
        axis += 1
    if not bounds:
        return None
    while kept and is_full(kept[-1]):
        kept.pop()
    base = ast.unparse(node.value) + (f"[{', '.join(ast.unparse(one) for one in kept)}]" if kept else "")
    within = {at: _within(scope, base, at, place) for at, place in bounds.items()}
    wide = {at: f"[:{', None' * (rank - 1 - at)}]" if at < rank - 1 else "" for at in bounds}
    one = next(iter(bounds)) if len(bounds) == 1 else None
    return MaskedPart(
        base=base,
        mask=within[one] if one is not None else f"({' & '.join(within[at] + wide[at] for at in bounds)})",
        wide=wide[one] if one is not None else "",
        counts={at: f"{mask}.sum()" for at, mask in within.items()},
        rank=rank,
        chosen=tuple((at,) for at in range(rank)),
        narrowed=frozenset(bounds),
        dtype=dtype,
        may_be_none=any(_is_of_list(scope, one) for place in bounds.values() for one in (place.lower, place.upper)),
    )


def _within(scope: Scope, base: str, axis: int, place: ast.Slice) -> str:
    """Where the indices of a dimension lie between the bounds; one below 0, as values may be, counts from the end."""
    size = f"{base}.shape[{axis}]"
    at, tests = f"torch.arange({size}, device={base}.device)", []
    if place.lower is not None:
        low = ast.unparse(place.lower)
        tests.append(f"({at} >= {low})")
        if _may_be_negative(scope, place.lower):
            tests.append(f"(({low} >= 0) | ({at} >= {low} + {size}))")
    if place.upper is not None:
        high = ast.unparse(place.upper)
        test = f"({at} < {high})"
        if _may_be_negative(scope, place.upper):
            test = f"({test} | ({high} < 0) & ({at} < {high} + {size}))"
        tests.append(test)
    return tests[0] if len(tests) == 1 else f"({' & '.join(tests)})"


def _may_be_negative(scope: Scope, bound: ast.expr) -> bool:
    """Whether values decide the bound: it is taken out of a tensor, or a list runs over such numbers."""
    return scope.depends_on(bound) in ("number", "tensor") or _is_of_list(scope, bound)


def _is_of_list(scope: Scope, bound: ast.expr | None) -> bool:
    """Whether a list comprehension runs over the bound, and does not count it."""
    names = set() if bound is None else set(loaded_names(bound))
    lists = [node for node in ast.walk(scope.function) if isinstance(node, ast.comprehension)]
    return any(names & set(stored_names(one.target)) and "range(" not in ast.unparse(one.iter) for one in lists)


def _is_one_index(scope: Scope, node: ast.expr) -> bool:
    held = node.value if isinstance(node, ast.Constant) else value_of(node, scope.seen)
    return type(held) is int or (isinstance(held, torch.Tensor) and held.ndim == 0 and held.dtype is torch.int64)


def _moves(scope: Scope, place: ast.Slice) -> bool:
    """Whether a bound is a number out of a tensor, or changes from step to step of a loop."""
    bounds = [one for one in (place.lower, place.upper) if one is not None]
    moving: set[str] = set()
    for node in ast.walk(scope.function) if bounds else ():
        if isinstance(node, ast.For):
            moving |= {*stored_names(node.target), *stored_names(node.body)}
        elif isinstance(node, ast.ListComp | ast.GeneratorExp):
            moving |= {name for rows in node.generators for name in stored_names(rows.target)}
    return any(scope.depends_on(one) in ("number", "tensor") or moving & set(loaded_names(one)) for one in bounds)


def rank_of(scope: Scope, node: ast.expr) -> int | None:
    """Dimensions of a tensor that is a name, or an element of one."""
    held = tensor_of(node, scope)
    if held is None and isinstance(node, ast.Subscript) and _is_one_index(scope, node.slice):
        outer = rank_of(scope, node.value)
        return None if outer is None else outer - 1
    return None if held is None else held.ndim


def mask_rank(scope: Scope, node: ast.expr) -> int | None:
    """Dimensions of a mask: a boolean tensor, a comparison, or several of these joined."""
    match node:
        case ast.Name() | ast.Attribute():
            held = tensor_of(node, scope)
            return held.ndim if held is not None and held.dtype is torch.bool else None
        case ast.Compare():
            ranks = [rank_of(scope, one) for one in (node.left, *node.comparators)]
            known = [rank for rank in ranks if rank is not None]
            return max(known) if known and scope.depends_on(node) == "tensor" else None
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _LOGIC):
            one, two = mask_rank(scope, left), mask_rank(scope, right)
            return None if one is None or two is None else max(one, two)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return mask_rank(scope, operand)
        case ast.Call(func=ast.Attribute(value=owner, attr=test), args=given) if test in _TESTS:
            return rank_of(scope, given[0] if ast.unparse(owner) == "torch" and given else owner)
    return None
