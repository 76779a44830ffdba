"""Whether statements change nothing where a mask is false everywhere, where a tensor has no element, or a size is 0.

    if rows.numel() > 0:                           # of no row, index_add_ adds nothing
        out.index_add_(0, rows, self.f(x[rows]))
    if n % 8:                                      # 0 where it is false, and pad fills with nothing
        x = F.pad(x, (0, -n % 8))

It is read off the statements and not off calls: it holds at all values. What is not known to change nothing may change
something.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trueline.doctor.rewrites.pure import writes_by_call
from trueline.doctor.rewrites.scope import (
    Scope,
    Spot,
    assignments,
    expression,
    indices_of,
    loaded_names,
    named_value,
    stored_names,
    substitute,
    tensor_of,
)
from trueline.doctor.rewrites.tensors.masked_part import mask_rank

_MOVES = (
    "unsqueeze", "squeeze", "view", "reshape", "expand", "expand_as", "transpose", "permute", "movedim", "flatten", "t",
    "T", "mT", "bool", "clone", "detach", "contiguous", "cpu",
)  # fmt: skip
"""Methods and attributes that give the same elements another shape."""
_MAKERS = (
    "zeros",
    "ones",
    "full",
    "empty",
    "randn",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "expand",
    "repeat",
)
_WRITERS = ("index_add", "index_copy", "index_fill", "scatter", "scatter_add")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """What is known to be nothing; the sets hold expressions as they are written."""

    false: frozenset[str] = frozenset()
    """Masks that are false everywhere."""
    empty: frozenset[str] = frozenset()
    """Tensors without an element."""
    zero: frozenset[str] = frozenset()
    """Numbers that are 0."""
    most: frozenset[tuple[str, int, str]] = frozenset()
    """Name of a tensor, a dimension, and what its size is at most."""
    values: Mapping[str, ast.expr] = field(default_factory=dict)
    """Sizes that have another name."""

    def join(self, other: Nothing) -> Nothing:
        """What both say."""
        return Nothing(
            false=self.false | other.false,
            empty=self.empty | other.empty,
            zero=self.zero | other.zero,
            most=self.most | other.most,
            values={**self.values, **other.values},
        )

    def forget(self, names: Sequence[str]) -> Nothing:
        """Without what is said about these names, which get other values."""

        def keep(texts: frozenset[str]) -> frozenset[str]:
            return frozenset(text for text in texts if not {*names} & {*loaded_names(expression(text))})

        values = {name: value for name, value in self.values.items() if not {*names} & {name, *loaded_names(value)}}
        most = frozenset(one for one in self.most if not {*names} & {one[0], *loaded_names(expression(one[2]))})
        return replace(
            self, false=keep(self.false), empty=keep(self.empty), zero=keep(self.zero), most=most, values=values
        )

    # ---- expressions

    def is_false(self, node: ast.expr) -> bool:
        """Whether it is a mask that is false everywhere."""
        if ast.unparse(node) in self.false:
            return True
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr=how)) | ast.Attribute(value=owner, attr=how) if (
                how in _MOVES
            ):
                return self.is_false(owner)
            case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
                return self.is_false(left) or self.is_false(right)
            case ast.Subscript(value=owner):
                return self.is_false(owner)
        return False

    def is_empty(self, node: ast.expr) -> bool:
        """Whether it is a tensor without an element."""
        if ast.unparse(node) in self.empty:
            return True
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="nonzero")):
                return self.is_false(owner) or (ast.unparse(owner) == "torch" and self.is_false(node.args[0]))
            case ast.Subscript(value=ast.Call(func=called, args=[mask])) if ast.unparse(called) == "torch.where":
                return self.is_false(mask)
            case ast.Call(func=ast.Attribute(attr=made)) if made in _MAKERS:
                sizes = [one for given in node.args for one in getattr(given, "elts", [given])]
                return any(self.is_zero(one) for one in (sizes[:-1] if "full" in made else sizes))
            case ast.Call(func=ast.Attribute(value=owner, attr=how)) | ast.Attribute(value=owner, attr=how) if (
                how in _MOVES
            ):
                return self.is_empty(owner)
            case ast.BinOp(left=left, right=right):
                return self.is_empty(left) or self.is_empty(right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.is_empty(operand)
            case ast.Subscript(value=owner, slice=at):
                return self.is_empty(owner) or self.selects_nothing(at)
        return False

    def selects_nothing(self, at: ast.expr) -> bool:
        """Whether an index takes no element of whatever it is applied to."""
        parts = at.elts if isinstance(at, ast.Tuple) else [at]
        return any(
            self.is_false(one)
            or self.is_empty(one)
            or (isinstance(one, ast.Slice) and not one.lower and one.upper is not None and self.is_zero(one.upper))
            for one in parts
        )

    def is_zero(self, node: ast.expr) -> bool:
        """Whether it is the number 0."""
        node = substitute(node, self.values) if self.values else node
        if ast.unparse(node) in self.zero:
            return True
        match node:
            case ast.Constant(value=value):
                return type(value) in (int, float) and value == 0
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.is_zero(operand)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return self.is_zero(left) or self.is_zero(right)
            case ast.BinOp(left=left, op=ast.Sub(), right=right) if ast.dump(left) == ast.dump(right):
                return True
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                return self.is_zero(left) and self.is_zero(right)
            case ast.BinOp(left=left, op=ast.Mod() | ast.FloorDiv()):
                return self.is_zero(left)
            case ast.Call(func=ast.Attribute(value=owner, attr="sum"), args=[], keywords=[]):
                return self.is_empty(owner) or self.is_false(owner)
            case ast.Call(func=ast.Name(id="len"), args=[given]):
                return self.is_empty(given)
            case ast.Call(func=ast.Attribute(value=owner, attr="numel"), args=[]):
                return self.is_empty(owner)
        return False

    def is_same(self, name: str, value: ast.expr) -> bool:
        """Whether `value` is what the name holds already."""
        match value:
            case ast.Name(id=other):
                return other == name
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                turned = isinstance(value.op, ast.Add) and self.is_same(name, right) and self.is_zero(left)
                return turned or (self.is_same(name, left) and self.is_zero(right))
            case ast.Subscript(value=ast.Name(id=other)):
                return other == name and self._keeps_all(name, indices_of(value))
            case ast.Call(func=ast.Attribute(value=owner, attr=how), args=args):
                given = list(args)
            case _:
                return False
        if ast.unparse(owner) in ("torch", "F", "torch.nn.functional", "nn.functional"):
            if how == "where":
                return len(given) == 3 and self.is_false(given[0]) and self.is_same(name, given[2])
            if how == "cat":
                parts = getattr(given[0], "elts", []) if given else []
                others = [one for one in parts if not self.is_same(name, one)]
                return len(others) == len(parts) - 1 and all(self.is_empty(one) for one in others)
            if how == "pad":
                sizes = getattr(given[1], "elts", []) if len(given) > 1 else []
                return bool(sizes) and self.is_same(name, given[0]) and all(self.is_zero(one) for one in sizes)
            owner, given = (given[0], given[1:]) if given else (owner, given)
        return self.is_same(name, owner) and self.writes_nothing(how, given)

    def _keeps_all(self, name: str, parts: Sequence[ast.expr]) -> bool:
        """Whether slices of the tensor take all of it: `x[:, :k]` and `x[:, -k:]` where its size is at most k."""
        for axis, part in enumerate(parts):
            match part:
                case ast.Slice(lower=None, upper=None, step=None):
                    continue
                case ast.Slice(lower=None, upper=ast.expr() as most, step=None):
                    pass
                case ast.Slice(lower=ast.UnaryOp(op=ast.USub(), operand=most), upper=None, step=None):
                    pass
                case _:
                    return False
            if (name, axis, ast.unparse(most)) not in self.most:
                return False
        return True

    def writes_nothing(self, how: str, given: Sequence[ast.expr]) -> bool:
        """Whether a method that writes into a tensor, with these arguments, writes nothing."""
        if how in ("masked_fill", "masked_scatter"):
            return bool(given) and self.is_false(given[0])
        if how == "index_put":
            return bool(given) and isinstance(given[0], ast.Tuple) and self.selects_nothing(given[0])
        return how in _WRITERS and len(given) > 1 and self.is_empty(given[1])

    # ---- statements

    def changes_nothing(self, scope: Scope, block: Sequence[ast.stmt], live: set[str]) -> bool:
        """Whether `block` leaves everything as it was, but for names that are not `live`."""
        return self._after(scope, block, live) is not None

    def _after(self, scope: Scope, block: Sequence[ast.stmt], live: set[str]) -> Nothing | None:
        """What is nothing after the statements; None where they may change something."""
        known = self
        for statement in block:
            if writes_by_call(scope, statement):
                return None
            after = known._after_one(scope, statement, live)
            if after is None:
                return None
            known = after
        return known

    def _after_one(self, scope: Scope, statement: ast.stmt, live: set[str]) -> Nothing | None:
        match statement:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                return self
            case ast.Assign(targets=[ast.Subscript(slice=at)]) | ast.AugAssign(target=ast.Subscript(slice=at)):
                return self if self.selects_nothing(at) else None
            case ast.AugAssign(op=ast.Add() | ast.Sub(), target=ast.Name(), value=value):
                return self if self.is_zero(value) else None
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if self.is_same(name, value):
                    return self
                return None if name in live else self._name(name, value)
            case ast.Assign(targets=[ast.Tuple() as target]):
                names = stored_names(target)
                plain = all(isinstance(one, ast.Name) for one in target.elts)
                return self.forget(names) if plain and not live & {*names} else None
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=how), args=given)) if how.endswith("_"):
                return self if self.writes_nothing(how.removesuffix("_"), given) else None
            case ast.If(body=body, orelse=orelse):
                ways = [self._after(scope, way, live) for way in (body, orelse)]
                return None if None in ways else self.forget(stored_names(statement))
            case ast.For(target=ast.Name(id=name), body=body, orelse=[]) if name not in live:
                inside = self.forget(stored_names(statement))
                return inside if inside.changes_nothing(scope, body, live | {*_read_first(body)}) else None
        return None

    def _name(self, name: str, value: ast.expr) -> Nothing:
        """With a name for `value`."""
        kinds = {"false": self.is_false(value), "empty": self.is_empty(value), "zero": self.is_zero(value)}
        known = self.forget([name])
        return replace(known, **{kind: getattr(known, kind) | {name} for kind, holds in kinds.items() if holds})


def nothing_where(scope: Scope, test: ast.expr, holds: bool) -> Nothing:
    """What is nothing where `test` is true, or with `holds` False where it is false."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return nothing_where(scope, operand, not holds)
        case ast.BoolOp(op=op, values=values) if isinstance(op, ast.And) is holds:
            found = Nothing()
            for one in values:
                found = found.join(nothing_where(scope, one, holds))
            return found
        case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=int(to))]):
            equal = isinstance(op, ast.Eq) and to == 0
            below = (isinstance(op, ast.Lt) and to == 1) or (isinstance(op, ast.LtE) and to == 0)
            other = isinstance(op, ast.NotEq) and to == 0
            above = (isinstance(op, ast.Gt) and to == 0) or (isinstance(op, ast.GtE) and to == 1)
            if (equal or below) if holds else (other or above):
                return _count_nothing(scope, left, negative=below or above)
            if not holds and isinstance(op, ast.Gt | ast.GtE):
                return _bound_size(scope, left, test.comparators[0])
            return Nothing()
        case ast.Compare(left=left, ops=[ast.Gt() | ast.GtE()], comparators=[bound]) if not holds:
            return _bound_size(scope, left, bound)
        case ast.Compare(left=bound, ops=[ast.Lt() | ast.LtE()], comparators=[size]) if not holds:
            return _bound_size(scope, size, bound)
    return Nothing() if holds else _count_nothing(scope, test, negative=False)


def _count_nothing(scope: Scope, node: ast.expr, *, negative: bool) -> Nothing:
    """What is nothing where `node` is 0; `negative`: or below, so that it has to be a number that never is."""
    match node:
        case (
            ast.Call(func=ast.Attribute(value=inner, attr="item"), args=[])
            | ast.Call(func=ast.Name(id="int" | "bool"), args=[inner])
        ):
            return _count_nothing(scope, inner, negative=negative)
        case ast.Call(func=ast.Attribute(value=mask, attr="any" | "sum" | "count_nonzero"), args=[], keywords=[]):
            return Nothing(false=frozenset([ast.unparse(mask)])) if mask_rank(scope, mask) is not None else Nothing()
        case (
            ast.Call(func=ast.Name(id="len"), args=[rows])
            | ast.Call(func=ast.Attribute(value=rows, attr="numel" | "nelement"), args=[])
            | ast.Call(func=ast.Attribute(value=rows, attr="size"), args=[ast.Constant()])
            | ast.Subscript(value=ast.Attribute(value=rows, attr="shape"), slice=ast.Constant())
        ):
            held = frozenset([ast.unparse(rows)]) if tensor_of(rows, scope) is not None else frozenset()
            return Nothing(empty=held, zero=frozenset([ast.unparse(node)]))
        case ast.BinOp(left=left, op=ast.Mod(), right=unit) if scope.depends_on(node) == "size":
            turned = ast.BinOp(left=ast.UnaryOp(op=ast.USub(), operand=left), op=ast.Mod(), right=unit)
            return Nothing(zero=frozenset(map(ast.unparse, (node, turned))))
    if isinstance(node, ast.Name) and is_remainder(scope, node.id):
        return Nothing(zero=frozenset([node.id]))
    if negative or scope.depends_on(node) not in ("size", "static"):
        return Nothing()
    return Nothing(zero=frozenset([ast.unparse(node)])) if isinstance(node, ast.Name | ast.BinOp) else Nothing()


def is_remainder(scope: Scope, name: str) -> bool:
    """Whether the name holds a remainder, which is never below 0."""
    given = [value for target, value in assignments(scope.function) if target == name]
    return bool(given) and all(isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod) for one in given)


def _bound_size(scope: Scope, size: ast.expr, bound: ast.expr) -> Nothing:
    """That `size`, of a dimension of a tensor, is at most `bound`."""
    if isinstance(size, ast.Name):
        given = [value for name, value in assignments(scope.function) if name == size.id]
        size = given[0] if len(given) == 1 else size
        name = next((one for one in loaded_names(size)), "")
        if len([one for one, _ in assignments(scope.function) if one == name]) > 1:
            return Nothing()  # it may have had another size
    match size:
        case (
            ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=ast.Constant(value=int(at)))
            | ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="size"), args=[ast.Constant(value=int(at))])
        ) if at >= 0 and scope.depends_on(bound) == "static":
            return Nothing(most=frozenset([(name, at, ast.unparse(bound))]))
    return Nothing()


def read_beyond(spot: Spot, *, rest: bool = True) -> set[str]:
    """Names that are read after the statement at `spot`, with `rest` in its own block too, before they are given a
    value again."""
    names = {*_read_first(spot.rest)} if rest else set()
    for outer in spot.outer:
        names |= {*_read_first(outer.rest)}
        match outer.statement:
            case ast.For(body=body):
                names |= {*_read_first(body)}
            case ast.While(test=test, body=body):
                names |= {*loaded_names(test), *_read_first(body)}
    return names


def _read_first(block: Sequence[ast.stmt]) -> list[str]:
    """Names that are read in `block` before it gives them a value."""
    given: set[str] = set()
    names: list[str] = []
    for statement in block:
        names += [name for name in loaded_names(statement) if name not in given]
        if named_value(statement) is not None or isinstance(statement, ast.Assign):
            given |= {*stored_names(statement)}
    return names
