"""Blocks that compute with a part of a tensor, whose length values or a counter choose: their statements with the whole
and a mask. What is computed of the part is followed by `ragged`.
"""

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trueline.doctor.rewrites.appends import appended_by
from trueline.doctor.rewrites.predicate import without_numbers
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    blocks,
    expression,
    loaded_names,
    named_value,
    statements,
    stored_names,
)
from trueline.doctor.rewrites.tensors.masked_part import MaskedPart, part_of
from trueline.doctor.rewrites.tensors.ragged import NoRule, Traced, Tracer


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The function with a named part as the whole with a mask, one part at a time."""
    for block in _blocks(scope.function.body):
        for index, statement in enumerate(block):
            named = named_value(statement) if isinstance(statement, ast.Assign) else None
            part = None if named is None else part_of(scope, named[1])
            if named is None or part is None or len(part.narrowed) != 1 or len(part.chosen) != part.rank:
                continue
            new = _follow(scope, block, index, named[0], part)
            if new is not None:
                words = f"`{ast.unparse(statement)}` and what is computed of it are of the whole, with a mask"
                yield scope.candidate(block[index : index + len(new[1])], new[0], words)


def _blocks(block: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    yield block
    for statement in block:
        for inner in blocks(statement):
            yield from _blocks(inner)


def _follow(
    scope: Scope, block: Sequence[ast.stmt], index: int, name: str, part: MaskedPart
) -> tuple[list[ast.stmt], Sequence[ast.stmt]] | None:
    """The statements that begin at `index`, and those that they replace."""
    here = scope.fresh(f"{name}_here")
    tracer = Tracer(scope, here, f"{here}.sum()")
    tracer.known[name] = Traced(part.base, part.rank, part.narrowed)
    given = without_numbers(statements(f"{here} = {part.mask}")[0], scope)
    new: list[ast.stmt] = [given]
    rest = block[index + 1 :]
    if {*loaded_names(expression(part.base))} & {*stored_names([*rest])}:
        return None  # what the part is of has another value later
    try:
        for statement in rest:
            new += follow_statement(tracer, statement, part)
    except NoRule:
        return None
    ragged = {one for one, traced in tracer.known.items() if traced.dims}
    elsewhere = [one for one in ast.walk(scope.function) if isinstance(one, ast.Name) and one.id in ragged]
    inside = {id(one) for statement in block[index:] for one in ast.walk(statement)}
    if any(id(one) not in inside and isinstance(one.ctx, ast.Load) for one in elsewhere):
        return None
    return new, block[index:]


def follow_statement(tracer: Tracer, statement: ast.stmt, part: MaskedPart | None) -> list[ast.stmt]:
    """The statement of the whole. Raises NoRule."""
    touched = any(_reads(statement, text) for text in tracer.known)
    if not touched:
        for name in stored_names(statement):
            tracer.known.pop(name, None)
        return [copy.deepcopy(statement)]
    appended, named = appended_by(statement), named_value(statement)
    if appended is not None:
        return statements(f"{appended[0]}.append({_alone(tracer, appended[1])})")
    if named is not None:
        return [_name(tracer, *named)]
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(names) == len(values):
            ids = [one.id for one in names if isinstance(one, ast.Name)]
            if len(ids) == len(names) and not {*ids} & {*loaded_names(values)}:
                return [_name(tracer, one, value) for one, value in zip(ids, values, strict=True)]
        case ast.Assign(targets=[ast.Subscript() as target], value=value) if part is not None:
            return [_store(tracer, target, value, part)]
        case ast.Return(value=ast.Tuple(elts=values)):
            return statements(f"return ({', '.join(_alone(tracer, one) for one in values)},)")
        case ast.Return(value=ast.expr() as value):
            return statements(f"return {_alone(tracer, value)}")
    raise NoRule(ast.unparse(statement))


def _reads(statement: ast.stmt, text: str) -> bool:
    return any(isinstance(node, ast.expr) and ast.unparse(node) == text for node in ast.walk(statement))


def _alone(tracer: Tracer, value: ast.expr) -> str:
    """A value that has no dimension of the part's length."""
    if not any(_reads(ast.Expr(value=value), text) for text in tracer.known):
        return ast.unparse(value)
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("torch.cat", "torch.stack"):
        match value.args:
            case [ast.List(elts=parts), *axes]:
                options = [*map(ast.unparse, axes), *(ast.unparse(one) for one in value.keywords)]
                listed = ", ".join(_alone(tracer, one) for one in parts)
                return f"{ast.unparse(value.func)}({', '.join([f'[{listed}]', *options])})"
    traced = tracer.trace(value)
    if traced.dims:
        raise NoRule(ast.unparse(value))
    return traced.text


def _name(tracer: Tracer, name: str, value: ast.expr) -> ast.stmt:
    traced = tracer.trace(value)
    tracer.known[name] = replace(traced, text=name)
    return statements(f"{name} = {traced.text}")[0]


def _store(tracer: Tracer, target: ast.Subscript, value: ast.expr, part: MaskedPart) -> ast.stmt:
    """`out[i, :n] = v` as `out[i] = torch.where(here, v, out[i])`, between the same bounds."""
    written = part_of(tracer.scope, ast.Subscript(value=target.value, slice=target.slice, ctx=ast.Load()))
    if written is None or written.mask.replace(written.base, part.base) != part.mask:
        raise NoRule(ast.unparse(target))
    traced = tracer.trace(value)
    if traced.dims != {dim + traced.rank - written.rank for dim in written.narrowed} or traced.rank > written.rank:
        raise NoRule(ast.unparse(target))
    (along,) = written.narrowed
    mask = Traced(written.base, written.rank).mask(tracer.here, along)
    return statements(f"{written.base} = torch.where({mask}, {traced.text}, {written.base})")[0]
