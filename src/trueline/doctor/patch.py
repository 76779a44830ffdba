"""A module whose classes run an edited text of their own file, in this process, without importing it again.

Only the functions of the edited file are compiled; its top level is not run a second time. Classes keep their
identity, instances their parameters. A method with decorators is compiled, with them, where the edit affects it.
"""

import __future__

import ast
import hashlib
import inspect
import linecache
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trueline.doctor.export import copy_without_hooks
from trueline.doctor.rewrites.scope import loaded_names
from trueline.doctor.rewrites.state import as_buffer, buffers_of, elements_of

MARK = "#rewritten-"
"""Separates the user's file and a digest in the file name of edited code."""


def owner_of(module: torch.nn.Module) -> type:
    """The class whose `forward` the module runs."""
    return next(base for base in type(module).__mro__ if "forward" in vars(base))


def file_of(owner: type) -> str:
    """The file of a class's `forward`."""
    return str(getattr(getattr(_forward(owner), "__code__", None), "co_filename", ""))


def _forward(owner: type) -> Any:
    return inspect.unwrap(vars(owner)["forward"])


def class_node(tree: ast.Module, owner: type) -> ast.ClassDef | None:
    """The definition of `owner` in its file; of several of its name the one at its line."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == owner.__name__]
    if len(nodes) < 2:
        return nodes[0] if nodes else None
    line = vars(owner)["forward"].__code__.co_firstlineno
    return min(nodes, key=lambda node: abs(node.lineno - line))


def patch_module(module: torch.nn.Module, texts: Mapping[str, str]) -> torch.nn.Module:
    """A copy of `module` that runs `texts` (file -> edited text) wherever a class of it comes from such a file."""
    twin = copy_without_hooks(module)
    compiled: dict[type, dict[str, Any]] = {}
    for part in twin.modules():
        if not any("forward" in vars(base) for base in type(part).__mro__[:-1] if base is not torch.nn.Module):
            continue
        owner = owner_of(part)
        if file_of(owner) not in texts:
            continue
        if owner not in compiled:
            compiled[owner] = _functions(owner, texts[file_of(owner)])
        for name, function in compiled[owner].items():
            if inspect.getattr_static(type(part), name, None) is vars(owner).get(name):  # no subclass has its own
                part.__dict__[name] = types.MethodType(function, part)
        _register_buffers(part, owner, texts[file_of(owner)])
    return twin


def _register_buffers(part: torch.nn.Module, owner: type, text: str) -> None:
    """The attributes of `part` that the edited `__init__` registers as buffers, as buffers of the same value."""
    node = class_node(ast.parse(text), owner)
    held = dict(part.__dict__)
    for attribute, value in part.__dict__.items():
        held |= elements_of(attribute, value)
    for name, value in (buffers_of(node) if node is not None else {}).items():
        if name in held and name not in part._buffers:
            code = compile(ast.Expression(value), file_of(owner), "eval")
            scope = _forward(owner).__globals__
            buffer = as_buffer(held[name], lambda code=code, scope=scope: eval(code, scope))
            part.__dict__.pop(name, None)
            part.register_buffer(name, buffer, persistent=False)


def name_of(file: str, text: str) -> str:
    """The file name of edited code in tracebacks, which show its lines from the edit."""
    name = f"{file}{MARK}{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return name


def _functions(owner: type, text: str) -> dict[str, Any]:
    """The methods of `owner` in `text`, compiled in a copy of their module's globals."""
    tree = ast.parse(text)
    node = class_node(tree, owner)
    scope = dict(_forward(owner).__globals__)
    # Dynamo would look names up in the module of that name, which lacks the imports of the edit
    scope.pop("__name__", None)
    name = name_of(file_of(owner), text)
    changed = _run_changed(tree, file_of(owner), name, scope)
    if node is None:
        return {}
    before = class_node(ast.parse(Path(file_of(owner)).read_text()), owner)
    same = {ast.dump(n) for n in before.body} if before is not None else set()
    plain = {name for name, value in vars(owner).items() if isinstance(value, types.FunctionType)}  # no properties
    methods = [
        n
        for n in node.body
        if isinstance(n, ast.FunctionDef)
        and n.name != "__init__"
        and (not n.decorator_list or (n.name in plain and (ast.dump(n) not in same or {*loaded_names(n)} & changed)))
    ]
    free = _closure_values(owner)
    names = ", ".join(["__class__", *free])
    maker = ast.parse(f"def __make({names}):\n    return {{}}").body[0]
    assert isinstance(maker, ast.FunctionDef)
    result = ast.parse("{" + ", ".join(f"{m.name!r}: {m.name}" for m in methods) + "}", mode="eval").body
    maker.body = [*methods, ast.Return(value=result)]
    code = ast.Module(body=[maker], type_ignores=[])
    exec(compile(ast.fix_missing_locations(code), name, "exec", _flags(tree), True), scope)
    made: dict[str, Any] = scope["__make"](owner, *free.values())
    return made


def _flags(tree: ast.Module) -> int:
    """As the file was compiled: names in its annotations may exist for type checkers alone."""
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    postponed = any(alias.name == "annotations" for node in imported for alias in node.names)
    return __future__.annotations.compiler_flag if postponed else 0


def _closure_values(owner: type) -> dict[str, Any]:
    """The variables around a class inside a function that its methods read."""
    values: dict[str, Any] = {}
    for function in vars(owner).values():
        code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
        for name, cell in zip(getattr(code, "co_freevars", ()), cells or (), strict=False):
            if name != "__class__":
                values[name] = cell.cell_contents
    return values


def _run_changed(tree: ast.Module, file: str, name: str, scope: dict[str, Any]) -> set[str]:
    """Runs the imports that the edit added, the functions of the file that it changed, and those that call one of
    these; returns the names of the functions."""
    original = ast.parse(Path(file).read_text())
    before = {ast.dump(node) for node in (*original.body, *_top_functions(original))}
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and ast.dump(node) not in before]
    functions = [*_top_functions(tree)]
    names = {node.name for node in functions if ast.dump(node) not in before}
    while more := {node.name for node in functions if node.name not in names and names & set(loaded_names(node))}:
        names |= more
    run = [*imports, *(node for node in functions if node.name in names)]
    exec(compile(ast.Module(body=run, type_ignores=[]), name, "exec", _flags(tree), True), scope)
    return names


def _top_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Functions that importing the file defines; those under an `if` or a `try` where their name is unique."""
    inside = [node for one in tree.body if isinstance(one, ast.If | ast.Try) for node in _under(one)]
    names = [node.name for node in (*tree.body, *inside) if isinstance(node, ast.FunctionDef)]
    yield from (node for node in tree.body if isinstance(node, ast.FunctionDef))
    yield from (node for node in inside if names.count(node.name) == 1)


def _under(statement: ast.stmt) -> Iterator[ast.FunctionDef]:
    for name in ("body", "orelse", "finalbody"):
        for node in getattr(statement, name, ()):
            if isinstance(node, ast.FunctionDef):
                yield node
            elif isinstance(node, ast.If | ast.Try):
                yield from _under(node)
