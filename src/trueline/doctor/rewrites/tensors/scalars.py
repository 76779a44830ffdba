"""Arithmetic with numbers taken out of tensors: `.item()` goes, the number stays a tensor of no dimension."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from trueline.doctor.rewrites.control.predicate import without_numbers
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The statement without `.item()`; then every statement of the function without it."""
    if not isinstance(spot.statement, ast.For | ast.While | ast.If | ast.With | ast.Try):
        new = without_numbers_in(spot.statement, scope)
        if ast.unparse(new) != ast.unparse(spot.statement):
            text = scope.replace([spot.statement], [new])
            if text:
                yield Candidate(text=text, words=f"`{ast.unparse(spot.statement)}` stays a tensor")
    for statement in ast.walk(scope.function):
        if isinstance(statement, ast.Assign | ast.AugAssign) and statement is not spot.statement:
            new = without_numbers_in(statement, scope)
            if ast.unparse(new) != ast.unparse(statement):
                text = scope.replace([statement], [new])
                if text:
                    yield Candidate(text=text, words=f"`{ast.unparse(statement)}` stays a tensor")


def without_numbers_in(statement: ast.stmt, scope: Scope) -> ast.stmt:
    """A copy of a simple statement in which numbers stay in their tensors."""
    new: ast.stmt = without_numbers(statement, scope)  # type: ignore[arg-type, assignment]
    return new
