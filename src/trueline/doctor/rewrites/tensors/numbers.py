"""Sizes and values that Python turns into numbers: `len(x)` and `int(x.shape[1])` fix a size that varies, `.item()`
takes a number out of a tensor.

Condition: none for `len` and `.item()`; `int` of a size is removed, and of arithmetic that rounds it becomes torch's.
Decimals of a size come from a table, whose end is the largest size.
NumPy arrays become the tensors that they came from: the functions called need counterparts of the same meaning in
torch; the proof compares values and dtypes.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import replace

from trueline.doctor.rewrites.indices import is_whole
from trueline.doctor.rewrites.predicate import without_numbers
from trueline.doctor.rewrites.scope import Candidate, Compound, Scope, Spot, expression, indices_of

TABLE = 1024
"""The largest size of a table."""
_FRACTIONS = ("math.log", "math.log2", "math.log10", "math.sqrt", "math.exp", "math.pow", "math.log1p")
FREED = "a size that stays free"
"""Part of the description of an edit that frees a size."""


def keep_sizes(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The simple statement at `spot`, then every simple statement of the function, one at a time, with free sizes."""
    seen: set[int] = set()
    for statement in (spot.statement, *ast.walk(scope.function)):
        if not isinstance(statement, ast.stmt) or isinstance(statement, Compound | ast.FunctionDef):
            continue
        if statement.lineno in seen:
            continue
        seen.add(statement.lineno)
        kept = _Sizes(scope)
        new = kept.visit(copy.deepcopy(statement))
        text = scope.replace([statement], [new]) if kept.words else None
        if text:
            yield Candidate(text=text, words="; ".join(dict.fromkeys(kept.words)), frees=True)


class _Sizes(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.words: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        free = free_size(self.scope, node)
        if free is not None:
            self.words.append(f"`{ast.unparse(node)}` is `{ast.unparse(free)}`, {FREED}")
        return free or node


def free_size(scope: Scope, node: ast.AST) -> ast.expr | None:
    """`node` with a size that stays free; None where it is no call that fixes one."""
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[given]) if scope.is_tensor(given):
            return expression(f"{ast.unparse(given)}.shape[0]")
        case ast.Call(func=ast.Name(id="int"), args=[given]) if scope.depends_on(given) == "size":
            parts = [*ast.walk(given)]  # a division, or a number with a point, may give a fraction
            rounds = any(isinstance(one, ast.Div | ast.Pow) for one in parts)
            rounds = rounds or any(isinstance(one, ast.Constant) and isinstance(one.value, float) for one in parts)
            rounds = rounds or any(isinstance(one, ast.Call) and ast.unparse(one.func) in _FRACTIONS for one in parts)
            return expression(f"torch.sym_int({ast.unparse(given)})") if rounds else given
        case ast.Call(func=ast.Name(id="round"), args=[given, _]) if scope.depends_on(given) == "size":
            return _looked_up(scope, node, given)
        case ast.Call(func=ast.Attribute(attr="isqrt"), args=[given]) if scope.depends_on(given) == "size":
            root = ast.BinOp(left=given, op=ast.Pow(), right=ast.Constant(value=0.5))  # exact up to 2**50
            return expression(f"torch.sym_int({ast.unparse(root)})")
    return None


def _looked_up(scope: Scope, node: ast.expr, given: ast.expr) -> ast.expr | None:
    """`round(n * 0.137, 2)`, whose decimals torch rounds otherwise than Python, from a table over the one size."""
    sizes = {
        ast.unparse(one)
        for one in ast.walk(given)
        if isinstance(one, ast.Name | ast.Subscript | ast.Call) and scope.depends_on(one) == "size"
    }
    size = max(sizes, key=len, default="")
    at = scope.fresh("at")
    value = ast.unparse(node).replace(size, at) if size else ""
    if not value or scope.depends_on(expression(value)) != "static":
        return None
    return expression(f"torch.tensor([{value} for {at} in range({TABLE + 1})], dtype=torch.float64)[{size}]")


def fixes_size(statement: ast.stmt) -> bool:
    """Whether a statement calls `int`, `round` or `isqrt`, which may fix a size that varies."""
    calls = (ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(called in ("int", "round", "math.isqrt") for called in calls)


def keep_scalars(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The statement at `spot` without `.item()`; then each assignment of the function."""
    others = [one for one in ast.walk(scope.function) if isinstance(one, ast.Assign | ast.AugAssign)]
    for statement in (spot.statement, *(one for one in others if one is not spot.statement)):
        if not isinstance(statement, Compound):
            new = without_numbers(_Elements(scope).visit(copy.deepcopy(statement)), scope)
            if ast.unparse(new) != ast.unparse(statement):
                yield scope.candidate([statement], [new], f"`{ast.unparse(statement)}` stays a tensor")


class _Elements(ast.NodeTransformer):
    """`x[b, min(end, n) - 1]`, an element whose place values choose, by an index of one element, which takes no number
    out of a tensor: `x[torch.as_tensor(b).reshape(1), …].squeeze(0)`. A place that is a name alone is left to loops."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        parts = indices_of(node)
        at = [i for i, part in enumerate(parts) if self._is_place(part)]
        others = [part for i, part in enumerate(parts) if i not in at]
        chosen = [parts[i] for i in at if self.scope.depends_on(parts[i]) in ("number", "tensor")]
        alone = len(at) == 1 and isinstance(parts[at[0]], ast.Name | ast.Constant)
        known = isinstance(node.ctx, ast.Load) and self.scope.is_tensor(node.value)
        plain = all(isinstance(one, ast.Slice) and self._is_fixed(one) for one in others)
        self.generic_visit(node)
        if not chosen or alone or not known or not plain:
            return node
        for i in at:
            parts[i] = expression(f"torch.as_tensor({ast.unparse(parts[i])}).reshape(1)")
        node.slice = parts[0] if len(parts) == 1 else ast.Tuple(elts=parts, ctx=ast.Load())
        axis = at[0] if at == [*range(at[0], at[0] + len(at))] else 0
        return expression(f"{ast.unparse(node)}.squeeze({axis})")

    def _is_place(self, part: ast.expr) -> bool:
        match part:
            case ast.Call(func=ast.Name(id="int")) | ast.Call(func=ast.Attribute(attr="item"), args=[]):
                return True
            case ast.Call(func=ast.Name(id="min" | "max"), args=[one, two]):
                return self._is_place(one) and self._is_place(two)
            case ast.BinOp(left=left, right=right):
                return self._is_place(left) and self._is_place(right)
        return is_whole(self.scope, part)

    def _is_fixed(self, part: ast.Slice) -> bool:
        ends = [one for one in (part.lower, part.upper, part.step) if one is not None]
        return all(self.scope.depends_on(one) in ("static", "size") for one in ends)


_SAME = {
    "abs", "all", "any", "arange", "arccos", "arcsin", "arctan", "arctan2", "argmax", "argmin", "argsort",
    "broadcast_to",
    "ceil", "cos", "cosh", "cumprod", "cumsum", "diff", "einsum", "exp", "expm1", "flip", "floor", "full_like",
    "hstack", "isfinite", "isinf", "isnan", "log", "log10", "log1p", "log2", "logical_and", "logical_not",
    "logical_or", "logical_xor", "matmul", "maximum", "mean", "minimum", "ones_like", "outer", "prod", "roll",
    "round", "sign", "sin", "sinh", "sqrt", "square", "squeeze", "stack", "sum", "tan", "tanh", "tile", "tril", "triu",
    "trunc", "vstack", "where", "zeros_like",
}  # fmt: skip
_RENAMED = {
    "concatenate": "cat", "clip": "clamp", "power": "pow", "dot": "matmul", "expand_dims": "unsqueeze",
    "transpose": "permute", "max": "amax", "min": "amin", "amax": "amax", "amin": "amin", "absolute": "abs",
    "repeat": "repeat_interleave",
}  # fmt: skip
_MADE = ("eye", "full", "linspace", "ones", "zeros")
_KEYWORDS = {"axis": "dim", "keepdims": "keepdim", "a_min": "min", "a_max": "max"}
_DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8")


def keep_arrays(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The function with tensors where it turns them into NumPy arrays and back."""
    arrays = _Arrays()
    text: str | None = scope.text
    kinds = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Return
    simple = [one for one in ast.walk(scope.function) if isinstance(one, kinds)]
    for statement in sorted(simple, key=lambda one: -one.lineno):  # the last first: lines above it stay where they are
        new = arrays.visit(copy.deepcopy(statement))
        if text is not None and ast.dump(new) != ast.dump(statement):
            text = replace(scope, text=text).replace([statement], [new])
    if text and arrays.seen:
        yield Candidate(text=text, words="NumPy arrays stay tensors")


class _Arrays(ast.NodeTransformer):
    def __init__(self) -> None:
        self.seen = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return node
        owner, name = ast.unparse(node.func.value), node.func.attr
        if name == "numpy" and not node.args:
            self.seen = True
            return node.func.value
        if owner == "torch" and name in ("from_numpy", "as_tensor", "tensor") and len(node.args) == 1:
            return node.args[0] if name == "from_numpy" else expression(f"torch.as_tensor({ast.unparse(node.args[0])})")
        if owner in ("np", "numpy"):
            found = _counterpart(name, node)
            self.seen = self.seen or found is not None
            return found or node
        if name == "astype" and len(node.args) == 1:
            return expression(f"{owner}.to({ast.unparse(node.args[0])})")
        if name == "copy" and not node.args:
            return expression(f"{owner}.clone()")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr in _DTYPES and ast.unparse(node.value) in ("np", "numpy"):
            return expression(f"torch.{node.attr}")
        return node


def _counterpart(name: str, node: ast.Call) -> ast.expr | None:
    """The torch call with the meaning of numpy's `name`."""
    given = [ast.unparse(one) for one in node.args]
    given += [f"{_KEYWORDS.get(one.arg or '', one.arg)}={ast.unparse(one.value)}" for one in node.keywords]
    arguments = ", ".join(given)
    if name == "sort":
        return expression(f"torch.sort({arguments}).values")
    if name in ("std", "var"):
        return expression(f"torch.{name}({arguments}, correction=0)")
    if name in _MADE:
        dtype = "" if any(one.arg == "dtype" for one in node.keywords) else ", dtype=torch.float64"
        return expression(f"torch.{name}({arguments}{dtype})")
    if name in _SAME or name in _RENAMED:
        return expression(f"torch.{_RENAMED.get(name, name)}({arguments})")
    return None
