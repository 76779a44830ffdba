"""The user's functions with a hook at each place where a value may come from outside: a call, an attribute, a name that
Python gives a file, a value that is written into a text.

What a hook gets is what the line would have; the hook may give something else. A function is called in the frame that
calls it, so `super()` and what looks at its caller work as before.
"""

import ast
from collections.abc import Sequence
from typing import Any

import torch

from trueline.capture.model.code_paths import Event
from trueline.capture.proof.state.literal_sets import Makers, find_changed

CALL, FIELD, NAME, VALUE = "__trueline_call__", "__trueline_field__", "__trueline_name__", "__trueline_value__"
OPERATION = "__trueline_operation__"
OF_FILES = frozenset({"__name__", "__file__", "__package__", "__spec__", "__cached__", "__path__"})
"""Names that Python's import gives a file, by where it lies and who imports it."""
_OPERATORS: dict[str, str] = {"Eq": "eq", "NotEq": "ne", "Lt": "lt", "LtE": "le", "Gt": "gt", "GtE": "ge"}
_OPERATORS |= {"Is": "is_", "IsNot": "is_not", "In": "contains"}
"""By what compares, the function of `operator` that does the same."""
_OF_FRAMES = frozenset({"super", "locals", "globals", "vars", "dir", "eval", "exec", "breakpoint"})
"""Functions that look at the frame which calls them."""


def find_readers(way: Sequence[Event], module: torch.nn.Module) -> Makers:
    """The functions that ran, each with its code that has hooks."""
    return find_changed(list(dict.fromkeys(code for _, code, _ in way)), module, _add_hooks)


def _add_hooks(tree: ast.AST) -> Any:
    return _AddHooks().visit(tree)


class _AddHooks(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in _OF_FRAMES:
            return self.generic_visit(node)
        changed = self.generic_visit(node)
        node.func = _hook(CALL, node, node.func)
        return changed

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        changed = self.generic_visit(node)
        mangled = node.attr.startswith("__") and not node.attr.endswith("__")
        if not isinstance(node.ctx, ast.Load) or mangled:
            return changed
        return _hook(FIELD, node, node.value, ast.copy_location(ast.Constant(node.attr), node))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in OF_FILES or not isinstance(node.ctx, ast.Load):
            return node
        return _hook(NAME, node, node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return _hook(VALUE, node, self.generic_visit(node))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        node.value = self.visit(node.value)
        return node  # its format is a text that stays one

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        changed = self.generic_visit(node)
        text = isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant | ast.JoinedStr)
        return _hook(VALUE, node, changed) if text else changed

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        changed = self.generic_visit(node)
        plain = isinstance(node.ctx, ast.Load) and not isinstance(node.slice, ast.Slice | ast.Tuple)
        return _operation("getitem", node, node.value, node.slice) if plain else changed

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        changed = self.generic_visit(node)
        name = _OPERATORS.get(type(node.ops[0]).__name__) if len(node.ops) == 1 else None
        return _operation(name, node, node.left, node.comparators[0]) if name else changed

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        node.guard = self.visit(node.guard) if node.guard is not None else None
        node.body = [self.visit(one) for one in node.body]
        return node  # a pattern holds no call


def _operation(name: str, at: ast.expr, *given: ast.AST) -> ast.Call:
    return _hook(OPERATION, at, ast.copy_location(ast.Constant(name), at), *given)


def _hook(name: str, at: ast.expr, *given: ast.AST) -> ast.Call:
    place: Any = at.lineno, at.col_offset, at.end_lineno, at.end_col_offset
    site = ast.copy_location(ast.Constant(place), at)
    function = ast.copy_location(ast.Name(id=name, ctx=ast.Load()), at)
    return ast.copy_location(ast.Call(func=function, args=[site, *given], keywords=[]), at)  # type: ignore[list-item]
