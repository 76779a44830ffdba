"""A state in a plain Python attribute becomes a buffer, which capture hands in and out (`--state explicit`).

    self.calls = 0                self.register_buffer('calls', torch.tensor(0), persistent=False)
    self.calls += 1               self.calls = self.calls + 1
    self.keys = []                self.register_buffer('keys', torch.zeros(0, 4), persistent=False)
    self.keys.append(k)           self.keys = torch.cat([self.keys, k[None]])
    torch.stack(self.keys)        self.keys

Conditions: `__init__` of the class sets it once, to a number, a tensor, or an empty list of what are tensors of one
shape later. The buffer is not persistent, so checkpoints stay as they are, and is bound anew, never written in place:
a number that was handed on stays what it was. Source: torch's documentation of nn.Module.register_buffer.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, blocks, expression, statements

Kind = Literal["number", "rows", "tensor"]
_NUMBERS: dict[type, str] = {bool: "", int: "", float: ", dtype=torch.float64"}
"""Type of a Python number -> what makes the same of it in a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attribute:
    name: str
    kind: Kind
    set_by: ast.stmt
    """The statement of `__init__`."""
    value: ast.expr
    """The buffer as it begins."""


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The attribute that the statement writes as a buffer, everywhere in its class."""
    name = written_attribute(spot.statement)
    owner = class_of(scope)
    found = _attribute(scope, owner, name) if name and owner is not None else None
    if owner is None or found is None:
        return
    text = _register_buffer(scope, owner, found)
    if text:
        yield Candidate(text=text, words=f"`self.{name}` is a buffer, to be captured with --state explicit")


def buffers_of(node: ast.ClassDef) -> dict[str, ast.expr]:
    """The buffers that `__init__` of the class registers: name -> what it registers."""
    found: dict[str, ast.expr] = {}
    for statement in _init(node):
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "self.register_buffer" and len(call.args) == 2:
            name = call.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found[name.value] = call.args[1]
    return found


def as_buffer(value: Any, empty: Any) -> torch.Tensor:
    """What an attribute holds as a buffer; `empty` makes the buffer of an empty list. Raises TypeError."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        rows: torch.Tensor = torch.stack(value).detach() if value else empty()
        return rows
    if type(value) in _NUMBERS:
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise TypeError(f"an attribute of type {type(value).__name__} is no buffer")


_IN_PLACE = ("append", "extend", "update", "pop", "clear", "insert", "setdefault")


def written_attribute(statement: ast.stmt) -> str | None:
    """The attribute of `self` that a simple statement writes: itself, an element of it, or in place."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AugAssign):
        targets = [statement.target]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        in_place = isinstance(function, ast.Attribute) and (
            function.attr in _IN_PLACE or (function.attr.endswith("_") and not function.attr.endswith("__"))
        )
        targets = [function.value] if isinstance(function, ast.Attribute) and in_place else []
    flat = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return next((name for target in flat if (name := _of_self(target))), None)


def _of_self(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return node.attr
        node = node.value
    return None


def class_of(scope: Scope) -> ast.ClassDef | None:
    """The class in which the function stands."""
    line = scope.function.lineno
    around = [
        node
        for node in ast.walk(ast.parse(scope.text))
        if isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or line)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _init(node: ast.ClassDef) -> list[ast.stmt]:
    functions = (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
    return next((one.body for one in functions), [])


def _attribute(scope: Scope, owner: ast.ClassDef, name: str) -> _Attribute | None:
    set_by = [one for one in _init(owner) if _sets(one, name)]
    imports_torch = any(
        isinstance(one, ast.Import) and any(a.name == "torch" and not a.asname for a in one.names)
        for one in ast.parse(scope.text).body
    )
    if len(set_by) != 1 or not imports_torch:
        return None
    given = set_by[0].value  # type: ignore[attr-defined]
    held = getattr(scope.seen.get("self"), "__dict__", {}).get(name)
    if ast.unparse(given) in ("[]", "list()"):
        empty = _empty(held)
        return None if empty is None else _Attribute(name=name, kind="rows", set_by=set_by[0], value=empty)
    if type(held) in _NUMBERS:
        value = expression(f"torch.tensor({ast.unparse(given)}{_NUMBERS[type(held)]})")
        return _Attribute(name=name, kind="number", set_by=set_by[0], value=value)
    if isinstance(held, torch.Tensor) and not isinstance(given, ast.Constant):
        return _Attribute(name=name, kind="tensor", set_by=set_by[0], value=given)
    return None


def _sets(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, ast.AnnAssign):
        return statement.value is not None and _is(statement.target, name)
    return isinstance(statement, ast.Assign) and len(statement.targets) == 1 and _is(statement.targets[0], name)


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and _of_self(node) == name


def _empty(held: Any) -> ast.expr | None:
    """No rows of the form that the list's tensors have."""
    if not isinstance(held, list) or not held or not all(isinstance(one, torch.Tensor) for one in held):
        return None
    forms = {(tuple(one.shape), one.dtype) for one in held}
    if len(forms) > 1:
        return None
    ((shape, dtype),) = forms
    like = "" if dtype is torch.float32 else f", dtype={dtype}"
    return expression(f"torch.zeros({', '.join(map(str, (0, *shape)))}{like})")


def _register_buffer(scope: Scope, owner: ast.ClassDef, found: _Attribute) -> str | None:
    """The file with the attribute as a buffer; None when an edit would share a line with other code."""
    value = ast.unparse(found.value)
    registered = statements(f"self.register_buffer({found.name!r}, {value}, persistent=False)")
    edits: list[tuple[ast.stmt, list[ast.stmt]]] = [(found.set_by, registered)]
    for method in owner.body:
        if isinstance(method, ast.FunctionDef) and method.name != "__init__":
            edits += _edits(method.body, found)
    text: str | None = scope.text
    for before, after in sorted(edits, key=lambda pair: -pair[0].lineno):  # what stands above keeps its lines
        text = replace(scope, text=text).replace([before], after) if text else None
    return text


def _edits(block: list[ast.stmt], found: _Attribute) -> Iterator[tuple[ast.stmt, list[ast.stmt]]]:
    """Statements that speak of the attribute, the innermost, each with what stands in its place."""
    if found.kind == "tensor":
        return
    for statement in block:
        head, inner = copy.deepcopy(statement), list(blocks(statement))
        for name in ("body", "orelse", "finalbody") if inner else ():
            setattr(head, name, [])
        plain = ast.dump(head)
        changed = _Tensors(found).visit(head)
        if not inner:
            if ast.dump(changed) != plain:
                yield statement, [changed]
        elif ast.dump(changed) != plain:
            yield statement, [_Tensors(found).visit(copy.deepcopy(statement))]
        else:
            for deeper in inner:
                yield from _edits(deeper, found)


class _Tensors(ast.NodeTransformer):
    """What is done with a number, or with a list, as it is done with a tensor."""

    def __init__(self, found: _Attribute) -> None:
        self.found = found
        self.self = f"self.{found.name}"

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not _is(node.target, self.found.name) or self.found.kind != "number":
            return node
        value = ast.BinOp(left=expression(self.self), op=node.op, right=node.value)
        return statements(f"{self.self} = {ast.unparse(value)}")[0]

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if len(node.targets) != 1 or not _is(node.targets[0], self.found.name):
            return node
        value = ast.unparse(node.value)
        if self.found.kind == "rows":
            return statements(f"{self.self} = {self.self}[:0]")[0] if value in ("[]", "list()") else node
        anew = not any(_is(one, self.found.name) for one in ast.walk(node.value))
        return statements(f"{self.self} = torch.full_like({self.self}, {value})")[0] if anew else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if self.found.kind == "rows" and isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            done = ast.unparse(call.func), [ast.unparse(one) for one in call.args]
            match done:
                case (name, [value]) if name == f"{self.self}.append":
                    return statements(f"{self.self} = torch.cat([{self.self}, ({value})[None]])")[0]
                case (name, ["0"]) if name == f"{self.self}.pop":
                    return statements(f"{self.self} = {self.self}[1:]")[0]
                case (name, []) if name == f"{self.self}.clear":
                    return statements(f"{self.self} = {self.self}[:0]")[0]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        rows = ast.unparse(node.args[0]) if node.args and self._is_rows(node.args[0]) else None
        if rows is None:
            return node
        given = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
        axis = int(ast.unparse(given[0])) if given and ast.unparse(given[0]).isdigit() else 0 if not given else None
        match ast.unparse(node.func), axis:
            case "len", 0:
                return expression(f"{rows}.shape[0]")
            case "sum", 0:
                return expression(f"{rows}.sum(0)")
            case "torch.stack", int():
                return expression(rows if axis == 0 else f"{rows}.movedim(0, {axis})")
            case "torch.cat" | "torch.concat", int():
                return expression(f"{rows}.movedim(0, {axis}).flatten({axis}, {axis + 1})")
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        node.test = self._whether(node.test)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        node.test = self._whether(node.test)
        return node

    def _whether(self, test: ast.expr) -> ast.expr:
        """A list is true when it is not empty."""
        if self.found.kind != "rows":
            return test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and _is(test.operand, self.found.name):
            return expression(f"{self.self}.shape[0] == 0")
        return expression(f"{self.self}.shape[0] > 0") if _is(test, self.found.name) else test

    def _is_rows(self, node: ast.expr) -> bool:
        """Whether `node` is the list, or some of it in its order."""
        if self.found.kind != "rows":
            return False
        cut = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and _is(node.value, self.found.name)
        return _is(node, self.found.name) or cut
