"""Everything that a model can reach, place by place: what it and its parts keep in attributes of any kind, and what
their functions use: closures, defaults, globals, classes.

Walked are containers, objects of the user's own classes, functions and methods, iterators and weak references. torch,
numpy and the standard library are walked where they hold the user's values (a deque, a hook, a partial), not inside.
"""

import contextvars
import decimal
import functools
import gc
import itertools
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, Literal

import numpy as np
import torch

from trueline.capture.model import code_paths
from trueline.capture.model.streams import is_iterator

MISSING = object()
AT_MOST = 200_000
"""Places that are looked at."""
WIDTH = 1000
"""Elements of a collection that are looked at, from its beginning; of a sequence the last 16 too."""
_SKIPPED = frozenset(
    {"_io", "abc", "asyncio", "concurrent", "enum", "importlib", "io", "logging", "re", "socket", "typing", "unittest"}
)
"""Modules of the standard library whose objects keep nothing that an answer could depend on."""
_LIBRARIES = frozenset({"torch", "numpy", "trueline", "onnxruntime"})
DEFAULTS = "__defaults__"
Kind = Literal["dict", "index", "attribute", "cell", "context", "element", "partial", "inside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptValue:
    """A value and the place where it is kept."""

    path: str
    holder: Any
    """The dict, sequence, object, class or cell in which it is kept; of a tuple's element, the place of the tuple."""
    name: Any
    """The key, index or attribute."""
    value: Any
    kind: Kind

    @property
    def attribute(self) -> str:
        """The name in code: of `meters[0].total["rows"]`, `total`."""
        return self.path.partition("[")[0].removesuffix("()").removesuffix(".args").rpartition(".")[2]

    def assign(self, value: Any) -> bool:
        """Keeps `value` instead, and removes the name where that is `MISSING`; False where that is not possible."""
        try:
            if self.kind == "cell":
                self.holder.cell_contents = value
            elif self.kind == "context":
                self.holder.set(value)
            elif self.kind == "attribute" and value is MISSING:
                delattr(self.holder, self.name)
            elif self.kind == "attribute":
                setattr(self.holder, self.name, value)
            elif self.kind == "dict" and value is MISSING:
                self.holder.pop(self.name, None)
            elif self.kind in ("dict", "index"):
                self.holder[self.name] = value
            elif self.kind == "element":
                whole = self.holder.value
                changed = [value if index == self.name else one for index, one in enumerate(whole)]
                return bool(self.holder.assign(whole._make(changed) if hasattr(whole, "_make") else tuple(changed)))
            elif self.kind == "partial":
                self.holder.__setstate__((self.holder.func, value, self.holder.keywords, vars(self.holder)))
            else:
                return False
        except (AttributeError, TypeError, IndexError, KeyError, ValueError):
            return False
        return True


def attributes(module: torch.nn.Module) -> Iterator[KeptValue]:
    """Every place that is reached from `module`, each object once, what is near before what is far. Of an installed
    package only functions are followed whose names occur in code that is reached."""
    seen: set[int] = {id(vars(module))}
    waiting = deque(_attributes_of(module, ""))
    named, unnamed, caches = {"forward"}, dict[str, list[KeptValue]](), list[KeptValue]()
    kept_alive: list[Any] = []  # an id is unique as long as its object lives
    count = 0
    while waiting and count < AT_MOST:
        kept = waiting.popleft()
        value = kept.value
        if kept.name and isinstance(value, FunctionType) and kept.kind == "inside" and kept.name not in named:
            unnamed.setdefault(kept.name, []).append(kept)
            continue
        count += 1
        yield kept
        plain = isinstance(value, tuple) and all(isinstance(one, _LEAVES) for one in value)
        if isinstance(value, _LEAVES) or (id(value) in seen and not plain):
            continue  # torch.export copies a tuple that two parts share: no path may depend on that
        seen.add(id(value))
        kept_alive.append(value)
        waiting.extend(_children(kept))
        caches += [kept] if isinstance(value, functools._lru_cache_wrapper) else []
        if isinstance(value, FunctionType):
            for name in code_paths.names_in(value.__code__) - named:
                named.add(name)
                waiting.extend(unnamed.pop(name, ()))
    for kept in caches if "cache_info" in named else ():  # `f.cache_info().hits`, which no attribute shows
        held, asked = vars(kept.value), kept.value.cache_info
        yield KeptValue(path=f"{kept.path}.cache_info", holder=held, name="cache_info", value=asked, kind="dict")


_LEAVES = (int, float, complex, str, bytes, type(None), np.ndarray, np.generic, torch.dtype, torch.device, CodeType)


def _children(kept: KeptValue) -> Iterable[KeptValue]:
    path, value = kept.path, kept.value
    if isinstance(value, torch.nn.Module):
        return _attributes_of(value, path)
    if isinstance(value, dict):
        return itertools.chain(_items(path, value), _fields(path, value))
    if isinstance(value, list | tuple | deque):
        return itertools.chain(_elements(kept), _fields(path, value))
    if isinstance(value, FunctionType):
        return _of_function(path, value)
    if isinstance(value, type):
        return _of_class(path, value) if _is_users(value) else ()
    if isinstance(value, torch.Tensor):
        return _fields(path, value)
    if isinstance(value, BuiltinFunctionType | MethodWrapperType | ModuleType):
        return () if owner_of(value) is None else (_inside(f"{path}.__self__", owner_of(value)),)
    if _is_skipped(value):
        return (one for one in _fields(path, value) if type(one.value) in (int, float))  # LOG.calls += 1
    return _of_object(path, value)


def owner_of(method: Any) -> Any:
    """The object whose method a function of C is; None for one of a module or class."""
    owner = getattr(method, "__self__", None)
    return None if isinstance(owner, ModuleType | type) else owner


def _attributes_of(module: torch.nn.Module, path: str) -> Iterator[KeptValue]:
    """The attributes of a module; parameters, buffers and submodules by their own names, as they are in code."""
    own = vars(module)
    for name, value in list(own.items()):
        if name in ("_parameters", "_buffers", "_modules") and isinstance(value, dict):
            for part, held in list(value.items()):
                yield KeptValue(path=_join(path, part), holder=value, name=part, value=held, kind="dict")
        elif name not in _CONSTANT and (not name.startswith("_") or name not in _EMPTY or value):
            yield KeptValue(path=_join(path, name), holder=own, name=name, value=value, kind="dict")
    if isinstance(module, torch.jit.ScriptModule):
        yield from _of_script(path, module)
    yield _inside(f"{type(module).__qualname__}", type(module))


def _of_script(path: str, module: torch.jit.ScriptModule) -> Iterator[KeptValue]:
    """What a script keeps, which is no attribute of Python."""
    kind: Any = getattr(module, "_concrete_type", None)
    for name in kind.get_attributes() if kind is not None else ():
        value = getattr(module, name, MISSING)
        if isinstance(value, int | float | str | list | dict):
            yield KeptValue(path=_join(path, name), holder=module, name=name, value=value, kind="attribute")


_CONSTANT = frozenset({"training", "_non_persistent_buffers_set", "_is_full_backward_hook"})
_EMPTY = frozenset(vars(torch.nn.Module()))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _inside(path: str, value: Any) -> KeptValue:
    return KeptValue(path=path, holder=None, name="", value=value, kind="inside")


def _items(path: str, value: dict[Any, Any]) -> Iterator[KeptValue]:
    for key, one in itertools.islice(items_of(value), WIDTH):
        plain = isinstance(key, (*_LEAVES, tuple))
        shown = repr(key) if plain else f"a {type(key).__name__}"
        yield KeptValue(path=f"{path}[{shown}]", holder=value, name=key, value=one, kind="dict")
        if not plain:
            yield _inside(f"{path}.key", key)


def items_of(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """What a dict keeps. One of a class of its own may give something else: that of transformers' activations gives an
    instance for each class that it keeps. Keys are not hashed: while a model is traced, a free size may be one."""
    items = list(dict.items(value))
    kept = {id(key): one for key, one in items} if isinstance(value, OrderedDict) else {}
    with suppress(TypeError):  # a key without a hash has no place in the order
        return [(key, kept[id(key)]) for key in OrderedDict.__iter__(value)] if kept else items
    return items


def elements_of(value: Any) -> list[Any]:
    """What a sequence or set keeps, whatever a class of its own gives."""
    kind: Any = next(kind for kind in (list, tuple, deque, set, frozenset) if isinstance(value, kind))
    return list(kind.__iter__(value))


def _elements(kept: KeptValue) -> Iterator[KeptValue]:
    value, elements = kept.value, elements_of(kept.value)
    size = len(elements)
    kind: Kind = "element" if isinstance(value, tuple) else "index"
    holder = kept if isinstance(value, tuple) else value
    for index in range(size) if size <= WIDTH + 16 else itertools.chain(range(WIDTH), range(size - 16, size)):
        yield KeptValue(path=f"{kept.path}[{index}]", holder=holder, name=index, value=elements[index], kind=kind)


def _of_function(path: str, function: FunctionType) -> Iterator[KeptValue]:
    """Its closure, defaults and attributes, and, where it is the user's, the globals that it uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield KeptValue(path=f"{path}.{name}", holder=cell, name=name, value=cell.cell_contents, kind="cell")
        except ValueError:
            continue  # it has no value yet
    yield from _fields(path, function)
    yield from _defaults_of(function)
    for name, value in (function.__kwdefaults__ or {}).items():
        held = function.__kwdefaults__
        yield KeptValue(path=f"{function.__qualname__}.{name}", holder=held, name=name, value=value, kind="dict")
    if code_paths.is_users(function.__code__.co_filename):
        yield from _globals_of(function)


def _defaults_of(function: FunctionType) -> Iterator[KeptValue]:
    """Those of positional arguments, each an element of the function's tuple of them."""
    whole, name = function.__defaults__ or (), function.__qualname__
    place = KeptValue(path=f"{name}.{DEFAULTS}", holder=function, name=DEFAULTS, value=whole, kind="attribute")
    named = function.__code__.co_varnames[function.__code__.co_argcount - len(whole) :]
    for index, (argument, value) in enumerate(zip(named, whole, strict=False)):
        yield KeptValue(path=f"{name}.{argument}", holder=place, name=index, value=value, kind="element")


def _globals_of(function: FunctionType) -> Iterator[KeptValue]:
    known, names = function.__globals__, code_paths.names_in(function.__code__)
    file = known.get("__name__", "")
    yield from _of_context(names)
    if "globals" in names:  # `globals()[f"calls_of_{name}"]`
        names |= {name for name in known if not name.startswith("__")}
    for name in names:
        value = known.get(name, MISSING)
        if name.startswith("@"):  # which no user can write: of an assert, from where all of pytest is reached
            continue
        if isinstance(value, ModuleType):
            yield from _of_module(value, names, function.__code__)
        elif value is not MISSING:
            yield KeptValue(path=f"{file}.{name}", holder=known, name=name, value=value, kind="dict")
            yield from _find_attached(name, value, code_paths.stored_in(function.__code__))


def _of_module(
    module: ModuleType, names: frozenset[str], code: CodeType, above: frozenset[str] = frozenset()
) -> Iterator[KeptValue]:
    """The attributes that `code` uses; of a library's those that may hold what the user's code put there: a count, a
    table of its own. One that is stored later is missing."""
    inside = vars(module)
    if code_paths.is_users(getattr(module, "__file__", None) or "<"):
        for name in names & inside.keys():
            path = f"{module.__name__}.{name}"
            yield KeptValue(path=path, holder=inside, name=name, value=inside[name], kind="dict")
        return
    stored = code_paths.stored_in(code)
    for name in (names & inside.keys()) | stored:
        value = inside.get(name, MISSING)
        if stored and isinstance(value, ModuleType) and value.__name__ not in above:
            yield from _of_module(value, names, code, above | {module.__name__, value.__name__})
        yield from _find_attached(f"{module.__name__}.{name}", value, stored)
        table = isinstance(value, dict | list | set | deque) and value is not sys.modules and len(value) <= WIDTH
        if table or value is MISSING or isinstance(value, _PLAIN):
            path = f"{module.__name__}.{name}"
            yield KeptValue(path=path, holder=module, name=name, value=value, kind="attribute")


def _find_attached(path: str, value: Any, stored: frozenset[str]) -> Iterator[KeptValue]:
    """What code stores on a class or a function of a library (`nn.Linear.calls += 1`), by the names `stored`."""
    function = isinstance(value, FunctionType) and not code_paths.is_users(value.__code__.co_filename)
    for name in stored if function or (isinstance(value, type) and not _is_users(value)) else ():
        held = vars(value).get(name, MISSING)
        if held is MISSING or isinstance(held, (*_PLAIN, dict, list, set, deque)):
            yield KeptValue(path=f"{path}.{name}", holder=value, name=name, value=held, kind="attribute")


_PLAIN = (int, float, str, torch.Tensor)


def _of_context(names: frozenset[str]) -> Iterator[KeptValue]:
    """What code that calls `decimal.getcontext` can keep there."""
    if "getcontext" in names:
        context = decimal.getcontext()
        for name in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp"):
            path, held = f"decimal.getcontext().{name}", getattr(context, name)
            yield KeptValue(path=path, holder=context, name=name, value=held, kind="attribute")


def _of_class(path: str, kind: type) -> Iterator[KeptValue]:
    """What the user's class and those above it keep, its functions among it."""
    for one in kind.__mro__:
        if not _is_users(one):
            continue
        for name, value in list(vars(one).items()):
            if isinstance(value, MemberDescriptorType) or (name.startswith("__") and not callable(value)):
                continue
            own = f"{one.__qualname__}.{name}"
            if name in ("__init__", "__new__"):
                continue
            if isinstance(value, FunctionType):
                yield _method(own, name, value)
            elif isinstance(value, property | staticmethod | classmethod | functools.cached_property):
                for part in ("fget", "fset", "func", "__func__"):
                    yield _method(own, name, getattr(value, part, None))
            else:
                yield KeptValue(path=own, holder=one, name=name, value=value, kind="attribute")
        if isinstance(type(one), type) and _is_users(type(one)):
            yield _inside(type(one).__qualname__, type(one))


def _method(path: str, name: str, value: Any) -> KeptValue:
    """A function of a class; of an installed one with its name, by which it is followed."""
    code = getattr(value, "__code__", None)
    follows = code is None or name.startswith("__") or not code_paths.is_installed(code.co_filename)
    return KeptValue(path=path, holder=None, name="" if follows else name, value=value, kind="inside")


def _of_object(path: str, value: Any) -> Iterator[KeptValue]:
    if isinstance(value, MethodType):
        yield _inside(path, value.__func__)
        yield _inside(f"{path}.__self__", value.__self__)
    elif isinstance(value, functools.partial):
        yield _inside(path, value.func)
        yield KeptValue(path=f"{path}.args", holder=value, name="args", value=value.args, kind="partial")
        yield _inside(f"{path}.keywords", value.keywords)
    elif isinstance(value, weakref.ref):
        yield _inside(f"{path}()", value())
    elif isinstance(value, contextvars.ContextVar):
        yield KeptValue(path=f"{path}()", holder=value, name="", value=value.get(None), kind="context")
    elif isinstance(value, GeneratorType):
        for name, held in (value.gi_frame.f_locals if value.gi_frame else {}).items():
            yield _inside(f"{path}.{name}", held)
    elif is_iterator(value):
        for at, held in enumerate(gc.get_referents(value)):
            if not isinstance(held, type):
                yield _inside(f"{path}.{at}", held)
    elif not isinstance(value, CellType):
        if isinstance(value, functools._lru_cache_wrapper):
            yield _inside(f"{path}.__wrapped__", value.__wrapped__)
        yield from _fields(path, value)
        if _is_users(type(value)):  # type: ignore[arg-type]
            yield _inside(type(value).__qualname__, type(value))


def _fields(path: str, value: Any) -> Iterator[KeptValue]:
    """Its attributes, in a `__dict__` and in slots."""
    if isinstance(held := getattr(value, "__dict__", None), dict):
        for name, one in list(held.items()):
            if name != "__wrapped__" or not isinstance(value, functools._lru_cache_wrapper):
                yield KeptValue(path=_join(path, str(name)), holder=held, name=name, value=one, kind="dict")
    for kind in type(value).__mro__:
        if kind.__module__ == "builtins" or "__slots__" not in vars(kind):
            continue
        for name, member in vars(kind).items():
            one = getattr(value, name, MISSING) if isinstance(member, MemberDescriptorType) else MISSING
            if one is not MISSING:
                yield KeptValue(path=f"{path}.{name}", holder=value, name=name, value=one, kind="attribute")


@functools.cache
def _is_users(kind: Any) -> bool:
    """Whether a class is the user's, or a library's that is no part of torch, numpy or Python."""
    module = kind.__module__.partition(".")[0]
    if module in _LIBRARIES or module == "builtins":
        return False
    held = [getattr(one, "__func__", one) for one in vars(kind).values()]  # of a static method its function
    functions = [one for one in held if isinstance(one, FunctionType)]
    codes = [function.__code__.co_filename for function in functions if function.__code__.co_filename[:1] != "<"]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return any(map(code_paths.is_users, codes if file is None else (*codes, file)))


def _is_skipped(value: Any) -> bool:
    module = type(value).__module__.partition(".")[0]
    return module in _SKIPPED or (module in _LIBRARIES and not isinstance(value, torch.nn.Module))
