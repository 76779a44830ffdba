"""A list that grows in a loop and that its steps read as a whole, as a cache of keys and values does, as a table with a
mask of the rows that there are.

    for t in range(n):                              rows = torch.zeros_like(x[:, 0]).expand(n, -1, -1).clone()
        keys.append(self.k(x[:, t]))                for t in range(n):
        K = torch.stack(keys, 1)             ──▶        here = torch.arange(n) < t + 1
        y.append((K @ q).softmax(1))                    rows = rows.index_put((t,), self.k(x[:, t]))
                                                        K = rows.movedim(0, 1)
                                                        y.append(torch.where(here, K @ q, -inf).softmax(1))

Condition: each step appends once, and all that the steps compute of the list has a rule in `ragged`.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trueline.doctor.rewrites.appends import appended_by, begins
from trueline.doctor.rewrites.control.folds import rows_of
from trueline.doctor.rewrites.control.windows import first_value
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, first_line, loaded_names, statements, stored_names
from trueline.doctor.rewrites.tensors.ragged import NoRule, Traced, Tracer
from trueline.doctor.rewrites.tensors.ragged_parts import follow_statement


@dataclass(frozen=True, slots=True)
class _Grown:
    """A list that each step appends to."""

    name: str
    table: str
    value: ast.expr
    first: list[ast.expr]
    """What it holds before the loop."""
    rank: int
    """Dimensions of an element."""
    kept: bool
    """Whether it is read after the loop."""


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The loop at `spot` with tables for the lists that its steps read."""
    loop = spot.statement
    counted = _counter(scope, loop) if isinstance(loop, ast.For) and not loop.orelse else None
    if counted is None or not isinstance(loop, ast.For) or scope.depends_on(loop.iter) == "static":
        return
    grown = [one for name in stored_names(spot.block[: spot.index]) if (one := _find_grown(scope, spot, loop, name))]
    if grown and len({len(one.first) for one in grown}) == 1:
        yield _with_tables(scope, spot, loop, counted, grown)


def _counter(scope: Scope, loop: ast.stmt) -> tuple[str, str, str] | None:
    """Name, start and end of the loop's counter."""
    match loop:
        case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=args)) if len(args) < 3:
            start = ast.unparse(args[0]) if len(args) == 2 else "0"
            return (name, start, ast.unparse(args[-1])) if start.isdigit() else None
        case ast.For(
            target=ast.Tuple(elts=[ast.Name(id=name), ast.Name()]),
            iter=ast.Call(func=ast.Name(id="enumerate"), args=[rows], keywords=[]),
        ):
            found = rows_of(scope, rows)
            return None if found is None else (name, "0", f"{found[0]}.shape[{found[1]}]")
    return None


def _find_grown(scope: Scope, spot: Spot, loop: ast.For, name: str) -> _Grown | None:
    first, held = begins(spot, name), scope.seen.get(name)
    appended = [found[1] for one in loop.body if (found := appended_by(one)) is not None and found[0] == name]
    reads = [node for node in ast.walk(loop) if isinstance(node, ast.Name) and node.id == name]
    stacks = [node for node in ast.walk(loop) if ast.unparse(node) in _stacks(name)]
    if first is None or len(appended) != 1 or not stacks or len(reads) != 1 + len(stacks):
        return None
    if not isinstance(held, list) or not held or not all(isinstance(one, torch.Tensor) for one in held):
        return None
    later = name in loaded_names([*spot.rest, *(one for outer in spot.outer for one in outer.rest)])
    return _Grown(name, scope.fresh(f"{name}_all"), appended[0], first, held[0].ndim, later)


def _stacks(name: str) -> dict[str, int]:
    forms = ("torch.stack({}, {})", "torch.stack({}, dim={})")
    return {f"torch.stack({name})": 0} | {form.format(name, dim): dim for form in forms for dim in range(3)}


def _with_tables(
    scope: Scope, spot: Spot, loop: ast.For, counted: tuple[str, str, str], grown: list[_Grown]
) -> Candidate | None:
    counter, start, end = counted
    begun = len(grown[0].first) - int(start)
    place = f"{counter} {'+' if begun > 0 else '-'} {abs(begun)}" if begun else counter
    size = f"{end} {'+' if begun > 0 else '-'} {abs(begun)}" if begun else end
    appends = [at for at, one in enumerate(loop.body) if any(_appends(one, each.name) for each in grown)]
    reads = [at for at, one in enumerate(loop.body) if any(s in _texts(one) for e in grown for s in _stacks(e.name))]
    after = min(reads) > max(appends)
    if not after and max(reads) >= min(appends):
        return None
    here, count = scope.fresh("here"), f"torch.as_tensor({place}{' + 1' if after else ''})"
    tracer = Tracer(scope, here, count)
    before: list[ast.stmt] = []
    for one in grown:
        lines = _begin(scope, spot, loop, one, size)
        if lines is None:
            return None
        before += lines
        for text, dim in _stacks(one.name).items():
            moved = f"{one.table}.movedim(0, {dim})" if dim else one.table
            tracer.known[text] = Traced(moved, one.rank + 1, frozenset([dim]))
    body = statements(f"{here} = torch.arange({size}) < {place}{' + 1' if after else ''}")
    try:
        for statement in loop.body:
            list_of = next((one for one in grown if _appends(statement, one.name)), None)
            if list_of is None:
                body += follow_statement(tracer, statement, None)
                continue
            new = scope.fresh(f"{list_of.name}_new")
            body += follow_statement(tracer, statements(f"{new} = {ast.unparse(list_of.value)}")[0], None)
            body += statements(f"{list_of.table} = {list_of.table}.index_put((torch.as_tensor({place}),), {new})")
            body += statements(f"{list_of.name}.append({new})") if list_of.kept else []
    except NoRule:
        return None
    ragged = {name for name, traced in tracer.known.items() if traced.dims}
    if ragged & {*loaded_names(spot.rest)}:
        return None
    changed = copy.deepcopy(loop)
    changed.body = body
    names = ", ".join(f"`{one.name}`" for one in grown)
    words = f"what {names} holds so far in `{first_line(loop)}` is a table with a mask"
    return scope.candidate([loop], [*before, changed], words)


def _appends(statement: ast.stmt, name: str) -> bool:
    found = appended_by(statement)
    return found is not None and found[0] == name


def _texts(statement: ast.stmt) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(statement) if isinstance(node, ast.Call)}


def _begin(scope: Scope, spot: Spot, loop: ast.For, one: _Grown, size: str) -> list[ast.stmt] | None:
    """The table before the loop."""
    if one.first:
        given = ", ".join(ast.unparse(each) for each in one.first)
        row = f"torch.zeros_like({ast.unparse(one.first[0])})"
    else:
        value = first_value(scope, spot, loop, one.value)
        if value is None:
            return None
        row = f"torch.zeros_like({ast.unparse(value)})"
    whole = f"{row}.expand({size}{f' - {len(one.first)}' if one.first else ''}, {', '.join(['-1'] * one.rank)})"
    table = f"torch.cat([torch.stack([{given}]), {whole}])" if one.first else f"{whole}.clone()"
    return statements(f"{one.table} = {table}")
