"""A loop over time, taken apart: what each step is given, what it carries, what it collects.

Conditions: the steps read slices of tensors and compute names; what they collect goes into a list, or into place `t` of
a tensor that nobody reads meanwhile. What one step leaves for the next keeps its shape and dtype. Each holds only if
the proof says so.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from trueline.doctor.rewrites.lists import appended_by
from trueline.doctor.rewrites.pure import pure
from trueline.doctor.rewrites.scope import Scope, Spot, bound_before, loaded, read_later, stored, value_of


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
    slices: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Name in the step -> (tensor, its dimension of time)."""
    shifts: dict[str, int] = field(default_factory=dict)
    """Name in the step -> how far it is from the counter: -1 of `x[t - 1]`."""
    lists: dict[str, ast.expr] = field(default_factory=dict)
    """List that each step appends to -> what it appends."""
    filled: dict[str, int] = field(default_factory=dict)
    """Tensor whose place `t` each step writes -> its dimension of time; it is in `lists` too."""
    body: list[ast.stmt] = field(default_factory=list)
    uses_index: bool = False

    @property
    def may_be_none(self) -> bool:
        """Whether there may be no step at all, of a tensor that a size makes empty."""
        return bool(self.start) or self.length is None

    def source(self, part: str) -> str:
        """The tensor, steps first, from which each step gets `part`."""
        tensor, axis = self.slices[part]
        moved = f"{tensor}.movedim({axis}, 0)" if axis else tensor
        shift, length = self.shifts.get(part, 0), self.length
        if length is not None and (self.start or shift):
            moved = f"{moved}[{_plus(self.start or '0', shift)}:{_plus(ast.unparse(length), shift)}]"
        return f"{moved}.flip(0)" if self.backwards else moved

    def counter(self, device: str = "") -> str:
        """The values of the counter, in the order of the steps."""
        assert self.length is not None
        start = f"{self.start}, " if self.start else ""
        numbers = f"torch.arange({start}{ast.unparse(self.length)}{device})"
        return f"{numbers}.flip(0)" if self.backwards else numbers


def _plus(number: str, shift: int) -> str:
    """`number + shift` as it would be written."""
    if number.isdecimal():
        return str(int(number) + shift)
    return f"({number}) {'+' if shift > 0 else '-'} {abs(shift)}" if shift else number


def kept(name: str) -> str:
    """What a step appends to the list `name`, as a name in the step."""
    return f"{name}_t"


def taken_apart(scope: Scope, loop: ast.For) -> Steps | None:
    """The steps of `for t in range(n)` (from a start, or down to 0), of `for x_t in x`, `x.unbind(1)`, `zip(x, y)`, or
    of these with enumerate; else None."""
    steps = headed(scope, loop.target, loop.iter)
    if steps is None or loop.orelse:
        return None
    slicing = _Slicing(scope, steps, set(stored([pure(scope, one) for one in loop.body])))
    for statement in loop.body:
        fills = _filled(scope, steps, statement, loop)
        if fills is None:
            new = slicing.visit(pure(scope, statement))
            appended = appended_by(new)
        else:
            name, axis, value = fills
            steps.filled[name], appended = axis, (name, slicing.visit(copy.deepcopy(value)))
        if appended is None:
            steps.body.append(new)
        elif appended[0] in steps.lists:
            return None
        else:
            steps.lists[appended[0]] = appended[1]
            steps.body.append(ast.Assign(targets=[ast.Name(id=kept(appended[0]), ctx=ast.Store())], value=appended[1]))
    if has_effects(steps.body) or set(steps.lists) & set(_values(steps.body)):
        return None
    if set(loaded(loop.iter)) & set(stored(steps.body)):
        return None
    steps.uses_index = steps.index is not None and steps.index in loaded(steps.body)
    return steps


def _filled(scope: Scope, steps: Steps, statement: ast.stmt, loop: ast.For) -> tuple[str, int, ast.expr] | None:
    """Name, dimension of time and value of `out[:, t] = value`."""
    if steps.index is None or not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
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
    """Whether `block` does more than compute names: jumps, writes into objects, calls for their effect."""
    for node in (node for statement in block for node in _run(statement)):
        if isinstance(node, ast.Break | ast.Continue | ast.Return | ast.Yield | ast.Global | ast.Nonlocal | ast.Delete):
            return True
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            return True
    return False


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when `node` does: what stands in a function that it defines does not."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _run(child)


def headed(scope: Scope, target: ast.expr, source: ast.expr) -> Steps | None:
    """The steps that `for target in source` takes, without their body."""
    index: str | None = None
    if isinstance(source, ast.Call) and isinstance(source.func, ast.Name):
        if source.func.id in ("range", "reversed"):
            return _counted(target, source)
        if source.func.id == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            first, target = target.elts
            index, source = (first.id if isinstance(first, ast.Name) else None), source.args[0]
    pairs = [(target, source)]
    zipped = isinstance(source, ast.Call) and ast.unparse(source.func) == "zip"
    if zipped and isinstance(source, ast.Call) and isinstance(target, ast.Tuple):
        if len(target.elts) != len(source.args) or any(one.arg != "strict" for one in source.keywords):
            return None
        pairs = [*zip(target.elts, source.args, strict=True)]
    steps = Steps(index=index, length=None)
    for name, given in pairs:
        axis, tensor = 0, given
        if isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "unbind":
            said = [*given.args, *(keyword.value for keyword in given.keywords)]
            axis = ast.literal_eval(said[0]) if said else 0
            tensor = given.func.value
        if not isinstance(name, ast.Name) or scope.worth(tensor) != "tensor":
            return None
        steps.slices[name.id] = (ast.unparse(tensor), axis)
    return steps


def _counted(target: ast.expr, source: ast.Call) -> Steps | None:
    """`range(n)`, `range(a, n)`, `reversed(range(n))` and `range(n - 1, -1, -1)`."""
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
        case [ast.BinOp(left=length, op=ast.Sub(), right=ast.Constant(value=1)), last, step] if not backwards:
            if ast.unparse(last) == ast.unparse(step) == "-1":
                return Steps(index=target.id, length=length, backwards=True)
    return None


def place_of(node: ast.Subscript, index: str) -> tuple[int, int] | None:
    """Dimension and shift of the one index `t`, `t - 1` or `t + 1` beside which there are only full slices."""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    shifts = [_shift(part, index) for part in parts]
    at = [i for i, shift in enumerate(shifts) if shift is not None]
    full = [isinstance(p, ast.Slice) and p.lower is None and p.upper is None and p.step is None for p in parts]
    if len(at) != 1 or sum(full) != len(parts) - 1:
        return None
    return at[0], shifts[at[0]] or 0


def _shift(node: ast.expr, index: str) -> int | None:
    match node:
        case ast.Name(id=name) if name == index:
            return 0
        case ast.BinOp(left=ast.Name(id=name), op=ast.Add() | ast.Sub() as op, right=ast.Constant(value=int(by))):
            return None if name != index else by if isinstance(op, ast.Add) else -by
    return None


class _Slicing(ast.NodeTransformer):
    """`x[:, t]` becomes `x_t`, a slice that the step is given."""

    def __init__(self, scope: Scope, steps: Steps, assigned: set[str]) -> None:
        self.scope, self.steps, self.assigned = scope, steps, assigned

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        found = self._place(node)
        if found is None or not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        axis, shift = found
        text = ast.unparse(node.value)
        word = "" if not shift else f"_{'less' if shift < 0 else 'plus'}_{abs(shift)}"
        name = f"{text.split('.')[-1]}_{self.steps.index}{word}"
        self.steps.slices[name] = (text, axis)
        if shift:
            self.steps.shifts[name] = shift
        return ast.Name(id=name, ctx=ast.Load())

    def _place(self, node: ast.Subscript) -> tuple[int, int] | None:
        index = self.steps.index
        if (
            index is None
            or not isinstance(node.value, ast.Name | ast.Attribute)
            or ast.unparse(node.value) in self.assigned  # a later step reads what an earlier one wrote
            or not self.scope.is_tensor(node.value)
        ):
            return None
        found = place_of(node, index)
        return None if found is None or (found[1] and self.steps.length is None) else found


def carried(scope: Scope, spot: Spot, steps: Steps) -> list[str]:
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
