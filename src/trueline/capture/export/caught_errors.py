"""Errors that the user's code catches in a trace and not in a call: `try: peak = float(x[0])`, `except Exception`.

A trace raises where a value decides, where a tensor has no memory, or where a library takes no symbolic size. Code that
catches this goes another way than the model does, and no guard tells of it. What a call catches, too, does not count.
To watch a trace takes longer than the trace, so only models with a function that may catch something are watched.
"""

import ast
import copy
import dis
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch

from trueline.capture.model.code_paths import SourceLine, is_installed, is_users, line_at, names_in, users_functions
from trueline.capture.model.syntax import nodes_of
from trueline.errors import CaptureError
from trueline.runtime.tensors import one_line

_THREADS = frozenset(("Thread", "ThreadPool", "ThreadPoolExecutor", "Timer", "submit", "to_thread"))
_Traced = TypeVar("_Traced")
_RETURNS = frozenset(dis.opmap[name] for name in ("RETURN_VALUE", "YIELD_VALUE", "RETURN_CONST") if name in dis.opmap)


@dataclass(slots=True)
class CaughtErrors:
    """The lines where the user's code caught an error, with the first error of each. What installed libraries catch
    does not count: those that are traced look for what is there to trace with."""

    found: dict[SourceLine, Exception] = field(default_factory=dict)

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The trace function of a call: follows the user's frames."""
        if not _is_own(frame.f_code):
            return None
        raised: list[tuple[SourceLine, Exception]] = []

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "exception" and isinstance(arg[1], Exception) and not isinstance(arg[1], StopIteration):
                raised.append((line_at(frame), arg[1]))  # a loop over a generator ends by such an error
            elif event == "return" and raised:
                # a call that ends by an error has caught those before it: that one is the caller's, if it gets it
                left = frame.f_code.co_code[frame.f_lasti] not in _RETURNS
                left = left and not (frame.f_code.co_name == "__del__" or _ends_thread(frame))
                for place, error in raised[:-1] if left else raised:
                    self.found.setdefault(place, error)
                raised.clear()
            return step

        frame.f_trace_lines = False
        return step

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Notes what this thread catches in the block, and what threads do that it starts."""
        before, in_threads = sys.gettrace(), threading.gettrace()
        sys.settrace(self.enter)
        threading.settrace(self.enter)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(in_threads)


def follow(module: torch.nn.Module, example: tuple[Any, ...], trace: Callable[[], _Traced]) -> _Traced:
    """What `trace` of `module` returns. Raises CaptureError, with the line, where the trace caught an error that a call
    with `example` does not."""
    if not any(map(_may_catch, _find_codes(module))):
        return trace()
    caught = CaughtErrors()
    with caught.watch():
        traced = trace()
    if caught.found:
        plain = CaughtErrors()
        with torch.no_grad(), plain.watch():
            module(*copy.deepcopy(example))
        for place in (one for one in caught.found if one not in plain.found):
            raise CaptureError(
                "the model catches an error there that a trace raises and a call does not, so that the trace goes "
                f"another way ({one_line(caught.found[place])})",
                hint=f"{place}",
            )
    return traced


def _ends_thread(frame: FrameType) -> bool:
    """Whether it is the user's first call of a thread: an error that leaves it is kept, or printed."""
    outer = frame.f_back
    while outer is not None and not _is_own(outer.f_code):
        if outer.f_code is threading.Thread.run.__code__:
            return True
        outer = outer.f_back
    return False


def _find_codes(module: torch.nn.Module) -> set[CodeType]:
    """The code of the users' functions that `module` reaches: its methods, those of objects that it keeps, and what
    these name, in other files too."""
    kept = [value for part in module.modules() for value in vars(part).values()]
    waiting: list[Any] = [*users_functions(module), *(value if callable(value) else type(value) for value in kept)]
    seen, codes = set[int](), set[CodeType]()
    while waiting:
        one = inspect.unwrap(waiting.pop())
        one = getattr(one, "__func__", one)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, type) and one.__module__.partition(".")[0] not in ("torch", "builtins"):
            waiting += [held for held in vars(one).values() if callable(held)]
        if not isinstance(one, FunctionType) or not _is_own(one.__code__):
            continue
        codes |= {one.__code__, *(held for held in one.__code__.co_consts if isinstance(held, CodeType))}
        names, given = names_in(one.__code__), [cell.cell_contents for cell in one.__closure__ or () if _has(cell)]
        named = [*given, *(one.__globals__.get(name) for name in names)]
        inner = [vars(held).get(name) for held in named if isinstance(held, ModuleType) for name in names]
        waiting += [held for held in (*named, *inner) if isinstance(held, FunctionType | type)]
    return codes


def _is_own(code: CodeType) -> bool:
    """Whether the user wrote it, and did not install it."""
    return is_users(code.co_filename) and not is_installed(code.co_filename)


def _has(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # it has no value yet
        return False


def _leaves(block: Sequence[ast.stmt]) -> bool:
    """Whether a `finally` ends by more than its last line: an error is dropped then."""
    return any(isinstance(node, ast.Return | ast.Break | ast.Continue) for one in block for node in ast.walk(one))


@functools.lru_cache(maxsize=20_000)
def _may_catch(code: CodeType) -> bool:
    """Whether it has an `except`, or a `with` of something else than torch's own, drops errors, or starts a thread."""
    if code.co_name == "__del__" or not _THREADS.isdisjoint(code.co_names):
        return True
    lines = {line for _, _, line in code.co_lines() if line}
    if not any(one.opname == "PUSH_EXC_INFO" for one in dis.get_instructions(code)):
        return False
    for node in nodes_of(code.co_filename):
        if getattr(node, "lineno", None) not in lines:
            continue
        if isinstance(node, ast.Try | ast.TryStar) and (node.handlers or _leaves(node.finalbody)):
            return True
        items = node.items if isinstance(node, ast.With) else []
        if not all(ast.unparse(item.context_expr).startswith("torch.") for item in items):
            return True
    return not nodes_of(code.co_filename)
