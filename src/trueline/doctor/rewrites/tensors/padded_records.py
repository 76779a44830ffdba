"""Records that are cut to their lengths in a list, and padded to one length again.

    cut = [r[:n] for r, n in zip(x, lengths)]           def each(r, n):
    cut = [self.f(c - c.mean(0)) for c in cut]              here = torch.arange(r.shape[0]) < n
    y = pad_sequence(cut, batch_first=True)     ──▶         …
                                                        rows, counts = torch.vmap(each)(x, lengths)
                                                        y = rows[:, :counts.max()]

What is computed of a record is followed by `ragged`, with a mask of what is there. Condition: the lists are made for
this alone.
"""

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    define,
    expression,
    loaded_names,
    named_value,
    statements,
    stored_names,
    substitute,
    tensor_of,
    tensor_of_list,
)
from trueline.doctor.rewrites.tensors.masked_part import part_of
from trueline.doctor.rewrites.tensors.ragged import NoRule, Traced, Tracer


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The block at `spot` with each call of `pad_sequence` as a vmap over the records."""
    for at, statement in enumerate(spot.block):
        if isinstance(statement, ast.Assign | ast.Return | ast.Expr):
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "pad_sequence":
                    yield _pad_under_mask(scope, spot.block, at, node)


def _pad_under_mask(scope: Scope, block: Sequence[ast.stmt], at: int, pad: ast.Call) -> Candidate | None:
    options = {keyword.arg: keyword.value for keyword in pad.keywords}
    listed = pad.args[0] if len(pad.args) == 1 and set(options) <= {"batch_first", "padding_value"} else None
    chain = _resolve(scope, block[:at], listed)
    if chain is None:
        return None
    element, rows, (row, number), used = chain
    (x, lengths), (whole, counts) = rows, (tensor_of(one, scope) for one in rows)
    if whole is None or counts is None or not whole.ndim or counts.ndim != 1 or counts.is_floating_point():
        return None
    seen = {
        **scope.seen,
        row: torch.zeros(whole.shape[1:], dtype=whole.dtype),
        number: torch.zeros((), dtype=torch.long),
    }
    inner = replace(scope, seen=seen)
    part = part_of(inner, expression(f"{row}[:{number}]"))
    if part is None:
        return None
    here, each, padded, found = (scope.fresh(name) for name in ("here", "each", "padded", "counts"))
    tracer = Tracer(inner, here, f"{here}.sum()")
    tracer.known[f"{row}[:{number}]"] = Traced(row, whole.ndim - 1, frozenset([0]))
    tracer.known[number] = Traced(number, 0)
    try:
        traced = tracer.trace(element)
    except NoRule:
        return None
    if traced.dims != {0}:
        return None
    value = ast.unparse(options.get("padding_value", ast.Constant(0.0)))
    answer = f"{traced.fill_beyond(here, value)}, {here}.sum()"
    function = define(each, f"{row}, {number}", statements(f"{here} = {part.mask}"), f"({answer})")
    call = statements(f"{padded}, {found} = torch.vmap({each})({ast.unparse(x)}, {ast.unparse(lengths)})")
    first = "batch_first" in options and ast.unparse(options["batch_first"]) == "True"
    cut = f"{padded}[:, :{found}.max()]{'' if first else '.movedim(1, 0)'}"
    first_used = min(used)
    kept = [copy.deepcopy(one) for i, one in enumerate(block[first_used:at], first_used) if i not in used]
    if {*loaded_names([element, x, lengths])} & {*stored_names(kept)}:
        return None
    last = _Put(ast.unparse(pad), cut).visit(copy.deepcopy(block[at]))
    words = f"records are padded by `{ast.unparse(pad.func)}` under a mask of what is left of them: torch.vmap"
    return scope.candidate(block[first_used : at + 1], [*kept, function, *call, last], words)


_Chain = tuple[ast.expr, tuple[ast.expr, ast.expr], tuple[str, str], set[int]]
"""What is padded of a record, the records and their lengths, their names, and the statements that make the lists."""


def _resolve(scope: Scope, block: Sequence[ast.stmt], listed: ast.expr | None) -> _Chain | None:
    used: set[int] = set()
    element: ast.expr | None = None
    inner = ""
    at = len(block)
    while listed is not None:
        made = listed
        if isinstance(listed, ast.Name):
            found = [i for i in range(at) if (named := named_value(block[i])) is not None and named[0] == listed.id]
            if not found or _reads(scope, listed.id) != _stores(scope, listed.id):
                return None
            at = found[-1]
            used.add(at)
            made = block[at].value  # type: ignore[attr-defined]
        match made:
            case ast.ListComp(elt=elt, generators=[ast.comprehension(target=target, iter=source, ifs=[])]):
                element = elt if element is None else substitute(element, {inner: elt})
            case _:
                return None
        match target, source:
            case ast.Name(id=inner), (ast.Name() | ast.ListComp()):
                listed = source
            case (
                ast.Tuple(elts=[ast.Name(id=row), ast.Name(id=number)]),
                ast.Call(func=ast.Name(id="zip"), args=[x, lengths], keywords=_),
            ):
                return (element, (x, tensor_of_list(lengths)), (row, number), used or {len(block)})
            case _:
                return None
    return None


def _reads(scope: Scope, name: str) -> int:
    nodes = [node for node in ast.walk(scope.function) if isinstance(node, ast.Name) and node.id == name]
    return sum(isinstance(node.ctx, ast.Load) for node in nodes)


def _stores(scope: Scope, name: str) -> int:
    nodes = [node for node in ast.walk(scope.function) if isinstance(node, ast.Name) and node.id == name]
    return sum(isinstance(node.ctx, ast.Store) for node in nodes)


class _Put(ast.NodeTransformer):
    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return expression(self.new) if ast.unparse(node) == self.old else self.generic_visit(node)
