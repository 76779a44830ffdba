"""What Python looks up or selects by a size, as tensors over the size.

    x * self.scales[x.shape[1]]          x * torch.tensor([self.scales[at] for at in range(1, 80)])[x.shape[1] - 1]
    x[:, [i for i in range(n) if i % 3]]         i = torch.arange(n); x[:, i[i % 3 != 0]]

A number may come from a dict, a list, a text or a function: anything that depends on one size alone. The table ends
where the function raises, or at TABLE, and the size is checked against its beginning. Condition: none; the proof asks
beyond its end.
"""

import ast
import copy
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    arguments_text,
    assignments,
    expression,
    first_line,
    loaded_names,
    named_value,
    statements,
    substitute,
)
from trueline.doctor.rewrites.tensors.numbers import TABLE

_DTYPES = {bool: "torch.bool", int: "torch.int64", float: "torch.float64"}
_PLAIN = (
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.operator, ast.unaryop, ast.boolop,
    ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.Name, ast.Constant, ast.expr_context,
)  # fmt: skip
"""What torch computes of a size by itself, or is a branch like any other."""
_DEPTH = 5
"""Names that stand for one another."""


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The function with places as tensors, and with numbers from tables."""
    yield _edit(scope, _Places(scope))
    yield _edit(scope, _Tables(scope))


class SizeTable(NamedTuple):
    """What an expression is at each size, as a table."""

    value: ast.expr
    """The element of the table at the size."""
    checks: list[str]
    """Statements that have to stand before it."""
    most: float
    """The largest number in it."""


def tabulate(scope: Scope, node: ast.expr) -> SizeTable | None:
    """The table of an expression that follows from one size; None where there is none."""
    tables = _Tables(scope)
    value = tables.make_table(node)
    return None if value is None else SizeTable(value, tables.before, tables.most)


class _Edit(ast.NodeTransformer):
    """An edit of expressions, each of which may need statements before the one that holds it."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.words: list[str] = []
        self.before: list[str] = []
        self.what = ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node


def _edit(scope: Scope, edit: _Edit) -> Candidate | None:
    new: dict[int, list[ast.stmt]] = {}
    for at, statement in enumerate(scope.function.body):
        edit.before = []
        changed = edit.visit(copy.deepcopy(statement))
        if ast.dump(changed) != ast.dump(statement):
            new[at] = [*(one for text in dict.fromkeys(edit.before) for one in statements(text)), changed]
    new |= {at: [] for at in _find_unread(scope, new)}
    text: str | None = scope.text
    for at in sorted(new, reverse=True):  # the last first: lines above it stay where they are
        text = replace(scope, text=text).replace([scope.function.body[at]], new[at]) if text else None
    return Candidate(text=text, words=f"`{edit.words[0]}` {edit.what}") if text and edit.words else None


def _find_unread(scope: Scope, new: Mapping[int, list[ast.stmt]]) -> list[int]:
    """Statements that give a name a value by a size, and that only what was edited has read: they would fix that size
    still."""
    body = scope.function.body
    unread: list[int] = []
    for at, statement in reversed([*enumerate(body)] if new else []):
        named = named_value(statement) if isinstance(statement, ast.Assign) else None
        if named is None or at in new or scope.depends_on(named[1]) != "size" or scope.is_tensor(named[1]):
            continue
        left = [one for i, one in enumerate(body) if i not in unread for one in new.get(i, [one])]
        if named[0] in loaded_names(body) and named[0] not in loaded_names(left):
            unread.append(at)
    return unread


class _Tables(_Edit):
    """Numbers that depend on one size."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.what = "comes from a table over the size"
        self._known = _globals_of(scope) | dict(scope.seen)
        self._sizes, self._named = _names_by_size(scope)
        self.most = 0.0
        """The largest number in the last table."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            table = self.make_table(node)
            if table is not None:
                return table
        return super().visit(node)

    def make_table(self, node: ast.expr) -> ast.expr | None:
        at = self.scope.fresh("at")
        sizes = _Sizes(self.scope, at, self._sizes)
        asked = sizes.visit(substitute(node, self._named))
        if len(sizes.found) != 1 or all(isinstance(one, _PLAIN) for one in ast.walk(asked)):
            return None
        if any(self.scope.depends_on(ast.Name(id=name, ctx=ast.Load())) != "static" for name in loaded_names(asked)):
            return None
        (size,) = sizes.found
        values = self._evaluate(asked, at, size)
        if values is None:
            return None
        first, count, dtype = values
        if first:
            self.before.append(f"torch._check({size} >= {first})")
        self.words.append(first_line(node))
        numbers = f"range({first}, {first + count})" if first else f"range({count})"
        listed = f"[{ast.unparse(asked)} for {at} in {numbers}]"
        return expression(f"torch.tensor({listed}, dtype={dtype})[{size}{f' - {first}' if first else ''}]")

    def _evaluate(self, asked: ast.expr, at: str, size: str) -> tuple[int, int, str] | None:
        """The first size, the number of sizes and the dtype of a table around the size of the call; None where what is
        looked up is no number."""
        code = compile(ast.fix_missing_locations(ast.Expression(body=asked)), "<table>", "eval")

        def value(number: int) -> Any:
            try:
                found = eval(code, {**self._known, at: number})  # the user's own expression
            except Exception:  # noqa: BLE001 - whatever it raises: the table ends there
                return None
            return found if type(found) in _DTYPES else None

        try:
            middle = eval(size, dict(self._known))
        except Exception:  # noqa: BLE001 - the tensor has no value here
            return None
        if not isinstance(middle, int) or value(middle) is None:
            return None
        first = next((number + 1 for number in range(middle - 1, -1, -1) if value(number) is None), 0)
        end = next((number for number in range(middle + 1, TABLE + 1) if value(number) is None), TABLE + 1)
        numbers = [value(number) for number in range(first, end)]
        self.most, kinds = max(numbers), {*map(type, numbers)}
        kind = float if float in kinds else int if int in kinds else bool
        return first, end - first, _DTYPES[kind]


class _Sizes(ast.NodeTransformer):
    """Replaces each size of a tensor by a name."""

    def __init__(self, scope: Scope, name: str, known: Collection[str]) -> None:
        """`known`: names that are sizes."""
        self.scope, self.name, self.known = scope, name, known
        self.found: set[str] = set()

    def visit(self, node: ast.AST) -> Any:
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in self.known:
                self.found.add(name)
                return ast.Name(id=self.name, ctx=ast.Load())
            case (
                ast.Subscript(value=ast.Attribute(value=owner, attr="shape"), slice=ast.Constant(value=int()))
                | ast.Call(func=ast.Attribute(value=owner, attr="size"), args=[ast.Constant(value=int())])
            ) if self.scope.is_tensor(owner):
                self.found.add(ast.unparse(node))
                return ast.Name(id=self.name, ctx=ast.Load())
            case ast.Call(func=ast.Name(id="len"), args=[owner]) if self.scope.is_tensor(owner):
                self.found.add(f"{ast.unparse(owner)}.shape[0]")
                return ast.Name(id=self.name, ctx=ast.Load())
        return super().visit(node)


def _names_by_size(scope: Scope) -> tuple[set[str], dict[str, ast.expr]]:
    """Names that are sizes; and those that are assigned once, to what depends on a size, with the names of such in
    their values replaced."""
    values: dict[str, list[ast.expr]] = {}
    for name, value in assignments(scope.function):
        values.setdefault(name, []).append(value)
    once = {name: found[0] for name, found in values.items() if len(found) == 1 and _reads_size(scope, found[0])}
    sizes = {
        name
        for name, value in once.items()
        if isinstance(_Sizes(scope, "at", ()).visit(copy.deepcopy(value)), ast.Name)
    }
    once = {name: value for name, value in once.items() if name not in sizes}
    for _ in range(_DEPTH):
        once = {name: substitute(value, once) for name, value in once.items()}
    return sizes, {name: value for name, value in once.items() if not set(loaded_names(value)) & set(once)}


def _reads_size(scope: Scope, value: ast.expr) -> bool:
    """Whether it is made of sizes, and of names that are."""
    return not scope.is_tensor(value) and scope.depends_on(value) == "size"


def _globals_of(scope: Scope) -> dict[str, Any]:
    """The names of the user's file."""
    module = sys.modules.get(type(scope.seen.get("self")).__module__)
    return dict(vars(module)) if module is not None else {}


class _Places(_Edit):
    """`[i for i in range(n) if i % 3]` as the elements of `torch.arange(n)` under a mask."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.what = "is a tensor of places"

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        match node.generators:
            case [ast.comprehension(target=ast.Name(id=i), iter=counted, ifs=tests)]:
                pass
            case _:
                return node
        if not isinstance(counted, ast.Call) or ast.unparse(counted.func) != "range" or not tests:
            return node
        if self.scope.depends_on(counted) != "size":
            return node
        if any(self.scope.depends_on(one) in ("number", "tensor") for one in (node.elt, *tests)):
            return node
        self.words.append(ast.unparse(node))
        at = self.scope.fresh(i) if not self.before else self.scope.fresh(f"{i}_{len(self.before)}")
        self.before.append(f"{at} = torch.arange({arguments_text(counted)})")
        named: dict[str, ast.expr] = {i: ast.Name(id=at, ctx=ast.Load())}
        mask = " & ".join(f"({_as_mask(substitute(one, named))})" for one in tests)
        value = ast.unparse(substitute(node.elt, named))
        return expression(f"{value}[{mask}]" if value == at else f"({value})[{mask}]")


def _as_mask(test: ast.expr) -> str:
    """A condition on a counter as one on all counters."""
    match test:
        case ast.BoolOp(op=op, values=values):
            return (" & " if isinstance(op, ast.And) else " | ").join(f"({_as_mask(one)})" for one in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"~({_as_mask(operand)})"
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [left, *others]
            pairs = zip(sides, ops, sides[1:], strict=False)
            parts = [ast.Compare(left=one, ops=[op], comparators=[other]) for one, op, other in pairs]
            return " & ".join(f"({ast.unparse(part)})" for part in parts)
    return f"({ast.unparse(test)}) != 0"
