"""Sets that the user's code makes without naming `set`: `{"a", "b"}`, `{name for name in names}`, `keys() - others`.

Python makes them itself, so no stand-in for `set` sees them. The functions that ran are compiled again from their
source, with each such set given to a function that replaces it. A function whose source is not what runs stays as it
is.
"""

import ast
import dis
import functools
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch

from trueline.capture.model.code_paths import Event
from trueline.capture.model.reach import attributes
from trueline.capture.proof.limits import find_functions

REPLACE = "__trueline_set__"
"""The global by which compiled code gives away its sets."""
_VIEWS = frozenset({"keys", "items"})
Change = Callable[[ast.AST], Any]
"""Changes a syntax tree; one function for all files, since what is compiled is kept."""
Makers = Sequence[tuple[FunctionType, CodeType]]
"""Functions of the user, each with the code that it runs instead."""


def find_set_makers(way: Sequence[Event], module: torch.nn.Module) -> Makers:
    """The functions that ran and make sets of their own; those that the model reaches are found in any case."""
    codes = [code for code in dict.fromkeys(code for _, code, _ in way) if _makes_sets(code)]
    return find_changed(codes, module, _give_sets)


def find_changed(codes: Sequence[CodeType], module: torch.nn.Module, change: Change) -> Makers:
    """The functions of these codes, each with what its source is after the `change`."""
    known = {code: _compile(code.co_filename, change).get(_name(code), []) for code in codes}
    pairs = {code: new for code, some in known.items() for old, new in some if old == code}
    if not pairs:
        return []
    reached = [kept.value for kept in attributes(module) if isinstance(kept.value, FunctionType)]
    functions = {id(one): one for one in (*reached, *find_functions(pairs))}
    made = [(one, pairs[one.__code__]) for one in functions.values() if one.__code__ in pairs]
    return [(function, code) for function, code in made if function.__code__.co_freevars == code.co_freevars]


@contextmanager
def giving_sets(makers: Makers, replace: Callable[[Any], Any]) -> Iterator[None]:
    """In this block the functions get `replace(made)` in place of each set that they make."""
    with running_changed(makers, {REPLACE: replace}):
        yield


@contextmanager
def running_changed(makers: Makers, hooks: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """In this block the functions run their other code, which knows `hooks` by their names."""
    with ExitStack() as stack:
        for function, code in makers:
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = code
            for name in hooks.keys() - function.__globals__.keys():
                function.__globals__[name] = hooks[name]
                stack.callback(function.__globals__.pop, name, None)
        yield


@functools.lru_cache(maxsize=20_000)
def _makes_sets(code: CodeType) -> bool:
    if any(isinstance(one, frozenset) for one in code.co_consts):
        return True  # of `for name in {"a", "b"}`
    operations = {one.opname for one in dis.get_instructions(code)}
    if "BUILD_SET" in operations or (_VIEWS & set(code.co_names) and "BINARY_OP" in operations):
        return True
    return any(_makes_sets(one) for one in code.co_consts if isinstance(one, CodeType))


def _name(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


@functools.lru_cache(maxsize=64)
def _compile(file: str, change: Change) -> dict[tuple[str, int], list[tuple[CodeType, CodeType]]]:
    """Of each function in the file its code as it is, and after the `change`. Lambdas of one line have one name."""
    source = "".join(linecache.getlines(file))
    try:
        plain = compile(source, file, "exec", dont_inherit=True)
        tree = ast.fix_missing_locations(change(ast.parse(source, file)))
        changed = compile(tree, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    found: dict[tuple[str, int], list[tuple[CodeType, CodeType]]] = {}
    ones, others = list(_codes_in(plain)), list(_codes_in(changed))
    for one, other in zip(ones, others, strict=True) if len(ones) == len(others) else ():
        found.setdefault(_name(one), []).append((one, other))
    return found


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes_in(one)


class _GiveSets(ast.NodeTransformer):
    def visit_Set(self, node: ast.Set) -> ast.AST:
        return _give(self.generic_visit(node))

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        return _give(self.generic_visit(node))

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        changed = self.generic_visit(node)
        return _give(changed) if isinstance(node.op, ast.Sub | ast.BitAnd | ast.BitOr | ast.BitXor) else changed

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """`names &= others` of keys makes a set."""
        changed = self.generic_visit(node)
        if not isinstance(node.target, ast.Name) or not isinstance(
            node.op, ast.Sub | ast.BitAnd | ast.BitOr | ast.BitXor
        ):
            return changed
        target = ast.copy_location(ast.Name(id=node.target.id, ctx=ast.Store()), node)
        kept: Any = _give(ast.copy_location(ast.Name(id=node.target.id, ctx=ast.Load()), node))
        return [changed, ast.copy_location(ast.Assign(targets=[target], value=kept), node)]


def _give_sets(tree: ast.AST) -> Any:
    return _GiveSets().visit(tree)


def _give(node: Any) -> ast.AST:
    call = ast.Call(func=ast.Name(id=REPLACE, ctx=ast.Load()), args=[node], keywords=[])
    return ast.copy_location(call, node)
