"""A tensor that is split into pieces of one length, the last of which may be shorter: parts between moving bounds.

    for c in x.split(3, 1):                     for at in range(0, x.shape[1], 3):
        out.append(c.mean(1))         ──▶           out.append(x[:, at : at + 3].mean(1))

How many pieces there are a size decides, and the last is of another form than the others. `parts` goes on from there.
Condition: none.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, expression


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The loop or the comprehension at `spot` over bounds."""
    pieces = _Pieces(scope)
    new = pieces.visit(copy.deepcopy(spot.statement))
    text = scope.replace([spot.statement], [new]) if pieces.words else None
    if text:
        yield Candidate(text=text, words=f"the pieces of `{pieces.words[0]}` lie between moving bounds")


class _Pieces(ast.NodeTransformer):
    """`for c in x.split(3, 1): f(c)` as `for at in range(0, x.shape[1], 3): f(x[:, at : at + 3])`."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.words: list[str] = []

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        found = self._piece(node.target, node.iter)
        if found is not None:
            node.target, node.iter, put = found
            node.body = [put.visit(one) for one in node.body]
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        self.generic_visit(node)
        rows = node.generators[0]
        found = self._piece(rows.target, rows.iter) if len(node.generators) == 1 else None
        if found is not None:
            rows.target, rows.iter, put = found
            node.elt = put.visit(node.elt)
            rows.ifs = [put.visit(one) for one in rows.ifs]
        return node

    def _piece(self, target: ast.expr, source: ast.expr) -> tuple[ast.expr, ast.expr, ast.NodeTransformer] | None:
        if not (isinstance(target, ast.Name) and isinstance(source, ast.Call)):
            return None
        called, given = source.func, list(source.args)
        if not isinstance(called, ast.Attribute) or called.attr != "split":
            return None
        owner = given.pop(0) if ast.unparse(called.value) == "torch" and given else called.value
        given += [one.value for one in source.keywords]
        match given:
            case [ast.Constant(value=int(size))]:
                axis = 0
            case [ast.Constant(value=int(size)), ast.Constant(value=int(axis))]:
                pass
            case _:
                return None
        if not isinstance(owner, ast.Name) or not self.scope.is_tensor(owner):
            return None
        self.words.append(ast.unparse(source))
        name, at, piece = target.id, self.scope.fresh("at"), f"{owner.id}[{':, ' * axis}"

        class Put(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.AST:
                return expression(f"{piece}{at}:{at} + {size}]") if node.id == name else node

        return ast.Name(id=at, ctx=ast.Store()), expression(f"range(0, {owner.id}.shape[{axis}], {size})"), Put()
