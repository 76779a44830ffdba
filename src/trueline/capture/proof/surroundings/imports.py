"""Does the answer depend on what is installed? A model that imports a package in its own lines, if it is there, runs
once where each package is found, and once where none is."""

import builtins
import dis
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

from trueline.capture.model import code_paths, explicit_state
from trueline.capture.model.python_state import Memento
from trueline.capture.proof.state.influence import Influence, Question
from trueline.capture.proof.state.tainted import quietly

WHAT = "what is installed"
_NAMES = frozenset({"import_module", "find_spec", "__import__", "find_loader"})
_ALWAYS = frozenset({"torch", "numpy", "trueline"})
"""Packages without which there is no model."""


@functools.lru_cache(maxsize=20_000)
def _imports(code: CodeType) -> bool:
    return bool(_NAMES & code_paths.names_in(code)) or any(
        one.opname == "IMPORT_NAME" and _is_optional(str(one.argval)) for one in dis.get_instructions(code)
    )


def _is_optional(name: str) -> bool:
    first = name.partition(".")[0]
    return first not in sys.stdlib_module_names and first not in _ALWAYS


def find_import_influence(question: Question) -> Influence | None:
    """Whether it answers differently where other packages are installed."""
    codes = [code for code in dict.fromkeys(code for _, code, _ in question.way) if _imports(code)]
    if not codes:
        return None
    memento = Memento(explicit_state.users_own(question.eager.module))
    for state in (_all_found, _none_found):
        with quietly(), state():
            why = question.differs(memento, exactly=False)
        if why:
            place = next((code_paths.find_line(question.way, word) for word in ("import", "find_spec")), None)
            return Influence(path=WHAT, how=f"it answers differently where that is another ({why})", place=place)
    return None


class _FindsAll(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for each name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if _is_optional(name) else None

    def create_module(self, spec: Any) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def _all_found() -> Iterator[None]:
    before, finder = set(sys.modules), _FindsAll()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in sys.modules.keys() - before:
            if getattr(sys.modules[name], "__loader__", None) is finder:
                del sys.modules[name]


@contextmanager
def _none_found() -> Iterator[None]:
    importing, importing_module, finding = builtins.__import__, importlib.import_module, importlib.util.find_spec

    def refuse(name: str, level: int = 0) -> None:
        if not level and _is_optional(name) and code_paths.is_users(sys._getframe(2).f_code.co_filename):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def import_name(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        refuse(name, level)
        return importing(name, globals, locals, fromlist, level)

    def import_module(name: str, package: str | None = None) -> Any:
        refuse(name, name.startswith("."))
        return importing_module(name, package)

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if _is_optional(name) else finding(name, package)

    builtins.__import__, importlib.import_module, importlib.util.find_spec = import_name, import_module, find_spec
    try:
        yield
    finally:
        builtins.__import__, importlib.import_module, importlib.util.find_spec = importing, importing_module, finding
