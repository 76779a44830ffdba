"""A loop over time as torch's scan: a function for one step, the values that it carries, and its inputs.

Condition: the carried values keep their shape and dtype. Source: torch's documentation of `scan`, and its errors about
strides and shared memory.
"""

import ast
import copy
from collections.abc import Iterator

import torch

from trueline.doctor.rewrites.indices import shift_of, size_of
from trueline.doctor.rewrites.loops.loop_steps import Steps, element_name
from trueline.doctor.rewrites.loops.recurrent_calls import call_functions
from trueline.doctor.rewrites.scope import (
    Scope,
    Spot,
    assign,
    bound_before,
    define,
    expression,
    indices_of,
    loaded_names,
    named_value,
    statements,
    stored_names,
    substitute,
    tensor_of,
    walk,
)

IN_ROWS = "clone(memory_format=torch.contiguous_format)"
"""A copy whose strides follow from its shape alone. The inputs of a structured loop and the results of its steps must
have equal strides, but a slice keeps the stride of the whole in a dimension of size 1."""


def add_import(text: str, name: str) -> str:
    """The file with the import of a structured operator, once."""
    line = f"from torch._higher_order_ops import {name}"
    if line in text:
        return text
    lines = text.splitlines(keepends=True)
    at = 0
    for statement in ast.parse(text).body:
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, ast.Import | ast.ImportFrom) or (at == 0 and docstring):
            at = statement.end_lineno or statement.lineno
        elif not docstring:
            break
    return "".join([*lines[:at], f"{line}\n", *lines[at:]])


def sources_of(steps: Steps) -> dict[str, str]:
    """Name in the step -> the tensor, steps first, that it is taken from."""
    sources = {part: steps.source(part) for part in steps.slices}
    index = steps.index if steps.uses_index or not steps.slices else None
    if index is not None and steps.length is not None:
        sources[index] = steps.counter(_device(steps))
    return sources


def _device(steps: Steps) -> str:
    return next((f", device={tensor}.device" for tensor, _ in steps.slices.values()), "")


def body_of(scope: Scope, steps: Steps, *, idle: bool = False) -> list[ast.stmt]:
    """A step's statements, with tensors for the counter and for indices that were computed."""
    least: dict[str, int] = {name: 0 for name in stored_names(steps.body) if _is_number(scope.seen.get(name))}
    given = set(steps.slices) if steps.numbers else set()  # as an index each is a number still
    least |= dict.fromkeys(given, 0)
    if steps.index is not None and (steps.uses_index or not steps.slices):
        least[steps.index] = (int(steps.start) if steps.start.isdecimal() else 0) - idle
    body: list[ast.stmt] = []
    for statement in steps.body:  # `x += y` as `x = x + y`: a step may not write into its inputs
        named = named_value(statement) if isinstance(statement, ast.AugAssign) else None
        body.append(copy.deepcopy(statement if named is None else assign(*named)))
    for name, low in least.items():
        body = [Picked(name, least=low, given=name in given).visit(one) for one in body]
    return body


def _is_number(held: object) -> bool:
    return isinstance(held, torch.Tensor) and held.ndim == 0 and held.dtype in (torch.int64, torch.int32)


def copies(scope: Scope, spot: Spot, steps: Steps, state: list[str]) -> list[ast.stmt]:
    """Copies of outer tensors that a step reads and that share memory (`a, b = self.pair`): scan accepts no two of
    these. Views that the step takes of the model's own tensors (`self.F.T`) get a name before the loop."""
    views = _Views(scope)
    steps.body = [views.visit(one) for one in steps.body]
    named = [one for text, name in views.names.items() for one in statements(f"{name} = {text}.clone()")]
    given = {*steps.slices, *state, *stored_names(steps.body)}
    known = bound_before(spot, scope.function)
    memory: dict[int, list[str]] = {}
    for name in loaded_names(steps.body):
        held = scope.seen.get(name)
        if name not in given and name in known and isinstance(held, torch.Tensor):
            memory.setdefault(held.untyped_storage().data_ptr(), []).append(name)
    shared = [name for names in memory.values() if len(names) > 1 for name in names]
    return named + [one for name in shared for one in statements(f"{name} = {name}.clone()")]


class _Views(ast.NodeTransformer):
    """Names views of tensors of the model, by their source."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.names: dict[str, str] = {}

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        turned = node.attr in ("T", "mT") and self._is_own(node.value)
        return self._name(node, node.value, node.attr) if turned else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="t" | "transpose" | "unsqueeze" as how), args=args):
                fixed = all(isinstance(one, ast.Constant | ast.UnaryOp) for one in args)
                if fixed and not node.keywords and self._is_own(owner):
                    return self._name(node, owner, how)
        return self.generic_visit(node)

    def _is_own(self, node: ast.expr) -> bool:
        return ast.unparse(node).startswith("self.") and tensor_of(node, self.scope) is not None

    def _name(self, node: ast.expr, owner: ast.expr, how: str) -> ast.AST:
        name = f"{ast.unparse(owner).rpartition('.')[2]}_{how}"
        return expression(self.names.setdefault(ast.unparse(node), self.scope.fresh(name)))


def scan(
    scope: Scope, steps: Steps, carries: list[str], *, in_rows: bool = False, idle: bool = False
) -> list[ast.stmt]:
    """The loop as a scan. `in_rows` where a step returns other strides than it received; `idle` where there may be no
    step at all, with steps that change nothing."""
    sources = sources_of(steps)
    weights, body = call_functions(scope, body_of(scope, steps, idle=idle))
    state = carries or [scope.fresh("idle")]
    first = [_initial(scope, one, steps) for one in carries] or ["torch.zeros(())"]
    back = [one if one in stored_names(body) else f"{one}.clone()" for one in state]
    if in_rows or idle:
        back = [f"{one}.{IN_ROWS}" for one in state]
    outs = [f"{element_name(one)}.clone()" for one in steps.lists] or [f"{state[0]}.clone()"]
    before: list[ast.stmt] = []
    after: list[ast.stmt] = []
    if idle and steps.fills_only:
        before, sources = _over_all_rows(scope, steps)
        body, back = _idle_in_rows(scope, steps, body, back, carries)
        first = [_empty_row(steps, one) or given for one, given in zip(state, first, strict=True)]
    elif idle:
        if steps.index in sources:
            sources[steps.index] = steps.counter(_device(steps), idle=True)
        before = [one for part, source in sources.items() for one in statements(f"{part} = {source}")]
        after = [one for name in steps.lists for one in statements(f"{name} = {name}[1:]")]
        sources, body, back = _with_idle_step(scope, steps, sources, body, back, carries)
    name = scope.fresh("step")
    given = {"carry": state, "inputs": list(sources)}
    arguments = [names[0] if len(names) == 1 else generic for generic, names in given.items()]
    unpacked = [
        one
        for generic, names in given.items()
        if len(names) > 1
        for one in statements(f"{one_or_all(names)} = {generic}")
    ]
    made, read = name_sizes(scope, outer_sizes(scope, body, {*state, *sources}), _device(steps))
    before, unpacked = [*weights, *before, *made], [*unpacked, *read]
    result = f"({one_or_all(back)}, {one_or_all(outs)})"
    function = define(name, ", ".join(arguments), [*unpacked, *body], result)
    left = [one if one in carries and one not in steps.rows else "_" for one in state]
    call = f"scan({name}, {one_or_all(first)}, {one_or_all(list(sources.values()))})"
    text = f"{one_or_all(left)}, {one_or_all(list(steps.lists) or ['_'])} = {call}"
    return [function, *before, *statements(text), *after]


def outer_sizes(scope: Scope, body: list[ast.stmt], given: set[str]) -> list[str]:
    """The sizes that a step reads as names from outside."""
    own = {*stored_names(body), *given}
    named = dict.fromkeys(name for name in loaded_names(body) if name not in own)
    return [name for name in named if scope.depends_on(ast.Name(id=name, ctx=ast.Load())) == "size"]


def name_sizes(scope: Scope, sizes: list[str], device: str = "") -> tuple[list[ast.stmt], list[ast.stmt]]:
    """A tensor without elements that has these sizes, made before a loop, and their names again in its steps: torch
    follows a number from outside where a step uses it once, and no more often."""
    if not sizes:
        return [], []
    made = scope.fresh("sizes")
    names, comma = ", ".join(sizes), "," if len(sizes) == 1 else ""
    return statements(f"{made} = torch.zeros((0, {names}){device})"), statements(f"{names}{comma} = {made}.shape[1:]")


def _over_all_rows(scope: Scope, steps: Steps) -> tuple[list[ast.stmt], dict[str, str]]:
    """A step for every row of the table, and whether it is one of the loop's: no slice, so no bound on a size."""
    assert steps.length is not None
    place = next(iter(steps.tables.values())).place
    at, turned = scope.fresh("at"), ".flip(0)" if steps.backwards else ""
    sources: dict[str, str] = {}
    for part, (tensor, along) in steps.slices.items():
        shift = steps.shifts.get(part, 0)
        moved = f".movedim({along}, 0)" if along else ""
        if shift or size_of(scope, tensor, along) != size_of(scope, place.base, place.axis):
            row = f"({at} {'+' if shift > 0 else '-'} {abs(shift)})" if shift else at
            sources[part] = f"{tensor}.index_select({along}, {row} % {tensor}.shape[{along}]){moved}"
        else:
            sources[part] = tensor + moved + turned
    if steps.uses_index and steps.index is not None:
        sources[steps.index] = at
    ends = f"({at} < {ast.unparse(steps.length)})"
    starts = f"({at} >= {steps.start}) & " if steps.start not in ("", "0") else ""
    sources[scope.fresh("going")] = starts + ends
    counter = f"torch.arange({place.base}.shape[{place.axis}], device={place.base}.device){turned}"
    return statements(f"{at} = {counter}"), sources


def _idle_in_rows(
    scope: Scope, steps: Steps, body: list[ast.stmt], back: list[str], carries: list[str]
) -> tuple[list[ast.stmt], list[str]]:
    """A step outside the loop leaves the carried values and the row as they were, and passes the row on."""
    going = scope.fresh("going")
    kept_rows = {table.row: scope.fresh(f"{table.row}_before") for table in steps.tables.values()}
    saved = {name: scope.fresh(f"{name}_before") for name in carries if name not in steps.rows} | kept_rows
    guarded = _save(saved)
    given = {element_name(new): table.row for new, table in steps.tables.items()}
    for statement in body:
        row = next((given[name] for name in stored_names(statement) if name in given), None)
        if row is not None:
            guarded += statements(f"{row} = torch.where({going}, {row}, {kept_rows[row]})")
        guarded.append(statement)
    return guarded, _keep(going, saved, carries, back)


def _save(saved: dict[str, str]) -> list[ast.stmt]:
    return [one for name, old in saved.items() for one in statements(f"{old} = {name}")]


def _keep(going: str, saved: dict[str, str], carries: list[str], back: list[str]) -> list[str]:
    """The carried values, the saved ones where the step is not `going`."""
    return [
        f"torch.where({going}, {name}, {saved[name]}).{IN_ROWS}" if name in saved else one
        for name, one in zip(carries or back, back, strict=True)
    ]


def _empty_row(steps: Steps, name: str) -> str | None:
    """The value of an earlier row before the first step, which does not read it."""
    if name not in steps.rows:
        return None
    table = next(one for one in steps.tables.values() if name in [one.earlier(by) for by in range(1, one.depth + 1)])
    return f"torch.zeros_like({table.place.base}.select({table.place.axis}, 0)).{IN_ROWS}"


def _with_idle_step(
    scope: Scope, steps: Steps, sources: dict[str, str], body: list[ast.stmt], back: list[str], carries: list[str]
) -> tuple[dict[str, str], list[ast.stmt], list[str]]:
    """One more step, before the first: its inputs are zeros, and the carried values stay."""
    going, parts = scope.fresh("going"), [part for part in sources if part != steps.index]
    longer = {part: f"torch.cat([{part}.new_zeros((1, *{part}.shape[1:])), {part}])" for part in parts}
    if steps.index in sources:
        longer[steps.index] = steps.index
    count = f"{parts[0]}.shape[0] + 1" if parts else f"{steps.index}.shape[0]"
    longer[going] = f"torch.arange({count}) > 0"
    saved = {name: scope.fresh(f"{name}_before") for name in carries}
    return longer, [*_save(saved), *body], _keep(going, saved, carries, back)


def one_or_all(names: list[str]) -> str:
    """One name as it is, several as a tuple."""
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


def _initial(scope: Scope, name: str, steps: Steps) -> str:
    """The value carried into the first step; a number becomes a tensor of the shape that the steps give it."""
    if name in steps.rows:
        return f"{steps.rows[name]}.{IN_ROWS}"
    value = scope.seen.get(name)
    start = next(_starts(scope, name), None)
    if not isinstance(start, ast.Constant) or not isinstance(start.value, int | float):
        return f"{name}.{IN_ROWS}" if isinstance(value, torch.Tensor) else name
    if isinstance(value, torch.Tensor) and value.ndim:
        plain = not (steps.start or steps.backwards or steps.shifts)
        firsts = {
            part: expression(f"{tensor}.select({axis}, 0)" if plain else f"({steps.source(part)})[0]")
            for part, (tensor, axis) in steps.slices.items()
        }
        updates = (named_value(one) for one in steps.body if stored_names(one) == [name])
        update = next((named[1] for named in updates if named is not None), None)
        if update is not None:
            first = substitute(update, firsts)
            if not {*loaded_names([first])} & {*stored_names(steps.body)} - {name}:
                return f"torch.full_like({ast.unparse(first)}, {start.value})"
        return _fill(scope, steps, value, start.value)
    return f"torch.full((), {start.value})"


def _fill(scope: Scope, steps: Steps, like: torch.Tensor, number: float) -> str:
    """`number` in the shape of `like`, which only a step computes, with the sizes of tensors that are known before the
    loop."""
    own = {*stored_names(steps.body), *steps.slices}
    known = [(name, held) for name, held in scope.seen.items() if isinstance(held, torch.Tensor) and name not in own]
    sizes: dict[int, str] = {}
    for name, held in known:
        for axis, size in enumerate(held.shape):
            sizes.setdefault(size, f"{name}.shape[{axis}]")
    shape = ", ".join(sizes.get(size, str(size)) for size in like.shape)
    base = next((name for name, held in known if held.dtype == like.dtype), None)
    if base is None:
        return f"torch.full(({shape},), {number}, dtype={like.dtype})"
    return f"{base}.new_full(({shape},), {number})"


def _starts(scope: Scope, name: str) -> Iterator[ast.expr]:
    """The values that the function assigns to `name`, in order."""
    for node in walk(scope.function):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)]) if target == name:
                yield node.value
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for one, value in zip(targets, values, strict=False):
                    if isinstance(one, ast.Name) and one.id == name:
                        yield value


class Picked(ast.NodeTransformer):
    """`x[t]` with a counter that is now a tensor, as index_select, which takes no number out of it."""

    def __init__(self, index: str, *, least: int = 0, given: bool = False) -> None:
        """`least`: the smallest value of the counter. `given`: it is no counter, but a number that each step receives
        (vmap of index_select would fix the sizes)."""
        self.index, self.least, self.given = index, least, given

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`torch.full_like(x, t)` and `torch.full(shape, t)`, which would take the number out."""
        self.generic_visit(node)
        called = ast.unparse(node.func)
        if called not in ("torch.full_like", "torch.full") or len(node.args) != 2 or node.keywords:
            return node
        like, value = (ast.unparse(one) for one in node.args)
        if self.index not in loaded_names(node.args[1]):
            return node
        if called == "torch.full":
            return expression(f"torch.as_tensor({value}).expand({like})")
        return expression(f"torch.as_tensor({value}).to({like}.dtype).expand_as({like})")

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        parts = indices_of(node)
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
