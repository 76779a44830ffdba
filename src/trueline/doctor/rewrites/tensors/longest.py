"""A length that values choose, `int(lengths.max())`, becomes the size that bounds it.

    x = x[:, : int(lengths.max())]         ──▶      x = x[:, : x.shape[1]]
    steps = torch.arange(lengths.max())    ──▶      steps = torch.arange(x.shape[1])

Condition: no answer depends on what lies beyond. The calls compare that, and one of them has to have a length below
the size: such a call raises in the candidate's `witness`.
"""

import ast
import copy
from collections.abc import Iterator

import torch

from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, expression, indices_of

MOST = 4
"""Sizes that are tried for one number."""


def bound_by_sizes(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The statement at `spot` with the size; then each assignment of the function."""
    others = [one for one in ast.walk(scope.function) if isinstance(one, ast.Assign)]
    for statement in dict.fromkeys((spot.statement, *others)):
        if isinstance(statement, ast.Assign | ast.Return | ast.Expr):
            for length in _lengths(scope, statement):
                yield from _edits(scope, statement, length)


def _edits(scope: Scope, statement: ast.stmt, length: ast.expr) -> Iterator[Candidate]:
    number = ast.unparse(length)
    for size in _sizes(scope, statement, number):
        shorter = f"{number} if {number} >= {size} else 1 // 0"
        text, witness = (
            scope.replace([statement], [_Edit(number, expression(new)).visit(copy.deepcopy(statement))])
            for new in (size, shorter)
        )
        if text and witness:
            words = f"`{number}` is at most `{size}`, and no answer depends on what lies beyond"
            yield Candidate(text=text, words=words, witness=witness)


class _Edit(ast.NodeTransformer):
    def __init__(self, number: str, new: ast.expr) -> None:
        self.number, self.new = number, new

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self.new if ast.unparse(node) == self.number else self.generic_visit(node)


def _lengths(scope: Scope, statement: ast.stmt) -> Iterator[ast.expr]:
    """Whole numbers that are taken out of tensors, the outermost first."""
    texts: list[str] = []
    for node in ast.walk(statement):
        match node:
            case ast.Call(func=ast.Name(id="int")) | ast.Call(func=ast.Attribute(attr="item"), args=[]):
                text = ast.unparse(node)
                if scope.depends_on(node) == "number" and not any(text in one for one in texts):
                    texts.append(text)
                    yield node


def _sizes(scope: Scope, statement: ast.stmt, number: str) -> list[str]:
    """The size of what is cut off there; else sizes of the function's arguments."""
    for node in ast.walk(statement):
        for axis, part in enumerate(indices_of(node) if isinstance(node, ast.Subscript) else ()):
            if isinstance(part, ast.Slice) and part.upper is not None and ast.unparse(part.upper) == number:
                return [f"{ast.unparse(node.value)}.shape[{axis}]"]  # type: ignore[attr-defined]
    names = [one.arg for one in (*scope.function.args.posonlyargs, *scope.function.args.args)]
    held = [(name, scope.seen.get(name)) for name in names]
    found = [(axis, name) for name, one in held if isinstance(one, torch.Tensor) for axis in range(one.ndim)]
    return [f"{name}.shape[{axis}]" for axis, name in sorted(found, key=lambda one: (one[0] == 0, one[0]))[:MOST]]
