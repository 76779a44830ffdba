"""Reductions of what a mask selects, and of what lies between two moving bounds, as reductions of the whole tensor.

    rows = h[seg == s]                                  rows_here = seg == s
    if len(rows): out.append(rows.mean(0))      ──▶     if rows_here.sum(): out.append(torch.where(rows_here[:, None],
                                                            h, 0).sum(0) / ...)
    out.append(x[:, s : s + 3].mean(1))         ──▶     the same with (at >= s) & (at < s + 3), of the indices `at`

Values or a counter decide how much is selected; the whole tensor keeps its size in each step. Condition: of the
selection only its size and reductions over it are used. The proof notices an index that counts from the end.
"""

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from trueline.doctor.rewrites.predicate import without_numbers
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    blocks,
    element_value,
    expression,
    loaded_names,
    statements,
    stored_names,
    tensor_of,
)
from trueline.doctor.rewrites.tensors.masked_part import REDUCTIONS, MaskedPart, part_of


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The function with each named part as a mask, one name at a time; then the statement at `spot`, or the loop, with
    the parts that it reduces at once."""
    scope = replace(scope, seen={**_counters(scope), **scope.seen})
    for block in _blocks(scope.function.body):
        for index, statement in enumerate(block):
            text = _without_part(scope, block, index)
            if text:
                words = f"`{ast.unparse(statement)}`: its size and reductions are taken of the whole, with a mask"
                yield Candidate(text=text, words=words)
    reduced: list[str] = []
    new = _mask_block(scope, [spot.statement], reduced)
    if reduced:
        yield scope.candidate([spot.statement], new, f"`{reduced[0]}` is of the whole, with a mask")


def _counters(scope: Scope) -> dict[str, Any]:
    """Names in comprehensions that count steps or run over numbers or rows: a trace of the call does not show their
    values."""
    counters: dict[str, Any] = {}
    for node in ast.walk(scope.function):
        if not isinstance(node, ast.comprehension):
            continue
        match node.target, node.iter:
            case ast.Name(id=name), ast.Call(func=ast.Name(id="range") | ast.Attribute(attr="tolist")):
                counters[name] = 0
            case ast.Tuple(elts=[ast.Name(id=name), inner]), ast.Call(func=ast.Name(id="enumerate"), args=[given]):
                counters[name] = 0
                if isinstance(inner, ast.Name) and ast.unparse(given).endswith(".tolist()"):
                    counters[inner.id] = 0
            case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=sources):
                pairs = [(one, of) for one, of in zip(targets, sources, strict=False) if isinstance(one, ast.Name)]
                counters |= {one.id: 0 for one, of in pairs if ast.unparse(of).endswith(".tolist()")}
                rows = [(one.id, tensor_of(of, scope)) for one, of in pairs]
                counters |= {name: held[0] for name, held in rows if held is not None and held.ndim and len(held)}
    return counters


def _mask_block(scope: Scope, block: list[ast.stmt], words: list[str]) -> list[ast.stmt]:
    """The statements with the parts that they reduce at once as named masks; `words` gets their sources."""
    masked: list[ast.stmt] = []
    for statement in block:
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.Return | ast.Expr):
            reducer = _Reducer(scope, {})
            new = reducer.mask_store(statement) or reducer.visit(copy.deepcopy(statement))
            words += reducer.words
            masked += [*reducer.before, new]
            continue
        new = copy.deepcopy(statement)
        for name in ("body", "orelse") if isinstance(new, ast.For | ast.If) else ():
            setattr(new, name, _mask_block(scope, getattr(statement, name), words))
        masked.append(new)
    return masked


def _blocks(block: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    yield block
    for statement in block:
        for inner in blocks(statement):
            yield from _blocks(inner)


def _without_part(scope: Scope, block: list[ast.stmt], index: int) -> str | None:
    """The file without the part that the statement names; None where it has uses that a mask cannot express."""
    match block[index]:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() as value):
            part = part_of(scope, value)
        case _:
            return None
    if part is None or _count(scope.function, name, ast.Store) != 1:
        return None
    here = scope.fresh(f"{name}_here")
    given = [without_numbers(statements(f"{here} = {part.mask}")[0], scope)]
    after = [one for one in block[index + 1 :] if name in loaded_names(one)]
    reducer = _Reducer(scope, {name: part.under(here)})
    new = [reducer.visit(copy.deepcopy(one)) for one in after]
    everywhere = sum(_count(one, name, ast.Load) for one in scope.function.body)
    reads = sum(_count(one, name, ast.Load) for one in after)
    if not after or any(_count(one, name, ast.Load) for one in new) or everywhere != reads:
        return None
    text: str | None = scope.text
    for old, one in reversed([*zip([block[index], *after], [given, *([one] for one in new)], strict=True)]):
        text = replace(scope, text=text).replace([old], one) if text is not None else None
    return text


def _count(node: ast.AST, name: str, context: type[ast.expr_context]) -> int:
    """How often `node` reads or stores the name."""
    names = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name) and inner.id == name)
    return sum(isinstance(inner.ctx, context) for inner in names)


class _Reducer(ast.NodeTransformer):
    """Replaces reductions and sizes of parts, those in `named` or all that are written out, by those of the whole."""

    def __init__(self, scope: Scope, named: dict[str, MaskedPart]) -> None:
        self.scope, self.named = scope, named
        self.words: list[str] = []
        self.before: list[ast.stmt] = []
        """Statements that name the masks."""
        self._listed: set[str] = set()

    def mask_store(self, statement: ast.stmt) -> ast.stmt | None:
        """`y[i, n:] = v` as `y[i] = torch.where(here, v, y[i])`, where the bounds move."""
        written = element_value(statement)
        part = part_of(self.scope, written[0]) if written is not None else None
        if written is None or part is None or len(part.narrowed) != 1 or len(part.chosen) != part.rank:
            return None
        value = _Whole(self.scope, part.mask, part.base).visit(copy.deepcopy(written[1]))
        part = self._name_mask(part)
        self.words.append(ast.unparse(written[0]))
        whole = f"{part.base} = torch.where({part.where}, {ast.unparse(value)}, {part.base})"
        return without_numbers(statements(whole)[0], self.scope)  # type: ignore[no-any-return]

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> ast.AST:
        self._listed |= {name for one in node.generators for name in stored_names(one.target)}
        return self.generic_visit(node)

    visit_GeneratorExp = visit_ListComp

    def _part(self, node: ast.expr) -> MaskedPart | None:
        if isinstance(node, ast.Name):
            return self.named.get(node.id)
        return None if self.named else part_of(self.scope, node)

    def _name_mask(self, part: MaskedPart) -> MaskedPart:
        """The part with a name for its mask, where the mask can be named before the statement."""
        if self.named or self._listed & set(loaded_names(expression(part.mask))):
            return part
        here = self.scope.fresh(f"here_{len(self.before)}" if self.before else "here")
        self.before.append(without_numbers(statements(f"{here} = {part.mask}")[0], self.scope))
        return part.under(here)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`rows.max(0).values`."""
        extreme = node.value if node.attr == "values" and _is_extreme(node.value) else None
        return (extreme and self._reduction(extreme, node)) or self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """`rows.shape[0]`, and `rows.max(0)[0]`."""
        match node:
            case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(value=0)) if _is_extreme(call):
                return self._reduction(call, node) or self.generic_visit(node)
            case ast.Subscript(
                value=ast.Attribute(value=ast.Name() as name, attr="shape"), slice=ast.Constant(value=int(dim))
            ):
                part = self._part(name)
                if part is not None:
                    return expression(part.size(dim))
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
        if _is_extreme(node) and _dims(node, _owner_and_arguments(node)[1]) is not None:
            return self.generic_visit(node)  # a pair: only its values are known of the whole
        return self._reduction(node, node) or self.generic_visit(node)

    def _reduction(self, node: ast.expr, shown: ast.expr) -> ast.expr | None:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REDUCTIONS):
            return None
        owner, given = _owner_and_arguments(node)
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
        return without_numbers(expression(text), self.scope)  # type: ignore[no-any-return]


class _Whole(ast.NodeTransformer):
    """Replaces parts between the same bounds, of a dimension of the same size, by the whole."""

    def __init__(self, scope: Scope, mask: str, base: str) -> None:
        self.scope, self.mask, self.base = scope, mask, base

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        part = part_of(self.scope, node)
        if part is not None and part.mask.replace(part.base, self.base) == self.mask:
            return expression(part.base)
        return self.generic_visit(node)


def _owner_and_arguments(node: ast.Call) -> tuple[ast.expr, list[ast.expr]]:
    """Of `x.sum(0)` and `torch.sum(x, 0)`: `x`, and `0`."""
    assert isinstance(node.func, ast.Attribute)
    of_torch = ast.unparse(node.func.value) == "torch" and bool(node.args)
    return (node.args[0], node.args[1:]) if of_torch else (node.func.value, node.args)


def _dims(node: ast.Call, given: Sequence[ast.expr]) -> tuple[int, ...] | None:
    """The dimensions that a reduction is over; None for all."""
    named = [*given, *(one.value for one in node.keywords if one.arg in ("dim", "axis"))]
    try:
        dims = ast.literal_eval(named[0]) if named else None
    except ValueError:
        return (1 << 20,)  # no dimension that is known
    return (dims,) if isinstance(dims, int) else tuple(dims) if dims is not None else None


def _is_extreme(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("max", "min")
