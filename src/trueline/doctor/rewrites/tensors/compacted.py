"""Rows that are shortened by their values and padded to one length, as greedy CTC decoding does, keep their length.

    row = torch.unique_consecutive(row[:n])              row_kept = (torch.arange(row.shape[0]) < n) & …
    row = row[row != 0]                        ──▶       row_kept = row_kept & (row != 0)
    out.append(F.pad(row, (0, w - len(row))))            out.append(torch.where(…, row[torch.argsort(~row_kept)], 0))

A mask says which elements are left; where the row is padded, or written into a longer one, these come first, in their
order. Condition: nothing else reads the shortened row, except for its length.
"""

import ast
import copy
from collections.abc import Iterator

from trueline.doctor.rewrites.predicate import without_numbers
from trueline.doctor.rewrites.pure import mask_of
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, expression, first_line, indices_of, statements

_FILLED = {"zeros": "0", "new_zeros": "0", "ones": "1", "new_ones": "1", "full": "", "new_full": ""}


def rewrites(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The loop at `spot` over rows."""
    loop = spot.statement
    if not isinstance(loop, ast.For) or loop.orelse:
        return
    rows = _Rows(scope)
    new = copy.deepcopy(loop)
    new.body = [one for statement in loop.body for one in rows.convert(statement)]
    if rows.padded and not rows.lost:
        words = f"rows of `{first_line(loop)}` keep their length under a mask of what is left of them"
        yield scope.candidate([loop], [new], words)


class _Rows(ast.NodeTransformer):
    """The statements of one loop, in order."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.kept: dict[str, str] = {}
        """Name of a shortened row -> that of its mask."""
        self.prefix: set[str] = set()
        """Masks of rows whose first elements are left."""
        self.written: set[ast.AST] = set()
        """What this class wrote of a row."""
        self.padded, self.lost = False, False
        """Whether a row became longer again, and whether one is read for something else."""

    def convert(self, statement: ast.stmt) -> list[ast.stmt]:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                short = self._shorten(value)
                if short is not None:
                    row, mask, prefix = short
                    kept = self.kept.setdefault(name, self.scope.fresh(f"{name}_kept"))
                    (self.prefix.add if prefix else self.prefix.discard)(kept)
                    return [*statements(f"{kept} = {mask}"), *(statements(f"{name} = {row}") if row != name else [])]
            case ast.Assign(
                targets=[ast.Subscript(value=out, slice=ast.Tuple(elts=[*at, ast.Slice(lower=None, upper=end)]))],
                value=ast.Name(id=name),
            ) if name in self.kept and end is not None and self._is_length(end, name):
                place = ast.unparse(ast.Subscript(value=out, slice=ast.Tuple(elts=at) if len(at) > 1 else at[0]))
                self.padded = True
                return statements(f"{place} = {self._pad(name, f'{ast.unparse(out)}.shape[{len(at)}]', place)}")
        new = self.visit(copy.deepcopy(statement))
        others = {one.id for one in ast.walk(new) if isinstance(one, ast.Name) and one not in self.written}
        self.lost = self.lost or bool(others & set(self.kept))
        return [new]

    def _shorten(self, value: ast.expr) -> tuple[str, str, bool] | None:
        """The whole row, the mask of what is left of it, and whether these are its first elements."""
        match value:
            case ast.Name(id=name) if name in self.kept:
                return name, self.kept[name], self.kept[name] in self.prefix
            case ast.Call(func=called, args=[given], keywords=[]) if ast.unparse(called) == "torch.unique_consecutive":
                return self._drop_repeats(given)
            case ast.Call(func=ast.Attribute(value=given, attr="unique_consecutive"), args=[], keywords=[]):
                return self._drop_repeats(given)
            case ast.Subscript(value=given):
                return self._cut(value) or self._filter(value, given)
        return None

    def _drop_repeats(self, given: ast.expr) -> tuple[str, str, bool] | None:
        row, mask, prefix = self._shorten(given) or (ast.unparse(given), "", True)
        if not mask and self.scope.rank(given) not in (None, 1):
            return None
        begins = f"torch.cat([torch.ones_like({row}[:1], dtype=torch.bool), {row}[1:] != {row}[:-1]])"
        if not prefix:  # the last element before each that is left
            last = f"torch.where({mask}, torch.arange({row}.shape[0]), -1).cummax(0).values.roll(1, 0)"
            before = f"torch.where(torch.arange({row}.shape[0]) > 0, {last}, -1)"
            begins = f"(({before} < 0) | ({row}[{before}.clamp(min=0)] != {row}))"
        return row, f"{mask} & {begins}" if mask else begins, False

    def _cut(self, value: ast.Subscript) -> tuple[str, str, bool] | None:
        """`x[i, :n]`, of a number `n` that is a value."""
        *at, last = indices_of(value)
        if not isinstance(last, ast.Slice) or last.lower or last.step or last.upper is None:
            return None
        if any(isinstance(one, ast.Slice) for one in at) or self.scope.depends_on(last.upper) not in (
            "number",
            "tensor",
        ):
            return None
        if at and ast.unparse(value.value) in self.kept:
            return None
        whole = (
            value.value if not at else ast.Subscript(value=value.value, slice=at[0] if len(at) == 1 else ast.Tuple(at))
        )
        row, mask, prefix = self._shorten(whole) or (ast.unparse(whole), "", True)
        if not prefix:
            return None
        end, size = ast.unparse(without_numbers(last.upper, self.scope)), f"{row}.shape[0]"
        left = f"(torch.arange({size}) < torch.where({end} < 0, {end} + {size}, {end}))"
        return row, f"{mask} & {left}" if mask else left, True

    def _filter(self, value: ast.Subscript, given: ast.expr) -> tuple[str, str, bool] | None:
        """`row[row != 0]`."""
        short = self._shorten(given)
        if short is None:
            mask = mask_of(self.scope, value)
            ranked = self.scope.rank(given) == 1 or isinstance(given, ast.Name)
            return (ast.unparse(given), f"({ast.unparse(mask)})", False) if mask is not None and ranked else None
        plain = isinstance(given, ast.Name) and _is_elementwise(value.slice)
        return (short[0], f"{short[1]} & ({ast.unparse(value.slice)})", False) if plain else None

    # ---- where a row is used

    def _is_length(self, node: ast.expr, name: str) -> bool:
        return ast.unparse(node) in (f"len({name})", f"{name}.shape[0]", f"{name}.size(0)", f"{name}.numel()")

    def _pad(self, name: str, width: str, rest: str) -> str:
        """The elements that are left, in a row of `width`, and `rest` behind them."""
        kept = self.kept[name]
        first = f"{name}[torch.argsort(~{kept}, stable=True)]"
        moved = f"torch.nn.functional.pad({first}, (0, {width} - {name}.shape[0]))"
        return f"torch.where(torch.arange({width}) < {kept}.sum(), {moved}, {rest})"

    def _width(self, node: ast.expr, name: str) -> str | None:
        """`w` of `w - len(row)`."""
        match node:
            case ast.BinOp(left=left, op=ast.Sub(), right=right) if self._is_length(right, name):
                return ast.unparse(left)
        return None

    def _note(self, text: str) -> ast.expr:
        node = expression(text)
        self.written |= set(ast.walk(node))
        self.padded = True
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        made = node.args[0] if ast.unparse(node.func) in ("torch.tensor", "torch.as_tensor") and node.args else node
        for name in self.kept:
            if self._is_length(node, name) or self._is_length(made, name):
                return self._note(f"{self.kept[name]}.sum()")
            padding = self._padding(node, name)
            if padding is not None:
                return self._note(self._pad(name, *padding))
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        for name in self.kept:
            if self._is_length(node, name):
                return self._note(f"{self.kept[name]}.sum()")
        return self.generic_visit(node)

    def _padding(self, node: ast.Call, name: str) -> tuple[str, str] | None:
        """Width and filling of a call that makes the row longer again."""
        called = ast.unparse(node.func).rpartition(".")[2]
        match node.args:
            case [
                ast.Name(id=given),
                ast.Tuple(elts=[ast.Constant(value=0), more]) | ast.List(elts=[ast.Constant(value=0), more]),
                *fill,
            ]:
                options = {one.arg: one.value for one in node.keywords}
                if called != "pad" or given != name or set(options) - {"value"} or fill:
                    return None
                width = self._width(more, name)
                return None if width is None else (width, ast.unparse(options.get("value", ast.Constant(0))))
            case [
                ast.List(elts=[ast.Name(id=given), ast.Call(func=ast.Attribute(attr=made), args=[size, *fill])]),
                *axes,
            ]:
                if (
                    called != "cat"
                    or given != name
                    or made not in _FILLED
                    or [*map(ast.unparse, axes)] not in ([], ["0"])
                ):
                    return None
                sizes = size.elts if isinstance(size, ast.Tuple | ast.List) else [size]
                width = self._width(sizes[0], name) if len(sizes) == 1 else None
                return None if width is None else (width, _FILLED[made] or ast.unparse(fill[0]))
        return None


def _is_elementwise(node: ast.expr) -> bool:
    """Whether it decides for each element by itself."""
    match node:
        case ast.Name() | ast.Constant():
            return True
        case ast.Compare(left=left, comparators=others):
            return all(_is_elementwise(one) for one in (left, *others))
        case ast.BinOp(left=left, right=right):
            return _is_elementwise(left) and _is_elementwise(right)
        case ast.UnaryOp(operand=operand):
            return _is_elementwise(operand)
    return False
