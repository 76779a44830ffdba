"""A list that a loop works off, taking its first element and what is left of the rest: greedy non-maximum suppression.

    order = scores.argsort(descending=True)
    while order.numel() > 0:
        i = order[0]
        keep.append(i)
        rest = order[1:]
        order = rest[overlap(i, rest) <= 0.5]

becomes a scan over the places of `order` that carries which are left. Condition: what is left is decided for each of
the rest by itself. How many are kept the values still decide, after the loop.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.loops.appends import appended_by, without_list
from trueline.doctor.rewrites.loops.loop_steps import has_effects
from trueline.doctor.rewrites.loops.scan import IN_ROWS, Picked, add_import
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, expression, statements, stored_names, walk

_COUNTED = ("{}.numel()", "len({})", "{}.shape[0]", "{}.size(0)", "{}.nelement()")
_MADE = ("torch.stack", "torch.tensor", "torch.as_tensor", "torch.LongTensor")


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """A candidate for a `while` that works off a tensor."""
    loop = spot.statement
    order = _worked_off(loop) if isinstance(loop, ast.While) and not loop.orelse else None
    if order is None or not isinstance(loop, ast.While):
        return
    found = _scan_worklist(scope, spot, loop, order)
    if found is not None:
        yield found


def _worked_off(loop: ast.While) -> str | None:
    """The name of which `while name.numel() > 0` counts the elements."""
    test = ast.unparse(loop.test)
    names = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
    for name in names:
        counts = [form.format(name) for form in _COUNTED]
        if test in [*counts, *(f"{count} {what}" for count in counts for what in ("> 0", "!= 0", ">= 1"))]:
            return name
    return None


def _scan_worklist(scope: Scope, spot: Spot, loop: ast.While, order: str) -> Candidate | None:
    head: str | None = None
    rest: str | None = None
    kept: str | None = None
    mask: ast.expr | None = None
    body: list[ast.stmt] = []
    for statement in loop.body:
        appended = appended_by(statement)
        text = ast.unparse(statement)
        if appended is not None and head is not None and _bare(appended[1]) == head:
            kept = appended[0]
        elif isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Break) and len(statement.body) == 1:
            continue  # of one element nothing is left, and the loop ends by itself
        elif isinstance(statement, ast.Assign) and text.endswith((f"= {order}[0]", f"= {order}[0].item()")):
            head = stored_names(statement)[0]
        elif isinstance(statement, ast.Assign) and text.endswith(f"= {order}[1:]"):
            rest = stored_names(statement)[0]
            if rest != order:
                body += statements(f"{rest} = {order}")
        elif isinstance(statement, ast.Assign) and stored_names(statement) == [order]:
            mask = _mask(statement.value, rest or order)
        else:
            body.append(copy.deepcopy(statement))
    swaps = _swaps(spot, kept) if kept is not None else None
    if (
        head is None
        or mask is None
        or kept is None
        or swaps is None
        or has_effects(body)
        or order in stored_names(body)
    ):
        return None
    left, place, step = scope.fresh("left"), scope.fresh("place"), scope.fresh("step")
    picked = f"index_select(0, {place}.reshape(1)).squeeze(0)"
    beyond = f"torch.arange({order}.shape[0], device={order}.device) > {place}"
    lines = (
        f"def {step}({left}, {place}):",
        f"    {head} = {order}.{picked}",
        f"    {left} = {left} & ~(({beyond}) & {left}.{picked} & ~({ast.unparse(mask)}))",
        f"    return {left}.{IN_ROWS}, {place}.clone()",
    )
    function = statements("\n".join(lines))[0]
    assert isinstance(function, ast.FunctionDef)
    function.body[1:1] = body
    function = Picked(head).visit(function)
    places = f"torch.arange({order}.shape[0], device={order}.device)"
    call = f"{left}, _ = scan({step}, torch.ones_like({order}, dtype=torch.bool).{IN_ROWS}, {places})"
    new = [function, *statements(call), *statements(f"{kept} = {order}[{left}]")]
    written = without_list(scope, spot, [kept], new, swaps)
    words = f"`{ast.unparse(loop).splitlines()[0]}` is a scan over what is left of `{order}`"
    return Candidate(text=add_import(written, "scan"), words=words, cheap=False) if written else None


def _bare(node: ast.expr) -> str:
    return ast.unparse(node).removesuffix(".item()")


def _mask(value: ast.expr, rest: str) -> ast.expr | None:
    """The mask of `rest[mask]`, which may be given by its places: `rest[torch.where(mask)[0]]`."""
    if not isinstance(value, ast.Subscript) or ast.unparse(value.value) != rest:
        return None
    text = ast.unparse(value.slice)
    for start, end in (("torch.where(", ")[0]"), ("torch.nonzero(", ").squeeze(1)"), ("(", ").nonzero().squeeze(1)")):
        if text.startswith(start) and text.endswith(end):
            return expression(text.removeprefix(start).removesuffix(end))
    return None if isinstance(value.slice, ast.Slice) else value.slice


def _swaps(spot: Spot, kept: str) -> dict[int, ast.expr | ast.stmt] | None:
    """What stands for the uses of the list `kept` after the loop, now a tensor."""
    found: dict[int, ast.expr | ast.stmt] = {}
    known: set[int] = set()
    nodes = [node for statement in spot.block[spot.index + 1 :] for node in walk(statement)]
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _MADE and ast.unparse(node.args[0]) == kept:
            found[id(node)] = expression(kept)
            known |= {id(one) for one in ast.walk(node)}
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice) == kept:
            known |= {id(one) for one in ast.walk(node.slice)}
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id == kept]
    return found if all(id(node) in known for node in names) else None
