"""Comprehensions over numbers in a plainer form: without a filter, without a counter, and in the place of a loop."""

import ast
from collections.abc import Sequence

from trueline.doctor.rewrites.appends import appended_by
from trueline.doctor.rewrites.scope import expression, named_value, statements, stored_names, substitute


def counted_tensor(source: ast.expr) -> str | None:
    """Of `range(len(x))`, `range(x.shape[0])` and `range(x.size(0))` the source of `x`."""
    match source:
        case ast.Call(func=ast.Name(id="range"), args=[ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)])]):
            return name
        case ast.Call(func=ast.Name(id="range"), args=[size]):
            name, _, end = ast.unparse(size).partition(".")
            return name if end in ("shape[0]", "size(0)") else None
    return None


class NamedRows(ast.NodeTransformer):
    """`x[i]` as a name of its own."""

    def __init__(self, tensor: str, index: str, name: str = "") -> None:
        self.row, self.name = f"{tensor}[{index}]", name or f"{tensor}_{index}"

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return expression(self.name) if ast.unparse(node) == self.row else self.generic_visit(node)


def without_filter(name: str, listing: ast.expr) -> ast.expr:
    """`sum(f(i) for i in … if c)` with 0 where c is false; `len([… if c])` as the sum of 1 and 0."""
    if not isinstance(listing, ast.ListComp | ast.GeneratorExp) or len(listing.generators) != 1:
        return listing
    rows = listing.generators[0]
    if not rows.ifs or name not in ("sum", "len"):
        return listing
    test = " and ".join(f"({ast.unparse(one)})" for one in rows.ifs)
    value = ast.unparse(listing.elt) if name == "sum" else "1"
    return expression(f"[{value} if {test} else 0 for {ast.unparse(rows.target)} in {ast.unparse(rows.iter)}]")


def as_comprehension(statement: ast.stmt, before: Sequence[ast.stmt], new: list[ast.stmt]) -> ast.Assign | None:
    """`rows = []`, then `for row in x.tolist(): n = len(row); rows.append(n * 2)`, as the comprehension that it is; the
    `rows = []` is taken out of `new`."""
    if not isinstance(statement, ast.For) or statement.orelse or "tolist" not in ast.unparse(statement.iter):
        return None
    *lines, last = statement.body
    appended = appended_by(last)
    values: dict[str, ast.expr] = {}
    for line in lines:
        named = named_value(line) if isinstance(line, ast.Assign) else None
        if named is None:
            return None
        values[named[0]] = substitute(named[1], values)
    begun = [one for one in new if appended is not None and ast.unparse(one) == f"{appended[0]} = []"]
    if appended is None or len(begun) != 1 or set(values) & {name for one in before for name in stored_names(one)}:
        return None
    new.remove(begun[0])
    element = ast.unparse(substitute(appended[1], values))
    source = f"for {ast.unparse(statement.target)} in {ast.unparse(statement.iter)}"
    made = statements(f"{appended[0]} = [{element} {source}]")[0]
    assert isinstance(made, ast.Assign)
    return ast.copy_location(made, statement)
