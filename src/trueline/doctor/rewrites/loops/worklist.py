"""A list that a loop consumes: it takes the first element and filters the rest, as greedy non-maximum suppression does.

    order = scores.argsort(descending=True)
    while order.numel() > 0:
        i = order[0]
        keep.append(i)
        rest = order[1:]
        order = rest[overlap(i, rest) <= 0.5]

becomes a scan over the positions of `order` that carries which are left. Condition: the filter decides for each element
by itself. After the loop, values still decide how many are kept.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.appends import Swaps, appended_by, without_list
from trueline.doctor.rewrites.loops.scan import IN_ROWS, Picked, add_import
from trueline.doctor.rewrites.pure import has_effects
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    define,
    expression,
    first_line,
    statements,
    stored_names,
    walk,
)

_COUNTED = ("{}.numel()", "len({})", "{}.shape[0]", "{}.size(0)", "{}.nelement()")
_MADE = ("torch.stack", "torch.tensor", "torch.as_tensor", "torch.LongTensor")


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """A candidate for a `while` that consumes a tensor."""
    loop = spot.statement
    order = _consumed(loop) if isinstance(loop, ast.While) and not loop.orelse else None
    if order is not None and isinstance(loop, ast.While):
        yield _scan_worklist(scope, spot, loop, order)


def _consumed(loop: ast.While) -> str | None:
    """The name whose elements `while name.numel() > 0` counts."""
    test = ast.unparse(loop.test)
    for name in {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}:
        counts = [form.format(name) for form in _COUNTED]
        if test in [*counts, *(f"{count} {what}" for count in counts for what in ("> 0", "!= 0", ">= 1"))]:
            return name
    return None


def _scan_worklist(scope: Scope, spot: Spot, loop: ast.While, order: str) -> Candidate | None:
    head = kept = mask = None
    rest = order
    body: list[ast.stmt] = []
    for statement in loop.body:
        appended = appended_by(statement)
        text = ast.unparse(statement)
        if appended is not None and head is not None and ast.unparse(appended[1]).removesuffix(".item()") == head:
            kept = appended[0]
        elif isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Break) and len(statement.body) == 1:
            continue  # nothing is left of one element, and the loop ends by itself
        elif isinstance(statement, ast.Assign) and text.endswith((f"= {order}[0]", f"= {order}[0].item()")):
            head = stored_names(statement)[0]
        elif isinstance(statement, ast.Assign) and text.endswith(f"= {order}[1:]"):
            rest = stored_names(statement)[0]
            body += statements(f"{rest} = {order}") if rest != order else []
        elif isinstance(statement, ast.Assign) and stored_names(statement) == [order]:
            mask = _mask(statement.value, rest)
        else:
            body.append(copy.deepcopy(statement))
    swaps = _swaps(spot, kept) if kept is not None else None
    if head is None or mask is None or kept is None or swaps is None:
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
    new = [function, *statements(call), *statements(f"{kept} = {order}[{left}]")]
    written = without_list(scope, spot, [kept], new, swaps)
    words = f"`{first_line(loop)}` is a scan over what is left of `{order}`"
    return Candidate(text=add_import(written, "scan"), words=words, cheap=False) if written else None


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
