"""Loops that values end: `while` as a while_loop, `break` in a loop of a fixed number of steps as a mask.

Conditions. while_loop: what the body assigns keeps its shape and dtype. Mask: the loop has a fixed number of steps.
Each holds only if the proof says so.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

import torch

from trueline.doctor.rewrites.loops import IN_ROWS, has_effects, imported
from trueline.doctor.rewrites.predicate import predicate, without_numbers
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    bound_before,
    expression,
    loaded,
    read_later,
    statements,
    stored,
    value_of,
)


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """Candidates for a loop at `spot`."""
    loop = spot.statement
    found = _masked_break(scope, spot) if isinstance(loop, ast.For) else None
    found = _while(scope, spot) if isinstance(loop, ast.While) else found
    if found is not None:
        yield found


def _masked_break(scope: Scope, spot: Spot) -> Candidate | None:
    """`if p: break` in a loop of a fixed number of steps: what is done is kept by a mask, the steps go on."""
    loop = spot.statement
    assert isinstance(loop, ast.For)
    at = [i for i, one in enumerate(loop.body) if isinstance(one, ast.If) and _breaks(one)]
    if len(at) != 1 or loop.orelse or scope.worth(loop.iter) in ("tensor", "number"):
        return None
    if has_effects([one for index, one in enumerate(loop.body) if index != at[0]]):
        return None
    known = bound_before(spot, scope.function)
    later = read_later(spot) | set(loaded(loop.body))
    done = scope.fresh("done")
    body: list[ast.stmt] = []
    for index, statement in enumerate(loop.body):
        if index == at[0]:
            assert isinstance(statement, ast.If)
            test = predicate(statement.test, scope)
            body.append(
                ast.Assign(
                    targets=[ast.Name(id=done, ctx=ast.Store())],
                    value=ast.BinOp(left=expression(done), op=ast.BitOr(), right=test),
                )
            )
            continue
        body.append(copy.deepcopy(statement))
        for name in stored(statement):
            if name in known and name in later:
                body[-1:] = _kept_when(done, name, body[-1], scope)
    head = statements(f"{done} = torch.zeros((), dtype=torch.bool)")
    new = ast.For(target=loop.target, iter=loop.iter, body=body, orelse=[], lineno=0)
    text = scope.replaced([loop], [*head, new])
    return Candidate(text=text, words="`break` becomes a mask: what is done stays as it is") if text else None


def _breaks(statement: ast.If) -> bool:
    return len(statement.body) == 1 and isinstance(statement.body[0], ast.Break) and not statement.orelse


def _kept_when(done: str, name: str, statement: ast.stmt, scope: Scope) -> list[ast.stmt]:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        value = statement.value
    elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        value = ast.BinOp(left=ast.Name(id=name, ctx=ast.Load()), op=statement.op, right=statement.value)
    else:
        return [
            *statements(f"{name}_before = {name}"),
            statement,
            *statements(f"{name} = torch.where({done}, {name}_before, {name})"),
        ]
    value = without_numbers(value, scope)
    return statements(f"{name} = torch.where({done}, {name}, {ast.unparse(value)})")


def _while(scope: Scope, spot: Spot) -> Candidate | None:
    """`while` on a value as torch's while_loop over what the body assigns."""
    loop = spot.statement
    assert isinstance(loop, ast.While)
    if loop.orelse:
        return None
    body = [copy.deepcopy(one) for one in loop.body]
    test: ast.expr = loop.test
    stop: ast.expr | None = None
    if body and isinstance(body[-1], ast.If) and _breaks(body[-1]):
        stop = predicate(body[-1].test, scope)
        body = body[:-1]
    if has_effects(body):
        return None
    known, later = bound_before(spot, scope.function), read_later(spot)
    carried = [n for n in stored(body) if n in known and (n in later or n in loaded(body) or n in loaded(test))]
    if not carried:
        return None
    always = isinstance(test, ast.Constant) and bool(test.value)
    condition = None if always else predicate(test, scope)
    return _while_text(scope, spot, carried, body, condition, stop)


def _while_text(
    scope: Scope,
    spot: Spot,
    carried: list[str],
    body: list[ast.stmt],
    condition: ast.expr | None,
    stop: ast.expr | None,
) -> Candidate | None:
    going, step, flag = scope.fresh("going"), scope.fresh("step"), scope.fresh("stopped")
    names = [*carried, flag] if stop is not None else carried
    tests = [] if condition is None else [f"({ast.unparse(condition)})"]
    tests += [f"~{flag}"] if stop is not None else []
    arguments = ", ".join(names)
    ends = [f"({ast.unparse(stop)}).reshape(())"] if stop is not None else []
    back = ", ".join([*carried, *ends])
    lines = (
        f"def {going}({arguments}):",
        f"    return ({' & '.join(tests)}).reshape(())",
        f"def {step}({arguments}):",
        f"    return {back},",
    )
    text = "\n".join(lines)
    functions = statements(text)
    assert isinstance(functions[1], ast.FunctionDef)
    functions[1].body[:0] = [_Pure(scope).visit(one) for one in body]
    first = ", ".join([_start(scope, name) for name in carried] + ["torch.zeros((), dtype=torch.bool)"] * len(ends))
    call = f"{arguments}{',' if len(names) == 1 else ''} = while_loop({going}, {step}, ({first},))"
    new = scope.replaced([spot.statement], [*functions, *statements(call)])
    head = ast.unparse(spot.statement).splitlines()[0]
    return (new and Candidate(text=imported(new, "while_loop"), words=f"`{head}` is a while_loop", cheap=False)) or None


def _start(scope: Scope, name: str) -> str:
    value = value_of(expression(name), scope.seen)
    return f"{name}.{IN_ROWS}" if isinstance(value, torch.Tensor) else f"torch.full((), {name})"


class _Pure(ast.NodeTransformer):
    """`x += y` as `x = x + y` (a loop may not write into what it is given), and numbers as tensors."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):
            return node
        left = ast.Name(id=node.target.id, ctx=ast.Load())
        value = ast.BinOp(left=left, op=node.op, right=without_numbers(node.value, self.scope))
        return ast.Assign(targets=[node.target], value=value)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        node.value = without_numbers(node.value, self.scope)
        return node
