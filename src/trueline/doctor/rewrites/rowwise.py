"""Whether an expression treats every row by itself and all rows alike, so that `f(x[0]), f(x[1]), …` is `f(x)`.

It is read off the code: calls show a largest value that all rows share only where it is large enough to matter.
"""

import ast
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch

from trueline.doctor.rewrites.scope import Scope, named_value, value_of

ELEMENTWISE = {
    "abs", "neg", "negative", "exp", "exp2", "log", "log2", "log10", "log1p", "expm1", "sqrt", "rsqrt", "sin",
    "cos", "tan", "tanh", "sinh", "cosh", "asin", "acos", "atan", "atan2", "sigmoid", "relu", "gelu", "silu",
    "softplus", "elu", "leaky_relu", "hardtanh", "relu6", "selu", "celu", "mish", "hardswish", "softsign",
    "logsigmoid", "erf", "clamp", "clamp_min", "clamp_max", "clip", "pow", "square", "sign", "floor", "ceil",
    "round", "trunc", "frac", "reciprocal", "where", "maximum", "minimum", "add", "sub", "mul", "div",
    "true_divide", "fmod", "remainder", "lerp", "float", "double", "half", "bfloat16", "long", "int", "bool",
    "to", "type_as", "clone", "detach", "contiguous", "isnan", "isinf", "isfinite", "logical_not", "logical_and",
    "logical_or", "logical_xor", "nan_to_num", "eq", "ne", "gt", "lt", "ge", "le", "masked_fill", "zeros_like",
    "ones_like", "full_like",
}  # fmt: skip
_OVER_LAST = {
    "softmax", "log_softmax", "sum", "mean", "amax", "amin", "argmax", "argmin", "std", "var", "norm", "cumsum",
    "cumprod", "prod", "logsumexp", "any", "all", "normalize",
}  # fmt: skip
"""Functions over dimensions that they name; those counted from the end are the same for a row and for all rows."""
_MODULES = (
    torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU, torch.nn.Tanh, torch.nn.Sigmoid, torch.nn.ELU, torch.nn.LeakyReLU,
    torch.nn.Softplus, torch.nn.Hardtanh, torch.nn.ReLU6, torch.nn.Dropout, torch.nn.Identity, torch.nn.Embedding,
)  # fmt: skip


class NotAlike(Exception):
    """Something that is not known to treat every row by itself."""


Rows = Callable[[ast.expr], int | None]
"""The dimensions within a row of an expression that is rows; None for any other."""


def named_rows(inner: Mapping[str, int]) -> Rows:
    """Rows that have names."""
    return lambda node: inner.get(node.id) if isinstance(node, ast.Name) else None


def treats_rows_alike(scope: Scope, node: ast.expr, rows: Rows) -> bool:
    """Whether `node` is rows too, each made of the same row of each of `rows`, or does not depend on rows."""
    try:
        _inner(scope, node, rows)
    except NotAlike:
        return False
    return True


def steps_are_alike(scope: Scope, block: list[ast.stmt], inner: Mapping[str, int]) -> bool:
    """Whether every statement gives a name what treats the rows alike; `inner`: names of rows."""
    known = dict(inner)
    for statement in block:
        named = named_value(statement) if isinstance(statement, ast.Assign) else None
        if named is None:
            return False
        try:
            found = _inner(scope, named[1], named_rows(known))
        except NotAlike:
            return False
        known = {name: left for name, left in known.items() if name != named[0]}
        if found is not None:
            known[named[0]] = found
    return True


def _inner(scope: Scope, node: ast.expr, rows: Rows) -> int | None:
    """The dimensions within each row; None where it does not depend on the rows. Raises NotAlike."""
    left = rows(node)
    if left is not None:
        return left
    match node:
        case ast.Name() | ast.Constant() | ast.Attribute(value=ast.Name()):
            return None
        case ast.BinOp(left=one, op=ast.MatMult(), right=two):
            found, other = _inner(scope, one, rows), _inner(scope, two, rows)
            if found is None and other is None:
                return None
            if not found or other is not None:
                raise NotAlike
            return found
        case ast.BinOp(left=one, right=two):
            return _together(scope, [one, two], rows)
        case ast.Compare(left=one, comparators=others):
            return _together(scope, [one, *others], rows)
        case ast.UnaryOp(operand=one):
            return _inner(scope, one, rows)
        case ast.Call():
            return _of_call(scope, node, rows)
    if any(isinstance(one, ast.expr) and rows(one) is not None for one in ast.walk(node)):
        raise NotAlike
    return None


def _together(scope: Scope, nodes: list[ast.expr], rows: Rows) -> int | None:
    found = [one for one in (_inner(scope, node, rows) for node in nodes) if one is not None]
    if any(one != other for one, other in pairwise(found)):
        raise NotAlike
    return found[0] if found else None


def _of_call(scope: Scope, node: ast.Call, rows: Rows) -> int | None:
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    module = value_of(node.func, scope.seen)
    if isinstance(module, torch.nn.Module):
        found = _together(scope, given, rows)
        if found is not None and not _module_is_alike(module, found):
            raise NotAlike
        return found
    if not isinstance(node.func, ast.Attribute):
        found = _together(scope, given, rows)
        if found is not None:
            raise NotAlike
        return None
    owner, how = node.func.value, node.func.attr
    of_torch = ast.unparse(owner) in ("torch", "F", "torch.nn.functional", "nn.functional")
    found = _together(scope, given if of_torch else [owner, *given], rows)
    if found is None:
        return None
    if (
        not of_torch
        and _inner(scope, owner, rows) is None
        and not isinstance(value_of(owner, scope.seen), torch.Tensor)
    ):
        raise NotAlike  # `self.add(row)` is a method of the user's
    if how in ELEMENTWISE:
        return found
    if how == "linear" and of_torch and found:
        return found
    if how not in _OVER_LAST:
        raise NotAlike
    return _over_last(node, found, given[of_torch:])


def _over_last(node: ast.Call, inner: int, given: list[ast.expr]) -> int:
    """The dimensions that a function over dimensions from the end leaves within each row."""
    named = [keyword.value for keyword in node.keywords if keyword.arg in ("dim", "axis")] or given[:1]
    try:
        dims = ast.literal_eval(named[0]) if named else None
        kept = any(one.arg == "keepdim" and ast.literal_eval(one.value) for one in node.keywords)
    except ValueError as error:
        raise NotAlike from error
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple) or not all(isinstance(one, int) and -inner <= one < 0 for one in dims):
        raise NotAlike
    assert isinstance(node.func, ast.Attribute)
    stays = kept or node.func.attr in ("softmax", "log_softmax", "cumsum", "cumprod", "normalize")
    return inner if stays else inner - len(dims)


def _module_is_alike(module: torch.nn.Module, inner: int) -> bool:
    if isinstance(module, torch.nn.Sequential):
        return all(_module_is_alike(one, inner) for one in module)
    if type(module) is torch.nn.Linear:
        return inner > 0
    if type(module) is torch.nn.LayerNorm:
        return 0 < len(module.normalized_shape) <= inner
    if type(module) in (torch.nn.Softmax, torch.nn.LogSoftmax):
        return isinstance(module.dim, int) and -inner <= module.dim < 0
    return type(module) in _MODULES


def selected_rows(scope: Scope, at: ast.expr, dims: int | None) -> Rows:
    """What an index `at` selects of tensors. It is over `dims` dimensions, over all where that is not known."""
    text = ast.unparse(at)

    def rows(node: ast.expr) -> int | None:
        if not isinstance(node, ast.Subscript) or ast.unparse(node.slice) != text:
            return None
        rank = scope.rank(node.value)
        return 0 if rank is None or dims is None else max(rank - dims, 0)

    return rows
