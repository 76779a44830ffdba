"""torch's compiler frontend, `torch._dynamo`, imported only where something compiles.

Eager training uses four of its functions, which do nothing unless a compiler runs: torch calls them when the first
optimizer is made, in each optimizer step, when a process group begins and when DistributedDataParallel is made. For
these it imports the whole of `torch._dynamo`: a second of processor time and 80 MB, on the way of every job's start.
A stand-in has the four. Any other use of it imports the real one, which takes its place everywhere.

torch's side: `torch/_compile.py`, `torch/optim/optimizer.py`, `torch/nn/parallel/distributed.py`,
`torch/distributed/distributed_c10d.py`.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from trueline.engine.local.client import import_for_later_processes

NAME = "torch._dynamo"


class DeferredDynamo(ModuleType):
    """In `sys.modules` in the place of `torch._dynamo`, until the real one is imported."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__spec__ = importlib.util.find_spec(NAME)
        self.__file__ = self.__spec__.origin if self.__spec__ is not None else None  # `inspect` asks every module
        self.__dict__["_disabled"] = list[tuple[Callable[..., Any], bool]]()
        self.__dict__["_lock"] = threading.RLock()
        self.__dict__["_real"] = None
        self.__dict__["utils"] = _Part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
        self.__dict__["trace_rules"] = _Part("trace_rules", clear_lru_cache=lambda: None)

    def graph_break(self, msg: str = "") -> None:
        """Means something to a compiler."""
        if self._real is not None:
            self._real.graph_break(msg)

    def disable(self, *args: Any, **options: Any) -> Any:
        """As torch itself asks for it, of a function that is called at once: that function, until there is a compiler
        that would have to leave it alone."""
        if self._real is not None or len(args) != 2 or options != {"wrapping": False}:
            return self.load().disable(*args, **options)
        self._disabled.append(args)
        return args[0]

    def load(self) -> Any:
        """The real one."""
        with self._lock:
            if self._real is None:
                if sys.modules.get(NAME) is self:
                    del sys.modules[NAME]
                vars(torch).pop("_dynamo", None)  # torch's own `__getattr__` finds it while it is imported
                real = importlib.import_module(NAME)
                for function, recursive in self._disabled:  # the name is that of `torch/_compile.py`
                    setattr(function, "__dynamo_disable", real.disable(function, recursive, wrapping=False))
                self.__dict__.update(_real=real, utils=real.utils, trace_rules=real.trace_rules)
                import_for_later_processes(NAME)
            return self._real

    def __getattr__(self, name: str) -> Any:
        if name != "__path__" and name.startswith("__"):
            raise AttributeError(name)  # what looks at all modules
        return getattr(self.load(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(self.load(), name, value)


class _Part(SimpleNamespace):
    """A module of it."""

    def __init__(self, name: str, **functions: Callable[[], Any]) -> None:
        super().__init__(**functions)
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(f"{NAME}.{self._name}"), name)


class _PartFinder(MetaPathFinder):
    """Finds a module of the real one whose import has just imported them all: importlib would run it once more."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        known = sys.modules.get(fullname) if fullname.startswith(f"{NAME}.") and target is None else None
        return None if known is None else ModuleSpec(fullname, _KnownPart(known))


class _KnownPart(Loader):
    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not self._spec:
            module.__spec__ = self._spec


def defer() -> None:
    """Puts the stand-in in place in this process, unless `torch._dynamo` has been imported."""
    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = DeferredDynamo()
        sys.meta_path.insert(0, _PartFinder())


def is_loaded() -> bool:
    """Whether something may be compiled here."""
    return not isinstance(sys.modules.get(NAME), DeferredDynamo | None)
