"""Expressions that mean a plainer one, which other rewrites then handle.

    [f(t) for t in range(n) if t % 2 == 0]          [f(t) for t in range(0, n, 2)]
    sum(f(t) for t in … if c)                       sum(torch.where(c, f(t), 0) for t in …)
    x.tensor_split(3, 1), x.chunk(3, 1)             slices of x
    {True: a, False: b}[c]                          a if c else b
    pad_sequence([x[i, :n] for i, n in …])          x under a mask of the lengths

A padded sequence is as long as x then: proven only where no answer depends on the padding.
"""

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.predicate import predicate
from trueline.doctor.rewrites.scope import (
    Candidate,
    Compound,
    Scope,
    Spot,
    expression,
    first_line,
    loaded_names,
    substitute,
    tensor_of_list,
)


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The simple statement at `spot` in plainer forms."""
    statement = spot.statement
    if isinstance(statement, Compound | ast.FunctionDef | ast.Match):
        return
    words = f"`{first_line(statement)}` in a plainer form"
    plain = _Plain(scope)
    new = plain.visit(copy.deepcopy(statement))
    yield scope.candidate([statement], [new], words) if plain.changed else None
    yield _mask_padding(scope, spot)


class _Plain(ast.NodeTransformer):
    """Filters of comprehensions, pieces of a tensor, and dicts of two values."""

    def __init__(self, scope: Scope) -> None:
        self.scope, self.changed = scope, False

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        self.generic_visit(node)
        match node.generators:
            case [
                ast.comprehension(
                    target=ast.Name(id=t), iter=ast.Call(func=ast.Name(id="range"), args=[n]), ifs=[test]
                ) as rows
            ]:
                stride = _stride(test, t)
                if stride is not None:
                    self.changed = True
                    rows.iter, rows.ifs = expression(f"range({stride[1]}, {ast.unparse(n)}, {stride[0]})"), []
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Name(id="sum"), args=[ast.ListComp() | ast.GeneratorExp() as listing, *starts], keywords=[]
            ) if len(listing.generators) == 1 and (listing.generators[0].ifs or starts):
                for test in listing.generators[0].ifs:
                    chosen = f"torch.where({ast.unparse(predicate(test, self.scope))}, {ast.unparse(listing.elt)}, 0)"
                    listing.elt = expression(chosen)
                listing.generators[0].ifs, self.changed = [], True
                return expression(" + ".join([f"sum({ast.unparse(listing)})", *map(ast.unparse, starts)]))
            case ast.Call(func=ast.Attribute(value=owner, attr="tensor_split" | "chunk" as how), args=[count, *axes]):
                if not isinstance(count, ast.Constant) or not self.scope.is_tensor(owner):
                    return node
                self.changed = True
                x, k, axis = ast.unparse(owner), int(count.value), ast.unparse(axes[0]) if axes else "0"  # type: ignore[arg-type]
                n, at = f"{x}.shape[{axis}]", self.scope.fresh("at")
                start, length = (
                    f"{at} * ({n} // {k}) + torch.sym_min({at}, {n} % {k})",
                    f"({n} + {k - 1} - {at}) // {k}",
                )
                if how == "chunk":
                    part = f"(({n} + {k - 1}) // {k})"
                    start, length = f"{at} * {part}", f"torch.sym_min({part}, {n} - {at} * {part})"
                return expression(f"[{x}.narrow({axis}, {start}, {length}) for {at} in range({k})]")
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        match node.value:
            case ast.Dict(keys=[ast.Constant(value=bool(first)), ast.Constant(value=bool())], values=[one, two]):
                self.changed = True
                yes, no = (one, two) if first else (two, one)
                return ast.IfExp(test=node.slice, body=yes, orelse=no)
        return node


def _stride(test: ast.expr, t: str) -> tuple[int, int] | None:
    """Stride and start of the numbers `t` with `t % k == r`, or `not t % k`."""
    match test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=int(start))]):
            pass
        case ast.UnaryOp(op=ast.Not(), operand=left):
            start = 0
        case _:
            return None
    match left:
        case ast.BinOp(left=ast.Name(id=name), op=ast.Mod(), right=ast.Constant(value=int(stride))) if name == t:
            return (stride, start) if 0 <= start < stride else None
    return None


def _mask_padding(scope: Scope, spot: Spot) -> Candidate | None:
    """`rows = [f(x[i, :n]) for i, n in enumerate(lengths.tolist())]`, then `pad_sequence(rows, batch_first=True)`."""
    named = {
        one.targets[0].id: one.value
        for one in spot.block
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
    }
    for at, statement in enumerate(spot.block[spot.index :], spot.index):
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("pad_sequence"):
                continue
            options = {one.arg: ast.unparse(one.value) for one in node.keywords}
            listing = substitute(node.args[0], named)
            whole = _whole_rows(scope, listing, options.get("padding_value", "0"))
            if whole is None or options.get("batch_first") != "True":
                return None
            old = ast.unparse(node)
            first = spot.index if isinstance(node.args[0], ast.Name) and at > spot.index else at
            kept = [
                copy.deepcopy(one) for one in spot.block[first:at] if ast.unparse(node.args[0]) not in _targets(one)
            ]
            words = f"`{old}` is the whole under a mask of the lengths"
            return scope.candidate(
                spot.block[first : at + 1], [*kept, _Whole(old, whole).visit(copy.deepcopy(statement))], words
            )
    return None


class _Whole(ast.NodeTransformer):
    def __init__(self, old: str, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self.new if ast.unparse(node) == self.old else self.generic_visit(node)


def _targets(statement: ast.stmt) -> list[str]:
    return [ast.unparse(one) for one in statement.targets] if isinstance(statement, ast.Assign) else []


def _whole_rows(scope: Scope, listing: ast.expr, padding: str) -> ast.expr | None:
    """`[f(x[i, :n]) for i, n in enumerate(lengths.tolist())]`, padded: `f(x)` where a position is below its length."""
    match listing:
        case ast.ListComp(
            elt=element,
            generators=[
                ast.comprehension(target=ast.Tuple(elts=[ast.Name(id=i), ast.Name(id=n)]), iter=source, ifs=[])
            ],
        ):
            pass
        case _:
            return None
    match source:
        case ast.Call(func=ast.Name(id="enumerate"), args=[counted]):
            lengths, rows = ast.unparse(tensor_of_list(counted)), ""
        case ast.Call(func=ast.Name(id="zip"), args=[whole, counted]):
            lengths, rows = ast.unparse(tensor_of_list(counted)), ast.unparse(whole)
        case _:
            return None
    parts: list[str] = []

    class Rows(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            owner, at = ast.unparse(node.value), ast.unparse(node.slice)
            ends = (f":{n}", f":int({n})")
            if (owner == i and at in ends) or at in [f"({i}, {end})" for end in ends] + [f"{i}, {end}" for end in ends]:
                parts.append(rows or owner)
                return expression(parts[-1])
            return self.generic_visit(node)

    new = Rows().visit(copy.deepcopy(element))
    if len(parts) != 1 or {i, n} & set(loaded_names(new)):
        return None
    rank = scope.rank(expression(parts[0]))
    wide = f"[..., {', '.join(['None'] * (rank - 2))}]" if rank is not None and rank > 2 else ""
    mask = f"(torch.arange({parts[0]}.shape[1]) < {lengths}[:, None]){wide}"
    return expression(f"torch.where({mask}, {ast.unparse(new)}, {padding})")
