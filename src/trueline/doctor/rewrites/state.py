"""A state that no answer depends on: kept in training only. One that answers depend on is for `attributes`.

Condition: the answers in evaluation do not change.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.attributes import written_attribute
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, expression


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
    return written_attribute(statement) is not None
