"""Loops over time: as one vectorised expression, one `vmap`, or a scan.

Conditions. At once, and vmap: nothing is carried from step to step. Scan: what is carried keeps its shape and dtype,
the steps read slices of tensors. Each holds only if the proof says so.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

import torch

from trueline.doctor.rewrites.lists import begins, joined, uses, without_list
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, expression, statements, stored, walk
from trueline.doctor.rewrites.steps import Steps, carried, kept, taken_apart

HOPS = "from torch._higher_order_ops import"
IN_ROWS = "clone(memory_format=torch.contiguous_format)"
"""A copy whose strides follow from its shape alone. What a structured loop is given and what each step hands on must
have equal strides, and of a dimension of size 1 a slice, and what is made like it, keeps the stride of the whole."""


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """Candidates for a loop at `spot`, or for a list that a simple statement at `spot` makes of one."""
    if isinstance(spot.statement, ast.For):
        found = [_vectorised(scope, spot), _mapped(scope, spot), _scanned(scope, spot)]
        found += [_scanned(scope, spot, idle=True), _scanned(scope, spot, in_rows=True)]
    else:
        found = [_listed(scope, spot)]
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


def _vectorised(scope: Scope, spot: Spot) -> Candidate | None:
    """`for t: outs.append(f(x[:, t]))` as `f(x)`: for an f that treats every step alike and by itself."""
    assert isinstance(spot.statement, ast.For)
    steps = taken_apart(scope, spot.statement)
    if steps is None or len(steps.lists) != 1 or carried(scope, spot, steps):
        return None
    ((name, _),) = steps.lists.items()
    if steps.uses_index or steps.start or steps.shifts or steps.filled or begins(spot, name):
        return None
    found = joined(spot, name, name)
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
            if node.id == kept(name):
                return ast.Name(id=name, ctx=node.ctx)
            return copy.deepcopy(whole[node.id]) if node.id in whole and isinstance(node.ctx, ast.Load) else node

    new = [Whole().visit(copy.deepcopy(statement)) for statement in steps.body]
    text = without_list(scope, spot, [name], new, {id(join): expression(name)})
    head = ast.unparse(spot.statement).splitlines()[0]
    return Candidate(text=text, words=f"`{head}` treats every step alike: all at once") if text else None


def _mapped(scope: Scope, spot: Spot) -> Candidate | None:
    """`for x_i in x: outs.append(f(x_i))` as `torch.vmap(f)(x)`: for steps that know nothing of each other."""
    assert isinstance(spot.statement, ast.For)
    steps = taken_apart(scope, spot.statement)
    if steps is None or not steps.lists or carried(scope, spot, steps) or (steps.uses_index and steps.length is None):
        return None
    swaps = _swaps(spot, steps)
    if swaps is None or any(begins(spot, name) for name in steps.lists if name not in steps.filled):
        return None
    function, sources, body = scope.fresh("each"), _sources(steps), _body(scope, steps)
    if not sources:
        return None
    answers = one_or_all([kept(name) for name in steps.lists])
    made = statements(f"def {function}({', '.join(sources)}):\n    return {answers}")[0]
    assert isinstance(made, ast.FunctionDef)
    made.body[:0] = body
    call = f"{', '.join(steps.lists)} = torch.vmap({function})({', '.join(sources.values())})"
    new = [made, *statements(call), *_places(steps)]
    text = without_list(scope, spot, [n for n in steps.lists if n not in steps.filled], new, swaps)
    head = ast.unparse(spot.statement).splitlines()[0]
    return Candidate(text=text, words=f"`{head}` treats every step by itself: torch.vmap") if text else None


def _listed(scope: Scope, spot: Spot) -> Candidate | None:
    """`torch.stack([f(a, b) for a, b in zip(x, y)])` as `torch.vmap(f)(x, y)`."""
    changed: list[str] = []

    class Map(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            listing = node.args[0] if node.args and ast.unparse(node.func) == "torch.stack" else None
            if not isinstance(listing, ast.ListComp | ast.GeneratorExp) or len(listing.generators) != 1:
                return node
            rows = listing.generators[0]
            loop = ast.For(target=rows.target, iter=rows.iter, body=[], orelse=[], lineno=0)
            loop.body = statements(f"listed.append({ast.unparse(listing.elt)})")
            steps = taken_apart(scope, loop) if not rows.ifs else None
            if steps is None or not steps.slices or (steps.uses_index and steps.length is None):
                return node
            sources = _sources(steps)
            value = ast.unparse(_body(scope, steps)[-1].value)  # type: ignore[attr-defined]
            changed.append(ast.unparse(node))
            mapped = f"torch.vmap(lambda {', '.join(sources)}: {value})({', '.join(sources.values())})"
            given = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
            return expression(mapped + (f".movedim(0, {ast.unparse(given[0])})" if given else ""))

    if isinstance(spot.statement, ast.For | ast.While | ast.If | ast.With | ast.Try | ast.FunctionDef):
        return None
    new = Map().visit(copy.deepcopy(spot.statement))
    text = scope.replaced([spot.statement], [new]) if changed else None
    return Candidate(text=text, words=f"`{changed[0]}` treats every step by itself: torch.vmap") if text else None


def _swaps(spot: Spot, steps: Steps) -> dict[int, ast.expr | ast.stmt] | None:
    """What stands for the uses of all that the loop collects in lists; None where one cannot be a tensor."""
    found: dict[int, ast.expr | ast.stmt] = {}
    for name in steps.lists:
        if name not in steps.filled:
            swaps = uses(spot, name)
            if swaps is None:
                return None
            found |= swaps
    return found


def _places(steps: Steps) -> list[ast.stmt]:
    """Moves the steps of a tensor that was filled to the dimension where they were."""
    turned = ".flip(0)" if steps.backwards else ""
    moved = {name: turned + (f".movedim(0, {axis})" if axis else "") for name, axis in steps.filled.items()}
    return [one for name, how in moved.items() if how for one in statements(f"{name} = {name}{how}")]


def _sources(steps: Steps) -> dict[str, str]:
    """Name in the step -> the tensor, steps first, that it is of."""
    sources = {part: steps.source(part) for part in steps.slices}
    index = steps.index if steps.uses_index or not steps.slices else None
    if index is not None and steps.length is not None:
        where = next((f", device={tensor}.device" for tensor, _ in steps.slices.values()), "")
        sources[index] = steps.counter(where)
    return sources


def _body(scope: Scope, steps: Steps) -> list[ast.stmt]:
    body = [copy.deepcopy(one) for one in steps.body]
    if steps.index is not None and (steps.uses_index or not steps.slices):
        body = [Picked(steps.index).visit(one) for one in body]
    return body


def _scanned(scope: Scope, spot: Spot, *, in_rows: bool = False, idle: bool = False) -> Candidate | None:
    """A loop over time as torch's scan; `in_rows` where what a step hands on has other strides than what it got; `idle`
    with a step before the first that changes nothing, where there may be no step at all."""
    assert isinstance(spot.statement, ast.For)
    steps = taken_apart(scope, spot.statement)
    if steps is None or not (steps.slices or steps.length is not None):
        return None
    state = carried(scope, spot, steps)
    if (steps.uses_index and steps.length is None) or (not steps.slices and not steps.uses_index and not state):
        return None
    firsts = {name: begins(spot, name) for name in steps.lists if name not in steps.filled}
    swaps = _swaps(spot, steps)
    if swaps is None or (in_rows and not state) or (idle and not steps.may_be_none):
        return None
    new = _scan(scope, steps, state, in_rows=in_rows, idle=idle)
    for name, first in firsts.items():  # what the list held before the loop may be named as what the loop carries
        if first:
            before = scope.fresh(f"{name}_before")
            given = ", ".join(ast.unparse(one) for one in first)
            new = [*statements(f"{before} = torch.stack([{given}])"), *new]
            new += statements(f"{name} = torch.cat([{before}, {name}])")
    text = without_list(scope, spot, [*firsts], [*new, *_places(steps)], swaps)
    head = ast.unparse(spot.statement).splitlines()[0]
    words = f"`{head}` is a scan" + (" that may have no step" if idle else "")
    return (text and Candidate(text=imported(text, "scan"), words=words, cheap=False)) or None


def _scan(scope: Scope, steps: Steps, carries: list[str], *, in_rows: bool, idle: bool) -> list[ast.stmt]:
    sources, body = _sources(steps), _body(scope, steps)
    state = carries or [scope.fresh("idle")]
    first = [_initial(scope, one, steps) for one in carries] or ["torch.zeros(())"]
    back = [one if one in stored(body) else f"{one}.clone()" for one in state]
    if in_rows or idle:
        back = [f"{one}.{IN_ROWS}" for one in state]
    outs = [f"{kept(one)}.clone()" for one in steps.lists] or [f"{state[0]}.clone()"]
    ahead: list[ast.stmt] = []
    if idle:
        ahead = [one for part, source in sources.items() for one in statements(f"{part} = {source}")]
        sources, body, back = _with_idle_step(scope, sources, body, back, carries)
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
    left = [one if one in carries else "_" for one in state]
    call = f"scan({name}, {one_or_all(first)}, {one_or_all(list(sources.values()))})"
    text = f"{one_or_all(left)}, {one_or_all(list(steps.lists) or ['_'])} = {call}"
    shorter = [one for name in steps.lists if idle for one in statements(f"{name} = {name}[1:]")]
    return [function, *ahead, *statements(text), *shorter]


def _with_idle_step(
    scope: Scope, sources: dict[str, str], body: list[ast.stmt], back: list[str], carries: list[str]
) -> tuple[dict[str, str], list[ast.stmt], list[str]]:
    """One step more, before the first: it is given zeros, and what it carries stays as it was."""
    going = scope.fresh("going")
    longer = {part: f"torch.cat([{part}.new_zeros((1, *{part}.shape[1:])), {part}])" for part in sources}
    longer[going] = f"torch.arange({next(iter(sources))}.shape[0] + 1) > 0"
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
        if isinstance(statement, ast.Assign) and stored(statement) == [name]:
            yield name, statement.value
        if isinstance(statement, ast.AugAssign) and stored(statement) == [name]:
            yield name, ast.BinOp(left=ast.Name(id=name, ctx=ast.Load()), op=statement.op, right=statement.value)


class Picked(ast.NodeTransformer):
    """`x[t]` with a counter that is now a tensor: index_select, which takes no number out of it."""

    def __init__(self, index: str) -> None:
        self.index = index

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        at = [i for i, part in enumerate(parts) if isinstance(part, ast.Name) and part.id == self.index]
        if len(at) != 1 or not isinstance(node.ctx, ast.Load):
            return node
        rest = [part for i, part in enumerate(parts) if i != at[0]]
        if any(isinstance(part, ast.Starred) or ast.unparse(part) in ("...", "None") for part in rest):
            return node
        picked = f"{ast.unparse(node.value)}.index_select({at[0]}, {self.index}.reshape(1)).squeeze({at[0]})"
        if any(ast.unparse(part) != ":" for part in rest):
            picked += f"[{', '.join(ast.unparse(part) for part in rest)}]"
        return expression(picked)
