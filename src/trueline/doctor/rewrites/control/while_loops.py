"""Loops that values end: `while` as a while_loop, `break` in a loop of a fixed number of steps as a mask.

Conditions. while_loop: the names that the body assigns keep their shape and dtype. Mask: the loop has a fixed number of
steps. Each holds only if the proof says so.
"""

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from trueline.doctor.rewrites.appends import appended_by
from trueline.doctor.rewrites.loops.recurrent_calls import call_functions
from trueline.doctor.rewrites.loops.scan import IN_ROWS, add_import, name_sizes, outer_sizes
from trueline.doctor.rewrites.predicate import predicate, without_numbers
from trueline.doctor.rewrites.pure import has_effects, pure
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    assign,
    bound_before,
    define,
    expression,
    first_line,
    loaded_names,
    named_value,
    read_later,
    statements,
    stored_names,
    tensor_of,
)


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """Candidates for a loop at `spot`."""
    loop = spot.statement
    if isinstance(loop, ast.For):
        new = _mask_after_break(scope, spot, loop)
        words = "`break` becomes a mask: values that are done stay"
        masked = scope.candidate([loop], new, words, _ends_and_appends(loop)) if new else None
        yield masked or _early_return(scope, spot, loop) or _counted_while(scope, spot, loop)
    elif isinstance(loop, ast.While):
        yield _while(scope, spot, loop)


def _ends_and_appends(loop: ast.For) -> tuple[int, int] | None:
    """Lines of the test and of the `break` of a loop that appends, or does something before it ends: calls have to take
    both ways, which shows whether the steps after the end may append zeros, and the shapes of what is done."""
    end = next(one for one in loop.body if isinstance(one, ast.If) and _breaks(one))
    appends = any(appended_by(node) is not None for node in ast.walk(loop))
    return (end.test.lineno, end.body[-1].lineno) if appends or len(end.body) > 1 else None


def _early_return(scope: Scope, spot: Spot, loop: ast.For) -> Candidate | None:
    """`if p: return v` in such a loop: `v` is kept, and chosen where the function returns after the loop."""
    tail = spot.rest
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
    changed = ast.copy_location(ast.For(target=loop.target, iter=loop.iter, body=body, orelse=loop.orelse), loop)
    block = [*spot.block[: spot.index], *first, changed, *rest]
    new = _mask_after_break(scope, Spot(block=block, index=spot.index + 1, outer=spot.outer), changed)
    words = "`return` in the loop becomes a mask: the value that was found is kept"
    lines = end.test.lineno, end.body[-1].lineno
    return scope.candidate(spot.block[spot.index :], [*first, *new, *rest], words, lines) if new else None


def _mask_after_break(scope: Scope, spot: Spot, loop: ast.For) -> list[ast.stmt] | None:
    """`if p: break` in a loop of a fixed number of steps: a mask keeps what is done, and the steps continue.

    Steps after the break append zeros; the proof shows whether the model pads with zeros too.
    """
    at = [i for i, one in enumerate(loop.body) if isinstance(one, ast.If) and _breaks(one)]
    if len(at) != 1 or loop.orelse or scope.depends_on(loop.iter) in ("tensor", "number"):
        return None
    whole = [pure(scope, one) for one in loop.body]
    end = whole[at[0]]
    assert isinstance(end, ast.If)
    last = [pure(scope, one) for one in end.body[:-1]]
    if has_effects([one for one in (*whole[: at[0]], *last, *whole[at[0] + 1 :]) if appended_by(one) is None]):
        return None
    later = read_later(spot) | set(loaded_names(loop.body))
    begun = _begin_results(scope, spot, loop) if scope.depends_on(loop.iter) == "static" else []
    names = (bound_before(spot, scope.function) | {*stored_names(begun)}) & later
    done = scope.fresh("done")
    body = mask_steps(scope, done, names, whole[: at[0]])
    test = f"({ast.unparse(predicate(end.test, scope))})"
    if ".item()" in ast.unparse(end.test):  # of a tensor of one element, which may have dimensions
        test = f"{test}.reshape(())"
    if last:
        ends = scope.fresh("ends")
        body += statements(f"{ends} = {test} & ~{done}")
        body += mask_steps(scope, f"~{ends}", names, last)
        test = ends
    body += statements(f"{done} = {done} | {test}")
    body += mask_steps(scope, done, names, whole[at[0] + 1 :])
    new = ast.For(target=loop.target, iter=loop.iter, body=body, orelse=[], lineno=0)
    return [*begun, *statements(f"{done} = torch.zeros((), dtype=torch.bool)"), new]


def _begin_results(scope: Scope, spot: Spot, loop: ast.For) -> list[ast.stmt]:
    """Zeros for the tensors that only the steps make and that are read after the loop; the first step replaces them."""
    after = {*loaded_names(spot.rest), *(name for outer in spot.outer for name in loaded_names(outer.rest))}
    made = {*stored_names(loop.body)} & after - bound_before(spot, scope.function)
    held = {name: tensor_of(expression(name), scope) for name in sorted(made)}
    texts = [f"{name} = torch.zeros((), dtype={one.dtype})" for name, one in held.items() if one is not None]
    return [one for text in texts for one in statements(text)]


def _counted_while(scope: Scope, spot: Spot, loop: ast.For) -> Candidate | None:
    """`for i in range(n)`, of a number that was taken out of a tensor, as the `while i < n` that it is."""
    match loop:
        case ast.For(target=ast.Name(id=index), iter=ast.Call(func=ast.Name(id="range"), args=given), orelse=[]):
            start, end = ("0", given[0]) if len(given) == 1 else (ast.unparse(given[0]), given[1])
        case _:
            return None
    read = read_later(spot) - set(loaded_names(loop))
    if len(given) > 2 or scope.depends_on(end) not in ("number", "tensor") or index in read:
        return None
    steps, index = scope.fresh("steps"), index if index in loaded_names(loop.body) else scope.fresh("done")
    before = statements(f"{index} = {start}\n{steps} = {ast.unparse(without_numbers(end, scope))}")
    body = [*loop.body, *statements(f"{index} = {index} + 1")]
    again = ast.While(test=expression(f"{index} < {steps}"), body=body, orelse=[])
    written = [ast.copy_location(one, loop) for one in (*before, again)]
    block = [*spot.block[: spot.index], *written, *spot.rest]
    scope = replace(scope, seen={**scope.seen, index: torch.zeros((), dtype=torch.int64)})
    edit = _while(scope, Spot(block=block, index=spot.index + 2, outer=spot.outer), again, before=written[:2])
    return edit and replace(edit, words=f"`{first_line(loop)}` is a while_loop")


def _breaks(statement: ast.If) -> bool:
    """Whether it ends the loop, after assignments perhaps."""
    straight = all(isinstance(one, ast.Assign | ast.AugAssign) for one in statement.body[:-1])
    return isinstance(statement.body[-1], ast.Break) and straight and not statement.orelse


def mask_steps(scope: Scope, mask: str, names: set[str], block: list[ast.stmt]) -> list[ast.stmt]:
    """The statements, which change `names` only where the mask is false."""
    masked: list[ast.stmt] = []
    for statement in block:
        appended = appended_by(statement)
        if appended is not None:
            name, value = appended[0], ast.unparse(appended[1])
            masked += statements(f"{name}.append(torch.where({mask}, torch.zeros_like({value}), {value}))")
            continue
        kept, named = [name for name in stored_names(statement) if name in names], named_value(statement)
        if kept and named is not None:
            value = ast.unparse(without_numbers(named[1], scope))
            masked += statements(f"{named[0]} = torch.where({mask}, {named[0]}, {value})")
            continue
        masked += [one for name in kept for one in statements(f"{name}_before = {name}")]
        masked.append(statement)
        for name in kept:
            masked += statements(f"{name} = torch.where({mask}, {name}_before, {name})")
    return masked


def _while(scope: Scope, spot: Spot, loop: ast.While, before: Sequence[ast.stmt] = ()) -> Candidate | None:
    """`while` on a value as torch's while_loop over the names that the body assigns, after `before`."""
    if loop.orelse:
        return None
    body = [pure(scope, one) for one in loop.body]
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
    always = isinstance(loop.test, ast.Constant) and bool(loop.test.value)
    once: list[ast.stmt] = []
    if always and stop is not None and not after and any(n in later and n not in known for n in stored_names(body)):
        once, known = body, known | (set(stored_names(body)) & later)  # it runs once at least
    if after:
        assert stop is not None
        stops = scope.fresh("stops")
        body = [*body, assign(stops, expression(f"({ast.unparse(stop)}).reshape(())"))]
        body += mask_steps(scope, stops, known, after)
        stop = expression(stops)
    read = {*later, *loaded_names(loop.test), *loaded_names([*body, *([stop] if stop is not None else [])])}
    carried = [name for name in stored_names(body) if name in known and name in read]
    if not carried:
        return None
    condition = None if always else predicate(loop.test, scope)
    return _while_loop(scope, spot, carried, body, condition, stop, once, before)


def _while_loop(
    scope: Scope,
    spot: Spot,
    carried: list[str],
    body: list[ast.stmt],
    condition: ast.expr | None,
    stop: ast.expr | None,
    once: list[ast.stmt],
    before: Sequence[ast.stmt],
) -> Candidate | None:
    """`stop` is true after the last step; `before`, and `once` where names begin with it, run before the loop."""
    going, step, flag = scope.fresh("going"), scope.fresh("step"), scope.fresh("stopped")
    ends = [f"({ast.unparse(stop)}).reshape(())"] if stop is not None else []
    names = [*carried, flag] if ends else carried
    tests = [] if condition is None else [f"({ast.unparse(condition)})"]
    tests += [f"~{flag}"] if ends else []
    arguments = ", ".join(names)
    weights, steps = call_functions(scope, [_AssignAnew(scope).visit(one) for one in body])
    turned = {name for one in steps if _turns(one) for name in stored_names(one)}
    results = ", ".join([*(f"{name}.{IN_ROWS}" if name in turned else name for name in carried), *ends])
    asked = statements(f"({' & '.join(tests)}).reshape(())")
    made, read = name_sizes(scope, outer_sizes(scope, [*asked, *steps], {*names}))
    functions = [
        *weights,
        *made,
        define(going, arguments, read, ast.unparse(asked[0])),
        define(step, arguments, [*read, *steps], f"{results},"),
    ]
    functions = [_Carried(carried).visit(one) for one in functions]
    if once:
        starts = [*(f"torch.as_tensor({name}).{IN_ROWS}" for name in carried), *ends]
    else:
        starts = [_start(scope, spot, name) for name in carried]
        starts += ["torch.zeros((), dtype=torch.bool)"] * len(ends)
    call = f"{arguments}{',' if len(names) == 1 else ''} = while_loop({going}, {step}, ({', '.join(starts)},))"
    first = [copy.deepcopy(one) for one in (*before, *once)]
    text = scope.replace([spot.statement], [*first, *functions, *statements(call)])
    words = f"`{first_line(spot.statement)}` is a while_loop"
    return Candidate(text=add_import(text, "while_loop"), words=words) if text else None


def _turns(statement: ast.stmt) -> bool:
    """Whether its value may have other strides than the one before: a row that is written."""
    return any(isinstance(node, ast.Attribute) and node.attr == "movedim" for node in ast.walk(statement))


def _start(scope: Scope, spot: Spot, name: str) -> str:
    """The value carried into the first step: a tensor as it is, a number as a tensor like the one that follows it."""
    value = tensor_of(expression(name), scope)
    if value is None:
        return f"torch.full((), {name})"
    return f"torch.full((), {name}, dtype={value.dtype})" if _is_number(spot, name) else f"{name}.{IN_ROWS}"


def _is_number(spot: Spot, name: str) -> bool:
    """Whether the last assignment before the loop gives `name` a number, which the first step makes a tensor."""
    for statement in reversed(spot.block[: spot.index]):
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return _is_literal_number(value)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if name in stored_names(
                statement
            ):
                pairs = zip(targets, values, strict=False)
                return any(stored_names(target) == [name] and _is_literal_number(value) for target, value in pairs)
        if name in stored_names(statement):
            return False
    return False


def _is_literal_number(node: ast.expr) -> bool:
    try:
        return isinstance(ast.literal_eval(node), int | float)
    except ValueError:
        return ast.unparse(node) in ("float('inf')", "-float('inf')", "float('-inf')", "math.inf", "-math.inf")


class _Carried(ast.NodeTransformer):
    """`torch.full((), i)` of a number that the loop carries, which is a tensor in its steps, as that."""

    def __init__(self, carried: Sequence[str]) -> None:
        self.carried = set(carried)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        made = ast.unparse(node.func) == "torch.full" and len(node.args) == 2 and ast.unparse(node.args[0]) == "()"
        return node.args[1] if made and self.carried & {*loaded_names(node.args[1])} else node


class _AssignAnew(ast.NodeTransformer):
    """`x += y` as `x = x + y` (a loop may not write into its inputs), and numbers as tensors."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        named = named_value(node)
        return node if named is None else self.visit_Assign(assign(*named))

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        node.value = without_numbers(node.value, self.scope)
        return node
