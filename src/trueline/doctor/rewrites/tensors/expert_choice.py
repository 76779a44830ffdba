"""A part of a ModuleList that a value selects, `self.adapters[int(task)](x)`: all parts are run, and one is chosen.

Condition: the outputs of all parts have one form, and no part raises. The work grows with the number of parts.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

import torch

from trueline.doctor.rewrites.predicate import without_numbers
from trueline.doctor.rewrites.scope import Candidate, Compound, Scope, Spot, arguments_text, expression, value_of


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The simple statement at `spot` with every part run."""
    if isinstance(spot.statement, Compound | ast.FunctionDef):
        return
    choice = _Choice(scope)
    new = choice.visit(copy.deepcopy(spot.statement))
    if choice.words:
        words = f"a value selects `{choice.words[0]}`: all parts are run, and one is chosen"
        yield scope.candidate([spot.statement], [new], words)


class _Choice(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.words: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        selected = node.func
        if not isinstance(selected, ast.Subscript) or self.scope.depends_on(selected.slice) not in ("number", "tensor"):
            return node
        if not isinstance(value_of(selected.value, self.scope.seen), torch.nn.ModuleList):
            return node
        self.words.append(ast.unparse(selected))
        part, parts = self.scope.fresh("part"), ast.unparse(selected.value)
        answers = f"torch.stack([{part}({arguments_text(node)}) for {part} in {parts}], -1)"
        at = ast.unparse(without_numbers(selected.slice, self.scope))
        # Negative indices count from the end, as in a list; all other outputs add 0 to the chosen one.
        chosen = f"torch.arange(len({parts})) == torch.as_tensor({at}) % len({parts})"
        return expression(f"torch.where({chosen}, {answers}, 0).sum(-1)")
