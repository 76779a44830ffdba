"""Python conditions as boolean tensors (`and` as &, `not` as ~), and arithmetic without `.item()` and `float()`."""

import ast
import copy
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import torch

from trueline.doctor.rewrites.scope import Scope, expression, tensor_of, value_of

_BOOLEAN = ("any", "all", "isnan", "isinf", "isfinite", "eq", "ne", "gt", "lt", "ge", "le", "bool", "equal", "allclose")
_NUMERIC = ("number", "tensor")


def predicate(test: ast.expr, scope: Scope) -> ast.expr:
    """`test` as a boolean tensor.

    >>> # x.sum().item() > 0 and not done   ->   (x.sum() > 0) & ~done
    """
    if isinstance(test, ast.BoolOp):
        operator = ast.BitAnd if isinstance(test.op, ast.And) else ast.BitOr
        return _join(operator, [predicate(value, scope) for value in test.values])
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.UnaryOp(op=ast.Invert(), operand=predicate(test.operand, scope))
    if isinstance(test, ast.Compare):
        pairs = zip(test.ops, pairwise([test.left, *test.comparators]), strict=True)
        return _join(ast.BitAnd, [_compare(_as_tensor(one, scope), op, two, scope) for op, (one, two) in pairs])
    plain = _as_tensor(test, scope)
    if scope.depends_on(test) in _NUMERIC and _is_boolean(plain, scope):
        return plain
    return _compare(plain, ast.NotEq(), ast.Constant(0), scope)


def _join(operator: type[ast.operator], parts: Sequence[ast.expr]) -> ast.expr:
    return reduce(lambda one, two: ast.BinOp(left=one, op=operator(), right=two), parts)


def _compare(left: ast.expr, operator: ast.cmpop, right: ast.expr, scope: Scope) -> ast.expr:
    return ast.Compare(left=left, ops=[operator], comparators=[without_numbers(right, scope)])


def _as_tensor(node: ast.expr, scope: Scope) -> ast.expr:
    """`node` without `.item()`; sizes and plain numbers become tensors of no dimension, and so do the numbers that a
    loop over a list of them gives."""
    plain = without_numbers(node, scope)
    if scope.depends_on(node) not in _NUMERIC:
        return expression(f"torch.full((), {ast.unparse(plain)})")
    listed = isinstance(plain, ast.Name) and type(value_of(plain, scope.seen)) in (int, float)
    return expression(f"torch.as_tensor({ast.unparse(plain)})") if listed else plain


def without_numbers(node: ast.AST, scope: Scope) -> Any:
    """A copy of `node` in which numbers stay in their tensors: `.item()` and `float(tensor)` are removed."""
    return _Numbers(scope).visit(copy.deepcopy(node))


class _Numbers(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def visit_Call(self, node: ast.Call) -> ast.AST:
        numeric = self.scope.depends_on(node) in _NUMERIC
        dependences = [self.scope.depends_on(argument) for argument in node.args]
        held = tensor_of(node.args[0], self.scope) if len(node.args) == 1 else None
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id="int"), args=[whole]) if held is not None and held.dtype is torch.int64:
                return whole
            case ast.Call(func=ast.Attribute(value=tensor, attr="item"), args=[]):
                return tensor
            case ast.Call(func=ast.Attribute(value=owner, attr="allclose" | "equal" as name), args=[_, *_]):
                # it returns a Python bool
                given = [] if ast.unparse(owner) == "torch" else [f"({ast.unparse(owner)})"]
                given += [ast.unparse(argument) for argument in (*node.args, *node.keywords)]
                alike = f"({given[0]} == {given[1]})" if name == "equal" else f"torch.isclose({', '.join(given)})"
                return expression(f"{alike}.all()")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr=name), args=given) if numeric:
                return ast.Call(func=expression(f"torch.{name}"), args=given, keywords=[])
            case ast.Call(func=ast.Name(id=name)) if {*dependences} & {*_NUMERIC}:
                return _builtin(name, node, dependences)
        return node


def _builtin(name: str, node: ast.Call, dependences: Sequence[str]) -> ast.AST:
    """A builtin that would take a number out of a tensor, as the tensor operation."""
    text = ast.unparse(node.args[0])
    if name in ("float", "int"):
        return expression(f"({text}).to(torch.{'float32' if name == 'float' else 'int64'})")
    if name == "bool":
        return ast.Compare(left=node.args[0], ops=[ast.NotEq()], comparators=[ast.Constant(0)])
    if name in ("max", "min") and len(node.args) == 2:
        which = 0 if dependences[0] in _NUMERIC else 1
        tensor, other = node.args[which], node.args[1 - which]
        if dependences[1 - which] in ("static", "size"):
            bound = "min" if name == "max" else "max"
            return expression(f"({ast.unparse(tensor)}).clamp({bound}={ast.unparse(other)})")
        pair = f"{ast.unparse(tensor)}, {ast.unparse(other)}"
        return expression(f"torch.{'maximum' if name == 'max' else 'minimum'}({pair})")
    return node


def _is_boolean(node: ast.expr, scope: Scope) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _BOOLEAN
    held = tensor_of(node, scope)
    return isinstance(node, ast.Compare) or (held is not None and held.dtype is torch.bool)
