"""Nodes of a file's syntax, and which of them decide where code goes."""

import ast
import functools
from pathlib import Path


@functools.lru_cache(maxsize=64)
def nodes_of(file: str) -> tuple[ast.AST, ...]:
    """All of them; none of a file that cannot be read."""
    try:
        return tuple(ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ()


def tests_of(node: ast.AST) -> list[ast.expr]:
    """What decides where code goes at `node`."""
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
            return [test]
        case ast.For(iter=iterated):
            return [iterated]
        case ast.comprehension(iter=iterated, ifs=tests):
            return [iterated, *tests]
    return []


def spans(node: ast.AST, line: int) -> bool:
    """Whether `line` is one of those of `node`."""
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)


def names_of(node: ast.AST, kind: type[ast.expr_context]) -> set[str]:
    """The names in `node` that are read, written or deleted there."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, kind)}
