"""A tensor split into pieces of one length, of which the last may be shorter, as parts between moving bounds.

    for c in x.split(3, 1):                     for at in range(0, x.shape[1], 3):
        out.append(c.mean(1))         ──▶           out.append(x[:, at : at + 3].mean(1))

A size decides how many pieces there are, and the last differs in shape. `masked_reduce` continues from there.
Condition: none.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, expression, put


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The loop or the comprehension at `spot` over bounds."""
    pieces = _Pieces(scope)
    new = pieces.visit(copy.deepcopy(spot.statement))
    if pieces.words:
        yield scope.candidate([spot.statement], [new], f"the pieces of `{pieces.words[0]}` lie between moving bounds")


class _Pieces(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.words: list[str] = []

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        piece = self._piece(node.target, node.iter)
        if piece is not None:
            node.target, node.iter, values = piece
            node.body = [put(one, values) for one in node.body]
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        self.generic_visit(node)
        rows = node.generators[0]
        piece = self._piece(rows.target, rows.iter) if len(node.generators) == 1 else None
        if piece is not None:
            rows.target, rows.iter, values = piece
            node.elt = put(node.elt, values)
            rows.ifs = [put(one, values) for one in rows.ifs]
        return node

    def _piece(self, target: ast.expr, source: ast.expr) -> tuple[ast.expr, ast.expr, dict[str, ast.expr]] | None:
        """The new target and source of the loop, and what replaces the piece's name."""
        match target, source:
            case ast.Name(id=name), ast.Call(func=ast.Attribute(value=owner, attr="split"), args=args):
                given = [*args, *(one.value for one in source.keywords)]
            case _:
                return None
        owner = given.pop(0) if ast.unparse(owner) == "torch" and args else owner
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
        at = self.scope.fresh("at")
        piece = expression(f"{owner.id}[{':, ' * axis}{at}:{at} + {size}]")
        bounds = expression(f"range(0, {owner.id}.shape[{axis}], {size})")
        return ast.Name(id=at, ctx=ast.Store()), bounds, {name: piece}
