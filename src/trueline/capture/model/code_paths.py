"""Which way did the user's code go? Two calls that went different ways show a branch that a tracer would
freeze.

While a call runs, every instruction of the user's own Python code is noted (`sys.settrace` with opcode
events: it works on every Python that Trueline supports, and sees a one-line `a if c else b` that line
events would miss). Code of torch, of the standard library and of Trueline is not noted. Only this thread
is watched.
"""

from __future__ import annotations

import gc
import inspect
import linecache
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import TYPE_CHECKING, Any

from trueline.runtime.torch_export_archive import SOURCE_LINE

if TYPE_CHECKING:
    import torch

MAX_EVENTS = 200_000
"""What comes after is not watched: enough for a large model, and a bound on memory for an endless loop."""

ENDLESS_S = 5.0
"""Seconds of this thread after which so many events are taken for those of a loop that never ends."""
AGAIN_S = 0.5
"""The same of a function in which one did not end before."""
_without_end: set[CodeType] = set()


class Endless(RuntimeError):
    """What a watched call is ended with: it was asked what nobody had answered before, and its loop does not end."""

    def __init__(self) -> None:
        super().__init__(f"a loop of the model does not end within {ENDLESS_S:.0f} s and {MAX_EVENTS} steps")


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

Event = tuple[int, CodeType, int]
"""Number of the call within the watched call, its code, offset of the instruction that runs next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of the user's code."""

    file: str
    line: int

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.source}"


@contextmanager
def watching(*, ends: bool = False) -> Iterator[list[Event]]:
    """Notes the way that user code takes in this thread while the block runs. With `ends`, a loop that never ends is
    ended: it raises Endless."""
    events: list[Event] = []
    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # a collection may come at any step, and who hears of it (gc.callbacks) would stand on the way
    sys.settrace(_tracer(events, ends))
    try:
        yield events
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()


def _tracer(events: list[Event], ends: bool) -> Callable[[FrameType, str, Any], Any]:
    calls, started = 0, time.thread_time()

    def entered(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal calls
        if not is_users(frame.f_code.co_filename):
            return None
        calls += 1
        number = calls
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def stepped(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "opcode" and len(events) < MAX_EVENTS:
                events.append((number, frame.f_code, frame.f_lasti))
            elif ends and event == "opcode":
                code, spent = frame.f_code, time.thread_time() - started
                if spent > (AGAIN_S if code in _without_end else ENDLESS_S):
                    _without_end.add(code)
                    raise Endless
            return stepped

        return stepped

    return entered


def _roots() -> tuple[str, ...]:
    own = Path(__file__).resolve().parents[2]
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    return (str(own) + "/", *(library.rstrip("/") + "/" for library in libraries), "<")


_ROOTS = _roots()
_LIBRARIES = frozenset({"torch", "numpy", "onnxscript", "onnx_ir", "onnxruntime"})
_users: dict[str, bool] = {}


def is_users(file: str) -> bool:
    """Whether `file` is code that the user wrote or chose, as against torch, the standard library and
    Trueline.
    """
    found = _users.get(file)
    if found is None:
        _, in_site, inside = file.rpartition("/site-packages/")
        known = in_site and inside.partition("/")[0] in _LIBRARIES  # a package may have a part called torch
        found = _users[file] = not known and (bool(in_site) or not file.startswith(_ROOTS))
    return found


def users_functions(module: torch.nn.Module) -> Iterator[FunctionType]:
    """The users' functions that are methods of `module` and its parts, but those that make them."""
    holders = {id(holder): holder for part in module.modules() for holder in (part, *type(part).__mro__)}
    for holder in holders.values():
        for name, one in list(vars(holder).items()):
            function = inspect.unwrap(getattr(one, "__func__", one)) if callable(one) else None
            if not isinstance(function, FunctionType) or name == "__init__":
                continue
            if is_users(function.__code__.co_filename):
                yield function


def brief(trace: str) -> str:
    """`layers.py:13`, the innermost of the user's lines in a stack trace; empty where there is none. A bundle says so
    much of where a program came from, and no folder."""
    frames = [(file, line) for file, line in _FRAME.findall(trace) if is_users(file)]
    found = f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""
    return found if SOURCE_LINE.fullmatch(found) else ""


def divergence(one: Sequence[Event], other: Sequence[Event]) -> Place | None:
    """The line at which two ways part; None when they are the same."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return _before(one, i, {a[0], b[0]})
    if len(one) != len(other):
        shorter, longer = sorted((one, other), key=len)
        return _before(longer, len(shorter), {longer[len(shorter)][0]})
    return None


def _before(events: Sequence[Event], index: int, calls: set[int]) -> Place | None:
    """Line of the last instruction before `index` in one of `calls`:

    the jump. Else of any call: the one that led there.
    """
    earlier = events[:index]
    for wanted in (calls, None):
        for number, code, offset in reversed(earlier):
            if wanted is None or number in wanted:
                return _place(code, offset)
    return None


def _place(code: CodeType, offset: int) -> Place:
    line = next((line for start, end, line in code.co_lines() if start <= offset < end and line), None)
    return Place(file=code.co_filename, line=line or code.co_firstlineno)


def reading(way: Sequence[Event], word: str) -> Place | None:
    """The first line on the way with `word` in it."""
    lines = dict.fromkeys((code, offset) for _, code, offset in way)
    places = dict.fromkeys(_place(code, offset) for code, offset in lines)
    return next((place for place in places if word in place.source), None)


def forward_of(module: object) -> Place | None:
    """Where the user's class defines `forward`; None for a class of torch's."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)  # type: ignore[attr-defined]
    if code is None or not is_users(code.co_filename):
        return None
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    decorators = next((i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "async def "))), 0)
    return Place(file=code.co_filename, line=code.co_firstlineno + decorators)


def users_line(error: BaseException) -> Place | None:
    """The innermost line of the user's code that `error`, or what caused it, came through."""
    seen: BaseException | None = error
    while seen is not None:
        places = [place for place in _places(seen.__traceback__) if is_users(place.file)]
        if places:
            return places[-1]
        seen = seen.__cause__ or seen.__context__
    return None


def line_at_hand(*, within: str = "") -> Place | None:
    """The innermost line of the user's code that is being run by this thread; not of who called code in `within`."""
    frame: FrameType | None = sys._getframe(1)
    entered = frame
    while frame is not None:
        if within and frame is not entered and frame.f_code.co_filename.startswith(within):
            return None
        if is_users(frame.f_code.co_filename):
            return Place(file=frame.f_code.co_filename, line=frame.f_lineno)
        frame = frame.f_back
    return None


def _places(trace: TracebackType | None) -> Iterator[Place]:
    while trace is not None:
        yield Place(file=trace.tb_frame.f_code.co_filename, line=trace.tb_lineno)
        trace = trace.tb_next
