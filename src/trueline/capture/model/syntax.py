"""Nodes of a file's syntax, which of them decide where code goes, and which of these a value decides that is taken on a
line: the names that it is given in its function are followed, no further."""

import ast
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch._numpy

NO_LINE = -1


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
def find_deciding(file: str, line: int, *, lists: bool = True) -> tuple[int, ...]:
    """`line` where it decides, and lines of its function whose test has a name in it that comes from there. Without
    `lists` no loop over `.tolist()` of a tensor: its size decides how many steps there are."""
    function, names = _follow_names(file, line)
    nodes = list(ast.walk(function)) if function is not None else []
    if not lists:
        listed = _names_of_lists(nodes)
        nodes = [node for node in nodes if not (isinstance(node, ast.For) and _is_list(node.iter, listed))]
    found = {test.lineno for node in nodes for test in tests_of(node) if names & names_of(test, ast.Load)}
    for node in nodes:
        if isinstance(node, ast.Match) and (spans(node.subject, line) or names & names_of(node.subject, ast.Load)):
            found |= {part.lineno for case in node.cases for part in _find_tried(case.pattern)}
    return tuple(sorted(found | {line for node in nodes if decides(node, line)}))


@functools.lru_cache(maxsize=1024)
def lines_of_given(file: str, line: int) -> frozenset[int]:
    """The lines of the functions that calls on `line` are given, by names that the function around it defines."""
    around = _function_around(file, line)
    nodes = list(ast.walk(around)) if around is not None else []
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.lineno == line]
    given = {one.id for call in calls for one in call.args if isinstance(one, ast.Name)}
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name in given]
    return frozenset(at for node in functions for at in range(node.lineno, (node.end_lineno or node.lineno) + 1))


def is_called(file: str, line: int, name: str) -> bool:
    """Whether a function of that name, of whatever module, is called on `line`."""
    calls = (node for node in nodes_of(file) if isinstance(node, ast.Call) and node.lineno == line)
    return any(ast.unparse(call.func).rpartition(".")[2] == name for call in calls)


def prints(file: str, line: int) -> bool:
    """Whether a call that spans `line` prints or logs what it is given."""
    calls = (node for node in nodes_of(file) if isinstance(node, ast.Call) and spans(node, line))
    return any(ast.unparse(call.func).rpartition(".")[2] in _LOGS for call in calls)


def _names_of_lists(nodes: Sequence[ast.AST]) -> set[str]:
    """The names of a function that are bound once, to `.tolist()` of a tensor."""
    bound = [name for node in nodes for name in names_of(node, ast.Store) if isinstance(node, ast.Name)]
    return {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _is_list(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name) and bound.count(target.id) == 1
    }


def _is_list(node: ast.expr, names: set[str]) -> bool:
    """Whether `node` is `.tolist()` of a tensor, one of `names`, or counts or pairs the elements of such lists."""
    match node:
        case ast.Call(func=ast.Attribute(attr="tolist"), args=[], keywords=[]):
            return True
        case ast.Name(id=name):
            return name in names
        case ast.Call(func=ast.Name(id="enumerate" | "reversed"), args=[counted], keywords=[]):
            return _is_list(counted, names)
        case ast.Call(func=ast.Name(id="zip"), args=[_, *_] as zipped, keywords=[]):
            return all(_is_list(one, names) for one in zipped)
    return False


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
def is_looked_up(file: str, line: int, traced: frozenset[int] = frozenset()) -> bool:
    """Whether a number taken on `line` is a key, part of a text, or an argument of a function of the user's: what
    follows from it may be the same for all but few numbers.

    On the lines `traced` the exported program has operators from which its answer follows. If `line` is one of them, a
    function of numpy's that a trace has a counterpart of is none of these there, and no number in a slice is: the trace
    followed it, or raised.
    """
    function = _function_around(file, line)
    told = function is None or line not in traced or _may_know_a_trace(function)
    numbers = _Numbers(set(), line, frozenset() if told else traced, _names_of_numpy(file))
    _follow_names(file, line, numbers)
    if function is None or _looks_up(function, numbers):
        return function is not None
    kept = {name for name in numbers.names if name.startswith(".")}  # by attributes, which other functions read
    others = (node for node in nodes_of(file) if kept and isinstance(node, ast.FunctionDef) and node is not function)
    for other in others:
        there = replace(numbers, names=set(kept), line=NO_LINE)
        _follow_names_in(other, NO_LINE, there)
        if _looks_up(other, there):
            return True
    return False


def _looks_up(function: ast.FunctionDef, numbers: "_Numbers") -> bool:
    for node in ast.walk(function):
        match node:
            case ast.Call(func=called, args=args) if not numbers.is_harmless(called, node.lineno):
                places: Sequence[ast.AST] = args
            case ast.Compare(ops=[ast.In() | ast.NotIn()], left=left):
                places = [left]
            case ast.Subscript(slice=index) if not numbers.is_part(node):
                places = [index]
            case ast.JoinedStr(values=values):
                places = values
            case _:
                continue
        if any(map(numbers.are_in, places)):
            return True
    return False


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers that are taken on a line, and what is made of them: by their names."""

    names: set[str]
    """Of attributes with a dot."""
    line: int
    traced: frozenset[int]
    numpy: frozenset[str]

    def is_harmless(self, called: ast.expr, line: int) -> bool:
        """Whether a function only logs a number, keeps it, or gives another one."""
        owner, _, name = ast.unparse(called).rpartition(".")
        if name in _HARMLESS:
            return True
        arrays = owner in self.numpy and callable(getattr(torch._numpy, name, None))
        return bool(self.traced) and ((arrays and line in self.traced) or f"{owner}.{name}" in _TENSORS)

    def are_in(self, node: ast.AST) -> bool:
        """Whether `node` is or holds such a number, and not a tensor or packed records that are made of it."""
        if isinstance(node, ast.Name):
            return isinstance(node.ctx, ast.Load) and node.id in self.names
        if isinstance(node, ast.Attribute) and f".{node.attr}" in self.names:
            return isinstance(node.ctx, ast.Load)
        if self._makes_tensor(node):
            return False
        return _takes(node, self.line) or any(map(self.are_in, ast.iter_child_nodes(node)))

    def is_part(self, node: ast.AST) -> bool:
        """Whether `node` is a slice that the trace followed: of a tensor, since one of a list would have raised."""
        if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)):
            return False
        return node.lineno in self.traced and not self.are_in(node.value)

    def _makes_tensor(self, node: ast.AST) -> bool:
        if self.is_part(node):
            return True
        if not isinstance(node, ast.Call):
            return False
        called = ast.unparse(node.func)
        return called.split(".")[-1] == "pack_padded_sequence" or (bool(self.traced) and called in _TENSORS)


_TENSORS = ("torch.from_numpy", "torch.as_tensor", "torch.tensor")
_TOLD = frozenset("is_exporting is_compiling is_dynamo_compiling is_tracing is_scripting is_fx_tracing".split())  # noqa: SIM905


def _may_know_a_trace(function: ast.FunctionDef) -> bool:
    """Whether the function may do something else in a trace: it asks, or catches what a trace raises."""
    return any(
        isinstance(node, ast.Try | ast.With) or {getattr(node, "attr", ""), getattr(node, "id", "")} & _TOLD
        for node in ast.walk(function)
    )


def _names_of_numpy(file: str) -> frozenset[str]:
    imported = (alias for node in nodes_of(file) if isinstance(node, ast.Import) for alias in node.names)
    return frozenset(alias.asname or alias.name for alias in imported if alias.name == "numpy")


_LOGS = frozenset("print debug info log warn warning error exception write".split())  # noqa: SIM905
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


def _function_around(file: str, line: int) -> ast.FunctionDef | None:
    around = [node for node in nodes_of(file) if isinstance(node, ast.FunctionDef) and spans(node, line)]
    return max(around, key=lambda node: node.lineno, default=None)


def _follow_names(file: str, line: int, numbers: _Numbers | None = None) -> tuple[ast.FunctionDef | None, set[str]]:
    """The function around `line`, and the names in it that come from there; those of `numbers` alone, if given."""
    function = _function_around(file, line)
    return function, set() if function is None else _follow_names_in(function, line, numbers)


def _follow_names_in(function: ast.FunctionDef, line: int, numbers: _Numbers | None) -> set[str]:
    names: set[str] = set() if numbers is None else numbers.names
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
            if numbers is not None and spans(value, line) and numbers.is_part(value):
                continue  # a slice of a tensor that the trace followed
            if spans(value, line) or (names & names_of(value, ast.Load) if numbers is None else numbers.are_in(value)):
                targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
                names |= {name for target in targets if target is not None for name in names_of(target, ast.Store)}
                if numbers is not None:
                    names |= {f".{target.attr}" for target in targets if isinstance(target, ast.Attribute)}
    return names


def _names_bound(pattern: ast.pattern) -> set[str]:
    """The names that a pattern gives to what fits it."""
    bound = ((getattr(one, name, None) for name in ("name", "rest")) for one in ast.walk(pattern))
    return {name for names in bound for name in names if isinstance(name, str)}
