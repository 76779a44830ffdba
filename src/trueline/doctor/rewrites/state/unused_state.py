"""A state that no answer depends on: kept in training only. One that answers depend on is for `attributes`.

Condition: the answers in evaluation do not change, and nothing reads it but what keeps it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, expression
from trueline.doctor.rewrites.state.attributes import class_of, written_attribute


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The write under `if self.training:`."""
    name = written_attribute(spot.statement)
    if name is None or _is_read(scope, name):
        return
    guarded = ast.If(test=expression("self.training"), body=[copy.deepcopy(spot.statement)], orelse=[])
    text = scope.replace([spot.statement], [guarded])
    if text:
        yield Candidate(text=text, words=f"`{ast.unparse(spot.statement)}` is for training only")


def _is_read(scope: Scope, name: str) -> bool:
    """Whether the class reads the attribute beside what it keeps, not in training alone: an answer may depend on it
    later than the proof has asked."""
    owner = class_of(scope)
    waiting: list[ast.AST] = [one for one in owner.body if not _is_init(one)] if owner is not None else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt) and written_attribute(node) is not None:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "self.training":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{name}":
            return True
        waiting += ast.iter_child_nodes(node)
    return False


def _is_init(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def writes_state(statement: ast.stmt) -> bool:
    """Whether a simple statement writes into `self`: an attribute, an element of one, or in place."""
    return written_attribute(statement) is not None
