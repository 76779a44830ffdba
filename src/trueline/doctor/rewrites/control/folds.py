"""Folds as the loops that they are, loops of at most a fixed number of steps, and generators inside of others.

    h = functools.reduce(f, x.unbind(1))              h = x[:, 0]; for t in range(1, n): h = f(h, x[:, t])
    rows = list(itertools.accumulate(x, f))           the same, and each step appends h
    for k in range(min(8, n // 2)): …                 for k in range(8): …, masked from n // 2 on
    for layer in self.layers[:n]: …                   all layers, masked from n on
    [f(p) for p in (g(i) for i in range(n))]          [f(g(i)) for i in range(n)]

Other rewrites then handle the loops. Condition: none; the proof decides.
"""

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.control.while_loops import mask_steps
from trueline.doctor.rewrites.scope import (
    Candidate,
    Compound,
    Scope,
    Spot,
    bound_before,
    expression,
    first_line,
    loaded_names,
    read_later,
    statements,
    substitute,
)
from trueline.doctor.rewrites.tensors.size_tables import tabulate

MOST_STEPS = 32
"""Of a loop that is unrolled."""
_REDUCES = ("functools.reduce", "reduce")
_RUNNING = ("itertools.accumulate", "accumulate")


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The statement at `spot` in the forms above."""
    statement = spot.statement
    if isinstance(statement, ast.For):
        yield _mask_steps(scope, spot, statement)
    elif not isinstance(statement, Compound | ast.FunctionDef | ast.Match):
        yield _fold(scope, spot)
        yield _merge(scope, statement)


def _fold(scope: Scope, spot: Spot) -> Candidate | None:
    """The first fold over a tensor in the statement as a loop before it."""
    statement = spot.statement
    for node in ast.walk(statement):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in (*_REDUCES, *_RUNNING):
            continue
        running = ast.unparse(node.func) in _RUNNING
        given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "func")]
        known = len(given) == len(node.args) + len(node.keywords)
        if not known or len(given) not in ((1, 2) if running else (2, 3)):
            return None
        rows, *function = given if running else (given[1], given[0])
        found = rows_of(scope, rows)
        if found is None:
            return None
        first = ast.unparse(given[2]) if len(given) > 2 else ""
        names = scope.fresh("folded"), _name_of_list(statement, node) or scope.fresh("listed")
        lines = statements(_loop(scope, function[0] if function else None, found, first, names, running=running))
        words = f"`{ast.unparse(node)}` is a loop"
        put = _Put(ast.unparse(node), names[running])
        if not running or _name_of_list(statement, node) is None:
            return scope.candidate([statement], [*lines, put.visit(copy.deepcopy(statement))], words)
        put = _Put(names[1], names[1])
        ends = [at for at, one in enumerate(spot.block) if at > spot.index and names[1] in loaded_names(one)]
        tail = spot.block[spot.index + 1 : max(ends, default=spot.index) + 1]
        return scope.candidate([statement, *tail], [*lines, *(put.visit(copy.deepcopy(one)) for one in tail)], words)
    return None


def _name_of_list(statement: ast.stmt, fold: ast.Call) -> str | None:
    """The name that a statement gives to what `fold` returns, or to the list of it."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if ast.unparse(value) in _forms_of(ast.unparse(fold)):
            return name
    return None


def _forms_of(text: str) -> tuple[str, ...]:
    return text, f"list({text})", f"tuple({text})"


def rows_of(scope: Scope, rows: ast.expr) -> tuple[str, int] | None:
    """Tensor and dimension of `x`, `x.unbind(1)` and `torch.unbind(x, 1)`."""
    match rows:
        case ast.Call(func=ast.Name(id="list" | "tuple" | "iter"), args=[inner]):
            return rows_of(scope, inner)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="unbind"), args=[tensor, *axes]):
            pass
        case ast.Call(func=ast.Attribute(value=tensor, attr="unbind"), args=axes):
            pass
        case _ if scope.depends_on(rows) == "tensor":
            return ast.unparse(rows), 0
        case _:
            return None
    axes += [keyword.value for keyword in rows.keywords if keyword.arg == "dim"]
    if not axes:
        return ast.unparse(tensor), 0
    axis = axes[0].value if isinstance(axes[0], ast.Constant) else None
    return (ast.unparse(tensor), axis) if isinstance(axis, int) and axis >= 0 else None


def _loop(
    scope: Scope, function: ast.expr | None, rows: tuple[str, int], first: str, names: tuple[str, str], *, running: bool
) -> str:
    """The source of the loop; `first`: what it begins with, the first slice if left out; `names`: of what is carried,
    and of the list of it."""
    (whole, axis), (folded, listed) = rows, names
    name, t = whole if whole.isidentifier() else scope.fresh("steps"), scope.fresh("t")
    row = f"{name}[{':, ' * axis}{{}}]"
    lines = [] if name == whole else [f"{name} = {whole}"]
    lines.append(f"{folded} = {first or row.format(0)}")
    lines += [f"{listed} = [{folded}]"] if running else []
    lines.append(f"for {t} in range({'' if first else '1, '}{name}.shape[{axis}]):")
    lines.append(f"    {folded} = {_apply(function, folded, row.format(t))}")
    lines += [f"    {listed}.append({folded})"] if running else []
    return "\n".join(lines)


def _apply(function: ast.expr | None, one: str, other: str) -> str:
    match function:
        case None:
            return f"{one} + {other}"
        case ast.Lambda(args=ast.arguments(args=[ast.arg(arg=a), ast.arg(arg=b)]), body=body):
            return ast.unparse(substitute(body, {a: expression(one), b: expression(other)}))
        case ast.Attribute(value=ast.Name(id="operator"), attr="add" | "mul" as name):
            return f"{one} {'+' if name == 'add' else '*'} {other}"
    return f"{ast.unparse(function)}({one}, {other})"


class _Put(ast.NodeTransformer):
    """A name in the place of the expression that reads as `text`, of `list(…)` of it too."""

    def __init__(self, text: str, name: str) -> None:
        self.texts, self.name = _forms_of(text), name

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return expression(self.name) if ast.unparse(node) in self.texts else self.generic_visit(node)


def _mask_steps(scope: Scope, spot: Spot, loop: ast.For) -> Candidate | None:
    """A loop whose number of steps follows from a size, and is at most a fixed one."""
    if loop.orelse or any(isinstance(one, ast.Break | ast.Continue | ast.Return) for one in ast.walk(loop)):
        return None
    before: list[str] = []
    made = _bounded_range(scope, loop) or _first_layers(scope, loop)
    if made is None:
        made = _few_steps(scope, loop, before)
    if made is None:
        return None
    target, source, counter, size = made
    names = bound_before(spot, scope.function) & (read_later(spot) | set(loaded_names(loop.body)))
    past = f"({size} <= {counter})"
    body = mask_steps(scope, past, names - {counter}, [copy.deepcopy(one) for one in loop.body])
    new = ast.For(target=expression(target), iter=expression(source), body=body, orelse=[])
    for node in ast.walk(new.target):
        if isinstance(node, ast.Name | ast.Tuple):
            node.ctx = ast.Store()
    checks = [one for text in before for one in statements(text)]
    return scope.candidate([loop], [*checks, new], f"`{first_line(loop)}` takes all of its steps, masked")


def _bounded_range(scope: Scope, loop: ast.For) -> tuple[str, str, str, str] | None:
    """Target, source, counter and size of `for k in range(min(8, n // 2))`."""
    match loop.target, loop.iter:
        case ast.Name(id=counter), ast.Call(func=ast.Name(id="range"), args=[
            ast.Call(func=ast.Name(id="min"), args=[one, two], keywords=[])
        ]):  # fmt: skip
            bound, size = (one, two) if scope.depends_on(one) == "static" else (two, one)
            if scope.depends_on(bound) == "static" and scope.depends_on(size) == "size":
                return counter, f"range({ast.unparse(bound)})", counter, f"torch.full((), {ast.unparse(size)})"
    return None


def _first_layers(scope: Scope, loop: ast.For) -> tuple[str, str, str, str] | None:
    """The same of `for layer in self.layers[:n]`."""
    match loop.target, loop.iter:
        case ast.Name(id=layer), ast.Subscript(value=layers, slice=ast.Slice(lower=None, upper=size, step=None)):
            if size is not None and scope.depends_on(layers) == "static" and scope.depends_on(size) == "size":
                counter = scope.fresh("k")
                number = f"torch.full((), {ast.unparse(size)})"
                return f"({counter}, {layer})", f"enumerate({ast.unparse(layers)})", counter, number
    return None


def _few_steps(scope: Scope, loop: ast.For, before: list[str]) -> tuple[str, str, str, str] | None:
    """The same of `for k in range(f(n))` that has few steps up to the largest size of a table; what the table checks
    is put into `before`."""
    match loop.target, loop.iter:
        case ast.Name(id=counter), ast.Call(func=ast.Name(id="range"), args=[count], keywords=[]):
            if scope.depends_on(count) != "size":
                return None
            table = tabulate(scope, count)
            if table is not None and 0 < table.most <= MOST_STEPS:
                before += table.checks
                return counter, f"range({table.most})", counter, ast.unparse(table.value)
    return None


def _merge(scope: Scope, statement: ast.stmt) -> Candidate | None:
    """Generators whose elements another one takes, as one."""
    merge = _Merge()
    new = merge.visit(copy.deepcopy(statement))
    return scope.candidate([statement], [new], f"`{merge.words}` is one loop") if merge.words else None


class _Merge(ast.NodeTransformer):
    words = ""

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        return self._merge(node)

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return self._merge(node)

    def _merge(self, node: ast.GeneratorExp | ast.ListComp) -> ast.AST:
        self.generic_visit(node)
        match node.generators:
            case [
                ast.comprehension(target=ast.Name(id=name), iter=ast.GeneratorExp() | ast.ListComp() as inner) as own
            ]:
                values = {name: inner.elt}
                last = inner.generators[-1]
                last.ifs += [substitute(test, values) for test in own.ifs]
                self.words = ast.unparse(node)
                node.elt, node.generators = substitute(node.elt, values), inner.generators
        return node
