"""`if not mask.any(): mask = None` is left out where whatever asks for the mask changes nothing under a mask that is
false everywhere.

    if mask is not None:
        scores = scores.masked_fill(mask[:, None], -1e9)

It is read off the code: of every use of the mask, also in the functions of the file that get it as an answer. A use
that is not known may tell None from such a mask.
"""

import ast
from collections.abc import Iterator, Sequence

import torch

from trueline.doctor.rewrites.control.no_change import Nothing, nothing_where, read_beyond
from trueline.doctor.rewrites.scope import Scope, Spot, assignments, loaded_names, stored_names, value_of, walk

_IGNORES = {
    torch.nn.MultiheadAttention: ("key_padding_mask", "attn_mask"),
    torch.nn.TransformerEncoderLayer: ("src_key_padding_mask", "src_mask"),
    torch.nn.TransformerEncoder: ("src_key_padding_mask", "mask"),
    torch.nn.TransformerDecoderLayer: ("tgt_key_padding_mask", "memory_key_padding_mask", "tgt_mask", "memory_mask"),
    torch.nn.TransformerDecoder: ("tgt_key_padding_mask", "memory_key_padding_mask", "tgt_mask", "memory_mask"),
}
"""Modules of torch -> their arguments that mean the same when they are left out and when they are false everywhere."""


def is_dropped_mask(scope: Scope, spot: Spot) -> bool:
    """Whether the statement only drops a mask that is false everywhere, and nothing tells that from the mask."""
    match spot.statement:
        case ast.If(
            test=test, body=[ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=None))], orelse=[]
        ):
            pass
        case _:
            return False
    if name not in nothing_where(scope, test, holds=True).false:
        return False
    return _is_ignored(scope, scope.function, spot.statement, name, set())


def _is_ignored(
    scope: Scope, function: ast.FunctionDef, after: ast.stmt, name: str, known: set[tuple[str, str]]
) -> bool:
    """Whether no statement of the function after `after` tells None from a mask that is false everywhere."""
    known.add((function.name, name))
    spot = Scope(text=scope.text, function=function, seen=scope.seen).spot(after.lineno)
    if spot is None or any(isinstance(one.statement, ast.For | ast.While) for one in spot.outer):
        return False
    within = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    if any(name in loaded_names(node) for node in within if node is not function):
        return False
    rest = [*spot.rest, *(one for outer in spot.outer for one in outer.rest)]
    if name in stored_names(rest):
        return False
    inner = Scope(text=scope.text, function=function, seen=scope.seen if function is scope.function else {})
    return all(_ignores(inner, scope, one, name, known) for one in _simple(rest, name))


def _simple(block: Sequence[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """The statements that read the name, those inside of others where nothing else of these reads it."""
    for statement in block:
        if name not in loaded_names(statement):
            continue
        parts = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
        heads = [one for one in ast.iter_child_nodes(statement) if not isinstance(one, ast.stmt)]
        if any(parts) and name not in loaded_names(heads):
            yield from _simple([one for part in parts for one in part], name)
        else:
            yield statement


def _ignores(inner: Scope, scope: Scope, statement: ast.stmt, name: str, known: set[tuple[str, str]]) -> bool:
    nothing = Nothing(false=frozenset([name]))
    match statement:
        case ast.If(test=test, body=body, orelse=[]):
            spot = inner.spot(statement.lineno)
            asked = _asks(test, name) and spot is not None
            return asked and nothing.changes_nothing(inner, body, read_beyond(spot))  # type: ignore[arg-type]
        case ast.Return(value=ast.Name(id=returned)) if returned == name:
            return _callers_ignore(scope, inner.function, known)
        case ast.Assign(
            targets=[ast.Name(id=target)], value=ast.IfExp(test=test, body=value, orelse=ast.Name(id=other))
        ):
            return target == other and _asks(test, name) and nothing.is_same(target, value)
    passed = [
        keyword.value
        for node in walk(statement)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg in _IGNORES.get(type(value_of(node.func, inner.seen)), ())
    ]
    alone = [one for one in passed if isinstance(one, ast.Name) and one.id == name]
    reads = [one for one in walk(statement) if isinstance(one, ast.Name) and one.id == name]
    return len(alone) == len(reads)


def _asks(test: ast.expr, name: str) -> bool:
    """Whether it is `name is not None`, perhaps with other conditions that do not read the name."""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    asks = [one for one in parts if ast.unparse(one) == f"{name} is not None"]
    return bool(asks) and all(one in asks or name not in loaded_names(one) for one in parts)


def _callers_ignore(scope: Scope, function: ast.FunctionDef, known: set[tuple[str, str]]) -> bool:
    """Whether no function of the file that calls `function` tells None from a mask that is false everywhere."""
    tree = ast.parse(scope.text)
    callers = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for statement in (one for one in ast.walk(node) if isinstance(one, ast.Assign)):
            for target, value in assignments(statement):
                if _calls(value, function.name):
                    callers += 1
                    seen = (node.name, target) in known
                    if not seen and not _is_ignored(scope, node, statement, target, known):
                        return False
    named = [
        one for one in ast.walk(tree) if isinstance(one, ast.Name | ast.Attribute) and _is_named(one, function.name)
    ]
    return callers > 0 and callers == len(named)


def _calls(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and _is_named(node.func, name)


def _is_named(node: ast.expr, name: str) -> bool:
    return name in (getattr(node, "id", ""), getattr(node, "attr", ""))
