"""Loops that values end: `while` as a while_loop, `break` in a loop of a fixed number of steps as a mask.

Conditions. while_loop: what the body assigns keeps its shape and dtype. Mask: the loop has a fixed number of steps.
Each holds only if the proof says so.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from trueline.doctor.rewrites.control.predicate import predicate, without_numbers
from trueline.doctor.rewrites.loops.appends import appended_by
from trueline.doctor.rewrites.loops.loop_steps import has_effects
from trueline.doctor.rewrites.loops.scan import IN_ROWS, add_import
from trueline.doctor.rewrites.pure import pure
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    bound_before,
    expression,
    loaded_names,
    read_later,
    statements,
    stored_names,
    value_of,
)


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """Candidates for a loop at `spot`."""
    loop = spot.statement
    found = None
    if isinstance(loop, ast.For):
        found = _masked_break(scope, spot) or _early_return(scope, spot) or _asked_for(scope, spot)
    found = _while(scope, spot) if isinstance(loop, ast.While) else found
    if found is not None:
        yield found


def _masked_break(scope: Scope, spot: Spot) -> Candidate | None:
    new = _mask_after_break(scope, spot)
    text = scope.replace([spot.statement], new) if new else None
    return Candidate(text=text, words="`break` becomes a mask: what is done stays as it is") if text else None


def _early_return(scope: Scope, spot: Spot) -> Candidate | None:
    """`if p: return v` in such a loop: `v` is kept, and chosen where the function returns after the loop."""
    loop, tail = spot.statement, spot.block[spot.index + 1 :]
    assert isinstance(loop, ast.For)
    at = [i for i, one in enumerate(loop.body) if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Return)]
    if len(at) != 1 or not tail or not isinstance(tail[-1], ast.Return):
        return None
    end, last = loop.body[at[0]], tail[-1].value
    assert isinstance(end, ast.If)
    assert isinstance(end.body[-1], ast.Return)
    value = end.body[-1].value
    if value is None or last is None or isinstance(value, ast.Tuple | ast.Dict) or end.orelse:
        return None
    found, done = scope.fresh("found"), scope.fresh("done")
    kept = [copy.deepcopy(one) for one in end.body[:-1]]
    kept += [*statements(f"{found} = {ast.unparse(value)}"), ast.Break()]
    body = [*loop.body[: at[0]], ast.If(test=end.test, body=kept, orelse=[]), *loop.body[at[0] + 1 :]]
    first = statements(f"{found} = torch.zeros(())")
    rest = [*tail[:-1], *statements(f"return torch.where({done}, {found}, {ast.unparse(last)})")]
    changed = ast.For(target=loop.target, iter=loop.iter, body=body, orelse=loop.orelse)
    block = [*spot.block[: spot.index], *first, ast.copy_location(changed, loop), *rest]
    new = _mask_after_break(scope, Spot(block=block, index=spot.index + 1, outer=spot.outer))
    text = scope.replace(spot.block[spot.index :], [*first, *new, *rest]) if new else None
    return Candidate(text=text, words="`return` in the loop becomes a mask: what is found is kept") if text else None


def _mask_after_break(scope: Scope, spot: Spot) -> list[ast.stmt] | None:
    """`if p: break` in a loop of a fixed number of steps: what is done is kept by a mask, the steps go on.

    What is done appends zeros: whoever breaks off and needs as many steps fills up with those, and the proof sees it.
    """
    loop = spot.statement
    assert isinstance(loop, ast.For)
    at = [i for i, one in enumerate(loop.body) if isinstance(one, ast.If) and _breaks(one)]
    if len(at) != 1 or loop.orelse or scope.worth(loop.iter) in ("tensor", "number"):
        return None
    whole = [pure(scope, one) for one in loop.body]
    end = whole[at[0]]
    assert isinstance(end, ast.If)
    last = [pure(scope, one) for one in end.body[:-1]]
    if has_effects([one for one in (*whole[: at[0]], *last, *whole[at[0] + 1 :]) if appended_by(one) is None]):
        return None
    known = bound_before(spot, scope.function)
    later = read_later(spot) | set(loaded_names(loop.body))
    done = scope.fresh("done")
    masking = _Masking(scope, done, known & later)
    body = masking.steps(whole[: at[0]])
    test = ast.unparse(predicate(end.test, scope))
    if last:
        ends = scope.fresh("ends")
        body += statements(f"{ends} = ({test}) & ~{done}")
        body += _Masking(scope, f"~{ends}", known & later).steps(last)
        body += statements(f"{done} = {done} | {ends}")
    else:
        body += statements(f"{done} = {done} | ({test})")
    body += masking.steps(whole[at[0] + 1 :])
    head = statements(f"{done} = torch.zeros((), dtype=torch.bool)")
    new = ast.For(target=loop.target, iter=loop.iter, body=body, orelse=[], lineno=0)
    return [*head, new]


def _asked_for(scope: Scope, spot: Spot) -> Candidate | None:
    """`for i in range(n)`, of a number that was taken out of a tensor, as the `while i < n` that it is."""
    loop = spot.statement
    match loop:
        case ast.For(target=ast.Name(id=index), iter=ast.Call(func=ast.Name(id="range"), args=given), orelse=[]):
            start, end = ("0", given[0]) if len(given) == 1 else (ast.unparse(given[0]), given[1])
        case _:
            return None
    if (
        len(given) > 2
        or scope.worth(end) not in ("number", "tensor")
        or index in read_later(spot) - set(loaded_names(loop))
    ):
        return None
    steps, index = scope.fresh("steps"), index if index in loaded_names(loop.body) else scope.fresh("done")
    lines = (
        f"{index} = {start}\n{steps} = {ast.unparse(without_numbers(end, scope))}\nwhile {index} < {steps}:\n    pass"
    )
    written = statements(lines)
    assert isinstance(written[-1], ast.While)
    written[-1].body = [*loop.body, *statements(f"{index} = {index} + 1")]
    written = [ast.copy_location(one, loop) for one in written]
    block = [*spot.block[: spot.index], *written, *spot.block[spot.index + 1 :]]
    scope = replace(scope, seen={**scope.seen, index: torch.zeros((), dtype=torch.int64)})
    found = _while(scope, Spot(block=block, index=spot.index + 2, outer=spot.outer), before=written[:2])
    return found and replace(found, words=f"`{ast.unparse(loop).splitlines()[0]}` is a while_loop")


def _breaks(statement: ast.If) -> bool:
    """Whether it ends the loop, after assignments perhaps."""
    straight = all(isinstance(one, ast.Assign | ast.AugAssign) for one in statement.body[:-1])
    return isinstance(statement.body[-1], ast.Break) and straight and not statement.orelse


class _Masking:
    """Statements that change `names` only where the mask is false."""

    def __init__(self, scope: Scope, mask: str, names: set[str]) -> None:
        self.scope, self.mask, self.names = scope, mask, names

    def steps(self, block: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in block:
            appended = appended_by(statement)
            if appended is not None:
                name, value = appended[0], ast.unparse(appended[1])
                found += statements(f"{name}.append(torch.where({self.mask}, torch.zeros_like({value}), {value}))")
                continue
            found.append(statement)
            for name in stored_names(statement):
                if name in self.names:
                    found[-1:] = _kept_when(self.mask, name, found[-1], self.scope)
        return found


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


def _while(scope: Scope, spot: Spot, before: Sequence[ast.stmt] = ()) -> Candidate | None:
    """`while` on a value as torch's while_loop over what the body assigns; `before` goes ahead of it."""
    loop = spot.statement
    assert isinstance(loop, ast.While)
    if loop.orelse:
        return None
    body = [pure(scope, one) for one in loop.body]
    test: ast.expr = loop.test
    stop: ast.expr | None = None
    after: list[ast.stmt] = []
    at = [i for i, one in enumerate(body) if isinstance(one, ast.If) and _breaks(one) and len(one.body) == 1]
    if len(at) == 1:
        end = body[at[0]]
        assert isinstance(end, ast.If)
        stop, body, after = predicate(end.test, scope), body[: at[0]], body[at[0] + 1 :]
    if has_effects([*body, *after]):
        return None
    known, later = bound_before(spot, scope.function), read_later(spot)
    always = isinstance(test, ast.Constant) and bool(test.value)
    first: list[ast.stmt] = []
    if always and stop is not None and not after and any(n in later and n not in known for n in stored_names(body)):
        first, known = body, known | (set(stored_names(body)) & later)  # it runs once at least
    if after:
        assert stop is not None
        stopped = scope.fresh("stops")
        given = expression(f"({ast.unparse(stop)}).reshape(())")
        body = [*body, ast.Assign(targets=[ast.Name(id=stopped, ctx=ast.Store())], value=given)]
        body += _Masking(scope, stopped, known).steps(after)
        stop = expression(stopped)
    inside = [*body, *([ast.Expr(value=stop)] if stop is not None else [])]
    carried = [
        n
        for n in stored_names(body)
        if n in known and (n in later or n in loaded_names(inside) or n in loaded_names(test))
    ]
    if not carried:
        return None
    condition = None if always else predicate(test, scope)
    return _while_text(scope, spot, carried, body, condition, stop, first, before)


def _while_text(
    scope: Scope,
    spot: Spot,
    carried: list[str],
    body: list[ast.stmt],
    condition: ast.expr | None,
    stop: ast.expr | None,
    once: list[ast.stmt],
    ahead: Sequence[ast.stmt] = (),
) -> Candidate | None:
    """`once` is what is done before, where names begin with it."""
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
    starts = [f"torch.as_tensor({n}).{IN_ROWS}" for n in carried] if once else []
    starts = starts or [_start(scope, spot, name) for name in carried]
    flags = ends if once else ["torch.zeros((), dtype=torch.bool)"] * len(ends)
    first = ", ".join([*starts, *flags])
    call = f"{arguments}{',' if len(names) == 1 else ''} = while_loop({going}, {step}, ({first},))"
    before = [copy.deepcopy(one) for one in (*ahead, *once)]
    new = scope.replace([spot.statement], [*before, *functions, *statements(call)])
    head = ast.unparse(spot.statement).splitlines()[0]
    return (
        new and Candidate(text=add_import(new, "while_loop"), words=f"`{head}` is a while_loop", cheap=False)
    ) or None


def _start(scope: Scope, spot: Spot, name: str) -> str:
    """What is carried into the first step: a tensor as it is, a number as a tensor like the one that follows it."""
    value = value_of(expression(name), scope.seen)
    if not isinstance(value, torch.Tensor):
        return f"torch.full((), {name})"
    return f"torch.full((), {name}, dtype={value.dtype})" if _is_number(scope, spot, name) else f"{name}.{IN_ROWS}"


def _is_number(scope: Scope, spot: Spot, name: str) -> bool:
    """Whether the last assignment before the loop gives `name` a number: a tensor it is from the first step on."""
    for statement in reversed(spot.block[: spot.index]):
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return _says_number(value)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if name in stored_names(
                statement
            ):
                pairs = zip(targets, values, strict=False)
                return any(stored_names(target) == [name] and _says_number(value) for target, value in pairs)
        if name in stored_names(statement):
            return False
    return False


def _says_number(node: ast.expr) -> bool:
    try:
        return isinstance(ast.literal_eval(node), int | float)
    except ValueError:
        return ast.unparse(node) in ("float('inf')", "-float('inf')", "float('-inf')", "math.inf", "-math.inf")


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
