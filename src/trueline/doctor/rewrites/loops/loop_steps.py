"""A loop over time, taken apart: what each step is given, what it carries, what it collects.

Conditions: the steps read slices of tensors and compute names; what they collect goes into a list, or into place `t` of
a tensor that nobody reads meanwhile, or only by its distance from `t` (`tables`). What one step leaves for the next
keeps its shape and dtype. Each holds only if the proof says so.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from trueline.doctor.rewrites.control.predicate import without_numbers
from trueline.doctor.rewrites.loops.appends import appended_by
from trueline.doctor.rewrites.loops.recurrences import (
    Table,
    filled_again,
    full,
    like_row,
    locate,
    parts_of,
    shift_of,
    tables,
    under_mask,
    whole,
)
from trueline.doctor.rewrites.pure import pure
from trueline.doctor.rewrites.scope import (
    Scope,
    Spot,
    bound_before,
    expression,
    loaded_names,
    read_later,
    statements,
    stored_names,
    value_of,
)


@dataclass(slots=True)
class Steps:
    """The steps of one loop."""

    index: str | None
    """Name of the counter, if the loop has one."""
    length: ast.expr | None
    """Where the counter ends; None where the steps are those of a tensor."""
    start: str = ""
    """Where the counter begins, if not at 0."""
    backwards: bool = False
    stride: int = 1
    """How far the counter goes in a step."""
    slices: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Name in the step -> (tensor, its dimension of time)."""
    shifts: dict[str, int] = field(default_factory=dict)
    """Name in the step -> how far it is from the counter: -1 of `x[t - 1]`."""
    lists: dict[str, ast.expr] = field(default_factory=dict)
    """List that each step appends to -> what it appends."""
    filled: dict[str, int] = field(default_factory=dict)
    """Tensor whose place `t` each step writes -> its dimension of time; it is in `lists` too."""
    tables: dict[str, Table] = field(default_factory=dict)
    """New rows of a tensor -> how it is filled with them; they are in `lists` too."""
    rows: dict[str, str] = field(default_factory=dict)
    """Row that an earlier step filled, as a name in the step -> what it is for the first step."""
    body: list[ast.stmt] = field(default_factory=list)
    uses_index: bool = False
    enumerated: bool = False
    """Whether the counter counts the steps of a tensor."""
    numbers: bool = False
    """Whether the steps go over numbers that were taken out of a tensor: those of a tensor of one dimension."""

    @property
    def may_be_none(self) -> bool:
        """Whether there may be no step at all, of a tensor that a size makes empty."""
        return bool(self.start) or self.enumerated or self.length is None or isinstance(self.length, ast.BinOp)

    @property
    def listed(self) -> list[str]:
        """Those of `lists` that are lists of the user's own."""
        return [name for name in self.lists if name not in self.filled and name not in self.tables]

    @property
    def fills_only(self) -> bool:
        """Whether what it collects are rows of tensors that are there already."""
        return bool(self.tables) and len(self.lists) == len(self.tables)

    @property
    def first(self) -> str:
        """The counter in the first step."""
        if not self.backwards:
            return self.start or "0"
        assert self.length is not None
        return _plus(ast.unparse(self.length), -1)

    def source(self, part: str) -> str:
        """The tensor, steps first, from which each step gets `part`."""
        tensor, axis = self.slices[part]
        moved = f"{tensor}.movedim({axis}, 0)" if axis else tensor
        shift, length = self.shifts.get(part, 0), self.length
        if length is not None and (self.start or shift or self.stride > 1):
            strides = f":{self.stride}" if self.stride > 1 else ""
            moved = f"{moved}[{_plus(self.start or '0', shift)}:{_plus(ast.unparse(length), shift)}{strides}]"
        return f"{moved}.flip(0)" if self.backwards else moved

    def counter(self, device: str = "", *, idle: bool = False) -> str:
        """The values of the counter, in the order of the steps; `idle` with one step more, before the first."""
        assert self.length is not None
        start, end = self.start, ast.unparse(self.length)
        if self.stride > 1:
            first = _plus(start or "0", -self.stride) if idle else start or "0"
            return f"torch.arange({first}, {end}, {self.stride}{device})"
        if self.backwards:
            numbers = f"torch.arange({f'{start}, ' if start else ''}{_plus(end, int(idle))}{device}).flip(0)"
            return f"{numbers} % ({end})" if idle else numbers
        start = _plus(start or "0", -1) if idle else start
        return f"torch.arange({f'{start}, ' if start else ''}{end}{device})"


def _plus(number: str, shift: int) -> str:
    """`number + shift` as it would be written."""
    match expression(number):
        case ast.Constant(value=int(value)):
            return str(value + shift)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=ast.Constant(value=int(by))):
            number, shift = ast.unparse(left), shift + (by if isinstance(op, ast.Add) else -by)
        case ast.Name() | ast.Attribute() | ast.Call() | ast.Subscript():
            pass
        case _:
            number = f"({number})"
    return f"{number} {'+' if shift > 0 else '-'} {abs(shift)}" if shift else number


def element_name(name: str) -> str:
    """What a step appends to the list `name`, as a name in the step."""
    return f"{name}_t"


def split_loop(scope: Scope, loop: ast.For) -> Steps | None:
    """The steps of `for t in range(n)` (from a start, or down to one), of `for x_t in x`, `x.unbind(1)`, `zip(x, y)`,
    or of these with enumerate; else None."""
    steps = steps_of_header(scope, loop.target, loop.iter)
    if steps is None or loop.orelse:
        return None
    loop, known = _with_tables(scope, steps, loop)
    scope = _knowing(scope, known.values())
    if steps.numbers:
        scope, loop = _with_numbers(scope, steps, loop)
    slicing = _Slicing(scope, steps, set(stored_names([pure(scope, one) for one in loop.body])), known)
    for statement in loop.body:
        fills = _filled_output(scope, steps, statement, loop)
        if fills is None:
            if known:
                new = _pure_rows(scope, slicing.visit(copy.deepcopy(statement)), known)
            else:
                new = slicing.visit(pure(scope, statement))
            appended = appended_by(new)
        else:
            name, axis, value = fills
            steps.filled[name], appended = axis, (name, slicing.visit(copy.deepcopy(value)))
        if appended is None:
            steps.body.append(_LastOf(steps.lists).visit(new))
        elif appended[0] in steps.lists:
            return None
        else:
            steps.lists[appended[0]] = appended[1]
            steps.body.append(
                ast.Assign(targets=[ast.Name(id=element_name(appended[0]), ctx=ast.Store())], value=appended[1])
            )
    if has_effects(steps.body) or set(steps.lists) & set(_values(steps.body)):
        return None
    if set(loaded_names(loop.iter)) & set(stored_names(steps.body)):
        return None
    for name, table in known.items():
        _collect_rows(scope, steps, name, table)
    steps.uses_index = steps.index is not None and steps.index in loaded_names(steps.body)
    return steps


class _LastOf(ast.NodeTransformer):
    """`rows[-1]`, after the step has appended to `rows`, as what it appended."""

    def __init__(self, lists: Mapping[str, ast.expr]) -> None:
        self.lists = set(lists)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.value)
        last = name in self.lists and ast.unparse(node.slice) == "-1" and isinstance(node.ctx, ast.Load)
        return ast.Name(id=element_name(name), ctx=ast.Load()) if last else node


def _with_tables(scope: Scope, steps: Steps, loop: ast.For) -> tuple[ast.For, dict[str, Table]]:
    """The loop with what it writes under masks written as a whole, and the tensors that it fills row by row."""
    if steps.index is None or steps.length is None or steps.stride > 1:
        return loop, {}
    loop = copy.copy(loop)
    loop.body = [under_mask(scope, one, steps.index) for one in loop.body]
    return loop, tables(scope, loop, steps.index, start=steps.start, backwards=steps.backwards)


def _with_numbers(scope: Scope, steps: Steps, loop: ast.For) -> tuple[Scope, ast.For]:
    """What is known of the steps' numbers, which stay in their tensors, and the loop that computes with those."""
    seen = dict(scope.seen)
    for name, (source, axis) in steps.slices.items():
        held = value_of(expression(source), scope.seen)
        if isinstance(held, torch.Tensor) and held.ndim > axis and held.shape[axis]:
            seen[name] = held.select(axis, 0)
    scope, loop = replace(scope, seen=seen), copy.copy(loop)
    loop.body = [without_numbers(one, scope) for one in loop.body]  # type: ignore[arg-type, misc]
    return scope, loop


def _knowing(scope: Scope, known: Iterable[Table]) -> Scope:
    """The scope with the rows of tables among what is known of the names in a step."""
    rows = {table.row: row for table in known if (row := like_row(scope, table)) is not None}
    return replace(scope, seen={**scope.seen, **rows}) if rows else scope


def _pure_rows(scope: Scope, statement: ast.stmt, known: dict[str, Table]) -> ast.stmt:
    """`statement` with what it writes into rows, which the step may not write into, as new values of their names."""
    rows = {table.row for table in known.values()}
    if isinstance(statement, ast.For | ast.If | ast.With):
        statement.body = [_pure_rows(scope, one, known) for one in statement.body]
        if not isinstance(statement, ast.With):
            statement.orelse = [_pure_rows(scope, one, known) for one in statement.orelse]
        return statement
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    if not isinstance(target, ast.Name) or target.id not in rows:
        return pure(scope, statement)
    if isinstance(statement, ast.AugAssign):
        value: ast.expr = ast.BinOp(left=expression(target.id), op=statement.op, right=statement.value)
    elif isinstance(statement, ast.Assign):
        value = statement.value
    else:
        return statement
    return statements(f"{target.id} = {_as_row(scope, value, target.id)}")[0]


def _as_row(scope: Scope, value: ast.expr, row: str) -> str:
    """What an assignment by index makes of a value: of the row's shape and dtype."""
    if isinstance(value, ast.Constant):
        return f"torch.full_like({row}, {ast.unparse(value)})"
    if scope.worth(value) == "tensor":
        return f"({ast.unparse(value)}).expand_as({row}).to({row}.dtype)"
    return f"torch.as_tensor({ast.unparse(value)}, dtype={row}.dtype).expand_as({row})"


def _collect_rows(scope: Scope, steps: Steps, name: str, table: Table) -> None:
    """Each step gives row t, and hands on the rows that the next ones read."""
    new = scope.fresh(f"{name}_new")
    steps.tables[new] = table
    steps.lists[new] = ast.Name(id=table.row, ctx=ast.Load())
    steps.slices.setdefault(table.row, (table.place.base, table.place.axis))
    steps.body += statements(f"{element_name(new)} = {table.row}")
    for by in range(table.depth, 0, -1):
        before = table.earlier(by - 1) if by > 1 else table.row
        steps.body += statements(f"{table.earlier(by)} = {before}")
        at = _plus(steps.first, by if steps.backwards else -by)
        steps.rows[table.earlier(by)] = f"{table.place.base}.select({table.place.axis}, {at})"


def put_back(scope: Scope, steps: Steps, *, all_rows: bool = False) -> list[ast.stmt]:
    """The tensors that the loop filled, with the rows that the steps gave: of all rows, or of those of the loop."""
    found: list[ast.stmt] = []
    for rows, table in steps.tables.items():
        turned = f"{rows}.flip(0)" if steps.backwards else rows
        found += filled_again(scope, table, turned, steps.start, None if all_rows else steps.length)
    return found


def _filled_output(scope: Scope, steps: Steps, statement: ast.stmt, loop: ast.For) -> tuple[str, int, ast.expr] | None:
    """Name, dimension of time and value of `out[:, t] = value`."""
    if (
        steps.index is None
        or steps.start
        or steps.stride > 1
        or not isinstance(statement, ast.Assign)
        or len(statement.targets) != 1
    ):
        return None
    target = statement.targets[0]
    if not (isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)):
        return None
    held = value_of(target.value, scope.seen)
    found = place_of(target, steps.index)
    if not isinstance(held, torch.Tensor) or found is None or found[1]:
        return None
    reads = [one for one in _values([loop]) if one == target.value.id]
    return (target.value.id, found[0], statement.value) if len(reads) == 1 else None


def _values(block: Sequence[ast.stmt]) -> list[str]:
    """Each name that `block` uses for what it holds, so often as it does: `x.dtype` says nothing of that."""
    nodes = [node for statement in block for node in ast.walk(statement)]
    kinds = {id(one.value) for one in nodes if isinstance(one, ast.Attribute) and one.attr in ("dtype", "device")}
    return [one.id for one in nodes if isinstance(one, ast.Name) and id(one) not in kinds]


def has_effects(block: list[ast.stmt]) -> bool:
    """Whether `block` does more than compute names: jumps, writes into objects that it has not made, calls for their
    effect."""
    own = set(stored_names(block))
    for node in (node for statement in block for node in _run(statement)):
        if isinstance(node, ast.Break | ast.Continue | ast.Return | ast.Yield | ast.Global | ast.Nonlocal | ast.Delete):
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _created_in(node, block) not in own:
            return True
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            appended = appended_by(node)
            if appended is None or not _starts_list(appended[0], block):
                return True
    return False


def _created_in(node: ast.Subscript, block: list[ast.stmt]) -> str:
    """The name of what is written into, where the block itself has made that before; else no name."""
    root, _ = parts_of(node)
    name = root.id if isinstance(root, ast.Name) else ""
    for statement in block:
        if node in ast.walk(statement):
            return ""
        if (
            isinstance(statement, ast.Assign)
            and stored_names(statement) == [name]
            and isinstance(statement.value, ast.Call)
        ):
            return name
    return ""


def _starts_list(name: str, block: list[ast.stmt]) -> bool:
    """Whether the block makes the list itself, anew in each step."""
    first = next((one for one in block if name in (*stored_names(one), *loaded_names(one))), None)
    return isinstance(first, ast.Assign) and ast.unparse(first.value) in ("[]", "list()")


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when `node` does: what stands in a function that it defines does not."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _run(child)


def steps_of_header(scope: Scope, target: ast.expr, source: ast.expr) -> Steps | None:
    """The steps that `for target in source` takes, without their body."""
    index: str | None = None
    if isinstance(source, ast.Call) and isinstance(source.func, ast.Name):
        if source.func.id in ("range", "reversed"):
            return _steps_of_range(target, source)
        if source.func.id == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            first, target = target.elts
            index, source = (first.id if isinstance(first, ast.Name) else None), source.args[0]
    pairs = [(target, source)]
    zipped = isinstance(source, ast.Call) and ast.unparse(source.func) == "zip"
    if zipped and isinstance(source, ast.Call) and isinstance(target, ast.Tuple):
        if len(target.elts) != len(source.args) or any(one.arg != "strict" for one in source.keywords):
            return None
        pairs = [*zip(target.elts, source.args, strict=True)]
    steps = Steps(index=index, length=None, enumerated=index is not None)
    for name, given in pairs:
        axis, tensor = 0, _tensor_of_list(given)
        steps.numbers = steps.numbers or tensor is not given
        if isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "unbind":
            said = [*given.args, *(keyword.value for keyword in given.keywords)]
            axis = ast.literal_eval(said[0]) if said else 0
            tensor = given.func.value
        if not isinstance(name, ast.Name) or scope.worth(tensor) != "tensor":
            return None
        steps.slices[name.id] = (ast.unparse(tensor), axis)
        if steps.enumerated and steps.length is None and isinstance(tensor, ast.Name):
            steps.length = expression(f"{tensor.id}.shape[{axis}]")
    return steps


def _tensor_of_list(node: ast.expr) -> ast.expr:
    """Of `lengths.tolist()` the tensor, whose numbers stay in it."""
    match node:
        case ast.Call(func=ast.Attribute(value=tensor, attr="tolist"), args=[]):
            return tensor
        case ast.Call(func=ast.Attribute(value=tensor, attr="cpu" | "detach" | "numpy"), args=[]):
            return _tensor_of_list(tensor)
    return node


def _steps_of_range(target: ast.expr, source: ast.Call) -> Steps | None:
    """`range(n)`, `range(a, n)`, `reversed(range(n))`, `range(n - 1, -1, -1)`, `range(n - 2, a, -1)`, and
    `range(a, n, 3)`."""
    backwards = ast.unparse(source.func) == "reversed"
    if backwards and len(source.args) == 1 and isinstance(source.args[0], ast.Call):
        source = source.args[0]
    if ast.unparse(source.func) != "range" or not isinstance(target, ast.Name) or source.keywords:
        return None
    given = source.args
    match given:
        case [length]:
            return Steps(index=target.id, length=length, backwards=backwards)
        case [start, length]:
            return Steps(index=target.id, length=length, start=ast.unparse(start), backwards=backwards)
        case [top, last, step] if not backwards and ast.unparse(step) == "-1":
            down = ast.unparse(last)
            start_ = "" if down == "-1" else _plus(down, 1)
            return Steps(index=target.id, length=_after(top), start=start_, backwards=True)
        case [start, length, ast.Constant(value=int(stride))] if not backwards and stride > 0:
            start_ = "" if ast.unparse(start) == "0" else ast.unparse(start)
            return Steps(index=target.id, length=length, start=start_, stride=stride)
    return None


def _after(top: ast.expr) -> ast.expr:
    """`top + 1`, as it would be written."""
    return expression(_plus(ast.unparse(top), 1))


def place_of(node: ast.Subscript, index: str) -> tuple[int, int] | None:
    """Dimension and shift of the one index `t`, `t - 1` or `t + 1` beside which there are only full slices."""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    shifts = [shift_of(part, index) for part in parts]
    at = [i for i, shift in enumerate(shifts) if shift is not None]
    if len(at) != 1 or sum(full(part) for part in parts) != len(parts) - 1:
        return None
    return at[0], shifts[at[0]] or 0


class _Slicing(ast.NodeTransformer):
    """`x[:, t]` becomes `x_t`, a slice that the step is given; and of a table a row that it fills or has filled."""

    def __init__(self, scope: Scope, steps: Steps, assigned: set[str], known: Mapping[str, Table]) -> None:
        self.scope, self.steps, self.assigned, self.known = scope, steps, assigned, known
        self.moving = {*assigned, *steps.slices, *([steps.index] if steps.index else ())}

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        index = self.steps.index
        place = locate(self.scope, node, index, self.moving) if index is not None else None
        if place is None or index is None:
            return self.generic_visit(node)
        table = self.known.get(place.root)
        row = place.row(index)
        rest = [self.visit(part) for part in place.rest]
        place = replace(place, rest=tuple(rest))
        if table is not None and place.base == table.place.base:
            ago = place.shift if self.steps.backwards else -place.shift
            if ago >= 0:
                return place.within(table.earlier(ago) if ago else table.row, node.ctx)
        elif place.root in self.assigned and table is None:
            return self.generic_visit(node)  # a later step reads what an earlier one wrote
        alone = not place.fixed and all(full(one) or self._known(one) for one in place.rest)
        if isinstance(node.ctx, ast.Store) or not (alone or self.known) or (place.shift and self.steps.length is None):
            return self.generic_visit(node)
        self.steps.slices[row] = (place.base, place.axis)
        if place.shift:
            self.steps.shifts[row] = place.shift
        return place.within(row, node.ctx)

    def _known(self, part: ast.expr) -> bool:
        """Whether an index beside the counter is a number: one that nothing changes, or one of the steps' own."""
        return self.scope.worth(part) == "static" or (self.steps.numbers and whole(self.scope, part))


def carried_names(scope: Scope, spot: Spot, steps: Steps) -> list[str]:
    """Names that a step leaves for the next one or for what follows the loop."""
    known, later = bound_before(spot, scope.function), read_later(spot)
    names: list[str] = []
    before: set[str] = set()
    for statement in steps.body:
        read = [name for name in loaded_names(statement) if name not in before]
        names += [name for name in read if name in stored_names(steps.body) and name in known]
        before |= set(stored_names(statement))
    names += [name for name in stored_names(steps.body) if name in later and name in known]
    return [name for name in dict.fromkeys([*names, *steps.rows]) if name not in steps.slices]
