"""A state that no answer depends on: kept in training only.

Condition: the answers in evaluation do not change. A state that answers depend on is not for an edit: it has
to become an input and an output of the model, which only the author can decide.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, expression

_WRITERS = ("append", "extend", "update", "pop", "clear", "insert", "setdefault")


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The write under `if self.training:`."""
    if not writes_state(spot.statement):
        return
    guarded = ast.If(test=expression("self.training"), body=[copy.deepcopy(spot.statement)], orelse=[])
    text = scope.replaced([spot.statement], [guarded])
    if text:
        yield Candidate(text=text, words=f"`{ast.unparse(spot.statement)}` is for training only")


def writes_state(statement: ast.stmt) -> bool:
    """Whether a simple statement writes into `self`: an attribute, an element of one, or in place."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AugAssign):
        targets = [statement.target]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        in_place = isinstance(function, ast.Attribute) and (
            function.attr in _WRITERS or (function.attr.endswith("_") and not function.attr.endswith("__"))
        )
        targets = [function.value] if isinstance(function, ast.Attribute) and in_place else []
    flat = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return any(_of_self(target) for target in flat)


def _of_self(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return True
        node = node.value
    return False
