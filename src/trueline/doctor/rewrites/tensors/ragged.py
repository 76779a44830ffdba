"""A part of a tensor whose length values or a counter choose, followed through what is computed of it, as the whole
tensor with a mask.

    s = x[i, :n]                                        here = torch.arange(x.shape[1]) < n
    w = torch.softmax(q(s) @ k(s).t(), -1)    ──▶       w = torch.where(here, q(x[i]) @ k(x[i]).t(), -inf).softmax(1)
    y = (w @ v(s)).mean(0)                              y = torch.where(here[:, None], w @ …, 0).sum(0) / here.sum()

Of each expression the dimensions are known that have the part's length: beyond it they hold anything, which no sum, no
softmax, and no product of matrices may see. Condition: all that is computed of the part has a rule here.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from trueline.doctor.rewrites.indices import is_full
from trueline.doctor.rewrites.rowwise import ELEMENTWISE
from trueline.doctor.rewrites.scope import Scope, expression, indices_of, tensor_of, value_of

_LEAST = {"amax": "float('-inf')", "amin": "float('inf')", "sum": "0", "mean": "0", "prod": "1"}
_ON_ROWS = (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Dropout, torch.nn.Identity)
_FUNCTIONS = ("torch", "F", "torch.nn.functional", "nn.functional")


class NoRule(Exception):
    """An expression that has no rule."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A new expression, how many dimensions it has, and those that have the part's length."""

    text: str
    rank: int
    dims: frozenset[int] = frozenset()
    ones: frozenset[int] = frozenset()
    """Dimensions that the code itself gives size 1."""

    def fill_beyond(self, here: str, fill: str, dims: frozenset[int] | None = None) -> str:
        """The expression with `fill` beyond the length in `dims`, all its own when left out."""
        masks = [self.mask(here, dim) for dim in sorted(self.dims if dims is None else dims)]
        return f"torch.where({' & '.join(masks)}, {self.text}, {fill})" if masks else self.text

    def mask(self, here: str, dim: int) -> str:
        """The mask along a dimension."""
        after = self.rank - 1 - dim
        return f"{here}[:{', None' * after}]" if after else here


class Tracer:
    """Follows a part through expressions; `known` are the names that hold something of it, or have a known rank."""

    def __init__(self, scope: Scope, here: str, count: str) -> None:
        self.scope, self.here, self.count = scope, here, count
        self.known: dict[str, Traced] = {}

    def trace(self, node: ast.expr) -> Traced:
        """The expression of the whole. Raises NoRule."""
        text = ast.unparse(node)
        if text in self.known:
            return self.known[text]
        match node:
            case ast.Constant(value=value) if type(value) in (int, float):
                return Traced(text, 0)
            case ast.Name() | ast.Attribute():
                return self._plain(node)
            case ast.UnaryOp(op=op, operand=operand):
                inner = self.trace(operand)
                if isinstance(op, ast.Not):
                    raise NoRule(text)
                return replace(inner, text=ast.unparse(ast.UnaryOp(op=op, operand=expression(inner.text))))
            case ast.BinOp(left=left, op=ast.MatMult(), right=right):
                return self._matmul(self.trace(left), self.trace(right))
            case ast.BinOp(left=left, op=op, right=right):
                one, two = self.trace(left), self.trace(right)
                joined = ast.BinOp(left=expression(one.text), op=op, right=expression(two.text))
                return self._together(ast.unparse(joined), [one, two])
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                one, two = self.trace(left), self.trace(right)
                compared = ast.Compare(left=expression(one.text), ops=[op], comparators=[expression(two.text)])
                return self._together(ast.unparse(compared), [one, two])
            case ast.Subscript():
                return self._subscript(node)
            case ast.Call():
                return self._call(node)
        raise NoRule(text)

    def _plain(self, node: ast.expr) -> Traced:
        held = value_of(node, self.scope.seen)
        if isinstance(held, torch.Tensor):
            return Traced(ast.unparse(node), held.ndim)
        if isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
            return self._turn(self.trace(node.value), -2, -1)
        if type(held) in (int, float) or ast.unparse(node) in ("torch.inf", "math.inf", "math.pi"):
            return Traced(ast.unparse(node), 0)
        raise NoRule(ast.unparse(node))

    def _together(self, text: str, parts: Sequence[Traced]) -> Traced:
        """Elementwise: dimensions are aligned from the end. What has the part's length on one side has it on the other,
        or is of size 1 there, or is not there."""
        rank = max(part.rank for part in parts)
        moved = [frozenset(dim + rank - part.rank for dim in part.dims) for part in parts]
        dims = frozenset().union(*moved)
        for part, own in zip(parts, moved, strict=True):
            there = {dim for dim in dims - own if dim >= rank - part.rank}
            if any(not self._is_one(part, dim - rank + part.rank) for dim in there):
                raise NoRule(text)
        others = [{dim + rank - part.rank for dim in part.ones} | {*range(rank - part.rank)} for part in parts]
        return Traced(text, rank, dims, frozenset(set(range(rank)).intersection(*others)))

    def _is_one(self, part: Traced, dim: int) -> bool:
        """Whether a dimension certainly has size 1: one that the code itself puts there."""
        held = tensor_of(expression(part.text), self.scope)
        if dim in part.ones:
            return True
        return held is not None and held.shape[dim] == 1 and part.text.startswith("self.")

    def _matmul(self, one: Traced, two: Traced) -> Traced:
        if one.rank < 2 or not two.rank:
            raise NoRule("a product of vectors")
        inner = two.rank - 2 if two.rank > 1 else 0
        left, right = one.rank - 1 in one.dims, inner in two.dims
        texts = [one.text, two.text]
        if left != right:
            raise NoRule("a product of a part with a whole")
        if left:
            texts = [
                one.fill_beyond(self.here, "0", frozenset([one.rank - 1])),
                two.fill_beyond(self.here, "0", frozenset([inner])),
            ]
        rank = max(one.rank, two.rank) if two.rank > 1 else one.rank - 1
        dims = (
            {dim + rank - one.rank for dim in one.dims - {one.rank - 1}} if two.rank > 1 else one.dims - {one.rank - 1}
        )
        if two.rank > 1:
            dims |= {rank - 1} if two.rank - 1 in two.dims else set()
            dims |= {dim + rank - two.rank for dim in two.dims if dim < inner}
        left_text, right_text = (f"({text})" for text in texts)
        return Traced(f"{left_text} @ {right_text}", rank, frozenset(dims))

    def _turn(self, one: Traced, first: int, second: int) -> Traced:
        order = [*range(one.rank)]
        order[first], order[second] = order[second], order[first]
        dims, ones = (frozenset(at for at, dim in enumerate(order) if dim in some) for some in (one.dims, one.ones))
        return Traced(f"({one.text}).transpose({first}, {second})", one.rank, dims, ones)

    # ---- subscripts

    def _subscript(self, node: ast.Subscript) -> Traced:
        one, parts = self.trace(node.value), indices_of(node)
        if [ast.unparse(part) for part in parts] == ["-1"] and 0 in one.dims:
            last = f"({one.text}).index_select(0, ({self.count} - 1).reshape(1)).squeeze(0)"
            return Traced(last, one.rank - 1, frozenset(dim - 1 for dim in one.dims if dim))
        named = sum(ast.unparse(part) not in ("None", "...", "Ellipsis") for part in parts)
        dims, ones = set[int](), set[int]()
        old = rank = 0
        for part in parts:
            text = ast.unparse(part)
            if text in ("...", "Ellipsis"):
                for _ in range(one.rank - named):
                    dims |= {rank} if old in one.dims else set()
                    old, rank = old + 1, rank + 1
            elif text == "None":
                ones.add(rank)
                rank += 1
            elif is_full(part):
                dims |= {rank} if old in one.dims else set()
                old, rank = old + 1, rank + 1
            elif old in one.dims or not self._is_number(part):
                raise NoRule(ast.unparse(node))
            else:
                old += 1
        dims |= {rank + dim - old for dim in one.dims if dim >= old}
        new = ast.Subscript(value=expression(one.text), slice=node.slice, ctx=ast.Load())
        return Traced(ast.unparse(new), rank + one.rank - old, frozenset(dims), frozenset(ones))

    def _is_number(self, part: ast.expr) -> bool:
        held = value_of(part, self.scope.seen)
        whole = isinstance(part, ast.Constant) and type(part.value) is int
        return whole or type(held) is int or ast.unparse(part).removeprefix("-").isdigit()

    # ---- calls

    def _call(self, node: ast.Call) -> Traced:
        module = value_of(node.func, self.scope.seen)
        if isinstance(module, torch.nn.Module):
            return self._module(node, module)
        if not isinstance(node.func, ast.Attribute):
            if ast.unparse(node.func) == "len" and 0 in self.trace(node.args[0]).dims:
                return Traced(self.count, 0)
            raise NoRule(ast.unparse(node))
        called, how = node.func.value, node.func.attr
        if ast.unparse(called) == "math" and all(self.trace(one).rank == 0 for one in node.args):
            return Traced(ast.unparse(node), 0)
        of_torch = ast.unparse(called) in _FUNCTIONS
        given = list(node.args) if of_torch else [called, *node.args]
        if not given:
            raise NoRule(ast.unparse(node))
        one, rest = self.trace(given[0]), given[1:]
        options = {keyword.arg or "": keyword.value for keyword in node.keywords}
        if how in ELEMENTWISE:
            traced = [one, *(self.trace(part) for part in rest), *(self.trace(part) for part in options.values())]
            names = ["", *([""] * len(rest)), *(f"{name}=" for name in options)]
            text = ", ".join(name + part.text for name, part in zip(names, traced, strict=True))
            return self._together(f"torch.{how}({text})" if of_torch else self._method(one, how, names, traced), traced)
        if how in ("t", "transpose"):
            first, second = (0, 1) if how == "t" else (self._number(part) for part in rest)
            return self._turn(one, first, second)
        if how in ("unsqueeze", "squeeze") and rest:
            return self._squeeze(one, how, self._number(rest[0]))
        if how in ("size", "dim"):
            return self._size(one, how, rest)
        return self._over(node, one, how, rest, options)

    def _method(self, one: Traced, how: str, names: Sequence[str], traced: Sequence[Traced]) -> str:
        given = ", ".join(name + part.text for name, part in zip(names[1:], traced[1:], strict=True))
        return f"({one.text}).{how}({given})"

    def _number(self, node: ast.expr) -> int:
        try:
            return int(ast.literal_eval(node))
        except (ValueError, TypeError) as error:
            raise NoRule(ast.unparse(node)) from error

    def _size(self, one: Traced, how: str, rest: Sequence[ast.expr]) -> Traced:
        if how == "size" and rest and self._number(rest[0]) % one.rank in one.dims:
            return Traced(self.count, 0)
        raise NoRule(how)

    def _squeeze(self, one: Traced, how: str, at: int) -> Traced:
        text = f"({one.text}).{how}({at})"
        if how == "unsqueeze":
            at %= one.rank + 1
            dims, ones = (frozenset(dim + (dim >= at) for dim in some) for some in (one.dims, one.ones))
            return Traced(text, one.rank + 1, dims, ones | {at})
        at %= one.rank
        if at in one.dims:
            raise NoRule(text)
        return Traced(text, one.rank - 1, frozenset(dim - (dim > at) for dim in one.dims))

    def _module(self, node: ast.Call, module: torch.nn.Module) -> Traced:
        if len(node.args) != 1 or node.keywords:
            raise NoRule(ast.unparse(node))
        one = self.trace(node.args[0])
        for part in module if isinstance(module, torch.nn.Sequential) else [module]:
            name = type(part).__name__.lower()
            over = len(part.normalized_shape) if isinstance(part, torch.nn.LayerNorm) else 1
            rows = type(part) in _ON_ROWS and not any(dim >= one.rank - over for dim in one.dims) and one.rank >= over
            if not rows and not (type(part).__module__ == "torch.nn.modules.activation" and name in ELEMENTWISE):
                raise NoRule(ast.unparse(node))
        return replace(one, text=f"{ast.unparse(node.func)}({one.text})")

    def _over(
        self, node: ast.Call, one: Traced, how: str, rest: Sequence[ast.expr], options: Mapping[str, ast.expr]
    ) -> Traced:
        """A softmax, a running sum or a reduction along one dimension."""
        given = [*rest, *(options[name] for name in ("dim", "axis") if name in options)]
        if len(given) != 1 or set(options) - {"dim", "axis", "keepdim"}:
            raise NoRule(ast.unparse(node))
        if not one.rank:
            raise NoRule(ast.unparse(node))
        dim = self._number(given[0]) % one.rank
        if how in ("softmax", "log_softmax"):
            text = one.fill_beyond(self.here, "float('-inf')", frozenset([dim]) & one.dims)
            return replace(one, text=f"({text}).{how}({dim})")
        if how == "cumsum":
            return replace(one, text=f"({one.text}).cumsum({dim})")
        if how not in _LEAST or (how in ("amax", "amin") and dim in one.dims):
            raise NoRule(ast.unparse(node))  # of nothing torch raises, and the neutral value would be an answer
        kept = "keepdim" in options and bool(self._number(options["keepdim"]))
        more = ", keepdim=True" if kept else ""
        left = one.dims - {dim} if kept else frozenset(at - (at > dim) for at in one.dims - {dim})
        rank, ones = (one.rank, frozenset([dim])) if kept else (one.rank - 1, frozenset[int]())
        if dim not in one.dims:
            return Traced(f"({one.text}).{how}({dim}{more})", rank, left, ones)
        whole = one.fill_beyond(self.here, _LEAST[how], frozenset([dim]))
        text = f"{whole}.{'sum' if how == 'mean' else how}({dim}{more})"
        return Traced(f"({text} / {self.count})" if how == "mean" else text, rank, left, ones)
