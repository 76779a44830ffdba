"""Nodes of a file's syntax, which of them decide where code goes, and which of these a value decides that is taken on a
line: the names that it is given in its function are followed, no further."""

import ast
import functools
from collections.abc import Sequence
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
        case ast.match_case(guard=ast.expr() as test):
            return [test]
    return []


def spans(node: ast.AST, line: int) -> bool:
    """Whether `line` is one of those of `node`."""
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)


def names_of(node: ast.AST, kind: type[ast.expr_context]) -> set[str]:
    """The names in `node` that are read, written or deleted there."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, kind)}


def decides(node: ast.AST, line: int) -> bool:
    """Whether `node` decides where code goes by a test on `line`, and not only whether it raises."""
    check = isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise)
    return not (check or isinstance(node, ast.Assert)) and any(
        test.lineno <= line <= (test.end_lineno or test.lineno) for test in tests_of(node)
    )


@functools.lru_cache(maxsize=1024)
def find_deciding(file: str, line: int) -> tuple[int, ...]:
    """`line` where it decides, and lines of its function whose test has a name in it that comes from there."""
    function, names = _follow_names(file, line)
    nodes = list(ast.walk(function)) if function is not None else []
    found = {test.lineno for node in nodes for test in tests_of(node) if names & names_of(test, ast.Load)}
    for node in nodes:
        if isinstance(node, ast.Match) and (spans(node.subject, line) or names & names_of(node.subject, ast.Load)):
            found |= {part.lineno for case in node.cases for part in _find_tried(case.pattern)}
    return tuple(sorted(found | {line for node in nodes if decides(node, line)}))


def _find_tried(pattern: ast.pattern) -> list[ast.pattern]:
    """The patterns of a case, itself or inside of it, that a value may not fit."""
    match pattern:
        case ast.MatchAs(pattern=None) | ast.MatchStar():
            return []
        case ast.MatchAs(pattern=ast.pattern() as inner):
            return _find_tried(inner)
        case ast.MatchOr(patterns=patterns):
            return [one for inner in patterns for one in _find_tried(inner)]
    return [pattern]


@functools.lru_cache(maxsize=1024)
def is_looked_up(file: str, line: int) -> bool:
    """Whether a number taken on `line` is a key, part of a text, or an argument of a function of the user's: what
    follows from it may be the same for all but few numbers."""
    function, names = _follow_names(file, line)
    for node in ast.walk(function) if function is not None else ():
        match node:
            case ast.Call(func=called, args=args) if ast.unparse(called).split(".")[-1] not in _HARMLESS:
                places: Sequence[ast.AST] = args
            case ast.Compare(ops=[ast.In() | ast.NotIn()], left=left):
                places = [left]
            case ast.Subscript(slice=index):
                places = [index]
            case ast.JoinedStr(values=values):
                places = values
            case _:
                continue
        for place in places:
            if names & names_of(place, ast.Load) or any(_takes(one, line) for one in ast.walk(place)):
                return True
    return False


_HARMLESS = frozenset(
    """
    abs all any append bool debug error float info int isfinite isinf isnan len log max min pack_padded_sequence print
    round sum warn warning
    """.split()  # noqa: SIM905 - as prose they take one line
)
"""Functions of a number that only log it, keep it, or give another number; the lengths of packed records are traced."""
_TAKEN = frozenset("item tolist numpy max min sum any all __dlpack__ from_dlpack int float bool".split())  # noqa: SIM905


def _takes(node: ast.AST, line: int) -> bool:
    """Whether a call on `line` may take a number."""
    return isinstance(node, ast.Call) and node.lineno == line and ast.unparse(node.func).split(".")[-1] in _TAKEN


def _follow_names(file: str, line: int) -> tuple[ast.FunctionDef | None, set[str]]:
    """The function around `line`, and the names in it that come from there."""
    around = [node for node in nodes_of(file) if isinstance(node, ast.FunctionDef) and spans(node, line)]
    if not around:
        return None, set()
    function = max(around, key=lambda node: node.lineno)
    names: set[str] = set()
    kinds = ast.stmt | ast.comprehension | ast.NamedExpr
    nodes = [node for node in ast.walk(function) if isinstance(node, kinds)]
    for _ in range(3):  # what a loop carries back to its head
        for node in sorted(nodes, key=lambda node: getattr(node, "lineno", line)):
            if isinstance(node, ast.Match):
                if spans(node.subject, line) or names & names_of(node.subject, ast.Load):
                    names |= {name for case in node.cases for name in _names_bound(case.pattern)}
                continue
            value = node.iter if isinstance(node, ast.For | ast.comprehension) else getattr(node, "value", None)
            if not isinstance(value, ast.AST) or "pack_padded_sequence(" in ast.unparse(value):
                continue
            if spans(value, line) or names & names_of(value, ast.Load):
                targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
                names |= {name for target in targets if target is not None for name in names_of(target, ast.Store)}
    return function, names


def _names_bound(pattern: ast.pattern) -> set[str]:
    """The names that a pattern gives to what fits it."""
    bound = ((getattr(one, name, None) for name in ("name", "rest")) for one in ast.walk(pattern))
    return {name for names in bound for name in names if isinstance(name, str)}
