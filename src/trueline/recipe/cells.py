"""A recipe that was written in the cells of a notebook, as the text of a file: worker processes load it from there.

Functions and classes travel by their source, imports as imports, plain values (numbers, texts, lists and dicts of
them) by their value at that moment. Nothing is pickled. What cannot travel that way, as a table or a tensor of the
notebook, is an error that names it and the function that uses it: made again by an old cell it could be another table.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import operator
import os
import symtable
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trueline.columns.declared import KINDS
from trueline.errors import RecipeError

_HEAD = """# Written by Trueline from the cells of a notebook.
import sys

if {cwd!r} not in sys.path:
    sys.path.append({cwd!r})
"""


def source_of(values: Mapping[str, Any], names: list[str]) -> str:
    """The text of a recipe that defines `names` as they are in `values`, the namespace of the notebook, with everything
    that they use. Raises RecipeError for what cannot travel."""
    collected: dict[str, str] = {}
    for name in names:
        _collect(name, "the recipe", values, collected)
    parts = [text for text in collected.values() if text]
    return "\n\n".join([_HEAD.format(cwd=os.getcwd()), *parts]) + "\n"


def is_of_cells(value: object) -> bool:
    """Whether a function or class was defined in a notebook's cell or a prompt: in `__main__`, and in no file."""
    return getattr(value, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__")


def _collect(name: str, user: str, values: Mapping[str, Any], collected: dict[str, str]) -> None:
    """Enters the text that defines `name`, after what it needs itself."""
    if name in collected:
        return
    collected[name] = ""  # what uses itself is not entered twice
    value = values[name]
    if isinstance(value, types.ModuleType):
        text = f"import {value.__name__} as {name}"
    elif isinstance(value, types.FunctionType | type) and value.__module__ == "__main__" and _is_alias(name, value):
        _collect(value.__name__, user, {**values, value.__name__: value}, collected)
        text = f"{name} = {value.__name__}"
    elif isinstance(value, types.FunctionType | type) and value.__module__ == "__main__":
        text = _definition(name, value)
        for used in _globals_of(text):
            if used in values and used != name:
                _collect(used, f"{name}()" if isinstance(value, types.FunctionType) else name, values, collected)
    elif (module := getattr(value, "__module__", None)) and hasattr(value, "__qualname__") and module != "__main__":
        top = value.__qualname__.partition(".")[0]
        text = f"from {module} import {top}" + (
            f"\n{name} = {value.__qualname__}" if name != value.__qualname__ else ""
        )
    elif _is_plain(value):
        text = f"{name} = {value!r}"
    elif text := _made_again(name, value, values):
        for used in _globals_of(text):
            if used in values:
                _collect(used, f"'{name}'", values, collected)
    else:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise RecipeError(
            f"{user} uses '{name}', a {kind} of this notebook, which worker processes do not have",
            hint=f"make '{name}' inside a function of the recipe, or read it from a file there",
        )
    del collected[name]  # it comes after what it needs
    collected[name] = text


def _is_alias(name: str, value: Any) -> bool:
    return bool(value.__name__ not in (name, "<lambda>"))


def _is_plain(value: object) -> bool:
    """Whether the value's repr makes it again."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(one) for pair in value.items() for one in pair)
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _made_again(name: str, value: Any, values: Mapping[str, Any]) -> str:
    """The statement of a cell that makes a torch module such as `loss = nn.CrossEntropyLoss()` or the declaration of
    columns, if it makes an equal one again; empty for other values, and for one that was trained or changed since."""
    torch = sys.modules.get("torch")
    is_same: Callable[[Any, Any], bool]
    if torch is not None and isinstance(value, torch.nn.Module):
        is_same = _is_same_module
    elif isinstance(value, KINDS) or (
        isinstance(value, dict) and all(isinstance(one, KINDS) for one in value.values())
    ):
        is_same = operator.eq
    else:
        return ""
    for cell in reversed(getattr(sys.modules["__main__"], "In", [])):
        for node in _statements(cell):
            if isinstance(node, ast.Assign) and [ast.unparse(one) for one in node.targets] == [name]:
                made = eval(compile(ast.Expression(node.value), "cell", "eval"), dict(values))
                return ast.unparse(node) if is_same(made, value) else ""
    return ""


def _is_same_module(made: Any, value: Any) -> bool:
    """Whether two modules are of one type, with the same settings, parameters and buffers."""
    if type(made) is not type(value) or repr(made) != repr(value):
        return False
    mine, other = made.state_dict(), value.state_dict()
    plain = [{key: own for key, own in vars(one).items() if _is_plain(own)} for one in (made, value)]
    equal = sys.modules["torch"].equal
    return plain[0] == plain[1] and mine.keys() == other.keys() and all(equal(mine[key], other[key]) for key in mine)


def _definition(name: str, value: Any) -> str:
    """The source of a function or class, from the cell that it was last defined in. Raises RecipeError."""
    codes = [value.__code__] if isinstance(value, types.FunctionType) else [
        one.__code__ for one in vars(value).values() if isinstance(one, types.FunctionType)
    ]  # fmt: skip
    if isinstance(value, types.FunctionType) and value.__closure__:
        free = ", ".join(value.__code__.co_freevars)
        raise RecipeError(
            f"'{name}' was made inside another function and uses its {free}, which worker processes do not have",
            hint="define it at the top level of a cell",
        )
    cells = ["".join(linecache.getlines(code.co_filename)) for code in codes if code.co_filename]
    cells += reversed(getattr(sys.modules["__main__"], "In", []))  # a class without methods
    for cell in filter(None, cells):
        for node in _statements(cell):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                return "\n".join(cell.splitlines()[first - 1 : node.end_lineno])
            if isinstance(node, ast.Assign) and any(getattr(one, "id", "") == name for one in node.targets):
                return ast.unparse(node)  # a lambda
    raise RecipeError(
        f"the source of '{name}' is not known, so worker processes cannot load it", hint="define it in a cell, by def"
    )


def _statements(cell: str) -> list[ast.stmt]:
    try:
        return ast.parse(cell).body
    except SyntaxError:  # a cell with magics, of IPython
        return []


def _globals_of(text: str) -> Iterator[str]:
    """Names that the definition reads from its module, those of decorators, defaults and annotations included."""

    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if (symbol.is_referenced() if top else symbol.is_global()) and not hasattr(builtins, symbol.get_name()):
                yield symbol.get_name()
        for inner in table.get_children():
            yield from walk(inner)

    yield from dict.fromkeys(walk(symtable.symtable(text, "cell", "exec")))
