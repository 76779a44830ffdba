"""What a mask selects and what lies between two moving bounds, reduced: as the whole tensor with a mask.

    rows = h[seg == s]                                  rows_here = seg == s
    if len(rows): out.append(rows.mean(0))      ──▶     if rows_here.sum(): out.append(torch.where(rows_here[:, None],
                                                            h, 0).sum(0) / ...)
    out.append(x[:, s : s + 3].mean(1))         ──▶     the same with (at >= s) & (at < s + 3), of the places `at`

How much is selected the values decide, or a counter; the whole tensor keeps its size at each step. Condition: of what
is selected only reductions over it and its size are asked. The proof sees whether an index counts from the end.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from trueline.doctor.rewrites.control.predicate import without_numbers
from trueline.doctor.rewrites.loops.recurrences import full
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    blocks,
    expression,
    loaded_names,
    statements,
    stored_names,
    value_of,
)
from trueline.doctor.rewrites.tensors.scalars import without_numbers_in

_LEAST = ("max", "amax", "logsumexp")
_MOST = ("min", "amin")
_REDUCES = ("sum", "mean", "prod", "any", "all", *_LEAST, *_MOST)
_LOGIC = (ast.BitAnd, ast.BitOr, ast.BitXor)
_TESTS = ("eq", "ne", "gt", "lt", "ge", "le", "isnan", "isfinite", "isinf", "bool", "logical_and", "logical_or")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPart:
    """A part of a tensor."""

    base: str
    """The whole tensor, as it is written."""
    mask: str
    """What is selected."""
    wide: str
    """What makes the mask broadcast to the whole."""
    counts: Mapping[int, str]
    """How long the part is, along the dimensions that are not whole."""
    rank: int
    """Dimensions of the whole."""
    chosen: tuple[tuple[int, ...], ...]
    """For each dimension of the part those of the whole that it stands for."""
    narrowed: frozenset[int]
    """Dimensions of the whole that are not whole in the part."""
    dtype: torch.dtype

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
        """A reduction over dimensions of the part, or over all of it; None where it leaves something ragged."""
        axes = {axis for dim in (range(len(self.chosen)) if dims is None else dims) for axis in self.chosen[dim]}
        if not self.narrowed <= axes or (keep and len(axes) > len(dims or ())):
            return None
        over = "" if dims is None else str(next(iter(axes))) if len(axes) == 1 else str(tuple(sorted(axes)))
        if how in ("max", "min"):
            how = f"a{how}"
        given = ", ".join(one for one in (over, keep) if one)
        if how == "logsumexp" and dims is None:
            return None
        neutral = _neutral(how, self.dtype)
        if neutral is None or (how == "prod" and len(axes) > 1):
            return None
        whole = f"torch.where({self.where}, {self.base}, {neutral})"
        if how != "mean":
            return f"{whole}.{how}({given})"
        return f"({whole}.sum({given}) / {self.where}.expand_as({self.base}).sum({given}))"


def _neutral(how: str, dtype: torch.dtype) -> str | None:
    """What changes nothing where it is reduced with the rest."""
    if how in ("any", "all"):
        return str(how == "all") if dtype is torch.bool else None
    if dtype is torch.bool:
        return "False" if how == "sum" else None
    if how in (*_LEAST, *_MOST):
        if dtype.is_floating_point:
            return "float('-inf')" if how in _LEAST else "float('inf')"
        return str(torch.iinfo(dtype).min if how in _LEAST else torch.iinfo(dtype).max)
    return "1" if how == "prod" else "0"


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The function with parts under a name of their own as masks, one name at a time; then the statement at `spot`, or
    the loop, with the parts that it reduces at once."""
    scope = replace(scope, seen={**_counters(scope), **scope.seen})
    for block in _blocks(scope.function.body):
        for index, statement in enumerate(block):
            text = _without(scope, block, index)
            if text:
                words = f"`{ast.unparse(statement)}`: what is asked of it is asked of the whole, with a mask"
                yield Candidate(text=text, words=words)
    reduced: list[str] = []
    new = _mask_block(scope, [spot.statement], reduced)
    text = scope.replace([spot.statement], new) if reduced else None
    if text:
        yield Candidate(text=text, words=f"`{reduced[0]}` is of the whole, with a mask")


def _counters(scope: Scope) -> dict[str, int]:
    """Names that count the steps of a comprehension, or go over numbers: nobody sees what they held."""
    found: dict[str, int] = {}
    for node in ast.walk(scope.function):
        if not isinstance(node, ast.comprehension):
            continue
        match node.target, node.iter:
            case ast.Name(id=name), ast.Call(func=ast.Name(id="range")):
                found[name] = 0
            case ast.Name(id=name), ast.Call(func=ast.Attribute(attr="tolist")):
                found[name] = 0
            case ast.Tuple(elts=[ast.Name(id=name), inner]), ast.Call(func=ast.Name(id="enumerate"), args=[given]):
                found[name] = 0
                if isinstance(inner, ast.Name) and ast.unparse(given).endswith(".tolist()"):
                    found[inner.id] = 0
    return found


def _mask_block(scope: Scope, block: list[ast.stmt], words: list[str]) -> list[ast.stmt]:
    """The statements with the parts that they reduce at once as masks, which have names of their own."""
    found: list[ast.stmt] = []
    for statement in block:
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.Return | ast.Expr):
            masked = _Masked(scope, {})
            new = masked.mask_store(statement) or masked.visit(copy.deepcopy(statement))
            words += masked.words
            found += [*masked.before, new]
            continue
        new = copy.deepcopy(statement)
        for name in ("body", "orelse") if isinstance(new, ast.For | ast.If) else ():
            setattr(new, name, _mask_block(scope, getattr(statement, name), words))
        found.append(new)
    return found


def _blocks(block: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    yield block
    for statement in block:
        for inner in blocks(statement):
            yield from _blocks(inner)


def _without(scope: Scope, block: list[ast.stmt], index: int) -> str | None:
    """The file without the part that the statement names; None where more is asked of it than a mask can say."""
    match block[index]:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() as value):
            part = part_of(scope, value)
        case _:
            return None
    if part is None or _stored_so_often(scope, name) != 1:
        return None
    here = scope.fresh(f"{name}_here")
    given = [without_numbers_in(statements(f"{here} = {part.mask}")[0], scope)]
    after = [one for one in block[index + 1 :] if name in loaded_names(one)]
    masked = _Masked(scope, {name: part.under(here)})
    new = [masked.visit(copy.deepcopy(one)) for one in after]
    everywhere = sum(_reads(one, name) for one in scope.function.body)
    if not after or any(_reads(one, name) for one in new) or everywhere != sum(_reads(one, name) for one in after):
        return None
    text: str | None = scope.text
    for old, one in reversed([*zip([block[index], *after], [given, *([one] for one in new)], strict=True)]):
        text = replace(scope, text=text).replace([old], one) if text is not None else None
    return text


def _stored_so_often(scope: Scope, name: str) -> int:
    nodes = (node for node in ast.walk(scope.function) if isinstance(node, ast.Name) and node.id == name)
    return sum(isinstance(node.ctx, ast.Store) for node in nodes)


def _reads(statement: ast.stmt, name: str) -> int:
    nodes = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name)
    return sum(isinstance(node.ctx, ast.Load) for node in nodes)


def part_of(scope: Scope, node: ast.expr) -> MaskedPart | None:
    """What `x[mask]` or `x[:, lo:hi]` is a part of, where values or the steps of a loop say how large it is."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name | ast.Attribute | ast.Subscript):
        return None
    held = value_of(_root(node), scope.seen)
    if not isinstance(held, torch.Tensor):
        return None
    rank = rank_of(scope, node.value)
    over = mask_rank(scope, node.slice)
    if rank is not None and over is not None:
        return _masked_part(node, rank, over, held.dtype)
    return None if rank is None else _between(scope, node, rank, held.dtype)


def _root(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _masked_part(node: ast.Subscript, rank: int, over: int, dtype: torch.dtype) -> MaskedPart:
    mask = ast.unparse(node.slice)
    mask = mask if isinstance(node.slice, ast.Name | ast.Attribute) else f"({mask})"
    wide = f"[..., {', '.join(['None'] * (rank - over))}]" if rank > over else ""
    chosen = (tuple(range(over)), *((axis,) for axis in range(over, rank)))
    return MaskedPart(
        base=ast.unparse(node.value),
        mask=mask,
        wide=wide,
        counts={0: f"{mask}.sum()"},
        rank=rank,
        chosen=chosen,
        narrowed=frozenset(range(over)),
        dtype=dtype,
    )


def _between(scope: Scope, node: ast.Subscript, rank: int, dtype: torch.dtype) -> MaskedPart | None:
    places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    kept: list[ast.expr] = []
    bounds: dict[int, ast.Slice] = {}
    axis = 0
    for place in places:
        if isinstance(place, ast.Slice) and place.step is None and _moves(scope, place):
            bounds[axis] = place
            kept.append(ast.Slice())
        elif full(place):
            kept.append(place)
        elif isinstance(place, ast.Name | ast.Constant) and _one_place(scope, place):
            kept.append(place)
            rank, axis = rank - 1, axis - 1
        else:
            return None
        axis += 1
    if not bounds:
        return None
    while kept and full(kept[-1]):
        kept.pop()
    inside = f"[{', '.join(ast.unparse(one) for one in kept)}]" if kept else ""
    base = f"{ast.unparse(node.value)}{inside}"
    within = {at: _within(base, at, place) for at, place in bounds.items()}
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
    )


def _within(base: str, axis: int, place: ast.Slice) -> str:
    """Where the places of a dimension lie between the bounds."""
    at = f"torch.arange({base}.shape[{axis}], device={base}.device)"
    tests = [f"({at} >= {ast.unparse(place.lower)})"] if place.lower is not None else []
    tests += [f"({at} < {ast.unparse(place.upper)})"] if place.upper is not None else []
    return tests[0] if len(tests) == 1 else f"({' & '.join(tests)})"


def _one_place(scope: Scope, node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    held = value_of(node, scope.seen)
    return type(held) is int or (isinstance(held, torch.Tensor) and held.ndim == 0 and held.dtype is torch.int64)


def _moves(scope: Scope, place: ast.Slice) -> bool:
    """Whether a bound is a number out of a tensor, or changes from step to step of a loop."""
    bounds = [one for one in (place.lower, place.upper) if one is not None]
    if not bounds:
        return False
    loops = [node for node in ast.walk(scope.function) if isinstance(node, ast.For)]
    moving = {name for loop in loops for name in (*stored_names(loop.target), *stored_names(loop.body))}
    listed = [one for node in ast.walk(scope.function) if isinstance(node, ast.ListComp) for one in node.generators]
    moving |= {name for one in listed for name in stored_names(one.target)}
    return any(scope.worth(one) in ("number", "tensor") or moving & set(loaded_names(one)) for one in bounds)


def rank_of(scope: Scope, node: ast.expr) -> int | None:
    """Dimensions of a tensor that is a name, or an element of one."""
    held = value_of(node, scope.seen)
    if isinstance(held, torch.Tensor):
        return held.ndim
    if isinstance(node, ast.Subscript) and _one_place(scope, node.slice):
        outer = rank_of(scope, node.value)
        return None if outer is None else outer - 1
    return None


def mask_rank(scope: Scope, node: ast.expr) -> int | None:
    """Dimensions of a mask: of a tensor of booleans, of a comparison, of several of these put together."""
    match node:
        case ast.Name() | ast.Attribute():
            held = value_of(node, scope.seen)
            return held.ndim if isinstance(held, torch.Tensor) and held.dtype is torch.bool else None
        case ast.Compare():
            ranks = [rank_of(scope, one) for one in (node.left, *node.comparators)]
            found = [rank for rank in ranks if rank is not None]
            return max(found) if found and scope.worth(node) == "tensor" else None
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _LOGIC):
            one, two = mask_rank(scope, left), mask_rank(scope, right)
            return None if one is None or two is None else max(one, two)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return mask_rank(scope, operand)
        case ast.Call(func=ast.Attribute(value=owner, attr=test), args=given) if test in _TESTS:
            return rank_of(scope, given[0] if ast.unparse(owner) == "torch" and given else owner)
    return None


class _Masked(ast.NodeTransformer):
    """Reductions and sizes of parts, by the names that some have or as they are written, as those of the whole."""

    def __init__(self, scope: Scope, named: dict[str, MaskedPart]) -> None:
        self.scope, self.named = scope, named
        self.words: list[str] = []
        self.before: list[ast.stmt] = []
        """What gives masks their names, ahead of the statement."""
        self._listed: set[str] = set()

    def mask_store(self, statement: ast.stmt) -> ast.stmt | None:
        """`y[i, n:] = v` as `y[i] = torch.where(here, v, y[i])`, of what is written between moving bounds."""
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        if not isinstance(statement, ast.Assign | ast.AugAssign) or not isinstance(target, ast.Subscript):
            return None
        part = part_of(self.scope, target)
        if part is None or len(part.narrowed) != 1 or len(part.chosen) != part.rank:
            return None
        mask, shown = part.mask, ast.unparse(target)
        value = _Whole(self.scope, mask, part.base).visit(copy.deepcopy(statement.value))
        part = self._name_mask(part)
        if isinstance(statement, ast.AugAssign):
            value = ast.BinOp(left=expression(part.base), op=statement.op, right=value)
        self.words.append(shown)
        whole = f"{part.base} = torch.where({part.where}, {ast.unparse(value)}, {part.base})"
        return without_numbers_in(statements(whole)[0], self.scope)

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> ast.AST:
        self._listed |= {name for one in node.generators for name in stored_names(one.target)}
        return self.generic_visit(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        return self.visit_ListComp(node)

    def _part(self, node: ast.expr) -> MaskedPart | None:
        if isinstance(node, ast.Name):
            return self.named.get(node.id)
        return None if self.named else part_of(self.scope, node)

    def _name_mask(self, part: MaskedPart) -> MaskedPart:
        """The part with a name for its mask, where the mask can be given one ahead of the statement."""
        if self.named or self._listed & set(loaded_names(expression(part.mask))):
            return part
        here = self.scope.fresh(f"here_{len(self.before)}" if self.before else "here")
        self.before.append(without_numbers_in(statements(f"{here} = {part.mask}")[0], self.scope))
        return part.under(here)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`rows.max(0).values`."""
        if node.attr == "values" and isinstance(node.value, ast.Call) and _extreme(node.value):
            return self._reduction(node.value, node) or self.generic_visit(node)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """`rows.shape[0]`, and `rows.max(0)[0]`."""
        first = isinstance(node.slice, ast.Constant) and node.slice.value == 0
        if first and isinstance(node.value, ast.Call) and _extreme(node.value):
            return self._reduction(node.value, node) or self.generic_visit(node)
        if (
            isinstance(node.value, ast.Attribute)
            and node.value.attr == "shape"
            and isinstance(node.slice, ast.Constant)
        ):
            part = self._part(node.value.value)
            if part is not None and isinstance(node.slice.value, int) and isinstance(node.value.value, ast.Name):
                return expression(part.size(node.slice.value))
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]) if name in self.named:
                return expression(self.named[name].size(0))
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=asked), args=given) if name in self.named:
                if asked in ("numel", "nelement"):
                    return expression(self.named[name].number)
                if asked == "size" and given and isinstance(given[0], ast.Constant):
                    return expression(self.named[name].size(int(str(given[0].value))))
        if _extreme(node) and _dims(node, _arguments_of(node)) is not None:
            return self.generic_visit(node)  # a pair: only its values are known of the whole
        return self._reduction(node, node) or self.generic_visit(node)

    def _reduction(self, node: ast.Call, shown: ast.expr) -> ast.expr | None:
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _REDUCES:
            return None
        owner, given = node.func.value, list(node.args)
        if isinstance(owner, ast.Name) and owner.id == "torch" and given:
            owner, given = given[0], given[1:]
        part = self._part(owner)
        keep = [one for one in node.keywords if one.arg in ("keepdim", "keepdims")]
        others = [one for one in node.keywords if one.arg not in ("keepdim", "keepdims", "dim", "axis")]
        if part is None or others or len(given) > 1:
            return None
        dims = _dims(node, given)
        if dims is not None and not all(-len(part.chosen) <= dim < len(part.chosen) for dim in dims):
            return None
        kept = f"keepdim={ast.unparse(keep[0].value)}" if keep else ""
        if part.reduce(node.func.attr, dims, kept) is None:
            return None
        text = self._name_mask(part).reduce(node.func.attr, dims, kept)
        assert text is not None
        self.words.append(ast.unparse(shown))
        return without_numbers(expression(text), self.scope)


class _Whole(ast.NodeTransformer):
    """Parts between the same bounds, of a dimension as long, as the whole."""

    def __init__(self, scope: Scope, mask: str, base: str) -> None:
        self.scope, self.mask, self.base = scope, mask, base

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        part = part_of(self.scope, node)
        if part is not None and part.mask.replace(part.base, self.base) == self.mask:
            return expression(part.base)
        return self.generic_visit(node)


def _arguments_of(node: ast.Call) -> list[ast.expr]:
    of_torch = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "torch"
    return node.args[1:] if of_torch else node.args


def _dims(node: ast.Call, given: Sequence[ast.expr]) -> tuple[int, ...] | None:
    """The dimensions that a reduction is over; None for all."""
    said = [*given, *(one.value for one in node.keywords if one.arg in ("dim", "axis"))]
    try:
        found = ast.literal_eval(said[0]) if said else None
    except ValueError:
        return (1 << 20,)  # no dimension that is known
    return (found,) if isinstance(found, int) else tuple(found) if found is not None else None


def _extreme(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr in ("max", "min")
