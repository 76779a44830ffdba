"""A list that holds the last few tensors, or one for each of a fixed number of places, as one tensor that a loop can
carry.

    window = collections.deque(maxlen=3)            window = torch.stack([torch.zeros_like(x[:, 0])] * 3)
    for t in range(n):                              held = torch.zeros((), dtype=torch.int64)
        window.append(x[:, t])                      for t in range(n):
        y.append(sum(window) / len(window))   ──▶       window = torch.cat([window[1:], x[:, t].unsqueeze(0)])
                                                        held = (held + 1).clamp(max=3)
                                                        y.append(window.sum(0) / held)

The newest is last; before that many were appended the first places hold zeros, which no use counts. So is a list that
`pop(0)` keeps short, and `rows[-3:]` of a growing one. A list of places (`season[t % 4] = s`) is stacked before the
loop. Condition: the tensors of a list have one shape, and nothing else is done with it.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trueline.doctor.rewrites.appends import appended_by
from trueline.doctor.rewrites.control.folds import rows_of
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    bound_before,
    expression,
    first_line,
    loaded_names,
    named_value,
    statements,
    stored_names,
    substitute,
)

MOST = 64
"""Elements of a list that becomes a tensor."""
_REDUCED = {"amax": "float('-inf')", "amin": "float('inf')", "max": "float('-inf')", "min": "float('inf')"}


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The loop at `spot` with tensors for the short lists that its steps change."""
    loop = spot.statement
    if not isinstance(loop, ast.For) or loop.orelse or scope.depends_on(loop.iter) == "static":
        return
    for name in stored_names([one for one in spot.block[: spot.index] if isinstance(one, ast.Assign)]):
        yield _as_window(scope, spot, loop, name)
        yield _as_places(scope, spot, loop, name)


@dataclass(frozen=True, slots=True)
class _Window:
    """A list whose last elements count."""

    name: str
    size: int
    value: ast.expr
    """What each step appends."""
    alias: str
    """A name that each step gives the last elements, of a list that grows; else nothing."""
    kept: bool
    """Whether the list is still read beside."""


def _as_window(scope: Scope, spot: Spot, loop: ast.For, name: str) -> Candidate | None:
    found = _window_of(spot, loop, name)
    first = None if found is None else first_value(scope, spot, loop, found.value)
    if found is None or first is None:
        return None
    window, held = scope.fresh(f"{found.alias or name}_last"), scope.fresh("held")
    uses = _WindowUses(found.alias or name, window, held, found.size)
    body: list[ast.stmt] = []
    for one in loop.body:
        appended = appended_by(one)
        if appended is not None and appended[0] == name:
            body += [copy.deepcopy(one)] if found.kept else []
            body += statements(f"{window} = torch.cat([{window}[1:], ({ast.unparse(found.value)}).unsqueeze(0)])")
            body += statements(f"{held} = ({held} + 1).clamp(max={found.size})")
        elif not _shortened_to(one, name) and stored_names(one) != [found.alias]:
            body.append(uses.visit(copy.deepcopy(one)))
    gone = {found.alias, *(() if found.kept else (name,))}
    after = [uses.visit(copy.deepcopy(one)) for one in spot.rest]
    if gone & {*loaded_names([*body, *after])}:
        return None
    begin = f"{window} = torch.stack([torch.zeros_like({ast.unparse(first)})] * {found.size})\n"
    begin += f"{held} = torch.zeros((), dtype=torch.int64)"
    new = copy.deepcopy(loop)
    new.body = body
    end = max((at for at, one in enumerate(spot.rest, 1) if ast.dump(one) != ast.dump(after[at - 1])), default=0)
    words = f"the last {found.size} elements of `{name}` are a tensor that `{first_line(loop)}` carries"
    block = spot.block[spot.index : spot.index + 1 + end]
    return scope.candidate(block, [*statements(begin), new, *after[:end]], words)


def _window_of(spot: Spot, loop: ast.For, name: str) -> _Window | None:
    begun = [one for one in spot.block[: spot.index] if name in stored_names(one)]
    size = _begins_empty(begun[-1], name) if begun else None
    appended = [found[1] for one in loop.body if (found := appended_by(one)) is not None and found[0] == name]
    inside = sum(appended_by(node) is not None and appended_by(node)[0] == name for node in ast.walk(loop))  # type: ignore[index]
    if size is None or len(appended) != 1 or inside != 1 or len(begun) != 1:
        return None
    alias, kept = "", False
    if not size:
        size = _kept_size(loop, name)
    if not size:
        taken = [(one, last) for one in loop.body if (last := _last_of(one, name))]
        if len({last for _, last in taken}) != 1 or len(taken) != 1:
            return None
        alias, size = stored_names(taken[0][0])[0], taken[0][1]
        reads = [node for part in (loop, *spot.rest) for node in ast.walk(part) if isinstance(node, ast.Name)]
        kept = sum(node.id == name for node in reads) > 2  # its append, and the part that is taken
        if [one for one in loop.body if alias in stored_names(one)] != [taken[0][0]]:
            return None
    return _Window(name, size, appended[0], alias, kept) if 0 < size <= MOST else None


def _begins_empty(statement: ast.stmt, name: str) -> int | None:
    """The length of an empty deque, 0 for an empty list, None for anything else."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    pairs = [(statement.targets[0], statement.value)]
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            pairs = [*zip(targets, values, strict=False)]
    value = next((one for target, one in pairs if ast.unparse(target) == name), None)
    match value:
        case ast.List(elts=[]) | ast.Call(func=ast.Name(id="list"), args=[]):
            return 0
        case ast.Call(func=called, args=[] | [ast.List(elts=[])], keywords=[ast.keyword(arg="maxlen", value=most)]):
            deque = ast.unparse(called).rpartition(".")[2] == "deque" and isinstance(most, ast.Constant)
            return most.value if deque and type(most.value) is int else None  # type: ignore[attr-defined]
    return None


def _kept_size(loop: ast.For, name: str) -> int:
    """The length that a step keeps the list to, before or after its append; 0 where none does."""
    cuts = [(at, size) for at, one in enumerate(loop.body) if (size := _shortened_to(one, name))]
    at = next(i for i, one in enumerate(loop.body) if (found := appended_by(one)) is not None and found[0] == name)
    if len(cuts) != 1:
        return 0
    cut, size = cuts[0]
    between = loop.body[min(cut, at) + 1 : max(cut, at)]
    return 0 if name in loaded_names(between) else size + (cut < at)


def _shortened_to(statement: ast.stmt, name: str) -> int:
    """The length that the statement keeps the list to, as one is appended at a time; 0 for any other statement."""
    text = ast.unparse(statement)
    pops = [f"{name}.pop(0)", f"{name}.popleft()", f"del {name}[0]", f"{name} = {name}[1:]"]
    match statement:
        case ast.If(
            test=ast.Compare(left=count, ops=[op], comparators=[ast.Constant(value=int(most))]), body=[one], orelse=[]
        ) if ast.unparse(count) == f"len({name})":
            size = most if isinstance(op, ast.Gt) else most - 1 if isinstance(op, ast.GtE | ast.Eq) else 0
            size = most - 1 if isinstance(op, ast.Eq) else size
            forms = [*pops, f"{name} = {name}[-{size}:]", f"del {name}[:-{size}]"]
            return size if ast.unparse(one) in forms else 0
    cut = text.removeprefix(f"{name} = {name}[-").removesuffix(":]")
    return int(cut) if cut.isdigit() and text == f"{name} = {name}[-{cut}:]" else 0


def _last_of(statement: ast.stmt, name: str) -> int:
    """`k` of `recent = rows[-k:]`."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=other)],
            value=ast.Subscript(
                value=ast.Name(id=read),
                slice=ast.Slice(lower=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(last))), upper=None),
            ),
        ) if read == name and other != name:
            return last
    return 0


def first_value(scope: Scope, spot: Spot, loop: ast.For, value: ast.expr) -> ast.expr | None:
    """What the first step appends, for its shape."""
    known = bound_before(spot, scope.function)
    values: dict[str, ast.expr] = {}
    match loop.target, loop.iter:
        case ast.Name(id=counter), ast.Call(func=ast.Name(id="range"), args=args) if len(args) < 3:
            values[counter] = args[0] if len(args) == 2 else ast.Constant(0)
        case ast.Name(id=row), rows if (found := rows_of(scope, rows)) is not None:
            values[row] = expression(f"({found[0]})[{':, ' * found[1]}0]")
        case ast.Tuple(elts=[ast.Name(), ast.Name(id=row)]), ast.Call(func=ast.Name(id="enumerate"), args=[rows]) if (
            found := rows_of(scope, rows)
        ) is not None:
            values[row] = expression(f"({found[0]})[{':, ' * found[1]}0]")
    made = {*stored_names(loop.body)} - known
    for one in reversed(loop.body):  # names that the step itself gives a value
        named = named_value(one) if isinstance(one, ast.Assign) else None
        if named is not None and named[0] in made and stored_names(loop.body).count(named[0]) == 1:
            value = substitute(value, {named[0]: named[1]})
    if made & {*loaded_names(value)} or not {*loaded_names(value)} & {*values, *known}:
        return None
    found_value: ast.expr = substitute(value, values)
    return found_value


class _WindowUses(ast.NodeTransformer):
    """What the steps ask of the list, of the tensor."""

    def __init__(self, name: str, window: str, held: str, size: int) -> None:
        self.name, self.window, self.held, self.size = name, window, held, size
        lists = (name, f"list({name})", f"tuple({name})")
        self.stacks = {f"torch.stack({one})": 0 for one in lists}
        self.stacks |= {form.format(one, dim): dim for one in lists for dim in range(4)
                        for form in ("torch.stack({}, {})", "torch.stack({}, dim={})")}  # fmt: skip

    def visit_Call(self, node: ast.Call) -> ast.AST:
        text = ast.unparse(node)
        if text == f"len({self.name})":
            return expression(self.held)
        if text == f"sum({self.name})":
            return expression(f"{self.window}.sum(0)")
        reduced = self._reduce(node)
        return expression(reduced) if reduced else self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`torch.stack(window).max(0).values`."""
        if node.attr == "values" and isinstance(node.value, ast.Call):
            reduced = self._reduce(node.value, pair=True)
            if reduced:
                return expression(reduced)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        text = ast.unparse(node)
        if text == f"{self.name}[-1]":
            return expression(f"{self.window}[-1]")
        if text == f"{self.name}[0]":
            return expression(f"{self.window}.index_select(0, ({self.size} - {self.held}).reshape(1)).squeeze(0)")
        if isinstance(node.value, ast.Call) and ast.unparse(node.slice) == "0":
            reduced = self._reduce(node.value, pair=True)
            if reduced:
                return expression(reduced)
        return self.generic_visit(node)

    def _reduce(self, node: ast.Call, *, pair: bool = False) -> str:
        """`torch.stack(window).mean(0)`, over what was appended."""
        if not isinstance(node.func, ast.Attribute) or ast.unparse(node.func.value) not in self.stacks:
            return ""
        how, dims = node.func.attr, [*node.args, *(one.value for one in node.keywords if one.arg == "dim")]
        along = self.stacks[ast.unparse(node.func.value)]
        if len(dims) != 1 or len(node.args) + len(node.keywords) != 1 or ast.unparse(dims[0]) != str(along):
            return ""
        if how in ("sum", "mean"):
            return f"{self.window}.sum(0)" if how == "sum" else f"({self.window}.sum(0) / {self.held})"
        if how not in _REDUCED or (how in ("max", "min")) is not pair:
            return ""
        there = f"(torch.arange({self.size}) >= {self.size} - {self.held})[(...,) + (None,) * ({self.window}.ndim - 1)]"
        return f"torch.where({there}, {self.window}, {_REDUCED[how]}).a{how.removeprefix('a')}(0)"


def _as_places(scope: Scope, spot: Spot, loop: ast.For, name: str) -> Candidate | None:
    """A list of as many tensors of one shape as there are places, which the steps read and write."""
    held = scope.seen.get(name)
    rows = isinstance(held, list) and 0 < len(held) <= MOST and all(isinstance(one, torch.Tensor) for one in held)
    begun = [one for one in spot.block[: spot.index] if name in stored_names(one)]
    if not rows or held is None or len({(one.shape, one.dtype) for one in held}) != 1 or len(begun) != 1:
        return None
    match begun[0]:
        case ast.Assign(targets=[ast.Name()], value=ast.List() | ast.ListComp()):
            pass
        case _:
            return None
    uses = _PlaceUses(scope, name, {*stored_names(loop)})
    body = [uses.visit(copy.deepcopy(one)) for one in loop.body]
    after = [uses.visit(copy.deepcopy(one)) for one in spot.rest]
    between = spot.block[spot.block.index(begun[0]) + 1 : spot.index]
    if uses.others or not uses.writes or name in loaded_names(between):
        return None
    new = copy.deepcopy(loop)
    new.body = body
    end = max((at for at, one in enumerate(spot.rest, 1) if ast.dump(one) != ast.dump(after[at - 1])), default=0)
    words = f"the places of `{name}` are a tensor that `{first_line(loop)}` carries"
    block = spot.block[spot.index : spot.index + 1 + end]
    return scope.candidate(block, [*statements(f"{name} = torch.stack({name})"), new, *after[:end]], words)


class _PlaceUses(ast.NodeTransformer):
    """Elements of a list by a number, of the tensor."""

    def __init__(self, scope: Scope, name: str, moving: set[str]) -> None:
        self.scope, self.name, self.moving = scope, name, moving
        self.writes, self.others = 0, False

    def _place(self, at: ast.expr) -> str:
        """A place as a tensor; one that a size gives, which `as_tensor` would make a constant of."""
        of_size = self.scope.depends_on(at) == "size" and not self.moving & {*loaded_names(at)}
        return f"torch.{'full((), ' if of_size else 'as_tensor('}{ast.unparse(at)})"

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        match node:
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=at)]) if name == self.name:
                self.writes += 1
                self.others = self.others or isinstance(at, ast.Slice | ast.Tuple)
                place, value = self._place(self.visit(at)), ast.unparse(self.visit(node.value))
                return statements(f"{name} = {name}.index_put(({place},), {value})")[0]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        text = ast.unparse(node)
        if text == f"sum({self.name})":
            return expression(f"{self.name}.sum(0)")
        if text in (f"torch.stack({self.name})", f"torch.stack({self.name}, 0)"):
            return ast.Name(id=self.name, ctx=ast.Load())
        if text == f"torch.stack({self.name}, 1)":
            return expression(f"{self.name}.movedim(0, 1)")
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if ast.unparse(node.value) != self.name or isinstance(node.slice, ast.Slice | ast.Tuple):
            return self.generic_visit(node)
        at = self.visit(node.slice)
        if ast.unparse(at).removeprefix("-").isdigit():
            return expression(f"{self.name}[{ast.unparse(at)}]")
        return expression(f"{self.name}.index_select(0, {self._place(at)}.reshape(1)).squeeze(0)")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        self.others = self.others or node.id == self.name
        return node
