"""Loops over time: as one vectorised expression, or as a scan.

Conditions. Vectorised: nothing is carried from step to step. Scan: what is carried keeps its shape and dtype,
the steps read slices of tensors. Each holds only if the proof says so.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    bound_before,
    expression,
    loaded,
    read_later,
    statements,
    stored,
    walk,
)

HOPS = "from torch._higher_order_ops import"
IN_ROWS = "clone(memory_format=torch.contiguous_format)"
"""A copy whose strides follow from its shape alone. What a structured loop is given and what each step hands on must
have equal strides, and of a dimension of size 1 a slice, and what is made like it, keeps the stride of the whole."""


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """Candidates for a loop at `spot`."""
    loop = spot.statement
    found: list[Candidate | None] = []
    if isinstance(loop, ast.For):
        found = [_vectorised(scope, spot), _scanned(scope, spot), _scanned(scope, spot, in_rows=True)]
    yield from (one for one in found if one is not None)


def imported(text: str, name: str) -> str:
    """The file with the import of a structured operator, once."""
    line = f"{HOPS} {name}"
    if line in text:
        return text
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    at = 0
    for statement in tree.body:
        words = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, ast.Import | ast.ImportFrom) or (at == 0 and words):
            at = statement.end_lineno or statement.lineno
        elif not words:
            break
    return "".join([*lines[:at], f"{line}\n", *lines[at:]])


@dataclass(slots=True)
class Steps:
    """A loop over time, taken apart: what each step is given, what it carries, what it collects."""

    index: str | None
    """Name of the counter, if the loop has one."""
    length: ast.expr | None
    slices: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Name in the step -> (tensor, its dimension of time)."""
    lists: dict[str, ast.expr] = field(default_factory=dict)
    """List that each step appends to -> what it appends."""
    body: list[ast.stmt] = field(default_factory=list)
    uses_index: bool = False


def taken_apart(scope: Scope, loop: ast.For) -> Steps | None:
    """The steps of `for t in range(n)`, `for x_t in x`, `for x_t in x.unbind(1)`, or with enumerate; else None."""
    steps = _headed(scope, loop)
    if steps is None or loop.orelse:
        return None
    slicing = _Slicing(scope, steps, set(stored(loop.body)))
    for statement in loop.body:
        new = slicing.visit(copy.deepcopy(statement))
        appended = appended_by(new)
        if appended is None:
            steps.body.append(new)
        elif appended[0] in steps.lists:
            return None
        else:
            steps.lists[appended[0]] = appended[1]
            steps.body.append(ast.Assign(targets=[ast.Name(id=_kept(appended[0]), ctx=ast.Store())], value=appended[1]))
    if has_effects(steps.body) or set(steps.lists) & set(loaded(steps.body)):
        return None
    if set(loaded(loop.iter)) & set(stored(loop.body)):
        return None
    steps.uses_index = steps.index is not None and steps.index in loaded(steps.body)
    return steps


def has_effects(block: list[ast.stmt]) -> bool:
    """Whether `block` does more than compute names: jumps, writes into objects, calls for their effect."""
    for node in (node for statement in block for node in ast.walk(statement)):
        if isinstance(node, ast.Break | ast.Continue | ast.Return | ast.Yield | ast.Global | ast.Nonlocal | ast.Delete):
            return True
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            return True
    return False


def _kept(name: str) -> str:
    return f"{name}_t"


def _headed(scope: Scope, loop: ast.For) -> Steps | None:
    target, source = loop.target, loop.iter
    index: str | None = None
    if isinstance(source, ast.Call) and isinstance(source.func, ast.Name):
        if source.func.id == "range" and len(source.args) == 1 and isinstance(target, ast.Name):
            return Steps(index=target.id, length=source.args[0])
        if source.func.id == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            first, target = target.elts
            index, source = (first.id if isinstance(first, ast.Name) else None), source.args[0]
    if not isinstance(target, ast.Name):
        return None
    axis, tensor = 0, source
    if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and source.func.attr == "unbind":
        given = [*source.args, *(keyword.value for keyword in source.keywords)]
        axis = ast.literal_eval(given[0]) if given else 0
        tensor = source.func.value
    if scope.worth(tensor) != "tensor":
        return None
    steps = Steps(index=index, length=None)
    steps.slices[target.id] = (ast.unparse(tensor), axis)
    return steps


class _Slicing(ast.NodeTransformer):
    """`x[:, t]` becomes `x_t`, a slice that the step is given."""

    def __init__(self, scope: Scope, steps: Steps, assigned: set[str]) -> None:
        self.scope, self.steps, self.assigned = scope, steps, assigned

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        axis = self._axis(node)
        if axis is None or not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        text = ast.unparse(node.value)
        name = f"{text.split('.')[-1]}_{self.steps.index}"
        self.steps.slices[name] = (text, axis)
        return ast.Name(id=name, ctx=ast.Load())

    def _axis(self, node: ast.Subscript) -> int | None:
        index = self.steps.index
        if (
            index is None
            or not isinstance(node.value, ast.Name | ast.Attribute)
            or ast.unparse(node.value) in self.assigned  # a later step reads what an earlier one wrote
            or not self.scope.is_tensor(node.value)
        ):
            return None
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        at = [i for i, part in enumerate(parts) if isinstance(part, ast.Name) and part.id == index]
        full = [isinstance(p, ast.Slice) and p.lower is None and p.upper is None and p.step is None for p in parts]
        return at[0] if len(at) == 1 and sum(full) == len(parts) - 1 else None


def appended_by(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append"):
        return None
    if isinstance(call.func.value, ast.Name) and len(call.args) == 1:
        return call.func.value.id, call.args[0]
    return None


def _carried(scope: Scope, spot: Spot, steps: Steps) -> list[str]:
    """Names that a step leaves for the next one or for what follows the loop."""
    known, later = bound_before(spot, scope.function), read_later(spot)
    names: list[str] = []
    before: set[str] = set()
    for statement in steps.body:
        read = [name for name in loaded(statement) if name not in before]
        names += [name for name in read if name in stored(steps.body) and name in known]
        before |= set(stored(statement))
    names += [name for name in stored(steps.body) if name in later and name in known]
    return [name for name in dict.fromkeys(names) if name not in steps.slices]


def joined(scope: Scope, spot: Spot, name: str, stacked: str) -> tuple[ast.expr, ast.Call] | None:
    """How the list `name` is joined after the loop, as an expression on `stacked` (time first), and the call that
    joins."""
    rest = spot.block[spot.index + 1 :]
    for node in (node for statement in rest for node in walk(statement)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        if (
            ast.unparse(node.func) not in ("torch.stack", "torch.cat", "torch.concat")
            or ast.unparse(node.args[0]) != name
        ):
            continue
        given = [*node.args[1:], *(k.value for k in node.keywords if k.arg in ("dim", "axis"))]
        try:
            axis = int(ast.literal_eval(given[0])) if given else 0
        except (ValueError, TypeError):
            return None
        if node.func.attr == "stack":
            return expression(stacked if axis == 0 else f"{stacked}.movedim(0, {axis})"), node
        if axis < 0:
            return None
        return expression(f"{stacked}.movedim(0, {axis}).flatten({axis}, {axis + 1})"), node
    return None


def without_list(
    scope: Scope, spot: Spot, names: list[str], new: list[ast.stmt], swaps: dict[int, ast.expr]
) -> str | None:
    """The file with the loop replaced by `new`, joins by `swaps` (id of the call -> expression), and the lists'
    `name = []` gone."""
    block = spot.block
    start = spot.index
    for index in range(spot.index - 1, -1, -1):
        statement = block[index]
        if isinstance(statement, ast.Assign | ast.AnnAssign) and set(stored(statement)) & set(names):
            start = index
    kept = [
        one
        for one in block[start : spot.index]
        if not (isinstance(one, ast.Assign | ast.AnnAssign) and set(stored(one)) & set(names))
    ]
    end = spot.index + 1
    tail: list[ast.stmt] = []
    for index in range(spot.index + 1, len(block)):
        if any(id(node) in swaps for node in ast.walk(block[index])):
            tail += [*block[end:index], _swapped(block[index], swaps)]
            end = index + 1
    return scope.replaced(block[start:end], [*kept, *new, *tail])


def _swapped(statement: ast.stmt, swaps: dict[int, ast.expr]) -> ast.stmt:
    class Swap(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            return swaps[id(node)] if id(node) in swaps else self.generic_visit(node)

    marked = Swap().visit(statement)
    assert isinstance(marked, ast.stmt)
    return marked


def _vectorised(scope: Scope, spot: Spot) -> Candidate | None:
    """`for t: outs.append(f(x[:, t]))` as `f(x)`: for an f that treats every step alike and by itself."""
    assert isinstance(spot.statement, ast.For)
    steps = taken_apart(scope, spot.statement)
    if steps is None or steps.uses_index or len(steps.lists) != 1 or _carried(scope, spot, steps):
        return None
    ((name, _),) = steps.lists.items()
    found = joined(scope, spot, name, name)
    if found is None:
        return None
    _, join = found
    whole = {part: expression(tensor) for part, (tensor, _) in steps.slices.items()}
    axes = {axis for _, axis in steps.slices.values()}
    stacks = ast.unparse(join.func) == "torch.stack"
    given = [*join.args[1:], *(k.value for k in join.keywords)]
    if not stacks or len(axes) != 1 or (ast.literal_eval(given[0]) if given else 0) not in axes:
        return None

    class Whole(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            if node.id == _kept(name):
                return ast.Name(id=name, ctx=node.ctx)
            return copy.deepcopy(whole[node.id]) if node.id in whole and isinstance(node.ctx, ast.Load) else node

    new = [Whole().visit(copy.deepcopy(statement)) for statement in steps.body]
    text = without_list(scope, spot, [name], new, {id(join): expression(name)})
    head = ast.unparse(spot.statement).splitlines()[0]
    return Candidate(text=text, words=f"`{head}` treats every step alike: all at once") if text else None


def _scanned(scope: Scope, spot: Spot, *, in_rows: bool = False) -> Candidate | None:
    """A loop over time as torch's scan; `in_rows` where what a step hands on has other strides than what it got."""
    assert isinstance(spot.statement, ast.For)
    steps = taken_apart(scope, spot.statement)
    if steps is None or not (steps.slices or steps.length is not None):
        return None
    carried = _carried(scope, spot, steps)
    if (steps.uses_index and steps.length is None) or (not steps.slices and not steps.uses_index and not carried):
        return None
    joins = {name: joined(scope, spot, name, name) for name in steps.lists}
    if any(join is None for join in joins.values()):
        return None
    if in_rows and not carried:
        return None
    new = _scan(scope, spot, steps, carried, in_rows=in_rows)
    swaps = {id(join[1]): join[0] for join in joins.values() if join is not None}
    text = without_list(scope, spot, list(steps.lists), new, swaps)
    head = ast.unparse(spot.statement).splitlines()[0]
    return (text and Candidate(text=imported(text, "scan"), words=f"`{head}` is a scan", cheap=False)) or None


def _scan(scope: Scope, spot: Spot, steps: Steps, carried: list[str], *, in_rows: bool) -> list[ast.stmt]:
    sources = {
        part: f"{tensor}.movedim({axis}, 0)" if axis else tensor for part, (tensor, axis) in steps.slices.items()
    }
    index = steps.index if steps.uses_index or not steps.slices else None
    if index is not None and steps.length is not None:
        where = next((f", device={tensor}.device" for tensor, _ in steps.slices.values()), "")
        sources[index] = f"torch.arange({ast.unparse(steps.length)}{where})"
    state = carried or [scope.fresh("idle")]
    body = [copy.deepcopy(one) for one in steps.body]
    if index is not None:
        body = [_Picked(scope, index).visit(one) for one in body]
    first = [_initial(scope, one, steps) for one in carried] or ["torch.zeros(())"]
    back = [one if one in stored(body) else f"{one}.clone()" for one in state]
    if in_rows:
        back = [f"{one}.{IN_ROWS}" for one in state]
    outs = [f"{_kept(one)}.clone()" for one in steps.lists] or [f"{state[0]}.clone()"]
    name = scope.fresh("step")
    opened = [f"{one_or_all(names)} = {given}" for names, given in ((state, "carry"), (list(sources), "inputs"))]
    given = [
        names[0] if len(names) == 1 else generic for names, generic in ((state, "carry"), (list(sources), "inputs"))
    ]
    unpacked = [line for line, names in zip(opened, (state, sources), strict=True) if len(names) > 1]
    lines = [f"def {name}({', '.join(given)}):", *unpacked, f"return {one_or_all(back)}, {one_or_all(outs)}"]
    function = statements("\n    ".join(lines))[0]
    assert isinstance(function, ast.FunctionDef)
    function.body[len(unpacked) : len(unpacked)] = body
    left = [one if one in carried else "_" for one in state]
    call = f"scan({name}, {one_or_all(first)}, {one_or_all(list(sources.values()))})"
    return [function, *statements(f"{one_or_all(left)}, {one_or_all(list(steps.lists) or ['_'])} = {call}")]


def one_or_all(names: list[str]) -> str:
    """One name as it is, several as a tuple."""
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


def _initial(scope: Scope, name: str, steps: Steps) -> str:
    """What is carried into the first step: a tensor as it is, a number as a tensor of the shape that it gets."""
    value = scope.seen.get(name)
    start = next((v for t, v in _starts(scope, name)), None)
    if start is None or not isinstance(start, ast.Constant) or not isinstance(start.value, int | float):
        return f"{name}.{IN_ROWS}" if isinstance(value, torch.Tensor) else name
    if isinstance(value, torch.Tensor) and value.ndim:
        firsts = {part: f"{tensor}.select({axis}, 0)" for part, (tensor, axis) in steps.slices.items()}
        update = next((v for t, v in _updates(steps, name)), None)
        if update is not None:

            class First(ast.NodeTransformer):
                def visit_Name(self, node: ast.Name) -> ast.AST:
                    return expression(firsts[node.id]) if node.id in firsts else node

            return f"torch.full_like({ast.unparse(First().visit(copy.deepcopy(update)))}, {start.value})"
    return f"torch.full((), {start.value})"


def _starts(scope: Scope, name: str) -> Iterator[tuple[str, ast.expr]]:
    for node in walk(scope.function):
        if isinstance(node, ast.Assign) and stored(node.targets[0]) == [name]:
            yield name, node.value


def _updates(steps: Steps, name: str) -> Iterator[tuple[str, ast.expr]]:
    for statement in steps.body:
        if isinstance(statement, ast.Assign) and stored(statement) == [name]:
            yield name, statement.value
        if isinstance(statement, ast.AugAssign) and stored(statement) == [name]:
            yield name, ast.BinOp(left=ast.Name(id=name, ctx=ast.Load()), op=statement.op, right=statement.value)


class _Picked(ast.NodeTransformer):
    """`x[t]` with a counter that is now a tensor: index_select, which takes no number out of it."""

    def __init__(self, scope: Scope, index: str) -> None:
        self.scope, self.index = scope, index

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        at = [i for i, part in enumerate(parts) if isinstance(part, ast.Name) and part.id == self.index]
        if len(at) != 1 or not all(isinstance(part, ast.Slice) for i, part in enumerate(parts) if i != at[0]):
            return node
        text = ast.unparse(node.value)
        return expression(f"{text}.index_select({at[0]}, {self.index}.reshape(1)).squeeze({at[0]})")
