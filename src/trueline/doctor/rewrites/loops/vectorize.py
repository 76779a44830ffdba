"""Loops over time: as one vectorised expression, one `vmap`, or a scan.

Conditions. One expression, and vmap: no step uses the result of another. Scan: the carried values keep their shape and
dtype, and the steps read slices of tensors. Each holds only if the proof says so.

A loop that consumes a list, as greedy non-maximum suppression does, takes the first element and filters the rest:

    order = scores.argsort(descending=True)
    while order.numel() > 0:
        i = order[0]
        keep.append(i)
        rest = order[1:]
        order = rest[overlap(i, rest) <= 0.5]

It becomes a scan over the positions of `order` that carries which are left. Condition: the filter decides for each
element by itself. After the loop, values still decide how many are kept.
"""

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.appends import Swaps, appended_by, begins, find_join, join, uses, without_list
from trueline.doctor.rewrites.loops.loop_steps import Steps, carried_names, element_name, put_back, split_loop
from trueline.doctor.rewrites.loops.scan import (
    IN_ROWS,
    Picked,
    add_import,
    body_of,
    copies,
    one_or_all,
    scan,
    sources_of,
)
from trueline.doctor.rewrites.pure import has_effects
from trueline.doctor.rewrites.rowwise import steps_are_alike
from trueline.doctor.rewrites.scope import (
    Candidate,
    Compound,
    Scope,
    Spot,
    assignments,
    define,
    expression,
    first_line,
    parameters,
    statements,
    stored_names,
    walk,
)

_COUNTED = ("{}.numel()", "len({})", "{}.shape[0]", "{}.size(0)", "{}.nelement()")
_MADE = ("torch.stack", "torch.tensor", "torch.as_tensor", "torch.LongTensor")


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """Candidates for a loop at `spot`, or for a list that a simple statement at `spot` makes of one."""
    loop = spot.statement
    if isinstance(loop, ast.For):
        for inner in _filling(scope, loop):
            yield from rewrites(scope, inner)
        yield from (_vectorize(scope, spot, loop), _map_steps(scope, spot, loop), _scan_steps(scope, spot, loop))
        yield from (_scan_steps(scope, spot, loop, idle=True), _scan_steps(scope, spot, loop, in_rows=True))
    else:
        yield from (_map_comprehension(scope, spot), _map_named_list(scope, spot))


def _filling(scope: Scope, loop: ast.For) -> Iterator[Spot]:
    """The inner loops that fill a tensor row by row: of two that fill a table the inner one goes first."""
    for one in loop.body:
        steps = split_loop(scope, one) if isinstance(one, ast.For) and scope.depends_on(one.iter) != "static" else None
        inner = scope.spot(one.lineno) if steps is not None and steps.tables else None
        if inner is not None:
            yield inner


def _vectorize(scope: Scope, spot: Spot, loop: ast.For) -> Candidate | None:
    """`for t: outs.append(f(x[:, t]))` as `f(x)`, where f treats every step alike and by itself."""
    steps = split_loop(scope, loop)
    if steps is None or len(steps.lists) != 1 or carried_names(scope, spot, steps):
        return None
    (name,) = steps.lists
    if steps.uses_index or steps.start or steps.shifts or steps.filled or steps.tables or begins(spot, name):
        return None
    joined = find_join(spot, name, name)
    if joined is None:
        return None
    call = joined[1]
    ranks = {part: (scope.rank(expression(tensor)), axis) for part, (tensor, axis) in steps.slices.items()}
    inner = {part: rank - 1 - axis for part, (rank, axis) in ranks.items() if rank is not None}
    if len(inner) < len(ranks) or not steps_are_alike(scope, steps.body, inner):
        return None
    whole = {part: expression(tensor) for part, (tensor, _) in steps.slices.items()}
    axes = {axis for _, axis in steps.slices.values()}
    given = [*call.args[1:], *(k.value for k in call.keywords)]
    stacks = ast.unparse(call.func) == "torch.stack"
    if not stacks or len(axes) != 1 or (ast.literal_eval(given[0]) if given else 0) not in axes:
        return None

    class Whole(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            if node.id == element_name(name):
                return ast.Name(id=name, ctx=node.ctx)
            return copy.deepcopy(whole[node.id]) if node.id in whole and isinstance(node.ctx, ast.Load) else node

    new = [Whole().visit(copy.deepcopy(statement)) for statement in steps.body]
    text = without_list(scope, spot, [name], new, {id(call): expression(name)})
    return Candidate(text=text, words=f"`{first_line(loop)}` treats every step alike: all at once") if text else None


def _map_steps(scope: Scope, spot: Spot, loop: ast.For) -> Candidate | None:
    """`for x_i in x: outs.append(f(x_i))` as `torch.vmap(f)(x)`, for independent steps."""
    steps = split_loop(scope, loop)
    if steps is None or not steps.lists or carried_names(scope, spot, steps) or steps.uses_unknown_index:
        return None
    swaps = uses(spot, steps.listed)
    function, sources, body = scope.fresh("each"), sources_of(steps), body_of(scope, steps)
    if swaps is None or not sources or any(begins(spot, name) for name in steps.listed):
        return None
    answers = one_or_all([element_name(name) for name in steps.lists])
    call = f"{', '.join(steps.lists)} = torch.vmap({function})({', '.join(sources.values())})"
    new = [define(function, ", ".join(sources), body, answers), *statements(call), *_places(scope, steps)]
    text = without_list(scope, spot, steps.listed, new, swaps)
    return Candidate(text=text, words=_independent(first_line(loop))) if text else None


def _independent(what: str) -> str:
    return f"`{what}` treats every step by itself: torch.vmap"


def _map_comprehension(scope: Scope, spot: Spot) -> Candidate | None:
    """`torch.stack([f(a, b) for a, b in zip(x, y)])` as `torch.vmap(f)(x, y)`; `sum` of such, summed."""
    changed: list[str] = []

    class Map(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            sums = ast.unparse(node.func) == "sum" and len(node.args) == 1
            joins = sums or ast.unparse(node.func) in ("torch.stack", "torch.cat")
            listing = node.args[0] if node.args and joins else None
            if not isinstance(listing, ast.ListComp | ast.GeneratorExp) or len(listing.generators) != 1:
                return node
            rows = listing.generators[0]
            loop = ast.For(target=rows.target, iter=rows.iter, body=[], orelse=[], lineno=0)
            loop.body = statements(f"listed.append({ast.unparse(listing.elt)})")
            steps = split_loop(scope, loop) if not rows.ifs else None
            if steps is None or not (steps.slices or steps.uses_index) or steps.uses_unknown_index:
                return node
            sources = sources_of(steps)
            value = ast.unparse(body_of(scope, steps)[-1].value)  # type: ignore[attr-defined]
            mapped = f"torch.vmap(lambda {', '.join(sources)}: {value})({', '.join(sources.values())})"
            joined = expression(f"{mapped}.sum(0)") if sums else join(node, mapped)
            changed.extend([ast.unparse(node)] if joined is not None else ())
            return joined or node

    if isinstance(spot.statement, Compound | ast.FunctionDef):
        return None
    new = Map().visit(copy.deepcopy(spot.statement))
    return scope.candidate([spot.statement], [new], _independent(changed[0])) if changed else None


def _map_named_list(scope: Scope, spot: Spot) -> Candidate | None:
    """`rows = [f(a) for a in x]` as the loop that it is."""
    match spot.statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.ListComp(elt=element, generators=[rows])):
            pass
        case _:
            return None
    if rows.ifs:
        return None
    loop = ast.For(target=rows.target, iter=rows.iter, body=[], orelse=[])
    loop.body = statements(f"{name}.append({ast.unparse(element)})")
    written = [ast.copy_location(one, spot.statement) for one in (*statements(f"{name} = []"), loop)]
    block = [*spot.block[: spot.index], *written, *spot.rest]
    return _map_steps(scope, Spot(block=block, index=spot.index + 1, outer=spot.outer), loop)


def _places(scope: Scope, steps: Steps, *, all_rows: bool = False) -> list[ast.stmt]:
    """Moves the steps of a tensor that was filled to the dimension where they were."""
    turned = ".flip(0)" if steps.backwards else ""
    moved = {name: turned + (f".movedim(0, {axis})" if axis else "") for name, axis in steps.filled.items()}
    whole = [one for name, how in moved.items() if how for one in statements(f"{name} = {name}{how}")]
    return whole + put_back(scope, steps, all_rows=all_rows)


def _scan_steps(
    scope: Scope, spot: Spot, loop: ast.For, *, in_rows: bool = False, idle: bool = False
) -> Candidate | None:
    """A loop over time as torch's scan; `in_rows` where a step returns other strides than it received; `idle` with a
    step before the first that changes nothing, for loops that may have no step."""
    steps = split_loop(scope, loop)
    if steps is None or not (steps.slices or steps.length is not None):
        return None
    state = carried_names(scope, spot, steps)
    if steps.uses_unknown_index or (not steps.slices and not steps.uses_index and not state):
        return None
    if any(_chooses(scope, node, steps.index) for node in walk(steps.body)):
        return None
    firsts = {name: begins(spot, name) for name in steps.listed}
    swaps = uses(spot, steps.listed)
    if swaps is None or (in_rows and not state) or (idle and not _may_be_none(scope, steps)):
        return None
    new = [*copies(scope, spot, steps, state)]
    new += scan(scope, steps, state, in_rows=in_rows or bool(steps.rows), idle=idle)
    for name, first in firsts.items():  # the scan may carry a name that is in the list before the loop
        if first:
            before = scope.fresh(f"{name}_before")
            given = ", ".join(ast.unparse(one) for one in first)
            new = [*statements(f"{before} = torch.stack([{given}])"), *new]
            new += statements(f"{name} = torch.cat([{before}, {name}])")
    new += _places(scope, steps, all_rows=idle and steps.fills_only)
    text = without_list(scope, spot, [*firsts], new, swaps)
    words = f"`{first_line(loop)}` is a scan" + (" that may have no step" if idle else "")
    return Candidate(text=add_import(text, "scan"), words=words) if text else None


def _may_be_none(scope: Scope, steps: Steps) -> bool:
    """Whether there may be no step at all; as many as something has that the function made, or as it computes of a
    size (`int(math.log(n))`), may be none."""
    match steps.length:
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape")):
            return steps.may_be_none or name not in parameters(scope.function)
        case ast.Name(id=name):
            given = [value for one, value in assignments(scope.function) if one == name]
        case other:
            given = [other] if other is not None else []
    return steps.may_be_none or any(_is_computed(value) for value in given)


def _is_computed(value: ast.expr) -> bool:
    called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return isinstance(value, ast.BinOp) or called in ("int", "round", "min") or called.startswith("math.")


def _chooses(scope: Scope, node: ast.AST, index: str | None) -> bool:
    """Whether it branches on a value or on the counter, which is a value in a scan: that is rewritten first."""
    if not isinstance(node, ast.If | ast.IfExp | ast.While):
        return False
    static = {id(one) for part in ast.walk(node.test) if _asks_for_type(part) for one in ast.walk(part)}
    by_index = any(
        isinstance(one, ast.Name) and one.id == index and id(one) not in static for one in ast.walk(node.test)
    )
    return by_index or (not _asks_for_type(node.test) and scope.depends_on(node.test) in ("number", "tensor"))


def _asks_for_type(node: ast.AST) -> bool:
    """`h is None`, `isinstance(h, Tensor)`: no value decides it."""
    if isinstance(node, ast.Compare):
        return all(isinstance(one, ast.Is | ast.IsNot) for one in node.ops)
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "hasattr")


def scan_worklist(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """A candidate for a `while` that consumes a tensor."""
    loop = spot.statement
    order = _consumed_name(loop) if isinstance(loop, ast.While) and not loop.orelse else None
    if order is not None and isinstance(loop, ast.While):
        yield _scan_worklist(scope, spot, loop, order)


def _consumed_name(loop: ast.While) -> str | None:
    """The name whose elements `while name.numel() > 0` counts."""
    test = ast.unparse(loop.test)
    for name in {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}:
        counts = [form.format(name) for form in _COUNTED]
        if test in [*counts, *(f"{count} {what}" for count in counts for what in ("> 0", "!= 0", ">= 1"))]:
            return name
    return None


def _scan_worklist(scope: Scope, spot: Spot, loop: ast.While, order: str) -> Candidate | None:
    head = kept = mask = marked = None
    rest, cut = order, False
    body: list[ast.stmt] = []
    for statement in loop.body:
        appended = appended_by(statement)
        text = ast.unparse(statement)
        of_all = _OfAll(order).visit(copy.deepcopy(statement))
        if appended is not None and head is not None and ast.unparse(appended[1]).removesuffix(".item()") == head:
            kept = appended[0]
        elif head is not None and text.endswith(f"[{head}] = True"):
            marked = text.removesuffix(f"[{head}] = True")
        elif (kept is not None or marked is not None) and _ends_with_the_last(statement, order, rest, cut):
            continue  # the loop ends by itself
        elif isinstance(statement, ast.Assign) and text.endswith((f"= {order}[0]", f"= {order}[0].item()")):
            head = stored_names(statement)[0]
        elif isinstance(statement, ast.Assign) and text.endswith(f"= {order}[1:]"):
            rest, cut = stored_names(statement)[0], True
            body += statements(f"{rest} = {order}") if rest != order else []
        elif isinstance(statement, ast.Assign) and stored_names(statement) == [order]:
            mask = _mask(of_all.value, rest)
        else:
            body.append(of_all)
    swaps = _swaps(spot, kept) if kept is not None else {}
    if head is None or mask is None or swaps is None or (kept is None and marked is None):
        return None
    if has_effects(body) or order in stored_names(body):
        return None
    left, place, step = scope.fresh("left"), scope.fresh("place"), scope.fresh("step")
    picked = f"index_select(0, {place}.reshape(1)).squeeze(0)"
    places = f"torch.arange({order}.shape[0], device={order}.device)"
    dropped = f"({places} > {place}) & {left}.{picked} & ~({ast.unparse(mask)})"
    steps = [*statements(f"{head} = {order}.{picked}"), *body, *statements(f"{left} = {left} & ~({dropped})")]
    function = Picked(head).visit(define(step, f"{left}, {place}", steps, f"({left}.{IN_ROWS}, {place}.clone())"))
    call = f"{left}, _ = scan({step}, torch.ones_like({order}, dtype=torch.bool).{IN_ROWS}, {places})"
    new = [function, *statements(call)]
    new += statements(f"{kept} = {order}[{left}]") if kept is not None else []
    if marked is not None:
        new += statements(f"{marked} = {marked}.index_put(({order},), {marked}[{order}] | {left})")
    written = without_list(scope, spot, [kept] if kept is not None else [], new, swaps)
    words = f"`{first_line(loop)}` is a scan over what is left of `{order}`"
    return Candidate(text=add_import(written, "scan"), words=words) if written else None


def _ends_with_the_last(statement: ast.stmt, order: str, rest: str, cut: bool) -> bool:
    """Whether it ends the loop where nothing is left, or nothing but the head: `if order.numel() == 1: break`. `cut`:
    after `rest = order[1:]`."""
    match statement:
        case ast.If(test=test, body=[ast.Break()], orelse=[]):
            pass
        case _:
            return False
    ends = [(rest, 0)] if cut else []
    ends += [] if cut and rest == order else [(order, 1)]
    forms = [
        f"{count.format(name)} {how}"
        for name, number in ends
        for count in _COUNTED
        for how in (f"== {number}", f"<= {number}", f"< {number + 1}")
    ]
    return ast.unparse(test) in forms


class _OfAll(ast.NodeTransformer):
    """Of what comes after the head (`order[1:]`) the whole: the scan drops none before its head."""

    def __init__(self, order: str) -> None:
        self.rest, self.order = f"{order}[1:]", order

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return expression(self.order) if ast.unparse(node) == self.rest else self.generic_visit(node)


def _mask(value: ast.expr, rest: str) -> ast.expr | None:
    """The mask of `rest[mask]`, which may be given by its indices: `rest[torch.where(mask)[0]]`."""
    if not isinstance(value, ast.Subscript) or ast.unparse(value.value) != rest:
        return None
    text = ast.unparse(value.slice)
    for start, end in (("torch.where(", ")[0]"), ("torch.nonzero(", ").squeeze(1)"), ("(", ").nonzero().squeeze(1)")):
        if text.startswith(start) and text.endswith(end):
            return expression(text.removeprefix(start).removesuffix(end))
    return None if isinstance(value.slice, ast.Slice) else value.slice


def _swaps(spot: Spot, kept: str) -> Swaps | None:
    """What replaces the uses of the list `kept` after the loop, now a tensor."""
    swaps: Swaps = {}
    known: set[int] = set()
    for node in walk(spot.rest):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _MADE and ast.unparse(node.args[0]) == kept:
            swaps[id(node)] = expression(kept)
            known |= {id(one) for one in ast.walk(node)}
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice) == kept:
            known |= {id(one) for one in ast.walk(node.slice)}
    names = [node for node in walk(spot.rest) if isinstance(node, ast.Name) and node.id == kept]
    return swaps if all(id(node) in known for node in names) else None
