"""Python forms that mean a plainer one, which other rewrites then handle.

    while t < n: …; t += 1                              for t in range(t, n): …
    match k: case 0: …                                  if k == 0: …
    for i in mask.nonzero().flatten().tolist(): …       out[mask] = …, or for i in range(…): if mask[i]: …
    for layer, t in zip(self.layers, range(n)): …       all layers, masked from n on
    head = self.heads[key](x), after key = a if c …     if c: head = self.heads[a](x) …
    rows.insert(0, y)                                   rows.append(y), then rows.reverse()
    for r, k in zip(x, w), of different lengths         for r, k in zip(x[:n], w[:n])

A loop of log2(n) steps is unrolled for sizes up to LONGEST, which the rewritten model checks.
"""

import ast
import copy
import functools
from collections.abc import Iterator, Sequence

from trueline.doctor.rewrites.appends import appended_by, swap_nodes
from trueline.doctor.rewrites.comprehensions import NamedRows
from trueline.doctor.rewrites.control.folds import rows_of
from trueline.doctor.rewrites.control.matches import as_ifs
from trueline.doctor.rewrites.control.while_loops import mask_steps
from trueline.doctor.rewrites.rowwise import selected_rows, treats_rows_alike
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
    stored_names,
    substitute,
    tensor_of_list,
)

LONGEST = 1024
"""Largest size of an unrolled loop of log2(n) steps."""
_CACHED = ("functools.lru_cache", "functools.cache", "lru_cache", "cache")
_FLATTENED = (".flatten()", ".view(-1)", ".reshape(-1)", ".squeeze()", ".squeeze(1)", ".squeeze(-1)", "[:, 0]")


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The statement at `spot` in its plainer forms."""
    statement = spot.statement
    words = f"`{first_line(statement).rstrip(':')}` in a plainer form"
    made: list[list[ast.stmt] | None] = []
    if isinstance(statement, ast.While):
        made = [form(scope, spot, statement) for form in (_counted_for, _unroll_while, _steps_of_while)]
    elif isinstance(statement, ast.Match):
        made = [as_ifs(scope, statement)]
    elif isinstance(statement, ast.For):
        made = [_over_mask(scope, statement), _over_places(scope, statement), _all_layers(scope, spot, statement)]
        made += [_unroll_for(scope, spot, statement), _append_and_reverse(statement)]
        yield _carry_last(scope, spot, statement)
    for new in made:
        if new is not None:
            yield scope.candidate([statement], new, words)
    yield _without_decorator(scope, statement)
    if not isinstance(statement, Compound | ast.FunctionDef | ast.Match):
        yield _by_key(scope, spot)


# ---- while


def _number_before(spot: Spot, name: str) -> str | None:
    """The whole number that `name` holds when the loop begins, as it is written."""
    for statement in reversed(spot.block[: spot.index]):
        if name in stored_names(statement):
            match statement:
                case ast.Assign(targets=[ast.Name()], value=ast.Constant(value=int(value))):
                    return str(value)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    held = dict(zip([ast.unparse(one) for one in names], map(ast.unparse, values), strict=False))
                    return held[name] if held.get(name, "").isdigit() else None
            return None
    return None


def _counter(scope: Scope, spot: Spot, loop: ast.While, steps: Sequence[str]) -> tuple[str, str, ast.expr] | None:
    """Counter, start and end of `while i < n: …; i += 1`, whose last statement is one of `steps`."""
    match loop.test:
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Lt() | ast.LtE() as operator], comparators=[end]):
            pass
        case _:
            return None
    start, last = _number_before(spot, name), ast.unparse(loop.body[-1])
    inside = [one for one in ast.walk(loop) if isinstance(one, ast.Break | ast.Continue | ast.Return)]
    moves = set(stored_names(loop.body[:-1])) & {name, *loaded_names(end)}
    if start is None or moves or inside or loop.orelse or last not in [one.format(i=name) for one in steps]:
        return None
    if scope.depends_on(end) != "size" or name in read_later(spot) - set(loaded_names(loop)):
        return None
    return name, start, expression(f"{ast.unparse(end)} + 1") if isinstance(operator, ast.LtE) else end


def _counted_for(scope: Scope, spot: Spot, loop: ast.While) -> list[ast.stmt] | None:
    found = _counter(scope, spot, loop, ("{i} += 1", "{i} = {i} + 1"))
    if found is None or len(loop.body) < 2:
        return None
    name, start, end = found
    bounds = ast.unparse(end) if start == "0" else f"{start}, {ast.unparse(end)}"
    return [_for(name, f"range({bounds})", loop.body[:-1])]


def _steps_of_while(scope: Scope, spot: Spot, loop: ast.While) -> list[ast.stmt] | None:
    """`while i < 6: …; i += 1; if p: break` as `for _ in range(6): …; i += 1; if p: break`: every step counts once."""
    match loop:
        case ast.While(
            test=ast.Compare(left=ast.Name(id=name), ops=[ast.Lt() | ast.LtE() as op], comparators=[end]), orelse=[]
        ) if scope.depends_on(end) in ("static", "size"):
            pass
        case _:
            return None
    start, read = _number_before(spot, name), set(loaded_names(end))
    counts = [one for one in loop.body if ast.unparse(one) in (f"{name} += 1", f"{name} = {name} + 1")]
    others = [one for one in loop.body if one not in counts]
    jumps = any(isinstance(node, ast.Continue) for one in loop.body for node in ast.walk(one))
    if start is None or len(counts) != 1 or jumps or {name, *read} & {*stored_names(others)}:
        return None
    bounds = f"range({start}, {ast.unparse(end)}{' + 1' if isinstance(op, ast.LtE) else ''})".replace("(0, ", "(")
    return [_for(scope.fresh("_step"), bounds, loop.body)]


def _for(name: str, source: str, body: Sequence[ast.stmt]) -> ast.For:
    target = ast.Name(id=name, ctx=ast.Store())
    return ast.For(target=target, iter=expression(source), body=[copy.deepcopy(one) for one in body], orelse=[])


def _unroll_while(scope: Scope, spot: Spot, loop: ast.While) -> list[ast.stmt] | None:
    """`d = 1`, `while d < n: …; d *= 2`: all powers of two, masked from n on."""
    found = _counter(scope, spot, loop, ("{i} *= 2", "{i} = {i} * 2", "{i} <<= 1", "{i} = 2 * {i}"))
    if found is None or found[1] != "1":
        return None
    name, _, end = found
    powers = [2**k for k in range(LONGEST.bit_length() - 1)]
    return _mask_from(scope, spot, name, f"{tuple(powers)}", name, end, loop.body[:-1])


def _unroll_for(scope: Scope, spot: Spot, loop: ast.For) -> list[ast.stmt] | None:
    """`for k in range(ceil(log2(n)))`: all powers of two up to LONGEST, masked from n on."""
    match loop:
        case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=[count]), orelse=[]):
            pass
        case _:
            return None
    text = ast.unparse(count)
    for node in ast.walk(count):
        match node:
            case (
                ast.Call(func=ast.Attribute(attr="log2"), args=[size]) | ast.Call(func=ast.Name(id="log2"), args=[size])
            ):
                bound = f"2 ** ({name} + 1) - 1" if text.startswith("int(") else f"2 ** {name}"
            case ast.Call(func=ast.Attribute(value=size, attr="bit_length"), args=[]):
                bound = f"2 ** {name} - 1"
            case _:
                continue
        logs = (
            f"log2({ast.unparse(size)})",
            f"({ast.unparse(size)}).bit_length()",
            f"{ast.unparse(size)}.bit_length()",
        )
        forms = [form.format(log) for log in (f"math.{logs[0]}", *logs) for form in ("{}", "int({})", "math.ceil({})")]
        forms += [f"int(math.ceil(math.{logs[0]}))", f"int(np.ceil(np.{logs[0]}))", f"int(np.{logs[0]})"]
        ceils = "ceil" in text
        if text not in forms or scope.depends_on(size) != "size":
            return None
        bound = f"2 ** {name}" if ceils else bound
        steps = f"range({LONGEST.bit_length() - (1 if ceils else 0)})"
        found = _mask_from(scope, spot, name, steps, bound, size, loop.body)
        if found is None or "log2" not in text:
            return found
        return [*statements(f"torch._check({ast.unparse(size)} >= 1)"), *found]  # log2(0) raises
    return None


def _mask_from(
    scope: Scope, spot: Spot, name: str, steps: str, bound: str, end: ast.expr, body: Sequence[ast.stmt]
) -> list[ast.stmt] | None:
    """`for name in steps: body`, which changes nothing where `bound` has reached `end`, for sizes up to LONGEST."""
    if any(isinstance(one, ast.Break | ast.Continue | ast.Return) for part in body for one in ast.walk(part)):
        return None
    names = bound_before(spot, scope.function) & (read_later(spot) | set(loaded_names([*body])))
    size = ast.unparse(end)
    past = f"(torch.full((), {size}) <= {bound})"
    loop = _for(name, steps, mask_steps(scope, past, names - {name}, [copy.deepcopy(one) for one in body]))
    return [*statements(f"torch._check({size} <= {LONGEST})"), loop]


# ---- match, keys


def _by_key(scope: Scope, spot: Spot) -> Candidate | None:
    """A statement that uses a key which values chose, once for each key; `spot` is one of the two."""
    statement = spot.statement
    chosen = _chosen_key(scope, statement)
    at, end = spot.index, spot.index
    if chosen is not None:
        end = next((i for i in range(at + 1, len(spot.block)) if _uses_key(spot.block[i], chosen[0])), 0)
    else:
        earlier = [(i, _chosen_key(scope, spot.block[i])) for i in range(spot.index)]
        at, chosen = next(((i, one) for i, one in earlier if one and _uses_key(statement, one[0])), (at, None))
    if chosen is None or end <= at:
        return None
    (key, test, one, two), between, use = chosen, spot.block[at + 1 : end], spot.block[end]
    if key in loaded_names([*between, *spot.block[end + 1 :]]) or set(loaded_names(test)) & set(stored_names(between)):
        return None
    ways = [[substitute(use, {key: value})] for value in (one, two)]
    new = [*map(copy.deepcopy, between), ast.If(test=test, body=ways[0], orelse=ways[1])]
    return scope.candidate(spot.block[at : end + 1], new, f"`{key}` chooses a way of `{first_line(use)}`")


def _uses_key(statement: ast.stmt, key: str) -> bool:
    at = [node.slice for node in ast.walk(statement) if isinstance(node, ast.Subscript)]
    return isinstance(statement, ast.Assign | ast.Return) and any(
        isinstance(one, ast.Name) and one.id == key for one in at
    )


def _chosen_key(scope: Scope, statement: ast.stmt) -> tuple[str, ast.expr, ast.expr, ast.expr] | None:
    """Name, condition and values of a key that values choose of two constants."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=key)], value=ast.IfExp(test=test, body=one, orelse=two)):
            pass
        case ast.If(
            test=test,
            body=[ast.Assign(targets=[ast.Name(id=key)], value=one)],
            orelse=[ast.Assign(targets=[ast.Name(id=other)], value=two)],
        ) if key == other:
            pass
        case _:
            return None
    plain = isinstance(one, ast.Constant) and isinstance(two, ast.Constant) and isinstance(one.value, str)
    return (key, test, one, two) if plain and scope.depends_on(test) != "static" else None


def _without_decorator(scope: Scope, statement: ast.stmt) -> Candidate | None:
    """The file without the `lru_cache` of a function that is called at `statement`, or that holds it."""
    called = {
        ast.unparse(node.func).rpartition(".")[2] for node in ast.walk(statement) if isinstance(node, ast.Call)
    } | {scope.function.name}
    for node in ast.walk(ast.parse(scope.text)):
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) and node.name in called else ():
            name = ast.unparse(mark.func if isinstance(mark, ast.Call) else mark)
            if name in _CACHED and isinstance(node, ast.FunctionDef):
                lines = scope.text.splitlines(keepends=True)
                del lines[mark.lineno - 1 : mark.end_lineno]
                return Candidate(text="".join(lines), words=f"`{node.name}` is computed at every call, not cached")
    return None


def _mask_of_loop(scope: Scope, source: ast.expr) -> str | None:
    """The mask whose places `mask.nonzero().flatten().tolist()` lists."""
    text = ast.unparse(tensor_of_list(source))
    for end in _FLATTENED:
        text = text.removesuffix(end)
    if text.endswith(".nonzero()"):
        mask = text.removesuffix(".nonzero()")
    elif text.startswith("torch.nonzero(") and text.endswith(")"):
        mask = text.removeprefix("torch.nonzero(").removesuffix(")").removesuffix(", as_tuple=False")
    elif text.startswith("torch.where(") and text.endswith(")[0]"):
        mask = text.removeprefix("torch.where(").removesuffix(")[0]")
    else:
        return None
    try:
        return mask if scope.depends_on(expression(mask)) == "tensor" else None
    except SyntaxError:
        return None


def _over_mask(scope: Scope, loop: ast.For) -> list[ast.stmt] | None:
    """`for i in places: out[i] = f(x[i])` as `out[mask] = f(x[mask])`."""
    mask = _mask_of_loop(scope, loop.iter)
    at, names = ast.unparse(loop.target).strip("()"), set(stored_names(loop.target))
    if mask is None or loop.orelse:
        return None
    rows = selected_rows(scope, loop.target, len(names))
    values = [one.value for one in loop.body if isinstance(one, ast.Assign)]
    if not all(treats_rows_alike(scope, value, rows) for value in values):
        return None
    new = [_Masked(at, mask).visit(copy.deepcopy(one)) for one in loop.body]
    stores = all(isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Subscript) for one in new)
    return new if stores and not names & set(loaded_names(new)) else None


class _Masked(ast.NodeTransformer):
    """`x[at]` as `x[mask]`."""

    def __init__(self, at: str, mask: str) -> None:
        self.at, self.mask = at, mask

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if ast.unparse(node.slice).strip("()") == self.at:
            node.slice = expression(self.mask)
            return node
        return self.generic_visit(node)


def _over_places(scope: Scope, loop: ast.For) -> list[ast.stmt] | None:
    """The loop over all places, with a condition."""
    mask = _mask_of_loop(scope, loop.iter)
    if mask is None or not isinstance(loop.target, ast.Name) or loop.orelse:
        return None
    i = loop.target.id
    test = ast.If(test=expression(f"({mask})[{i}]"), body=[copy.deepcopy(one) for one in loop.body], orelse=[])
    return [_for(i, f"range(({mask}).shape[0])", [test])]


def _all_layers(scope: Scope, spot: Spot, loop: ast.For) -> list[ast.stmt] | None:
    """`for layer, t in zip(self.layers, range(n)): …` over all layers; from n on nothing changes."""
    match loop.target, loop.iter:
        case (
            ast.Tuple(elts=[ast.Name() as one, ast.Name() as two]),
            ast.Call(func=ast.Name(id="zip"), args=[first, second], keywords=[]),
        ) if not loop.orelse:
            pass
        case _:
            return None
    if isinstance(first, ast.Call):
        one, two, first, second = two, one, second, first
    match second:
        case ast.Call(func=ast.Name(id="range"), args=[size]) if scope.depends_on(size) == "size":
            pass
        case _:
            return None
    if scope.depends_on(first) != "static":
        return None
    n, names = ast.unparse(size), bound_before(spot, scope.function) & (read_later(spot) | set(loaded_names(loop.body)))
    last = expression(f"torch.sym_min({two.id}, {n} - 1)")
    body = [substitute(part, {two.id: last}) for part in loop.body]
    masked = mask_steps(scope, f"(torch.full((), {n}) <= {two.id})", names, body)
    return [
        ast.For(target=_pair(two, one), iter=expression(f"enumerate({ast.unparse(first)})"), body=masked, orelse=[])
    ]


def _pair(one: ast.expr, two: ast.expr) -> ast.expr:
    return ast.Tuple(elts=[one, two], ctx=ast.Store())


def cut_zips(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """`zip(x, w)` of tensors of different lengths, which ends with the shorter, as `zip(x[:n], w[:n])`."""
    for node in ast.walk(spot.statement):
        match node:
            case ast.Call(func=ast.Name(id="zip"), args=[_, _, *_] as given, keywords=[]):
                rows = [found for one in given if (found := rows_of(scope, one)) is not None]
            case _:
                continue
        sizes = [f"{name}.shape[{axis}]" for name, axis in rows]
        if len(rows) < len(given) or "sym_min" in ast.unparse(node) or len(set(sizes)) == 1:
            continue
        least = functools.reduce("torch.sym_min({}, {})".format, sizes)
        cut = [f"{name}[{':, ' * axis}:{least}]" + (f".unbind({axis})" if axis else "") for name, axis in rows]
        new = swap_nodes(spot.statement, {id(node): expression(f"zip({', '.join(cut)})")})
        yield scope.candidate([spot.statement], [new], f"`{ast.unparse(node)}` ends with the shorter")


def _carry_last(scope: Scope, spot: Spot, loop: ast.For) -> Candidate | None:
    """`path = [y]`, then `path.append(f(path[-1]))` in the loop, with the last element under a name of its own."""
    for at, one in enumerate(loop.body):
        appended = appended_by(one)
        if appended is None or f"{appended[0]}[-1]" not in ast.unparse(loop):
            continue
        name, value = appended
        begun = [i for i in range(spot.index) if name in stored_names(spot.block[i])]
        first = spot.block[begun[-1]] if begun else None
        if not isinstance(first, ast.Assign) or not isinstance(first.value, ast.List) or len(first.value.elts) != 1:
            return None
        last = scope.fresh(f"{name}_last")
        begin = statements(f"{last} = {ast.unparse(first.value.elts[0])}\n{name} = [{last}]")
        new = copy.deepcopy(loop)
        new.body[at : at + 1] = statements(f"{last} = {ast.unparse(value)}\n{name}.append({last})")
        new = NamedRows(name, "-1", last).visit(new)
        between = [copy.deepcopy(each) for each in spot.block[begun[-1] + 1 : spot.index]]
        words = f"`{name}[-1]` is carried under a name of its own"
        return scope.candidate(spot.block[begun[-1] : spot.index + 1], [*begin, *between, new], words)
    return None


def _append_and_reverse(loop: ast.For) -> list[ast.stmt] | None:
    """`rows.insert(0, y)` in the loop as `rows.append(y)`, and `rows.reverse()` after it."""
    new, reversed_ = copy.deepcopy(loop), list[str]()
    for at, one in enumerate(new.body):
        match one:
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id=name), attr="insert"), args=[ast.Constant(value=0), value]
                )
            ):
                new.body[at] = statements(f"{name}.append({ast.unparse(value)})")[0]
                reversed_.append(name)
    for name in reversed_:  # the one in front is the last one now
        new = NamedRows(name, "0", f"{name}[-1]").visit(new)
    return [new, *(one for name in reversed_ for one in statements(f"{name}.reverse()"))] if reversed_ else None
