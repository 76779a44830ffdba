"""Packages that are callable: `trueline.train(...)` runs, and `trueline.train.api` is still a module of the package.

A package's `__init__` calls `make_callable(__name__)`; calling the package then calls the function of the same name in
its `api` module, imported at the call. Reasons: docs/decisions/0005-callable-packages.md.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

from trueline.extras import naming_extras


class _Verb(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        verb = self.__name__.rpartition(".")[2]
        with naming_extras():
            function = vars(self).get(verb) or getattr(importlib.import_module(f"{self.__name__}.api"), verb)
            return function(*args, **kwargs)


def make_callable(name: str) -> None:
    """Makes the module `name` callable, as the function of its own name in it or in `name.api`."""
    sys.modules[name].__class__ = _Verb
