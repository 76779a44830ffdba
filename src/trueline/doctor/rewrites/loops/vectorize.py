"""Loops over time: as one vectorised expression, one `vmap`, or a scan.

Conditions. At once, and vmap: nothing is carried from step to step. Scan: what is carried keeps its shape and dtype,
the steps read slices of tensors. Each holds only if the proof says so.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.loops.appends import begins, find_join, join, uses, without_list
from trueline.doctor.rewrites.loops.loop_steps import Steps, carried_names, element_name, put_back, split_loop
from trueline.doctor.rewrites.loops.scan import add_import, body_of, copies, one_or_all, scan, sources_of
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    expression,
    statements,
    walk,
)


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """Candidates for a loop at `spot`, or for a list that a simple statement at `spot` makes of one."""
    if isinstance(spot.statement, ast.For):
        for inner in _filling(scope, spot.statement):
            yield from rewrites(scope, inner)
        found = [_vectorize(scope, spot), _map_steps(scope, spot), _scan_steps(scope, spot)]
        found += [_scan_steps(scope, spot, idle=True), _scan_steps(scope, spot, in_rows=True)]
    else:
        found = [_map_comprehension(scope, spot), _named_list(scope, spot)]
    yield from (one for one in found if one is not None)


def _filling(scope: Scope, loop: ast.For) -> Iterator[Spot]:
    """The loops in the loop that fill a tensor row by row: of two that fill a table the inner one goes first."""
    for one in loop.body:
        steps = split_loop(scope, one) if isinstance(one, ast.For) and scope.worth(one.iter) != "static" else None
        inner = scope.spot(one.lineno) if steps is not None and steps.tables else None
        if inner is not None:
            yield inner


def _vectorize(scope: Scope, spot: Spot) -> Candidate | None:
    """`for t: outs.append(f(x[:, t]))` as `f(x)`: for an f that treats every step alike and by itself."""
    assert isinstance(spot.statement, ast.For)
    steps = split_loop(scope, spot.statement)
    if steps is None or len(steps.lists) != 1 or carried_names(scope, spot, steps):
        return None
    ((name, _),) = steps.lists.items()
    if steps.uses_index or steps.start or steps.shifts or steps.filled or steps.tables or begins(spot, name):
        return None
    found = find_join(spot, name, name)
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
            if node.id == element_name(name):
                return ast.Name(id=name, ctx=node.ctx)
            return copy.deepcopy(whole[node.id]) if node.id in whole and isinstance(node.ctx, ast.Load) else node

    new = [Whole().visit(copy.deepcopy(statement)) for statement in steps.body]
    text = without_list(scope, spot, [name], new, {id(join): expression(name)})
    head = ast.unparse(spot.statement).splitlines()[0]
    return Candidate(text=text, words=f"`{head}` treats every step alike: all at once") if text else None


def _map_steps(scope: Scope, spot: Spot) -> Candidate | None:
    """`for x_i in x: outs.append(f(x_i))` as `torch.vmap(f)(x)`: for steps that know nothing of each other."""
    assert isinstance(spot.statement, ast.For)
    steps = split_loop(scope, spot.statement)
    if (
        steps is None
        or not steps.lists
        or carried_names(scope, spot, steps)
        or (steps.uses_index and steps.length is None)
    ):
        return None
    swaps = _swaps(spot, steps)
    if swaps is None or any(begins(spot, name) for name in steps.listed):
        return None
    function, sources, body = scope.fresh("each"), sources_of(steps), body_of(scope, steps)
    if not sources:
        return None
    answers = one_or_all([element_name(name) for name in steps.lists])
    made = statements(f"def {function}({', '.join(sources)}):\n    return {answers}")[0]
    assert isinstance(made, ast.FunctionDef)
    made.body[:0] = body
    call = f"{', '.join(steps.lists)} = torch.vmap({function})({', '.join(sources.values())})"
    new = [made, *statements(call), *_places(scope, steps)]
    text = without_list(scope, spot, steps.listed, new, swaps)
    head = ast.unparse(spot.statement).splitlines()[0]
    return Candidate(text=text, words=f"`{head}` treats every step by itself: torch.vmap") if text else None


def _map_comprehension(scope: Scope, spot: Spot) -> Candidate | None:
    """`torch.stack([f(a, b) for a, b in zip(x, y)])` as `torch.vmap(f)(x, y)`."""
    changed: list[str] = []

    class Map(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            joins = ast.unparse(node.func) in ("torch.stack", "torch.cat")
            listing = node.args[0] if node.args and joins else None
            if not isinstance(listing, ast.ListComp | ast.GeneratorExp) or len(listing.generators) != 1:
                return node
            rows = listing.generators[0]
            loop = ast.For(target=rows.target, iter=rows.iter, body=[], orelse=[], lineno=0)
            loop.body = statements(f"listed.append({ast.unparse(listing.elt)})")
            steps = split_loop(scope, loop) if not rows.ifs else None
            if steps is None or not (steps.slices or steps.uses_index) or (steps.uses_index and steps.length is None):
                return node
            sources = sources_of(steps)
            value = ast.unparse(body_of(scope, steps)[-1].value)  # type: ignore[attr-defined]
            mapped = f"torch.vmap(lambda {', '.join(sources)}: {value})({', '.join(sources.values())})"
            found = join(node, mapped)
            changed.extend([ast.unparse(node)] if found is not None else ())
            return found or node

    if isinstance(spot.statement, ast.For | ast.While | ast.If | ast.With | ast.Try | ast.FunctionDef):
        return None
    new = Map().visit(copy.deepcopy(spot.statement))
    text = scope.replace([spot.statement], [new]) if changed else None
    return Candidate(text=text, words=f"`{changed[0]}` treats every step by itself: torch.vmap") if text else None


def _named_list(scope: Scope, spot: Spot) -> Candidate | None:
    """`rows = [f(a) for a in x]` as the loop that it is."""
    match spot.statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.ListComp(elt=element, generators=[rows])) if (
            not rows.ifs
        ):
            pass
        case _:
            return None
    loop = ast.For(target=rows.target, iter=rows.iter, body=[], orelse=[])
    loop.body = statements(f"{name}.append({ast.unparse(element)})")
    written = [ast.copy_location(one, spot.statement) for one in (*statements(f"{name} = []"), loop)]
    block = [*spot.block[: spot.index], *written, *spot.block[spot.index + 1 :]]
    return _map_steps(scope, Spot(block=block, index=spot.index + 1, outer=spot.outer))


def _swaps(spot: Spot, steps: Steps) -> dict[int, ast.expr | ast.stmt] | None:
    """What stands for the uses of all that the loop collects in lists; None where one cannot be a tensor."""
    found: dict[int, ast.expr | ast.stmt] = {}
    for name in steps.listed:
        swaps = uses(spot, name)
        if swaps is None:
            return None
        found |= swaps
    return found


def _places(scope: Scope, steps: Steps, *, all_rows: bool = False) -> list[ast.stmt]:
    """Moves the steps of a tensor that was filled to the dimension where they were."""
    turned = ".flip(0)" if steps.backwards else ""
    moved = {name: turned + (f".movedim(0, {axis})" if axis else "") for name, axis in steps.filled.items()}
    whole = [one for name, how in moved.items() if how for one in statements(f"{name} = {name}{how}")]
    return whole + put_back(scope, steps, all_rows=all_rows)


def _scan_steps(scope: Scope, spot: Spot, *, in_rows: bool = False, idle: bool = False) -> Candidate | None:
    """A loop over time as torch's scan; `in_rows` where what a step hands on has other strides than what it got; `idle`
    with a step before the first that changes nothing, where there may be no step at all."""
    assert isinstance(spot.statement, ast.For)
    steps = split_loop(scope, spot.statement)
    if steps is None or not (steps.slices or steps.length is not None):
        return None
    state = carried_names(scope, spot, steps)
    if (steps.uses_index and steps.length is None) or (not steps.slices and not steps.uses_index and not state):
        return None
    if any(_chooses(scope, node, steps.index) for statement in steps.body for node in walk(statement)):
        return None
    firsts = {name: begins(spot, name) for name in steps.listed}
    swaps = _swaps(spot, steps)
    if swaps is None or (in_rows and not state) or (idle and not steps.may_be_none):
        return None
    new = scan(scope, steps, state, in_rows=in_rows or bool(steps.rows), idle=idle)
    new[:0] = copies(scope, spot, steps, state)
    for name, first in firsts.items():  # what the list held before the loop may be named as what the loop carries
        if first:
            before = scope.fresh(f"{name}_before")
            given = ", ".join(ast.unparse(one) for one in first)
            new = [*statements(f"{before} = torch.stack([{given}])"), *new]
            new += statements(f"{name} = torch.cat([{before}, {name}])")
    text = without_list(
        scope, spot, [*firsts], [*new, *_places(scope, steps, all_rows=idle and steps.fills_only)], swaps
    )
    head = ast.unparse(spot.statement).splitlines()[0]
    words = f"`{head}` is a scan" + (" that may have no step" if idle else "")
    return (text and Candidate(text=add_import(text, "scan"), words=words, cheap=False)) or None


def _chooses(scope: Scope, node: ast.AST, index: str | None) -> bool:
    """Whether it goes by a value or by the counter, which is one in a scan: that has to be rewritten before."""
    if not isinstance(node, ast.If | ast.IfExp | ast.While):
        return False
    told = {id(one) for part in ast.walk(node.test) if _of_form(part) for one in ast.walk(part)}
    asked = [one for one in ast.walk(node.test) if isinstance(one, ast.expr) and id(one) not in told]
    by_index = any(isinstance(one, ast.Name) and one.id == index for one in asked)
    return by_index or (not _of_form(node.test) and scope.worth(node.test) in ("number", "tensor"))


def _of_form(node: ast.AST) -> bool:
    """`h is None`, `isinstance(h, Tensor)`: what no value decides."""
    if isinstance(node, ast.Compare):
        return all(isinstance(one, ast.Is | ast.IsNot) for one in node.ops)
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "hasattr")
