"""A value that is kept from call to call by a size (`if n not in self.kept: self.kept[n] = table(n)`) is computed at
every call.

Condition: what is kept depends on the key alone, as the code says: on nothing else that differs between calls.
"""

import ast
import copy
from collections.abc import Iterator, Sequence

from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, assignments, first_line, parameters, stored_names


def leave_out(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The function without the cache that the statement at `spot` asks."""
    statement = spot.statement
    words = f"`{first_line(statement).rstrip(':')}` is left out: the cached value is computed at every call"
    if isinstance(statement, ast.If) and (new := _of_element(scope, spot, statement)):
        yield scope.candidate(spot.block[spot.index :], new, words)
    elif isinstance(statement, ast.Try) and (new := _of_error(scope, statement)):
        yield scope.candidate([statement], new, words)
    elif isinstance(statement, ast.Assign) and (value := _of_default(scope, statement)):
        yield scope.candidate([statement], [ast.Assign(targets=statement.targets, value=value, lineno=0)], words)
    else:
        yield _of_none(scope, spot, words)


def _of_none(scope: Scope, spot: Spot, words: str) -> Candidate | None:
    """`t = self.kept.get(n)`, then `if t is None: t = table(n); self.kept[n] = t`: what fills it is always run."""
    at = spot.index if isinstance(spot.statement, ast.Assign) else spot.index - 1
    if at < 0 or at + 1 >= len(spot.block):
        return None
    match spot.block[at], spot.block[at + 1]:
        case (
            ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Attribute(value=kept, attr="get"), args=[key] | [key, ast.Constant(value=None)]
                ),
            ),
            ast.If(
                test=ast.Compare(left=ast.Name(id=asked), ops=[ast.Is()], comparators=[ast.Constant(value=None)]),
                body=body,
                orelse=[],
            ),
        ) if name == asked and _keeps(scope, kept):
            new = _without_stores(body, kept)
            right = name in stored_names(new) and _depends_on_key(scope, key, new)
            return scope.candidate(spot.block[at : at + 2], new, words) if right else None
    return None


def _of_error(scope: Scope, statement: ast.Try) -> list[ast.stmt] | None:
    """`try: t = self.kept[n]`, `except KeyError: …`: what the handler does."""
    match statement:
        case ast.Try(
            body=[
                ast.Assign(value=ast.Subscript(value=kept, slice=key))
                | ast.Return(value=ast.Subscript(value=kept, slice=key))
            ],
            handlers=[ast.ExceptHandler(type=ast.Name(id="KeyError" | "LookupError"), body=body)],
            orelse=[],
            finalbody=[],
        ) if _keeps(scope, kept):
            new = _without_stores(body, kept)
            return new if _depends_on_key(scope, key, new) else None
    return None


def _of_default(scope: Scope, statement: ast.Assign) -> ast.expr | None:
    """The value of `t = self.kept.setdefault(n, table(n))`."""
    match statement.value:
        case ast.Call(func=ast.Attribute(value=kept, attr="setdefault"), args=[key, value]) if _keeps(scope, kept):
            return value if _depends_on_key(scope, key, [ast.Expr(value=value)]) else None
    return None


def _without_stores(block: Sequence[ast.stmt], kept: ast.expr) -> list[ast.stmt]:
    """`block` without what it writes into elements of `kept`."""
    new: list[ast.stmt] = []
    for statement in map(copy.deepcopy, block):
        if isinstance(statement, ast.Assign):
            stores = [
                isinstance(target, ast.Subscript) and ast.unparse(target.value) == ast.unparse(kept)
                for target in statement.targets
            ]
            statement.targets = [target for target, store in zip(statement.targets, stores, strict=True) if not store]
            if not statement.targets:
                continue
        new.append(statement)
    return new


def _of_element(scope: Scope, spot: Spot, statement: ast.If) -> list[ast.stmt] | None:
    """From `if key not in self.kept: self.kept[key] = value` on: the value under a name of its own.

    And of `if key in self.kept: return self.kept[key]` the statements that follow.
    """
    match statement.test:
        case ast.Compare(left=key, ops=[ast.NotIn() | ast.In() as operator], comparators=[kept]) if _keeps(scope, kept):
            cell = ast.Subscript(value=kept, slice=key, ctx=ast.Load())
        case _:
            return None
    if isinstance(operator, ast.In):
        returns = len(statement.body) == 1 and isinstance(statement.body[0], ast.Return)
        rest = [copy.deepcopy(one) for one in spot.rest if not ast.unparse(one).startswith(f"{ast.unparse(cell)} = ")]
        return rest if returns and rest and _depends_on_key(scope, key, rest) else None
    if statement.orelse or not _depends_on_key(scope, key, statement.body):
        return None
    name = scope.fresh(f"{ast.unparse(kept).rpartition('.')[2].strip('_').lower()}_here")
    new = [_Named(ast.dump(cell), name).visit(copy.deepcopy(one)) for one in (*statement.body, *spot.rest)]
    stores = [
        target
        for one in new
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name) and target.id == name
    ]
    return new if stores else None


_OF_A_KIND = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "to", "type_as")
"""Methods that take device and dtype of a tensor, which a key does not name either."""


def _depends_on_key(scope: Scope, key: ast.expr, block: Sequence[ast.stmt]) -> bool:
    """Whether what `block` computes depends on the key alone, beside what is the same in every call."""
    given = dict[str, list[ast.expr]]()
    for name, value in assignments(scope.function):
        given.setdefault(name, []).append(value)
    own = parameters(scope.function) | set(given)
    texts = {ast.unparse(one) for one in ast.walk(key) if isinstance(one, ast.expr)}
    for name in [text for text in texts if len(given.get(text, [])) == 1]:
        texts.add(ast.unparse(given[name][0]))
    made: set[str] = set()

    def is_known(node: ast.AST, depth: int = 8) -> bool:
        if isinstance(node, ast.expr) and ast.unparse(node) in texts - {"self"}:
            return True
        match node:
            case ast.Name(id=name):
                if name not in own or name == "self" or name in made or isinstance(node.ctx, ast.Store):
                    return True
                return depth > 0 and name in given and all(is_known(one, depth - 1) for one in given[name])
            case ast.Attribute(attr="device" | "dtype"):
                return True
            case ast.Call(func=ast.Attribute(value=owner, attr=how), args=args, keywords=keywords) if how in _OF_A_KIND:
                kept = [one for one in args if not (how in ("to", "type_as") and isinstance(one, ast.Name))]
                rest = [*kept, *keywords, *([owner] if how in ("to", "type_as") else [])]
                return all(is_known(one, depth) for one in rest)
        return all(is_known(one, depth) for one in ast.iter_child_nodes(node))

    for statement in block:
        if not is_known(statement):
            return False
        made |= {*stored_names(statement)} if isinstance(statement, ast.Assign) else set()
    return True


def _keeps(scope: Scope, node: ast.expr) -> bool:
    """Whether it may keep something from call to call: an attribute, or a name of the file."""
    own = parameters(scope.function) | set(stored_names(scope.function))
    return isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and node.id not in own)


class _Named(ast.NodeTransformer):
    """Replaces an element of a cache by a name."""

    def __init__(self, cell: str, name: str) -> None:
        self.cell, self.name = cell, name

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        same = ast.dump(ast.Subscript(value=node.value, slice=node.slice, ctx=ast.Load())) == self.cell
        return ast.Name(id=self.name, ctx=node.ctx) if same else node
