"""A loop over time as torch's scan: one function for a step, what it carries, what it is given.

Condition: what is carried keeps its shape and dtype. Source: torch's documentation of `scan`; what it wants of strides
and of memory it says in its refusals.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

import torch

from trueline.doctor.rewrites.loops.loop_steps import Steps, element_name
from trueline.doctor.rewrites.loops.recurrences import shift_of, size_of
from trueline.doctor.rewrites.scope import (
    Scope,
    Spot,
    bound_before,
    expression,
    loaded_names,
    statements,
    stored_names,
    walk,
)

HOPS = "from torch._higher_order_ops import"
IN_ROWS = "clone(memory_format=torch.contiguous_format)"
"""A copy whose strides follow from its shape alone. What a structured loop is given and what each step hands on must
have equal strides, and of a dimension of size 1 a slice, and what is made like it, keeps the stride of the whole."""


def add_import(text: str, name: str) -> str:
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


def sources_of(steps: Steps) -> dict[str, str]:
    """Name in the step -> the tensor, steps first, that it is of."""
    sources = {part: steps.source(part) for part in steps.slices}
    index = steps.index if steps.uses_index or not steps.slices else None
    if index is not None and steps.length is not None:
        sources[index] = steps.counter(_device(steps))
    return sources


def _device(steps: Steps) -> str:
    return next((f", device={tensor}.device" for tensor, _ in steps.slices.values()), "")


def body_of(scope: Scope, steps: Steps, *, idle: bool = False) -> list[ast.stmt]:
    """What a step does, with numbers that are tensors now: the counter, and what indices were computed."""
    least: dict[str, int] = {name: 0 for name in stored_names(steps.body) if _is_number(scope.seen.get(name))}
    given = set(steps.slices) if steps.numbers else set()  # as an index each is a number still
    least |= dict.fromkeys(given, 0)
    if steps.index is not None and (steps.uses_index or not steps.slices):
        least[steps.index] = (int(steps.start) if steps.start.isdecimal() else 0) - idle
    body = [_rebound(copy.deepcopy(one)) for one in steps.body]
    for name, low in least.items():
        body = [Picked(name, least=low, given=name in given).visit(one) for one in body]
    return body


def _is_number(held: object) -> bool:
    return isinstance(held, torch.Tensor) and held.ndim == 0 and held.dtype in (torch.int64, torch.int32)


def _rebound(statement: ast.stmt) -> ast.stmt:
    """`x += y` as `x = x + y`: a step may not write into what it is given."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        left = ast.Name(id=statement.target.id, ctx=ast.Load())
        return ast.Assign(
            targets=[statement.target], value=ast.BinOp(left=left, op=statement.op, right=statement.value)
        )
    return statement


def copies(scope: Scope, spot: Spot, steps: Steps, state: list[str]) -> list[ast.stmt]:
    """Copies of what a step reads from around it and what lies in one memory (`a, b = self.pair`): torch takes no two
    of those into a scan."""
    given = {*steps.slices, *state, *stored_names(steps.body)}
    around = [
        name for name in loaded_names(steps.body) if name not in given and name in bound_before(spot, scope.function)
    ]
    memory: dict[int, list[str]] = {}
    for name in around:
        held = scope.seen.get(name)
        if isinstance(held, torch.Tensor):
            memory.setdefault(held.untyped_storage().data_ptr(), []).append(name)
    shared = [name for names in memory.values() if len(names) > 1 for name in names]
    return [one for name in shared for one in statements(f"{name} = {name}.clone()")]


def scan(
    scope: Scope, steps: Steps, carries: list[str], *, in_rows: bool = False, idle: bool = False
) -> list[ast.stmt]:
    """The loop as a scan. `in_rows` where what a step hands on has other strides than what it got; `idle` where there
    may be no step at all, with steps that change nothing."""
    sources, body = sources_of(steps), body_of(scope, steps, idle=idle)
    state = carries or [scope.fresh("idle")]
    first = [_initial(scope, one, steps) for one in carries] or ["torch.zeros(())"]
    back = [one if one in stored_names(body) else f"{one}.clone()" for one in state]
    if in_rows or idle:
        back = [f"{one}.{IN_ROWS}" for one in state]
    outs = [f"{element_name(one)}.clone()" for one in steps.lists] or [f"{state[0]}.clone()"]
    ahead: list[ast.stmt] = []
    if idle and steps.fills_only:
        ahead, sources = _over_all_rows(scope, steps)
        body, back = _idle_in_rows(scope, steps, body, back, carries)
        first = [_empty_row(steps, one) or given for one, given in zip(state, first, strict=True)]
    elif idle:
        if steps.index in sources:
            sources[steps.index] = steps.counter(_device(steps), idle=True)
        ahead = [one for part, source in sources.items() for one in statements(f"{part} = {source}")]
        sources, body, back = _with_idle_step(scope, steps, sources, body, back, carries)
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
    left = [one if one in carries and one not in steps.rows else "_" for one in state]
    call = f"scan({name}, {one_or_all(first)}, {one_or_all(list(sources.values()))})"
    text = f"{one_or_all(left)}, {one_or_all(list(steps.lists) or ['_'])} = {call}"
    shorter = [
        one for name in steps.lists if idle and not steps.fills_only for one in statements(f"{name} = {name}[1:]")
    ]
    return [function, *ahead, *statements(text), *shorter]


def _over_all_rows(scope: Scope, steps: Steps) -> tuple[list[ast.stmt], dict[str, str]]:
    """A step for every row of the table, and whether it is one of the loop's: no size is cut, so none has a bound."""
    assert steps.length is not None
    table = next(iter(steps.tables.values()))
    base, axis = table.place.base, table.place.axis
    at, turned = scope.fresh("at"), ".flip(0)" if steps.backwards else ""
    sources: dict[str, str] = {}
    for part, (tensor, along) in steps.slices.items():
        shift = steps.shifts.get(part, 0)
        if shift or size_of(scope, tensor, along) != size_of(scope, base, axis):
            place = f"({at} {'+' if shift > 0 else '-'} {abs(shift)})" if shift else at
            sources[part] = f"{tensor}.index_select({along}, {place} % {tensor}.shape[{along}])"
            sources[part] += f".movedim({along}, 0)" if along else ""
        else:
            sources[part] = (f"{tensor}.movedim({along}, 0)" if along else tensor) + turned
    if steps.uses_index and steps.index is not None:
        sources[steps.index] = at
    ends = f"({at} < {ast.unparse(steps.length)})"
    going = scope.fresh("going")
    sources[going] = f"({at} >= {steps.start}) & {ends}" if steps.start not in ("", "0") else ends
    return statements(f"{at} = torch.arange({base}.shape[{axis}], device={base}.device){turned}"), sources


def _idle_in_rows(
    scope: Scope, steps: Steps, body: list[ast.stmt], back: list[str], carries: list[str]
) -> tuple[list[ast.stmt], list[str]]:
    """A step that is none of the loop's leaves what is carried and the row as they were, and hands the row on."""
    going = scope.fresh("going")
    kept_rows = {table.row: scope.fresh(f"{table.row}_before") for table in steps.tables.values()}
    saved = {name: scope.fresh(f"{name}_before") for name in carries if name not in steps.rows} | kept_rows
    found = [one for name, old in saved.items() for one in statements(f"{old} = {name}")]
    given = {element_name(new): table.row for new, table in steps.tables.items()}
    for statement in body:
        row = next((given[name] for name in stored_names(statement) if name in given), None)
        if row is not None:
            found += statements(f"{row} = torch.where({going}, {row}, {kept_rows[row]})")
        found.append(statement)
    ends = [
        f"torch.where({going}, {name}, {saved[name]}).{IN_ROWS}" if name in saved else one
        for name, one in zip(carries or back, back, strict=True)
    ]
    return found, ends


def _empty_row(steps: Steps, name: str) -> str | None:
    """What stands for an earlier row before the first step, which reads none of it."""
    if name not in steps.rows:
        return None
    table = next(one for one in steps.tables.values() if name in [one.earlier(by) for by in range(1, one.depth + 1)])
    return f"torch.zeros_like({table.place.base}.select({table.place.axis}, 0)).{IN_ROWS}"


def _with_idle_step(
    scope: Scope, steps: Steps, sources: dict[str, str], body: list[ast.stmt], back: list[str], carries: list[str]
) -> tuple[dict[str, str], list[ast.stmt], list[str]]:
    """One step more, before the first: it is given zeros, and what it carries stays as it was."""
    going, parts = scope.fresh("going"), [part for part in sources if part != steps.index]
    longer = {part: f"torch.cat([{part}.new_zeros((1, *{part}.shape[1:])), {part}])" for part in parts}
    if steps.index in sources:
        longer[steps.index] = steps.index
    longer[going] = (
        f"torch.arange({parts[0]}.shape[0] + 1) > 0" if parts else f"torch.arange({steps.index}.shape[0]) > 0"
    )
    saved = {name: scope.fresh(f"{name}_before") for name in carries}
    before = [one for name, old in saved.items() for one in statements(f"{old} = {name}")]
    ends = [
        f"torch.where({going}, {name}, {saved[name]}).{IN_ROWS}" if name in saved else one
        for name, one in zip(carries or back, back, strict=True)
    ]
    return longer, [*before, *body], ends


def one_or_all(names: list[str]) -> str:
    """One name as it is, several as a tuple."""
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


def _initial(scope: Scope, name: str, steps: Steps) -> str:
    """What is carried into the first step: a tensor as it is, a number as a tensor of the shape that it gets."""
    if name in steps.rows:
        return f"{steps.rows[name]}.{IN_ROWS}"
    value = scope.seen.get(name)
    start = next((v for t, v in _starts(scope, name)), None)
    if start is None or not isinstance(start, ast.Constant) or not isinstance(start.value, int | float):
        return f"{name}.{IN_ROWS}" if isinstance(value, torch.Tensor) else name
    if isinstance(value, torch.Tensor) and value.ndim:
        plain = not (steps.start or steps.backwards or steps.shifts)
        firsts = {
            part: f"{tensor}.select({axis}, 0)" if plain else f"({steps.source(part)})[0]"
            for part, (tensor, axis) in steps.slices.items()
        }
        update = next((v for t, v in _updates(steps, name)), None)
        if update is not None:

            class First(ast.NodeTransformer):
                def visit_Name(self, node: ast.Name) -> ast.AST:
                    return expression(firsts[node.id]) if node.id in firsts else node

            return f"torch.full_like({ast.unparse(First().visit(copy.deepcopy(update)))}, {start.value})"
    return f"torch.full((), {start.value})"


def _starts(scope: Scope, name: str) -> Iterator[tuple[str, ast.expr]]:
    for node in walk(scope.function):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)]) if target == name:
                yield name, node.value
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for one, value in zip(targets, values, strict=False):
                    if isinstance(one, ast.Name) and one.id == name:
                        yield name, value


def _updates(steps: Steps, name: str) -> Iterator[tuple[str, ast.expr]]:
    for statement in steps.body:
        if isinstance(statement, ast.Assign) and stored_names(statement) == [name]:
            yield name, statement.value
        if isinstance(statement, ast.AugAssign) and stored_names(statement) == [name]:
            yield name, ast.BinOp(left=ast.Name(id=name, ctx=ast.Load()), op=statement.op, right=statement.value)


class Picked(ast.NodeTransformer):
    """`x[t]` with a counter that is now a tensor: index_select, which takes no number out of it."""

    def __init__(self, index: str, *, least: int = 0, given: bool = False) -> None:
        self.index, self.least = index, least
        """The counter, and the smallest that it is."""
        self.given = given
        """Whether it is none, but a number that each step is given: vmap, mapping index_select, fixes the sizes."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`torch.full_like(x, t)`, which would take the number out."""
        self.generic_visit(node)
        if ast.unparse(node.func) != "torch.full_like" or len(node.args) != 2 or node.keywords:
            return node
        like, value = (ast.unparse(one) for one in node.args)
        if self.index not in loaded_names(node.args[1]):
            return node
        return expression(f"torch.as_tensor({value}).to({like}.dtype).expand_as({like})")

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        at = [i for i, part in enumerate(parts) if shift_of(part, self.index) is not None]
        if not at or not isinstance(node.ctx, ast.Load):
            return node
        rest = [part for i, part in enumerate(parts) if i not in at]
        if any(isinstance(part, ast.Starred) or ast.unparse(part) == "..." for part in parts):
            return node
        picked = whole = ast.unparse(node.value)
        for i in reversed(at):
            axis = sum(ast.unparse(part) != "None" for part in parts[:i])
            place = ast.unparse(parts[i])
            if self.least + (shift_of(parts[i], self.index) or 0) < 0:  # as Python counts from the end
                place = f"(({place}) % {whole}.shape[{axis}])"
            elif place != self.index:
                place = f"({place})"
            if self.given:
                picked += f"[{':, ' * axis}{place}.reshape(1)].squeeze({axis})"
            else:
                picked += f".index_select({axis}, {place}.reshape(1)).squeeze({axis})"
        if any(ast.unparse(part) != ":" for part in rest):
            picked += f"[{', '.join(ast.unparse(part) for part in rest)}]"
        return expression(picked)
