"""The functions of `compiled.py`, loaded in a thread: numba takes a second or two to import and to read its cache, in
which servers answer and workers train by NumPy.
"""

import importlib.util
import os
import threading
from concurrent.futures import Future
from typing import Any

_loaded: "dict[str, Future[Any]]" = {}


def find_compiled(what: str, *, wait: bool = False) -> Any:
    """The compiled function of that name, in `compiled.FUNCTIONS`. None: numba is not installed, or it is being loaded;
    `wait` until it is there."""
    future = _loaded.get(what)
    if future is None:
        future = _loaded[what] = Future()
        if importlib.util.find_spec("numba") is None:
            future.set_result(None)
        else:
            threading.Thread(target=_load, args=(what, future), name="numba").start()
    return future.result() if wait or future.done() else None


def _load(what: str, future: "Future[Any]") -> None:
    """In a thread that ends before its process does: a daemon that is ended within LLVM would end it by SIGABRT."""
    function = None
    try:
        from trueline.ps.tables.compiled import compile_function

        function = compile_function(what)
    finally:  # a numba that is broken is in the log, and NumPy does the work
        future.set_result(function)


def _forget_loading() -> None:
    """A fork has no thread that loads."""
    for what in [what for what, future in _loaded.items() if not future.done()]:
        del _loaded[what]


os.register_at_fork(after_in_child=_forget_loading)
