"""A part of a ModuleList that a value names, `self.adapters[int(task)](x)`: all are asked, and the one is taken.

Condition: all parts answer in one form, and one that is not named raises nothing. The work grows with their number.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

import torch

from trueline.doctor.rewrites.control.predicate import without_numbers
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, expression, value_of


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The simple statement at `spot` with every part asked."""
    if isinstance(spot.statement, ast.For | ast.While | ast.If | ast.With | ast.Try | ast.FunctionDef):
        return
    asked = _Asked(scope)
    new = asked.visit(copy.deepcopy(spot.statement))
    text = scope.replace([spot.statement], [new]) if asked.words else None
    if text:
        words = f"`{asked.words[0]}` is named by a value: all parts are asked, and the one is taken"
        yield Candidate(text=text, words=words)


class _Asked(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.words: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        named = node.func
        if not isinstance(named, ast.Subscript) or self.scope.worth(named.slice) not in ("number", "tensor"):
            return node
        if not isinstance(value_of(named.value, self.scope.seen), torch.nn.ModuleList):
            return node
        self.words.append(ast.unparse(named))
        part = self.scope.fresh("part")
        given = ", ".join(ast.unparse(one) for one in (*node.args, *node.keywords))
        parts = ast.unparse(named.value)
        answers = f"torch.stack([{part}({given}) for {part} in {parts}], -1)"
        at = ast.unparse(without_numbers(named.slice, self.scope))
        # a list counts from its end too; what is added to the one answer is nought
        taken = f"torch.arange(len({parts})) == torch.as_tensor({at}) % len({parts})"
        return expression(f"torch.where({taken}, {answers}, 0).sum(-1)")
