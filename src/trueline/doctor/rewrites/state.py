"""A state in a Python attribute becomes a buffer, which capture passes in and out (`--state explicit`); one that no
answer depends on is kept in training only.

    self.calls = 0                self.register_buffer('calls', torch.tensor(0), persistent=False)
    self.calls += 1               self.calls = self.calls + 1
    self.keys = []                self.register_buffer('keys', torch.zeros(0, 4), persistent=False)
    self.keys.append(k)           self.keys = torch.cat([self.keys, k[None]])
    torch.stack(self.keys)        self.keys
    self.ema = [torch.zeros(4)]   self.register_buffer('ema_0', torch.zeros(4), persistent=False)
    self.ema[0] = y               self.ema_0 = y

Conditions: `__init__` of the class sets it once, to a number, a tensor, an empty list that later holds tensors of one
shape, or a list or dict whose elements are used by constant keys only. The buffer is not persistent, so checkpoints
stay as they are. It is assigned, never written in place, so a number that was passed on keeps its value. Source:
torch's documentation of nn.Module.register_buffer.
"""

import ast
import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, blocks, expression, statements

_NUMBERS: dict[type, str] = {bool: "", int: "", float: ", dtype=torch.float64"}
"""Type of a Python number -> the dtype argument of the tensor that holds it."""
_IN_PLACE = ("append", "extend", "update", "pop", "clear", "insert", "setdefault")
_NO_LIST = ("[]", "list()")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attribute:
    name: str
    kind: Literal["number", "rows", "tensor"]
    set_by: ast.stmt
    """The statement of `__init__`."""
    value: ast.expr
    """The buffer's first value."""


def register_buffers(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """The attribute that the statement writes as a buffer, everywhere in its class."""
    name, owner = written_attribute(spot.statement), _class_of(scope)
    if not name or owner is None:
        return
    held = getattr(scope.seen.get("self"), "__dict__", {}).get(name)
    attribute = _attribute(scope, owner, name, held)
    text = _register_buffer(scope, owner, attribute) if attribute is not None else None
    text = text or _register_elements(scope, owner, name, held)
    if text:
        yield Candidate(text=text, words=f"`self.{name}` is a buffer, to be captured with --state explicit")


def buffers_of(node: ast.ClassDef) -> dict[str, ast.expr]:
    """The buffers that `__init__` of the class registers: name -> value."""
    buffers: dict[str, ast.expr] = {}
    for statement in _init(node):
        match statement:
            case ast.Expr(value=ast.Call(func=called, args=[ast.Constant(value=str(name)), value])):
                if ast.unparse(called) == "self.register_buffer":
                    buffers[name] = value
    return buffers


def as_buffer(value: Any, empty: Any) -> torch.Tensor:
    """An attribute's value as a buffer; `empty` makes the buffer of an empty list. Raises TypeError."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        rows: torch.Tensor = torch.stack(value).detach() if value else empty()
        return rows
    if type(value) in _NUMBERS:
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise TypeError(f"an attribute of type {type(value).__name__} cannot be a buffer")


def written_attribute(statement: ast.AST) -> str | None:
    """The attribute of `self` that a simple statement writes: itself, an element of it, or in place."""
    targets: list[ast.expr] = []
    match statement:
        case ast.Assign():
            targets = statement.targets
        case ast.AugAssign():
            targets = [statement.target]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=method))):
            in_place = method in _IN_PLACE or (method.endswith("_") and not method.endswith("__"))
            targets = [owner] if in_place else []
    flat = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return next((name for target in flat if (name := _of_self(target))), None)


def _of_self(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return node.attr
        node = node.value
    return None


def _class_of(scope: Scope) -> ast.ClassDef | None:
    """The class of the method."""
    line = scope.function.lineno
    around = [
        node
        for node in ast.walk(ast.parse(scope.text))
        if isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or line)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _is_init(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def _init(node: ast.ClassDef) -> list[ast.stmt]:
    return next((one.body for one in node.body if isinstance(one, ast.FunctionDef) and _is_init(one)), [])


def _register_elements(scope: Scope, owner: ast.ClassDef, name: str, held: Any) -> str | None:
    """The file with each element of a list or dict as a buffer of its own."""
    values = elements_of(name, held)
    set_by = [one for one in _init(owner) if _sets(one, name)]
    match [one.value for one in set_by if isinstance(one, ast.Assign)]:
        case [ast.List(elts=given) | ast.Dict(values=given)] if len(given) == len(values) > 0:
            pass
        case _:
            return None
    pairs = zip(values, given, strict=True)
    alone = [one for element, value in pairs for one in statements(f"self.{element} = {ast.unparse(value)}")]
    first, last = owner.lineno - 1, owner.end_lineno or owner.lineno
    lines = scope.text.splitlines(keepends=True)
    inside = re.sub(rf"\bself\.{name}\[['\"]?(\w+)['\"]?\]", rf"self.{name}_\1", "".join(lines[first:last]))
    text: str | None = "".join([*lines[:first], inside, *lines[last:]])
    text = replace(scope, text=text or "").replace(set_by, alone)
    for element, value in values.items():
        scope = replace(scope, text=text or "")
        node = _class_of(replace(scope, function=_find_init(scope, owner))) if text else None
        attribute = _attribute(scope, node, element, value) if node is not None else None
        text = _register_buffer(scope, node, attribute) if node is not None and attribute is not None else None
    return None if text is None or re.search(rf"\bself\.{name}\b", text) else text


def _find_init(scope: Scope, owner: ast.ClassDef) -> ast.FunctionDef:
    """`__init__` of the class as it stands in the edited text; lines above it have not changed."""
    nodes = [one for one in ast.walk(ast.parse(scope.text)) if isinstance(one, ast.ClassDef)]
    found = next(one for one in nodes if one.lineno == owner.lineno)
    return next(one for one in found.body if isinstance(one, ast.FunctionDef) and _is_init(one))


def elements_of(name: str, held: Any) -> Mapping[str, Any]:
    """Names and values of the buffers that stand for the elements of a list or dict."""
    pairs = enumerate(held) if isinstance(held, list) else held.items() if isinstance(held, dict) else ()
    return {f"{name}_{key}": value for key, value in pairs}


def _attribute(scope: Scope, owner: ast.ClassDef, name: str, held: Any) -> _Attribute | None:
    set_by = [one for one in _init(owner) if _sets(one, name)]
    imports_torch = any(
        isinstance(one, ast.Import) and any(a.name == "torch" and not a.asname for a in one.names)
        for one in ast.parse(scope.text).body
    )
    if len(set_by) != 1 or not imports_torch:
        return None
    given = set_by[0].value  # type: ignore[attr-defined]
    if ast.unparse(given) in _NO_LIST:
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
    """No rows, of the shape and dtype of the list's tensors."""
    if not isinstance(held, list) or not held or not all(isinstance(one, torch.Tensor) for one in held):
        return None
    forms = {(tuple(one.shape), one.dtype) for one in held}
    if len(forms) > 1:
        return None
    ((shape, dtype),) = forms
    like = "" if dtype is torch.float32 else f", dtype={dtype}"
    return expression(f"torch.zeros({', '.join(map(str, (0, *shape)))}{like})")


def _register_buffer(scope: Scope, owner: ast.ClassDef, attribute: _Attribute) -> str | None:
    """The file with the attribute as a buffer; None when an edit would share a line with other code."""
    value = ast.unparse(attribute.value)
    registered = statements(f"self.register_buffer({attribute.name!r}, {value}, persistent=False)")
    edits: list[tuple[ast.stmt, list[ast.stmt]]] = [(attribute.set_by, registered)]
    for method in owner.body:
        if isinstance(method, ast.FunctionDef) and not _is_init(method):
            edits += _edits(method.body, attribute)
    text: str | None = scope.text
    for before, after in sorted(edits, key=lambda pair: -pair[0].lineno):  # lines above an edit keep their numbers
        text = replace(scope, text=text).replace([before], after) if text else None
    return text


def _edits(block: list[ast.stmt], attribute: _Attribute) -> Iterator[tuple[ast.stmt, list[ast.stmt]]]:
    """The innermost statements that use the attribute, each with its replacement."""
    if attribute.kind == "tensor":
        return
    for statement in block:
        head, inner = copy.deepcopy(statement), list(blocks(statement))
        for name in ("body", "orelse", "finalbody") if inner else ():
            setattr(head, name, [])
        plain = ast.dump(head)
        whole = isinstance(statement, ast.If) and _Tensors(attribute).longest(statement) is not None
        changed = whole or ast.dump(_Tensors(attribute).visit(head)) != plain
        if changed:
            yield statement, [_Tensors(attribute).visit(copy.deepcopy(statement))]
        else:
            for deeper in inner:
                yield from _edits(deeper, attribute)


class _Tensors(ast.NodeTransformer):
    """Operations on a number or a list as operations on a tensor."""

    def __init__(self, attribute: _Attribute) -> None:
        self.name, self.kind = attribute.name, attribute.kind
        self.self = f"self.{attribute.name}"

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not _is(node.target, self.name) or self.kind != "number":
            return node
        value = ast.BinOp(left=expression(self.self), op=node.op, right=node.value)
        return statements(f"{self.self} = {ast.unparse(value)}")[0]

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if len(node.targets) != 1 or not _is(node.targets[0], self.name):
            return node
        value = ast.unparse(node.value)
        if self.kind == "rows":
            return statements(f"{self.self} = {self.self}[:0]")[0] if value in _NO_LIST else node
        anew = not any(_is(one, self.name) for one in ast.walk(node.value))
        return statements(f"{self.self} = torch.full_like({self.self}, {value})")[0] if anew else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if self.kind == "rows" and isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            match ast.unparse(call.func), [ast.unparse(one) for one in call.args]:
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

    def visit_If(self, node: ast.If | ast.IfExp) -> ast.AST:
        """A list is true when it is not empty; `if len(rows) > 3: rows.pop(0)` keeps the last three."""
        longest = self.longest(node)
        if longest is not None:
            first = f"torch.sym_max({self.self}.shape[0] - {longest}, 0)"
            return statements(f"{self.self} = {self.self}[{first}:]")[0]
        self.generic_visit(node)
        match node.test:
            case ast.UnaryOp(op=ast.Not(), operand=operand) if self.kind == "rows" and _is(operand, self.name):
                node.test = expression(f"{self.self}.shape[0] == 0")
            case test if self.kind == "rows" and _is(test, self.name):
                node.test = expression(f"{self.self}.shape[0] > 0")
        return node

    visit_IfExp = visit_If

    def longest(self, node: ast.If | ast.IfExp) -> str | None:
        match node:
            case ast.If(test=ast.Compare(left=left, ops=[ast.Gt()], comparators=[most]), body=[one], orelse=[]):
                drops = ast.unparse(one) in (f"{self.self}.pop(0)", f"{self.self} = {self.self}[1:]")
                counted = ast.unparse(left) == f"len({self.self})" and self.kind == "rows"
                return ast.unparse(most) if drops and counted else None
        return None

    def _is_rows(self, node: ast.expr) -> bool:
        """Whether `node` is the list, or a slice of it."""
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            node = node.value
        return self.kind == "rows" and _is(node, self.name)


def keep_for_training(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The write under `if self.training:`, where only what keeps the state reads it."""
    name = written_attribute(spot.statement)
    if name is not None and not _is_read(scope, name):
        guarded = ast.If(test=expression("self.training"), body=[copy.deepcopy(spot.statement)], orelse=[])
        words = f"`{ast.unparse(spot.statement)}` is for training only"
        yield scope.candidate([spot.statement], [guarded], words)


def _is_read(scope: Scope, name: str) -> bool:
    """Whether the class reads the attribute outside of training and of statements that write it: an answer may depend
    on it after more calls than the proof makes."""
    owner = _class_of(scope)
    waiting: list[ast.AST] = [one for one in owner.body if not _is_init(one)] if owner is not None else []
    while waiting:
        node = waiting.pop()
        if written_attribute(node) is not None:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "self.training":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{name}":
            return True
        waiting += ast.iter_child_nodes(node)
    return False
