"""A loop over time, taken apart: what each step receives, carries and collects.

Conditions: the steps read slices of tensors and compute names. What they collect goes into a list, or into place `t` of
a tensor that they do not read, or read only by the distance from `t` (`tables`). What one step leaves for the next
keeps its shape and dtype. Each holds only if the proof says so.
"""

import ast
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from trueline.doctor.rewrites.appends import appended_by
from trueline.doctor.rewrites.indices import OneRow, is_full, is_whole, locate, shift_of, size_of
from trueline.doctor.rewrites.loops.recurrences import Table, fill_again, like_row, tables, under_mask
from trueline.doctor.rewrites.predicate import without_numbers
from trueline.doctor.rewrites.pure import has_effects, pure
from trueline.doctor.rewrites.scope import (
    Scope,
    Spot,
    assign,
    bound_before,
    expression,
    indices_of,
    loaded_names,
    named_value,
    read_later,
    statements,
    stored_names,
    tensor_of,
    tensor_of_list,
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
    slices: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Name in the step -> (tensor, its dimension of time)."""
    shifts: dict[str, int] = field(default_factory=dict)
    """Name in the step -> its distance from the counter: -1 of `x[t - 1]`."""
    lists: dict[str, ast.expr] = field(default_factory=dict)
    """List that each step appends to -> what it appends."""
    filled: dict[str, int] = field(default_factory=dict)
    """Tensor whose place `t` each step writes -> its dimension of time; it is in `lists` too."""
    tables: dict[str, Table] = field(default_factory=dict)
    """New rows of a tensor -> how it is filled with them; they are in `lists` too."""
    rows: dict[str, str] = field(default_factory=dict)
    """Row that an earlier step filled, as a name in the step -> its value in the first step."""
    body: list[ast.stmt] = field(default_factory=list)
    uses_index: bool = False
    enumerated: bool = False
    """Whether the counter counts the steps of a tensor."""
    numbers: bool = False
    """Whether the steps run over numbers taken out of a tensor of one dimension."""
    longer: bool = False
    """Whether a tensor has more rows than there are steps."""

    @property
    def may_be_none(self) -> bool:
        """Whether there may be no step at all, because a size makes a tensor empty."""
        return bool(self.start) or self.enumerated or self.length is None or isinstance(self.length, ast.BinOp)

    @property
    def uses_unknown_index(self) -> bool:
        """Whether the steps use a counter whose end is not known."""
        return self.uses_index and self.length is None

    @property
    def listed(self) -> list[str]:
        """Those of `lists` that are lists of the user's own."""
        return [name for name in self.lists if name not in self.filled and name not in self.tables]

    @property
    def fills_only(self) -> bool:
        """Whether all that it collects are rows of existing tensors."""
        return bool(self.tables) and len(self.lists) == len(self.tables)

    def source(self, part: str) -> str:
        """The tensor, steps first, from which each step receives `part`."""
        tensor, axis = self.slices[part]
        moved = f"{tensor}.movedim({axis}, 0)" if axis else tensor
        shift, length = self.shifts.get(part, 0), self.length
        cut = self.start or shift or self.stride > 1 or self.longer or isinstance(length, ast.BinOp)
        if length is not None and cut:
            strides = f":{self.stride}" if self.stride > 1 else ""
            moved = f"{moved}[{_plus(self.start or '0', shift)}:{_plus(ast.unparse(length), shift)}{strides}]"
        return f"{moved}.flip(0)" if self.backwards else moved

    def counter(self, device: str = "", *, idle: bool = False) -> str:
        """The values of the counter, in the order of the steps; `idle` with one more step, before the first."""
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
    """The source of `number + shift`."""
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
    steps = _steps_of_header(scope, loop.target, loop.iter)
    if steps is None or loop.orelse:
        return None
    if steps.index is not None:
        loop = copy.copy(loop)
        loop.body = [OneRow(scope, steps.index).visit(copy.deepcopy(one)) for one in loop.body]
    loop, known = _with_tables(scope, steps, loop)
    rows = {table.row: row for table in known.values() if (row := like_row(scope, table)) is not None}
    scope = replace(scope, seen={**scope.seen, **rows})
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
            steps.body.append(assign(element_name(appended[0]), appended[1]))
    if has_effects(steps.body) or set(steps.lists) & set(_value_names(steps.body)):
        return None
    if set(loaded_names(loop.iter)) & set(stored_names(steps.body)):
        return None
    for name, table in known.items():
        _collect_rows(scope, steps, name, table)
    steps.uses_index = steps.index is not None and steps.index in loaded_names(steps.body)
    sizes = {size_of(scope, tensor, axis) for tensor, axis in steps.slices.values()}
    steps.longer = not steps.enumerated and (len(sizes) > 1 or max(steps.shifts.values(), default=0) > 0)
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
    """The loop with masked writes as writes of the whole, and the tensors that it fills row by row."""
    if steps.index is None or steps.length is None or steps.stride > 1:
        return loop, {}
    loop = copy.copy(loop)
    loop.body = [under_mask(scope, one, steps.index) for one in loop.body]
    return loop, tables(scope, loop, steps.index, start=steps.start, backwards=steps.backwards)


def _with_numbers(scope: Scope, steps: Steps, loop: ast.For) -> tuple[Scope, ast.For]:
    """The scope with the values of the steps' numbers, and the loop that keeps these in their tensors."""
    seen = dict(scope.seen)
    for name, (source, axis) in steps.slices.items():
        held = tensor_of(expression(source), scope)
        if held is not None and held.ndim > axis and held.shape[axis]:
            seen[name] = held.select(axis, 0)
    scope, loop = replace(scope, seen=seen), copy.copy(loop)
    loop.body = [without_numbers(one, scope) for one in loop.body]
    return scope, loop


def _pure_rows(scope: Scope, statement: ast.stmt, known: dict[str, Table]) -> ast.stmt:
    """`statement` with its writes into rows, which are inputs of the step, as new values of their names."""
    if isinstance(statement, ast.For | ast.If | ast.With):
        for name in ("body",) if isinstance(statement, ast.With) else ("body", "orelse"):
            setattr(statement, name, [_pure_rows(scope, one, known) for one in getattr(statement, name)])
        return statement
    named = named_value(statement)
    if named is None or named[0] not in {table.row for table in known.values()}:
        return pure(scope, statement)
    return statements(f"{named[0]} = {_as_row(scope, named[1], named[0])}")[0]


def _as_row(scope: Scope, value: ast.expr, row: str) -> str:
    """A value with the row's shape and dtype, as an assignment by index converts it."""
    if isinstance(value, ast.Constant):
        return f"torch.full_like({row}, {ast.unparse(value)})"
    if scope.depends_on(value) == "tensor":
        return f"({ast.unparse(value)}).expand_as({row}).to({row}.dtype)"
    return f"torch.as_tensor({ast.unparse(value)}, dtype={row}.dtype).expand_as({row})"


def _collect_rows(scope: Scope, steps: Steps, name: str, table: Table) -> None:
    """Each step returns row t, and passes on the rows that the next ones read."""
    first = steps.start or "0"
    if steps.backwards and steps.length is not None:
        first = _plus(ast.unparse(steps.length), -1)
    new = scope.fresh(f"{name}_new")
    steps.tables[new] = table
    steps.lists[new] = ast.Name(id=table.row, ctx=ast.Load())
    steps.slices.setdefault(table.row, (table.place.base, table.place.axis))
    steps.body += statements(f"{element_name(new)} = {table.row}")
    for by in range(table.depth, 0, -1):
        before = table.earlier(by - 1) if by > 1 else table.row
        steps.body += statements(f"{table.earlier(by)} = {before}")
        at = _plus(first, by if steps.backwards else -by)
        steps.rows[table.earlier(by)] = f"{table.place.base}.select({table.place.axis}, {at})"


def put_back(scope: Scope, steps: Steps, *, all_rows: bool = False) -> list[ast.stmt]:
    """The tensors that the loop filled, with the rows of the steps: of all rows, or of those of the loop."""
    end, turned = None if all_rows else steps.length, ".flip(0)" if steps.backwards else ""
    filled = [fill_again(scope, table, rows + turned, steps.start, end) for rows, table in steps.tables.items()]
    return [statement for block in filled for statement in block]


def _filled_output(scope: Scope, steps: Steps, statement: ast.stmt, loop: ast.For) -> tuple[str, int, ast.expr] | None:
    """Name, dimension of time and value of `out[:, t] = value`."""
    if steps.index is None or steps.start or steps.stride > 1:
        return None
    match statement:
        case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name) as tensor) as target], value=value):
            place = _place_of(target, steps.index)
        case _:
            return None
    if not scope.is_tensor(tensor) or place is None or place[1]:
        return None
    return (name, place[0], value) if _value_names([loop]).count(name) == 1 else None


def _value_names(block: Sequence[ast.stmt]) -> list[str]:
    """Each name whose value `block` uses, as often as it does; `x.dtype` does not use it."""
    nodes = [node for statement in block for node in ast.walk(statement)]
    kinds = {id(one.value) for one in nodes if isinstance(one, ast.Attribute) and one.attr in ("dtype", "device")}
    return [one.id for one in nodes if isinstance(one, ast.Name) and id(one) not in kinds]


def _steps_of_header(scope: Scope, target: ast.expr, source: ast.expr) -> Steps | None:
    """The steps that `for target in source` takes, without their body."""
    index: str | None = None
    if isinstance(source, ast.Call) and isinstance(source.func, ast.Name):
        if source.func.id in ("range", "reversed"):
            return _steps_of_range(target, source)
        if source.func.id == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            first, target = target.elts
            index, source = (first.id if isinstance(first, ast.Name) else None), source.args[0]
    pairs = [(target, source)]
    if isinstance(source, ast.Call) and ast.unparse(source.func) == "zip" and isinstance(target, ast.Tuple):
        if len(target.elts) != len(source.args) or any(one.arg != "strict" for one in source.keywords):
            return None
        pairs = [*zip(target.elts, source.args, strict=True)]
    steps = Steps(index=index, length=None, enumerated=index is not None)
    for name, given in pairs:
        axis, tensor = 0, tensor_of_list(given)
        held = tensor_of(tensor, scope)
        whole = held is not None and held.ndim == 1 and held.dtype in (torch.int64, torch.int32)
        steps.numbers = steps.numbers or tensor is not given or whole
        if isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "unbind":
            named = [*given.args, *(keyword.value for keyword in given.keywords)]
            axis = ast.literal_eval(named[0]) if named else 0
            tensor = given.func.value
        if not isinstance(name, ast.Name) or scope.depends_on(tensor) != "tensor":
            return None
        steps.slices[name.id] = (ast.unparse(tensor), axis)
        if steps.enumerated and steps.length is None and isinstance(tensor, ast.Name):
            steps.length = expression(f"{tensor.id}.shape[{axis}]")
    return steps


def _steps_of_range(target: ast.expr, source: ast.Call) -> Steps | None:
    """`range(n)`, `range(a, n)`, `reversed(range(n))`, `range(n - 1, -1, -1)`, `range(n - 2, a, -1)`, and
    `range(a, n, 3)`."""
    backwards = ast.unparse(source.func) == "reversed"
    if backwards and len(source.args) == 1 and isinstance(source.args[0], ast.Call):
        source = source.args[0]
    if ast.unparse(source.func) != "range" or not isinstance(target, ast.Name) or source.keywords:
        return None
    match source.args:
        case [length]:
            return Steps(index=target.id, length=length, backwards=backwards)
        case [start, length]:
            return Steps(index=target.id, length=length, start=ast.unparse(start), backwards=backwards)
        case [top, last, step] if not backwards and ast.unparse(step) == "-1":
            down, above = ast.unparse(last), expression(_plus(ast.unparse(top), 1))
            return Steps(index=target.id, length=above, start="" if down == "-1" else _plus(down, 1), backwards=True)
        case [start, length, ast.Constant(value=int(stride))] if not backwards and stride > 0:
            first = ast.unparse(start)
            return Steps(index=target.id, length=length, start="" if first == "0" else first, stride=stride)
    return None


def _place_of(node: ast.Subscript, index: str) -> tuple[int, int] | None:
    """Dimension and shift of the one index `t`, `t - 1` or `t + 1` that has only full slices beside it."""
    parts = indices_of(node)
    at = [(i, shift) for i, part in enumerate(parts) if (shift := shift_of(part, index)) is not None]
    return at[0] if len(at) == 1 and sum(is_full(part) for part in parts) == len(parts) - 1 else None


class _Slicing(ast.NodeTransformer):
    """`x[:, t]` becomes `x_t`, a slice that the step receives; a row of a table becomes the name of that row."""

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
        place = replace(place, rest=tuple([self.visit(part) for part in place.rest]))
        if table is not None and place.base == table.place.base:
            ago = place.shift if self.steps.backwards else -place.shift
            if ago >= 0:
                return place.within(table.earlier(ago) if ago else table.row, node.ctx)
        elif place.root in self.assigned and table is None:
            return self.generic_visit(node)  # a later step reads what an earlier one wrote
        # an index beside the counter has to be a constant, or a number of the step's own
        alone = not place.fixed and all(
            is_full(one) or self.scope.depends_on(one) == "static" or (self.steps.numbers and is_whole(self.scope, one))
            for one in place.rest
        )
        if isinstance(node.ctx, ast.Store) or not (alone or self.known) or (place.shift and self.steps.length is None):
            return self.generic_visit(node)
        self.steps.slices[row] = (place.base, place.axis)
        if place.shift:
            self.steps.shifts[row] = place.shift
        return place.within(row, node.ctx)


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
