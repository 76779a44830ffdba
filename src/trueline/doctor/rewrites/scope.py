"""A function of the user's file as a rewrite sees it: its tree, its text, and the values of its names in a run.

An edit replaces whole statements and leaves every other line of the file as it is.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Dependence = Literal["static", "size", "number", "tensor"]
"""What an expression's value depends on, the strongest last: nothing that varies, a size, a number taken out of a
tensor, a tensor's values."""
Compound = ast.For | ast.While | ast.If | ast.With | ast.Try

_ORDER: tuple[Dependence, ...] = ("static", "size", "number", "tensor")
_STATIC_ATTRIBUTES = ("dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")
_FACTORIES = ("torch", "F", "nn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One possible edit: the whole file after it, and a description."""

    text: str
    words: str
    both: tuple[int, int] | None = None
    """Lines (before the edit) of a condition and of its body: the edit is proven only if calls took both ways."""
    frees: bool = False
    """Whether it frees a size: other code may then accept only multiples."""
    witness: str = ""
    """The file in which calls that the edit makes a difference to raise: it is proven only if there is one."""
    alike: tuple[str, ...] = ()
    """Files with other values where the edit says that they change nothing: they have to answer alike."""
    ways: tuple[int, int] | None = None
    """Lines of a condition and of its body: where calls took both ways, `alike` is not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A statement in its block, and the statements around it, outermost first."""

    block: list[ast.stmt]
    index: int
    outer: tuple[Spot, ...]

    @property
    def statement(self) -> ast.stmt:
        return self.block[self.index]

    @property
    def rest(self) -> list[ast.stmt]:
        """What follows the statement in its block."""
        return self.block[self.index + 1 :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One function of the user's file, and the values that its locals held in a real call."""

    text: str
    function: ast.FunctionDef
    seen: Mapping[str, Any]

    def spot(self, line: int) -> Spot | None:
        """The innermost statement that holds `line`."""
        return _find(self.function.body, line, ())

    def replace(self, block: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> str | None:
        """The file with the lines of `block` replaced; None when they share a line with other code."""
        lines = self.text.splitlines(keepends=True)
        first, last = block[0].lineno - 1, block[-1].end_lineno or block[-1].lineno
        indent = lines[first][: block[0].col_offset]
        if indent.strip():
            return None
        written = []
        for statement in new:
            for line in ast.unparse(ast.fix_missing_locations(statement)).splitlines():
                written.append(f"{indent}{line}\n" if line.strip() else "\n")
        return "".join([*lines[:first], *written, *lines[last:]])

    def candidate(
        self, block: Sequence[ast.stmt], new: Sequence[ast.stmt], words: str, both: tuple[int, int] | None = None
    ) -> Candidate | None:
        """The edit that puts `new` in the place of `block`; None when they share a line with other code."""
        text = self.replace(block, new)
        return Candidate(text=text, words=words, both=both) if text else None

    def depends_on(self, node: ast.expr) -> Dependence:
        """What the value of `node` depends on."""
        names: dict[str, Dependence] = {}
        for _ in range(4):  # to a fixed point
            before = dict(names)
            for target, value in assignments(self.function):
                names[target] = _strongest(names.get(target, "static"), _dependence(value, self, names))
            if names == before:
                break
        return _dependence(node, self, names)

    def rank(self, node: ast.expr) -> int | None:
        """Number of dimensions of a tensor expression, where its value was seen."""
        value = value_of(node, self.seen)
        return value.ndim if isinstance(value, torch.Tensor) else None

    def is_tensor(self, node: ast.expr) -> bool:
        return isinstance(value_of(node, self.seen), torch.Tensor)

    def fresh(self, name: str) -> str:
        """`name`, or with a number where the function has it already."""
        used = {n.id for n in ast.walk(self.function) if isinstance(n, ast.Name)} | set(self.seen)
        used |= {n.name for n in ast.walk(self.function) if isinstance(n, ast.FunctionDef)}
        free, count = name, 2
        while free in used:
            free, count = f"{name}_{count}", count + 1
        return free


def _find(block: list[ast.stmt], line: int, outer: tuple[Spot, ...]) -> Spot | None:
    for index, statement in enumerate(block):
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            spot = Spot(block=block, index=index, outer=outer)
            inside = (_find(inner, line, (*outer, spot)) for inner in blocks(statement))
            return next((inner for inner in inside if inner is not None), spot)
    return None


def blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks inside a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        inner = getattr(statement, name, None)
        if inner and not isinstance(statement, ast.ClassDef):
            yield inner


def assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Every `name = value` in `node`: targets of loops, and of unpacking one value, get the whole of it."""
    for part in ast.walk(node):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(part, ast.Assign):
            pairs = [pair for target in part.targets for pair in _unpack(target, part.value)]
        elif isinstance(part, ast.AugAssign | ast.NamedExpr) or (isinstance(part, ast.AnnAssign) and part.value):
            pairs = [(part.target, part.value)]  # type: ignore[list-item]
        elif isinstance(part, ast.For):
            pairs = [(part.target, part.iter)]
        yield from ((name, value) for target, value in pairs for name in stored_names(target))


def _unpack(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Of `a, b = x, y` each name with its own value."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def stored_names(node: ast.AST | Sequence[ast.stmt]) -> list[str]:
    """Names that are assigned in `node`, in order, each once."""
    names = [n.id for n in walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return list(dict.fromkeys(names))


def loaded_names(node: ast.AST | Sequence[ast.AST]) -> list[str]:
    """Names that are read in `node`, in order, each once; `x += 1` reads x."""
    names: list[str] = []
    for part in walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            names.append(part.id)
        if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
            names.append(part.target.id)
    return list(dict.fromkeys(names))


def walk(node: ast.AST | Sequence[ast.AST]) -> Iterator[ast.AST]:
    """As ast.walk, in the order of the source; of a block all its statements."""
    if isinstance(node, ast.AST):
        yield node
    for child in node if isinstance(node, Sequence) else ast.iter_child_nodes(node):
        yield from walk(child)


def read_later(spot: Spot, end: int | None = None) -> set[str]:
    """Names that may be read after the statements of `spot.block` up to `end` (that of the spot when left out)."""
    after = spot.index + 1 if end is None else end
    names = set(loaded_names(spot.block[after:]))
    for outer in spot.outer:
        names |= set(loaded_names(outer.rest))
        if isinstance(outer.statement, ast.For | ast.While):
            head = outer.statement.iter if isinstance(outer.statement, ast.For) else outer.statement.test
            names |= {*loaded_names(head), *_read_first(outer.statement.body, set())}
    return names


def _read_first(block: Sequence[ast.stmt], known: set[str]) -> set[str]:
    """Names that a step may read before it gives them a value, with those of `known` given; these grow."""
    names = set[str]()
    for statement in block:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names |= set(loaded_names(value)) - known
                known.add(name)
            case ast.If(test=test, body=body, orelse=other):
                one, two = set(known), set(known)
                names |= set(loaded_names(test)) - known
                names |= _read_first(body, one) | _read_first(other, two)
                known |= one & two
            case _:
                names |= set(loaded_names(statement)) - known
    return names


def parameters(function: ast.FunctionDef) -> set[str]:
    """Names of the arguments, without `*args` and `**kwargs`."""
    given = function.args
    return {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def bound_before(spot: Spot, function: ast.FunctionDef) -> set[str]:
    """Names that certainly or possibly hold a value when the statement is reached."""
    names = parameters(function)
    for outer in (*spot.outer, spot):
        names |= set(stored_names(outer.block[: outer.index]))
        if isinstance(outer.statement, ast.For) and outer is not spot:
            names |= set(stored_names(outer.statement.target))
    return names


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def statements(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def assign(name: str, value: ast.expr) -> ast.Assign:
    """`name = value`."""
    return ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=value)


def define(name: str, arguments: str, body: Sequence[ast.stmt], result: str = "") -> ast.stmt:
    """`def name(arguments)` of the statements `body`, which returns `result` if there is one."""
    function = statements(f"def {name}({arguments}):\n    return {result}")[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [*body, *(function.body if result else [])]
    return function


def first_line(node: ast.AST) -> str:
    """The first line of the node's source."""
    return ast.unparse(node).splitlines()[0]


def arguments_text(call: ast.Call) -> str:
    """The call's arguments as they are written."""
    return ", ".join(ast.unparse(argument) for argument in (*call.args, *call.keywords))


def indices_of(node: ast.Subscript) -> list[ast.expr]:
    """The indices of `x[i, j]`."""
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]


def named_value(statement: ast.AST) -> tuple[str, ast.expr] | None:
    """Name and new value of `x = v`, or of `x += v`, which is `x = x + v`."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, value
        case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
            return name, ast.BinOp(left=ast.Name(id=name, ctx=ast.Load()), op=op, right=value)
    return None


def element_value(statement: ast.stmt) -> tuple[ast.Subscript, ast.expr] | None:
    """Target and new value of `x[i] = v`, or of `x[i] += v`, which is `x[i] = x[i] + v`."""
    match statement:
        case ast.Assign(targets=[ast.Subscript() as target, *_], value=value):
            return target, value
        case ast.AugAssign(target=ast.Subscript() as target, op=op, value=value):
            read = copy.deepcopy(target)
            read.ctx = ast.Load()
            return target, ast.BinOp(left=read, op=op, right=value)
    return None


class _Substitution(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self.values.get(node.id, node)) if isinstance(node.ctx, ast.Load) else node


def substitute(node: ast.AST, values: Mapping[str, ast.expr]) -> Any:
    """A copy of `node` with `values` in the place of the names that it reads."""
    return _Substitution(values).visit(copy.deepcopy(node))


def value_of(node: ast.expr, seen: Mapping[str, Any]) -> Any:
    """The value that a name, a chain of attributes or an element held in the call; None when it is not known."""
    if isinstance(node, ast.Name):
        return seen.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(value_of(node.value, seen), node.attr, None)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        holder, key = value_of(node.value, seen), node.slice.value
        try:
            if isinstance(holder, list | tuple):
                return holder[key] if isinstance(key, int) else None
            return holder[key] if isinstance(holder, dict) else None
        except (KeyError, IndexError, TypeError):
            return None
    return None


def tensor_of_list(node: ast.expr) -> ast.expr:
    """Of `lengths.tolist()` the tensor, in which the numbers stay."""
    match node:
        case ast.Call(func=ast.Attribute(value=tensor, attr="tolist"), args=[]):
            return tensor
        case ast.Call(func=ast.Attribute(value=tensor, attr="cpu" | "detach" | "numpy"), args=[]):
            return tensor_of_list(tensor)
    return node


def tensor_of(node: ast.expr, scope: Scope) -> torch.Tensor | None:
    """The tensor that `node` was in the call, if it was one."""
    held = value_of(node, scope.seen)
    return held if isinstance(held, torch.Tensor) else None


def _strongest(*found: Dependence) -> Dependence:
    return max(found, key=_ORDER.index, default="static")


def _dependence(node: ast.expr, scope: Scope, names: Mapping[str, Dependence]) -> Dependence:
    def of(*nodes: ast.expr) -> Dependence:
        return _strongest("static", *(_dependence(inner, scope, names) for inner in nodes))

    if scope.is_tensor(node):
        return "tensor"
    if isinstance(node, ast.Name):
        return names.get(node.id, "static")
    if isinstance(node, ast.Attribute):
        base = of(node.value)
        if base != "tensor":
            return base if not isinstance(node.value, ast.Name) else "static"
        return "size" if node.attr == "shape" else "static" if node.attr in _STATIC_ATTRIBUTES else "tensor"
    if isinstance(node, ast.Call):
        arguments = of(*node.args, *(keyword.value for keyword in node.keywords))
        owner = of(node.func.value) if isinstance(node.func, ast.Attribute) else "static"
        return _of_call(node.func, scope, owner, arguments)
    if isinstance(node, ast.Subscript):
        return of(node.value)
    return of(*(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)))


def _of_call(function: ast.expr, scope: Scope, owner: Dependence, arguments: Dependence) -> Dependence:
    if isinstance(function, ast.Name):
        if function.id == "len":
            return "size" if arguments == "tensor" else "static"
        if function.id in ("int", "float", "bool", "round"):
            return "number" if arguments == "tensor" else arguments
        return arguments
    if not isinstance(function, ast.Attribute):
        return arguments
    if isinstance(function.value, ast.Name) and function.value.id in _FACTORIES:
        return "tensor"
    if owner == "tensor":
        if function.attr in ("item", "tolist"):
            return "number"
        if function.attr in ("size", "numel", "nelement"):
            return "size"
        return "static" if function.attr in ("dim", "is_floating_point") else "tensor"
    return "tensor" if isinstance(value_of(function, scope.seen), torch.nn.Module) else _strongest(owner, arguments)
