"""Loops over pairs of positions as one loop, which other rewrites then map or scan.

    for i in range(n):                          i_all, j_all = torch.cartesian_prod(…).unbind(1)
        for j in range(n):              ──▶     for i, j in zip(i_all.tolist(), j_all.tolist()):
            rows.append(x[:, i] * x[:, j])          rows.append(x[:, i] * x[:, j])

Also `range(i + 1, n)` and `range(i, n)` inside, `itertools.combinations` and `product`, and a list with two `for`. Of
the pairs with i < j, those of row i begin at i (2 n - i - 1) / 2, which is solved for i; double precision is exact for
lengths below 2^26. Condition: that of the rewrite of one loop.
"""

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from trueline.doctor.rewrites.loops.vectorize import rewrites
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, expression, first_line, loaded_names, statements

_Ends = tuple[str, str, int | None]
"""Lengths of the outer and the inner loop, and how far from i the inner one begins; None where it begins at 0."""


def map_pairs(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The loop, or the list with two `for`, at `spot` as the rewrites of one loop over all pairs."""
    loop = _as_loop(spot.statement)
    ends = None if loop is None else _ends(scope, loop)
    if loop is None or ends is None:
        return
    first, second = (scope.fresh(f"{name}_all") for name in loop.names)
    at = expression(f"zip({first}.tolist(), {second}.tolist())")
    joined = ast.For(target=_target(loop.names), iter=at, body=copy.deepcopy(loop.body), orelse=[])
    written = [ast.copy_location(one, spot.statement) for one in (*loop.before, joined)]
    block = [*spot.block[: spot.index], *written, *spot.rest]
    numbers = dict.fromkeys((first, second), torch.zeros(2, dtype=torch.int64))
    known = replace(scope, seen={**scope.seen, **numbers})
    for edit in rewrites(known, Spot(block=block, index=spot.index + len(loop.before), outer=spot.outer)):
        if edit is not None:
            words = f"`{first_line(spot.statement)}` runs over pairs: {edit.words}"
            yield replace(edit, text=_before_use(edit.text, first, _positions(scope, first, second, ends)), words=words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairLoop:
    names: tuple[str, str]
    sources: tuple[ast.expr, ...]
    """One source of pairs, or one of each position."""
    body: list[ast.stmt]
    before: list[ast.stmt]
    """The list that it fills, where the loop is written as one."""


def _as_loop(statement: ast.stmt) -> _PairLoop | None:
    match statement:
        case ast.For(
            target=ast.Name(id=one),
            iter=rows,
            body=[ast.For(target=ast.Name(id=two), iter=columns, body=body, orelse=[])],
            orelse=[],
        ):
            return _PairLoop(names=(one, two), sources=(rows, columns), body=body, before=[])
        case ast.For(target=ast.Tuple(elts=[ast.Name(id=one), ast.Name(id=two)]), iter=source, body=body, orelse=[]):
            return _PairLoop(names=(one, two), sources=(source,), body=body, before=[])
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.ListComp(elt=element, generators=generators)):
            body, before = statements(f"{name}.append({ast.unparse(element)})"), statements(f"{name} = []")
        case _:
            return None
    match generators:
        case [
            ast.comprehension(target=ast.Name(id=one), iter=rows, ifs=[]),
            ast.comprehension(target=ast.Name(id=two), iter=columns, ifs=[]),
        ]:
            return _PairLoop(names=(one, two), sources=(rows, columns), body=body, before=before)
    return None


def _target(names: tuple[str, str]) -> ast.expr:
    return ast.Tuple(elts=[ast.Name(id=name, ctx=ast.Store()) for name in names], ctx=ast.Store())


def _before_use(text: str, name: str, new: list[str]) -> str:
    """`text` with the lines `new` before the first line that uses `name`."""
    lines = text.splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if re.search(rf"\b{name}\b", line))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    return "".join([*lines[:at], *(f"{indent}{line}\n" for line in new), *lines[at:]])


def _ends(scope: Scope, loop: _PairLoop) -> _Ends | None:
    if len(loop.sources) == 1:
        match loop.sources[0]:
            case ast.Call(func=function, args=given):
                return _ends_of_itertools(scope, ast.unparse(function).rpartition(".")[2], given)
        return None
    match loop.sources:
        case (
            ast.Call(func=ast.Name(id="range"), args=[n]),
            ast.Call(func=ast.Name(id="range"), args=[*starts, m]),
        ) if len(starts) < 2 and scope.depends_on(n) == "size":
            pass
        case _:
            return None
    (outer, _), length, width = loop.names, ast.unparse(n), ast.unparse(m)
    if not starts:
        return None if outer in loaded_names(m) else (length, width, None)
    shift = {f"{outer} + 1": 1, outer: 0}.get(ast.unparse(starts[0]))
    fits = width == length or (shift == 1 and length == f"{width} - 1")
    return (width, width, shift) if shift is not None and fits else None


def _ends_of_itertools(scope: Scope, name: str, given: list[ast.expr]) -> _Ends | None:
    lengths = []
    for one in given:
        match one:
            case ast.Call(func=ast.Name(id="range"), args=[n]) if scope.depends_on(n) == "size":
                lengths.append(ast.unparse(n))
    match name, lengths, given:
        case ("product", [rows, columns], [_, _]):
            return rows, columns, None
        case ("combinations", [both], [_, ast.Constant(value=2)]):
            return both, both, 1
        case ("combinations_with_replacement", [both], [_, ast.Constant(value=2)]):
            return both, both, 0
    return None


def _positions(scope: Scope, first: str, second: str, ends: _Ends) -> list[str]:
    """The lines that compute the positions of all pairs."""
    n, m, shift = ends
    if shift is None:
        return [f"{first}, {second} = torch.cartesian_prod(torch.arange({n}), torch.arange({m})).unbind(1)"]
    size, pair, by = scope.fresh("size"), scope.fresh("pair"), " + 1" if shift else ""
    return [
        f"{size} = {n}{'' if shift else ' + 1'}",  # pairs with j >= i are those with j > i of one position more
        f"{pair} = torch.arange({size} * ({size} - 1) // 2)",
        f"{first} = ((2 * {size} - 1 - ((2 * {size} - 1) ** 2 - 8 * {pair}).double().sqrt()) / 2).long()",
        f"{second} = {pair} - {first} * (2 * {size} - {first} - 1) // 2 + {first}{by}",
    ]
