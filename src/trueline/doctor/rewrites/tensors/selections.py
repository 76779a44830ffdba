"""Pieces of a tensor whose number a size decides, and parts of a ModuleList that a value selects.

    for c in x.split(3, 1):                     for at in range(0, x.shape[1], 3):
        out.append(c.mean(1))         ──▶           out.append(x[:, at : at + 3].mean(1))

The last piece may be shorter; `masked_reduce` continues from there. Of `self.adapters[int(task)](x)` all parts are run,
and one is chosen. Condition: the outputs of all parts have one form, and no part raises. The work grows with their
number.
"""

import ast
import copy
from collections.abc import Iterator

import torch

from trueline.doctor.rewrites.predicate import without_numbers
from trueline.doctor.rewrites.scope import (
    Candidate,
    Compound,
    Scope,
    Spot,
    arguments_text,
    assignments,
    expression,
    named_value,
    stored_names,
    substitute,
    value_of,
)


def slice_pieces(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The loop or the comprehension at `spot` over bounds; the first piece and the last one as slices."""
    yield _slice_ends(scope, spot)
    pieces = _Pieces(scope)
    new = pieces.visit(copy.deepcopy(spot.statement))
    if not pieces.words:
        return
    words = f"the pieces of `{pieces.words[0]}` lie between moving bounds"
    for at, statement in enumerate(spot.block[: spot.index]):
        named = named_value(statement)
        if named is not None and named[0] in pieces.named and _reads(scope.function, named[0]) == 1:
            yield scope.candidate(spot.block[at : spot.index + 1], [*spot.block[at + 1 : spot.index], new], words)
    yield scope.candidate([spot.statement], [new], words)


def makes_pieces(statement: ast.stmt) -> bool:
    """Whether it takes a tensor apart into pieces, as many as a size says."""
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(isinstance(one, ast.Attribute) and one.attr == "split" for one in calls)


def _slice_ends(scope: Scope, spot: Spot) -> Candidate | None:
    """`parts[0]`, `parts[-1]` and `len(parts)`, after `parts = x.split(16, 1)`, without the list."""
    for at, statement in enumerate(spot.block[: spot.index + 1]):
        named = named_value(statement) if isinstance(statement, ast.Assign) else None
        made = None if named is None else split_of(scope, named[1])
        if named is None or made is None or len([one for one, _ in assignments(scope.function) if one == named[0]]) > 1:
            continue
        ends = _Ends(named[0], *made)
        new = [ends.visit(copy.deepcopy(one)) for one in spot.block[at + 1 :]]
        if ends.count and made[0] not in stored_names(spot.block[at:]):
            kept = [statement] if _reads(scope.function, named[0]) > ends.count else []
            words = f"the ends of `{ast.unparse(named[1])}` are slices"
            return scope.candidate(spot.block[at:], [*kept, *new], words)
    return None


class _Ends(ast.NodeTransformer):
    """The first piece, the last one and their number, of pieces of `size` along `axis`."""

    def __init__(self, name: str, owner: str, size: int, axis: int) -> None:
        self.name, self.count = name, 0
        along, length = ":, " * axis, f"{owner}.shape[{axis}]"
        self.forms = {
            f"{name}[0]": f"{owner}[{along}:{size}]",
            f"{name}[-1]": f"{owner}[{along}({length} - 1) // {size} * {size}:]",
            f"len({name})": f"torch.sym_max(({length} + {size - 1}) // {size}, 1)",
        }

    def _visit_end(self, node: ast.expr) -> ast.AST:
        form = self.forms.get(ast.unparse(node)) if isinstance(getattr(node, "ctx", ast.Load()), ast.Load) else None
        if form is None:
            return self.generic_visit(node)
        self.count += 1
        return expression(form)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return self._visit_end(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self._visit_end(node)


def split_of(scope: Scope, source: ast.expr) -> tuple[str, int, int] | None:
    """The tensor, the size of its pieces and their dimension, of `x.split(16, 1)` and `torch.split(x, 16, dim=1)`."""
    match source:
        case ast.Call(func=ast.Attribute(value=owner, attr="split"), args=args):
            given = [*args, *(one.value for one in source.keywords)]
        case _:
            return None
    owner = given.pop(0) if ast.unparse(owner) == "torch" and args else owner
    match given:
        case [ast.Constant(value=int(size))]:
            axis = 0
        case [ast.Constant(value=int(size)), ast.Constant(value=int(axis))]:
            pass
        case _:
            return None
    if not isinstance(owner, ast.Name) or not scope.is_tensor(owner) or axis < 0 or size < 1:
        return None
    return owner.id, size, axis


def _reads(function: ast.FunctionDef, name: str) -> int:
    """How often the function reads the name."""
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name)
    return sum(isinstance(node.ctx, ast.Load) for node in names)


class _Pieces(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.words: list[str] = []
        self.named: set[str] = set()
        """Names of lists of pieces."""

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        piece = self._piece(node.target, node.iter)
        if piece is not None:
            node.target, node.iter, values = piece
            node.body = [substitute(one, values) for one in node.body]
        return node

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        return self.visit_ListComp(node)

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> ast.AST:
        self.generic_visit(node)
        rows = node.generators[0]
        piece = self._piece(rows.target, rows.iter) if len(node.generators) == 1 else None
        if piece is not None:
            rows.target, rows.iter, values = piece
            node.elt = substitute(node.elt, values)
            rows.ifs = [substitute(one, values) for one in rows.ifs]
        return node

    def _piece(self, target: ast.expr, source: ast.expr) -> tuple[ast.expr, ast.expr, dict[str, ast.expr]] | None:
        """The new target and source of the loop, and what replaces the piece's name and its number."""
        number = ""
        match target, source:
            case (
                ast.Tuple(elts=[ast.Name(id=number), target]),
                ast.Call(func=ast.Name(id="enumerate"), args=[source], keywords=[]),
            ):
                pass
        if isinstance(source, ast.Name):
            made = [value for name, value in assignments(self.scope.function) if name == source.id]
            self.named.add(source.id)
            source = made[0] if len(made) == 1 else source
        split = split_of(self.scope, source)
        if split is None or not isinstance(target, ast.Name):
            return None
        (owner, size, axis), name = split, target.id
        self.words.append(ast.unparse(source))
        at = self.scope.fresh("at")
        piece = expression(f"{owner}[{':, ' * axis}{at}:{at} + {size}]")
        bounds = expression(f"range(0, {owner}.shape[{axis}], {size})")
        values = {name: piece} | ({number: expression(f"({at} // {size})")} if number else {})
        return ast.Name(id=at, ctx=ast.Store()), bounds, values


def run_all_parts(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The simple statement at `spot` with every part run."""
    if isinstance(spot.statement, Compound | ast.FunctionDef):
        return
    choice = _Choice(scope)
    new = choice.visit(copy.deepcopy(spot.statement))
    if choice.words:
        words = f"a value selects `{choice.words[0]}`: all parts are run, and one is chosen"
        yield scope.candidate([spot.statement], [new], words)


class _Choice(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.words: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        selected = node.func
        if not isinstance(selected, ast.Subscript) or self.scope.depends_on(selected.slice) not in ("number", "tensor"):
            return node
        if not isinstance(value_of(selected.value, self.scope.seen), torch.nn.ModuleList):
            return node
        self.words.append(ast.unparse(selected))
        part, parts = self.scope.fresh("part"), ast.unparse(selected.value)
        answers = f"torch.stack([{part}({arguments_text(node)}) for {part} in {parts}], -1)"
        at = ast.unparse(without_numbers(selected.slice, self.scope))
        # Negative indices count from the end, as in a list; all other outputs add 0 to the chosen one.
        chosen = f"torch.arange(len({parts})) == torch.as_tensor({at}) % len({parts})"
        return expression(f"torch.where({chosen}, {answers}, 0).sum(-1)")
