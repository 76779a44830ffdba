"""A Python condition as a tensor expression of one boolean: `and` as &, `not` as ~, sizes as tensors."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence

from trueline.doctor.rewrites.scope import Scope, expression

_BOOLEAN = ("any", "all", "isnan", "isinf", "isfinite", "eq", "ne", "gt", "lt", "ge", "le", "bool", "equal", "allclose")
_ALIKE = ("allclose", "equal")


def predicate(test: ast.expr, scope: Scope) -> ast.expr:
    """`test` as a boolean tensor.

    >>> # x.sum().item() > 0 and not done   ->   (x.sum() > 0) & ~done
    """
    if isinstance(test, ast.BoolOp):
        operator: ast.operator = ast.BitAnd() if isinstance(test.op, ast.And) else ast.BitOr()
        found = predicate(test.values[0], scope)
        for value in test.values[1:]:
            found = ast.BinOp(left=found, op=copy.copy(operator), right=predicate(value, scope))
        return found
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.UnaryOp(op=ast.Invert(), operand=predicate(test.operand, scope))
    if isinstance(test, ast.Compare):
        return _comparison(test, scope)
    worth = scope.worth(test)
    plain = as_tensor(test, scope)
    if worth in ("tensor", "number") and _is_boolean(plain, scope):
        return plain
    return ast.Compare(left=plain, ops=[ast.NotEq()], comparators=[ast.Constant(0)])


def _comparison(test: ast.Compare, scope: Scope) -> ast.expr:
    found: ast.expr | None = None
    left = test.left
    for operator, right in zip(test.ops, test.comparators, strict=True):
        one: ast.expr = ast.Compare(
            left=as_tensor(left, scope), ops=[operator], comparators=[without_numbers(right, scope)]
        )
        found = one if found is None else ast.BinOp(left=found, op=ast.BitAnd(), right=one)
        left = right
    assert found is not None
    return found


def as_tensor(node: ast.expr, scope: Scope) -> ast.expr:
    """`node` without `.item()`; a size becomes a tensor of no dimension, and so does a plain number."""
    worth = scope.worth(node)
    plain = without_numbers(node, scope)
    if worth in ("tensor", "number"):
        return plain
    return expression(f"torch.full((), {ast.unparse(plain)})")


def without_numbers(node: ast.expr, scope: Scope) -> ast.expr:
    """A copy of `node` in which numbers stay in their tensors: `.item()` and `float(tensor)` are taken away."""
    return _Numbers(scope).visit(copy.deepcopy(node))  # type: ignore[no-any-return]


class _Numbers(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def visit_Call(self, node: ast.Call) -> ast.AST:
        worth = self.scope.worth(node)
        function = node.func
        arguments = [self.scope.worth(argument) for argument in node.args]
        self.generic_visit(node)
        if isinstance(function, ast.Attribute) and function.attr == "item" and not node.args:
            return function.value
        if isinstance(function, ast.Attribute) and function.attr in _ALIKE and node.args:
            return _alike(function, node)
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "math":
            if worth in ("number", "tensor"):
                return ast.Call(func=expression(f"torch.{function.attr}"), args=node.args, keywords=[])
        elif isinstance(function, ast.Name) and node.args and any(one in ("number", "tensor") for one in arguments):
            return _builtin(function.id, node, arguments)
        return node


def _alike(function: ast.Attribute, node: ast.Call) -> ast.expr:
    """`torch.allclose(a, b)` and `a.equal(b)`, which answer with a bool of Python's, as a tensor of one boolean."""
    owner = ast.unparse(function.value)
    given = [ast.unparse(one) for one in node.args]
    pair, rest = (given[:2], given[2:]) if owner == "torch" else ([f"({owner})", given[0]], given[1:])
    if function.attr == "equal":
        return expression(f"({pair[0]} == {pair[1]}).all()")
    options = [*rest, *(ast.unparse(keyword) for keyword in node.keywords)]
    return expression(f"torch.isclose({', '.join([*pair, *options])}).all()")


def _builtin(name: str, node: ast.Call, worths: Sequence[str]) -> ast.AST:
    """The builtins that would take a number out of a tensor, as what does the same to the tensor."""
    text = ast.unparse(node.args[0])
    if name == "float":
        return expression(f"({text}).to(torch.float32)")
    if name == "int":
        return expression(f"({text}).to(torch.int64)")
    if name == "bool":
        return ast.Compare(left=node.args[0], ops=[ast.NotEq()], comparators=[ast.Constant(0)])
    if name in ("max", "min") and len(node.args) == 2:
        which = 0 if worths[0] in ("number", "tensor") else 1
        tensor, other = node.args[which], node.args[1 - which]
        if worths[1 - which] == "static":
            bound = "min" if name == "max" else "max"
            return expression(f"({ast.unparse(tensor)}).clamp({bound}={ast.unparse(other)})")
        pair = f"{ast.unparse(tensor)}, {ast.unparse(other)}"
        return expression(f"torch.{'maximum' if name == 'max' else 'minimum'}({pair})")
    return node


def _is_boolean(node: ast.expr, scope: Scope) -> bool:
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _BOOLEAN
    import torch

    from trueline.doctor.rewrites.scope import value_of

    value = value_of(node, scope.seen)
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool
