"""What the user's lines got from outside in one run: the results of calls of libraries, attributes of modules, names of
files. A run may be given others in their place.

Calls whose arguments are plain, or were made by such calls, are kept as steps that another process can replay.
"""

import functools
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.proof.surroundings import rewritten

Part = tuple[int, int, int, int]
"""Where in a file a value is made: first line and column, last line and column."""
Site = tuple[str, int, int, int, int]
Step = tuple[Any, ...]
MOST_STEPS, MOST_VALUES = 2_000, 100
"""Steps of a run, and values of one place, that are kept."""
LONGEST = 256
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_COLLECTIONS = (list, tuple, set, frozenset, dict)
_FUNCTIONS = (BuiltinFunctionType, MethodWrapperType, WrapperDescriptorType, MethodDescriptorType)
_LOOKS = frozenset({"stack", "currentframe", "trace", "_getframe", "warn", "extract_stack", "print_stack"})
"""Functions that look at the frames which call them."""
_OF_CODE = frozenset({*rewritten.OF_FILES, "__module__", "co_filename"})
_NOTHING = object()


class Raised:
    """What a library raised in place of a value."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text, or a small collection of these.

    >>> is_plain([1, ("a", None)]), is_plain(object())
    (True, False)
    """
    if type(value) in _PLAIN:
        return True
    if type(value) not in _COLLECTIONS or len(value) > LONGEST:
        return False
    return all(map(is_plain, value)) and (type(value) is not dict or all(map(is_plain, value.values())))


class ReadingLog:
    """`replace` gives what a line gets in place of what it would get: of the place, how often it was there, and the
    value."""

    def __init__(self, replace: Callable[[Site, int, Any], Any] | None = None) -> None:
        self.values: dict[Site, list[Any]] = {}
        self.lines: dict[Site, SourceLine] = {}
        self.words: dict[Site, str] = {}
        self.stated: dict[Site, bool] = {}
        """Places that read a state: functions without arguments, attributes that are computed."""
        self.steps: list[Step] = []
        self.step_of: dict[int, tuple[Site, int]] = {}
        """By the number of a step, the place and which of its values it gave."""
        self._replace = replace
        self._counts: dict[Site, int] = {}
        self._made: dict[int, tuple[Any, Step]] = {}
        self._looks = True

    def hooks(self) -> Mapping[str, Callable[..., Any]]:
        """A class whose `__getattribute__` is Python code runs it where a hook looks at it: that is not noted."""

        def once(hook: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: self._while(False, hook, *given) if self._looks else plain(*given)

        def keep(_: Part, value: Any) -> Any:
            return value

        return {
            rewritten.CALL: once(self._call, keep),
            rewritten.FIELD: once(self._field, lambda _, value, name: getattr(value, name)),
            rewritten.NAME: once(lambda at, value: self._of_code(at, value, "the name of a file"), keep),
            rewritten.OPERATION: once(self._operate, lambda _, *given: _compute(*given)),
            rewritten.VALUE: once(lambda at, value: self._read(at, value, "a text", None), keep),
        }

    def _while(self, looks: bool, compute: Callable[..., Any], *given: Any) -> Any:
        """What `compute` returns, whose code is noted or not."""
        self._looks, before = looks, self._looks
        try:
            return compute(*given)
        finally:
            self._looks = before

    def _call(self, at: Part, function: Any) -> Any:
        if not _is_of_library(function):
            return function
        named = _describe(function, self._made)

        def call(*args: Any, **options: Any) -> Any:
            value: Any
            asked: Any = function
            given = args
            while isinstance(asked, functools.partial) and not asked.keywords:
                asked, given = asked.func, (*asked.args, *given)
            try:
                value = function(*args, **options)
            except Exception as error:  # noqa: BLE001 - what a library raises may be the answer
                value = Raised(error)
            if isinstance(value, torch.Tensor) or len(self.steps) > MOST_STEPS:
                return value
            return self._while(False, note, value, asked, given, args, options)

        def note(value: Any, asked: Any, given: Any, args: Any, options: Any) -> Any:
            step = self._describe_call(named, args, options)
            stated = _is_free(asked) if not given and not options else _asks_system(asked, given, value)
            return self._read(at, value, _name_of(function), step, stated=stated)

        return call

    def _describe_call(self, named: Step | None, args: Any, options: Any) -> Step | None:
        if named is None:
            return None
        given = [_describe(one, self._made) for one in args]
        chosen = {name: _describe(one, self._made) for name, one in options.items()}
        return None if None in given or None in chosen.values() else ("call", named, given, chosen)

    def _field(self, at: Part, value: Any, name: str) -> Any:
        held = self._while(True, getattr, value, name)
        known = id(value) in self._made
        if not known and not isinstance(value, ModuleType):
            own = name in _OF_CODE and name not in ("__name__", "__spec__") and is_plain(held)
            if type(value).__module__.startswith("torch.backends"):
                return self._read(at, held, f"{type(value).__module__}.{name}", None, stated=True)
            own = own or (type(value).__module__ in sys.stdlib_module_names and is_place(held, sys._getframe(1)))
            return self._of_code(at, held, name) if own else held
        if isinstance(value, ModuleType) and code_paths.is_users(getattr(value, "__file__", None) or "<"):
            return self._of_code(at, held, name) if name in _OF_CODE and is_plain(held) else held
        if _describe(held, self._made) is not None and callable(held):
            return held
        if isinstance(held, ModuleType):
            return held
        holder = _describe(value, self._made)
        stated = isinstance(value, ModuleType) and name not in vars(value)
        return self._read(at, held, f"{getattr(value, '__name__', type(value).__name__)}.{name}",
                          None if holder is None else ("field", holder, name), stated=stated)  # fmt: skip

    def _operate(self, at: Part, name: str, left: Any, right: Any) -> Any:
        """A comparison or an element; noted where one of the two was read before."""
        both = (right, left) if name == "contains" else (left, right)
        value = self._while(True, _compute, name, left, right)
        if id(left) not in self._made and id(right) not in self._made:
            own = name == "getitem" and type(right) is str and right in rewritten.OF_FILES and isinstance(left, dict)
            return self._of_code(at, value, right) if own and "__builtins__" in left else value
        step = self._describe_call(("named", "operator", name), both, {})
        return self._read(at, value, f"operator.{name}", step)

    def _of_code(self, at: Part, value: Any, name: str) -> Any:
        """Of an installed package the names of files are the same everywhere, and their places are not."""
        installed = code_paths.is_installed(sys._getframe(2).f_code.co_filename)
        fixed = installed and not (isinstance(value, str) and "/" in value)
        return value if fixed else self._read(at, value, name, None, stated=True)

    def _read(self, at: Part, value: Any, what: str, step: Step | None, *, stated: bool = False) -> Any:
        plain = is_plain(value)
        if step is not None:
            self.steps.append(step)
            if not plain or type(value) in (list, dict, set):
                self._made[id(value)] = value, ("made", len(self.steps) - 1)
        raised = isinstance(value, Raised)
        if not plain and step is None and not (raised and stated):
            return _give(value)
        frame: Any = sys._getframe(2)
        while frame.f_code.co_filename.startswith(_HERE):
            frame = frame.f_back
        site = (frame.f_code.co_filename, *at)
        number = self._counts[site] = self._counts.get(site, -1) + 1
        if self._replace is not None:
            return _give(self._replace(site, number, value))
        if number < MOST_VALUES:
            self.values.setdefault(site, []).append(value if plain else type(value))
            self.lines.setdefault(site, SourceLine(file=site[0], line=site[1]))
            self.words.setdefault(site, what)
            self.stated[site] = (stated and (plain or raised)) or is_place(value, frame)
            if step is not None:
                self.step_of[len(self.steps) - 1] = site, number
        return _give(value)


_HERE = __file__
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


def _give(value: Any) -> Any:
    if isinstance(value, Raised):
        raise value.error
    return value


def is_place(value: Any, frame: FrameType) -> bool:
    """Whether a text names where the user's file lies, a path of this machine, or an address."""
    if type(value) is not str or not 6 < len(value) < 10_000:
        return False
    folder = frame.f_code.co_filename.rpartition("/")[0]
    found = (len(folder) > 1 and folder in value) or ADDRESS.search(value) is not None
    return found or (value.startswith("/") and os.path.lexists(value))


_SYSTEM = frozenset({"posix", "nt", "resource", "_signal", "sys"})
"""Modules of C whose functions ask the system or the interpreter."""


def _asks_system(function: Any, args: Sequence[Any], value: Any) -> bool:
    """Whether it asks the system, or a module of Python for what it has only in some processes."""
    if function in (getattr, hasattr) and len(args) > 1 and isinstance(args[0], ModuleType):
        return args[0].__name__ in sys.stdlib_module_names and args[1] not in vars(args[0])
    builtin = isinstance(function, BuiltinFunctionType) and function.__module__ in _SYSTEM
    return builtin and not any(one is value for one in args)  # `os.fspath`, `sys.intern`


def _compute(name: str, left: Any, right: Any) -> Any:
    """A comparison or an element, by its name in `operator`."""
    function: Callable[[Any, Any], Any] = getattr(operator, name)
    return function(right, left) if name == "contains" else function(left, right)


def _is_of_library(function: Any) -> bool:
    """Whether it is a function of a library or of Python that may look at something outside."""
    if isinstance(function, functools.partial):
        return _is_of_library(function.func)
    function = getattr(function, "__func__", function) if isinstance(function, MethodType) else function
    if isinstance(function, FunctionType):
        return not code_paths.is_users(function.__code__.co_filename) and function.__name__ not in _LOOKS
    if isinstance(function, _FUNCTIONS):
        return function.__name__ not in _LOOKS
    if isinstance(function, type):
        return not code_paths.is_users(getattr(sys.modules.get(function.__module__), "__file__", None) or "<")
    return type(function).__module__ in ("operator", "functools") and not hasattr(function, "__wrapped__")


def _is_free(function: Any) -> bool:
    """Whether it is a function of a module, and no method or class."""
    if isinstance(function, BuiltinFunctionType):
        owner = function.__self__
        bound = type(owner).__module__.startswith("pybind11") or type(owner).__name__ == "PyCapsule"
        return owner is None or isinstance(owner, ModuleType | type) or bound  # by pybind11, to the function itself
    if isinstance(function, MethodType):
        return isinstance(function.__self__, type)
    return isinstance(function, FunctionType)


def _name_of(function: Any) -> str:
    function = function.func if isinstance(function, functools.partial) else function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__name__)
    name = function.__name__ if name.startswith("pybind11") else name
    return name if module in (None, "builtins") else f"{module}.{name}"


def _describe(value: Any, made: Mapping[int, tuple[Any, Step]]) -> Step | None:
    """How another process gets it; None where it cannot."""
    if id(value) in made:
        return made[id(value)][1]
    if is_plain(value):
        return "plain", (value.copy() if isinstance(value, list | dict | set) else value)
    if isinstance(value, ModuleType):
        name = value.__name__
        return ("module", name) if name.partition(".")[0] in sys.stdlib_module_names else None
    if isinstance(value, functools.partial):
        parts = [_describe(one, made) for one in (value.func, value.args, value.keywords)]
        partial = ("named", "functools", "partial")
        if None in parts or value.keywords:
            return None
        return "call", partial, [parts[0], *[("plain", one) for one in value.args]], {}
    if isinstance(value, MethodType | MethodWrapperType) or (
        isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType | None)
    ):
        owner = _describe(value.__self__, made)
        return None if owner is None else ("field", owner, value.__name__)
    return _find_name(value) if isinstance(value, (type, FunctionType, *_FUNCTIONS)) else None


def _find_name(value: Any) -> Step | None:
    """Module and name of a function or class of the standard library."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module is None and hasattr(value, "__objclass__"):
        module = value.__objclass__.__module__
    if not isinstance(module, str) or module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, _NOTHING)
    return ("named", module, name) if found is value else None
