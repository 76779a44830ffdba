"""The user's function as a rewrite sees it: its tree, its text, and what its names held when it was run.

An edit replaces whole statements by others and leaves every other line of the file as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Worth = Literal["static", "size", "number", "tensor"]
"""What an expression's value depends on, the strongest last: nothing that varies, a size, a number that was taken out
of a tensor, a tensor's values."""

_ORDER: tuple[Worth, ...] = ("static", "size", "number", "tensor")
_OUT = ("item", "tolist")
_STATIC_ATTRIBUTES = ("dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")
_FACTORIES = ("torch", "F", "nn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One possible edit: the whole file after it, and what it does in words."""

    text: str
    words: str
    both: tuple[int, int] | None = None
    """Lines of a condition and of what stands under it, as the text was: a proof has to have seen both ways."""
    frees: bool = False
    """Whether it frees a size: what is left may take it in multiples only."""
    cheap: bool = True
    """False where the eager rewrite is slow to run (torch compiles structured control flow): the proof is then left
    to the exported program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A statement in its block; `loop` says that the block is run again (what is read above is read later)."""

    block: list[ast.stmt]
    index: int
    outer: tuple[Spot, ...]

    @property
    def statement(self) -> ast.stmt:
        return self.block[self.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One function of the user's file with what its locals held on a real call."""

    text: str
    function: ast.FunctionDef
    seen: Mapping[str, Any]
    """Local name -> its last value on a real call."""

    def spot(self, line: int) -> Spot | None:
        """The innermost statement that holds `line`."""
        return _find(self.function.body, line, ())

    def replace(self, block: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> str | None:
        """The file with the lines of `block` replaced; None when they share a line with other code."""
        lines = self.text.splitlines(keepends=True)
        first, last = block[0].lineno - 1, block[-1].end_lineno or block[-1].lineno
        head = lines[first][: block[0].col_offset]
        if head.strip():
            return None
        written = []
        for statement in new:
            for line in ast.unparse(ast.fix_missing_locations(statement)).splitlines():
                written.append(f"{head}{line}\n" if line.strip() else "\n")
        return "".join([*lines[:first], *written, *lines[last:]])

    def worth(self, node: ast.expr) -> Worth:
        """What the value of `node` depends on."""
        return _worth(node, self, self._names())

    def _names(self) -> dict[str, Worth]:
        """Names whose values are plain numbers, by what they were computed from; to a fixed point."""
        names: dict[str, Worth] = {}
        for _ in range(4):
            before = dict(names)
            for target, value in assignments(self.function):
                names[target] = _stronger(names.get(target, "static"), _worth(value, self, names))
            if names == before:
                break
        return names

    def rank(self, node: ast.expr) -> int | None:
        """Number of dimensions of a tensor expression, where it is a name that was seen."""
        value = value_of(node, self.seen)
        return value.ndim if isinstance(value, torch.Tensor) else None

    def is_tensor(self, node: ast.expr) -> bool:
        return isinstance(value_of(node, self.seen), torch.Tensor)

    def fresh(self, name: str) -> str:
        """`name`, or with a number where the function has it already."""
        taken = {n.id for n in ast.walk(self.function) if isinstance(n, ast.Name)} | set(self.seen)
        taken |= {n.name for n in ast.walk(self.function) if isinstance(n, ast.FunctionDef)}
        free, count = name, 2
        while free in taken:
            free, count = f"{name}_{count}", count + 1
        return free


def _find(block: list[ast.stmt], line: int, outer: tuple[Spot, ...]) -> Spot | None:
    for index, statement in enumerate(block):
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            spot = Spot(block=block, index=index, outer=outer)
            for inner in blocks(statement):
                found = _find(inner, line, (*outer, spot))
                if found is not None:
                    return found
            return spot
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
        if isinstance(part, ast.Assign):
            for target, its in (pair for one in part.targets for pair in _pairs(one, part.value)):
                yield from ((name, its) for name in stored_names(target))
        elif isinstance(part, ast.AugAssign) or (isinstance(part, ast.AnnAssign) and part.value is not None):
            value = part.value
            if value is not None:
                yield from ((name, value) for name in stored_names(part.target))
        elif isinstance(part, ast.For):
            yield from ((name, part.iter) for name in stored_names(part.target))
        elif isinstance(part, ast.NamedExpr):
            yield part.target.id, part.value


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Of `a, b = x, y` each name with its own value."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def stored_names(node: ast.AST | Sequence[ast.stmt]) -> list[str]:
    """Names that are assigned in `node`, in order, each once."""
    nodes = node if isinstance(node, Sequence) else [node]
    names = [n.id for one in nodes for n in walk(one) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return list(dict.fromkeys(names))


def loaded_names(node: ast.AST | Sequence[ast.AST]) -> list[str]:
    """Names that are read in `node`, in order, each once; `x += 1` reads x."""
    nodes = node if isinstance(node, Sequence) else [node]
    names: list[str] = []
    for one in nodes:
        for part in walk(one):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                names.append(part.id)
            if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
                names.append(part.target.id)
    return list(dict.fromkeys(names))


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """As ast.walk, in the order of the source."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from walk(child)


def read_later(spot: Spot, end: int | None = None) -> set[str]:
    """Names that may be read after the statements of `spot.block` up to `end` (that of the spot when left out)."""
    after = spot.index + 1 if end is None else end
    names = set(loaded_names(spot.block[after:]))
    for outer in spot.outer:
        names |= set(loaded_names(outer.block[outer.index + 1 :]))
        if isinstance(outer.statement, ast.For | ast.While):
            names |= set(loaded_names(outer.statement))
    return names


def bound_before(spot: Spot, function: ast.FunctionDef) -> set[str]:
    """Names that certainly or possibly hold a value when the statement is reached."""
    arguments = function.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    for outer in (*spot.outer, spot):
        names |= set(stored_names(outer.block[: outer.index]))
        if isinstance(outer.statement, ast.For) and outer is not spot:
            names |= set(stored_names(outer.statement.target))
    return names


def expression(text: str) -> ast.expr:
    """Parses an expression of ours."""
    return ast.parse(text, mode="eval").body


def statements(text: str) -> list[ast.stmt]:
    """Parses statements of ours."""
    return ast.parse(text).body


def value_of(node: ast.expr, seen: Mapping[str, Any]) -> Any:
    """What a name or a chain of attributes held on the call that was seen; None when that is not known."""
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


def _stronger(*worths: Worth) -> Worth:
    return max(worths, key=_ORDER.index, default="static")


def _worth(node: ast.expr, scope: Scope, names: Mapping[str, Worth]) -> Worth:
    def of(*nodes: ast.expr) -> Worth:
        return _stronger("static", *(_worth(one, scope, names) for one in nodes))

    if isinstance(value_of(node, scope.seen), torch.Tensor):
        return "tensor"
    if isinstance(node, ast.Name):
        return names.get(node.id, "static")
    if isinstance(node, ast.Attribute):
        base = of(node.value)
        if base != "tensor":
            return base if not isinstance(node.value, ast.Name) else "static"
        return "size" if node.attr == "shape" else "static" if node.attr in _STATIC_ATTRIBUTES else "tensor"
    if isinstance(node, ast.Call):
        return _worth_of_call(node, scope, names)
    if isinstance(node, ast.Subscript):
        return of(node.value)
    return of(*(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)))


def _worth_of_call(node: ast.Call, scope: Scope, names: Mapping[str, Worth]) -> Worth:
    def of(*nodes: ast.expr) -> Worth:
        return _stronger("static", *(_worth(one, scope, names) for one in nodes))

    arguments = of(*node.args, *(keyword.value for keyword in node.keywords))
    function = node.func
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
    owner = of(function.value)
    if owner == "tensor":
        if function.attr in _OUT:
            return "number"
        if function.attr in ("size", "numel", "nelement"):
            return "size"
        return "static" if function.attr in ("dim", "is_floating_point") else "tensor"
    if isinstance(value_of(function, scope.seen), torch.nn.Module):
        return "tensor"
    return _stronger(owner, arguments)
