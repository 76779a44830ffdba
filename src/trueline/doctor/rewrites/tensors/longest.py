"""A length that values choose, `int(lengths.max())`, becomes the size that bounds it.

    x = x[:, : int(lengths.max())]         ──▶      x = x[:, : x.shape[1]]
    steps = torch.arange(lengths.max())    ──▶      steps = torch.arange(x.shape[1])

Condition: no answer depends on what lies beyond. The calls compare that, also with large values in the places beyond,
and one of them has to have a length below the size: such a call raises in the candidate's `witness`. Steps that are
counted beyond are only compared with lengths.
"""

import ast
import copy
from collections.abc import Iterator

import torch

from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, assignments, expression, indices_of, named_value

MOST = 4
"""Sizes that are tried for one number."""
_LARGE = ("1e10 if {0}.is_floating_point() else {0}.max()", "-1e10 if {0}.is_floating_point() else {0}.min()")
"""What the places beyond hold in calls that have to be answered alike."""


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
        text, witness = (_replace(scope, statement, number, new) for new in (size, shorter))
        filled = [_replace(scope, statement, number, size, beyond=value) for value in _LARGE]
        if text and witness and all(filled):
            words = f"`{number}` is at most `{size}`, and no answer depends on what lies beyond"
            yield Candidate(text=text, words=words, witness=witness, alike=tuple(one for one in filled if one))


def _replace(scope: Scope, statement: ast.stmt, number: str, new: str, beyond: str = "") -> str | None:
    """The file with `new` for the number, and `beyond` in the places that the number would cut off."""
    edit = _Edit(number, new, beyond)
    return scope.replace([statement], [edit.visit(copy.deepcopy(statement))])


class _Edit(ast.NodeTransformer):
    def __init__(self, number: str, new: str, beyond: str) -> None:
        self.number, self.new, self.beyond = number, new, beyond

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return expression(self.new) if ast.unparse(node) == self.number else self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        axis = _cut_axis(node, self.number)
        self.generic_visit(node)
        if axis is None or not self.beyond:
            return node
        whole = ast.unparse(node.value)
        inside = f"(torch.arange({whole}.shape[{axis}]) < {self.number})"
        inside += f"[(...,) + (None,) * ({whole}.ndim - {axis + 1})]"
        node.value = expression(f"torch.where({inside}, {whole}, {self.beyond.format(whole)})")
        return node


def _cut_axis(node: ast.Subscript, number: str) -> int | None:
    """The dimension that `x[:, :number]` cuts off."""
    for axis, part in enumerate(indices_of(node)):
        if isinstance(part, ast.Slice) and part.upper is not None and ast.unparse(part.upper) == number:
            return axis
    return None


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
    """The size of what is cut off there; else sizes of the function's arguments, for steps that are only compared."""
    for node in ast.walk(statement):
        axis = _cut_axis(node, number) if isinstance(node, ast.Subscript) else None
        if axis is not None:
            return [f"{ast.unparse(node.value)}.shape[{axis}]"]  # type: ignore[attr-defined]
    if not _only_compared(scope, statement, number):
        return []
    names = [one.arg for one in (*scope.function.args.posonlyargs, *scope.function.args.args)]
    held = [(name, scope.seen.get(name)) for name in names]
    found = [(axis, name) for name, one in held if isinstance(one, torch.Tensor) for axis in range(one.ndim)]
    return [f"{name}.shape[{axis}]" for axis, name in sorted(found, key=lambda one: (one[0] == 0, one[0]))[:MOST]]


def _only_compared(scope: Scope, statement: ast.stmt, number: str) -> bool:
    """Whether the number is only the end of steps, `torch.arange(number)`, which are compared and nothing else."""
    names: set[str] = set()
    steps: set[ast.AST] = set()
    for node in ast.walk(statement):
        counts = isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.arange"
        if counts and ast.unparse(node.args[0]) == number:  # type: ignore[attr-defined]
            steps.add(node)
    named = named_value(statement)
    if named is not None and steps and not any(isinstance(node, ast.Compare) for node in ast.walk(statement)):
        names = {named[0]}
        steps = {one for one in ast.walk(scope.function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        steps = {one for one in steps if isinstance(one, ast.Name) and one.id in names}
    inside = {id(one) for node in ast.walk(scope.function) if isinstance(node, ast.Compare) for one in ast.walk(node)}
    stores = [name for name, _ in assignments(scope.function) if name in names]
    return bool(steps) and all(id(one) in inside for one in steps) and len(stores) <= 1
