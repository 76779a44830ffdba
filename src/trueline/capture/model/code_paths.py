"""Which way did the user's code go? Two calls that went different ways show a branch that a tracer would freeze.

While a call runs, every instruction of the user's own Python code is recorded (`sys.settrace` with opcode events, on
every Python that Trueline supports, sees a one-line `a if c else b` that line events would miss). Code of torch, of the
standard library and of Trueline is not recorded. Only this thread is watched.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import itertools
import linecache
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from trueline.runtime.torch_export_archive import SOURCE_LINE

if TYPE_CHECKING:
    import torch

MAX_EVENTS = 200_000
"""Later events are not recorded: enough for a large model, and a bound on memory for an endless loop."""
ENDLESS_S = 5.0
"""Seconds of this thread after which that many events count as a loop that never ends."""
REPEAT_ENDLESS_S = 0.5
"""The same for a function whose loop did not end before."""
KEPT = 1024
"""Events that are kept of a call that was ended."""
_endless_codes: set[CodeType] = set()


class Endless(RuntimeError):
    """Ends a watched call whose loop does not end."""

    def __init__(self) -> None:
        super().__init__(f"a loop of the model does not end within {ENDLESS_S:.0f} s and {MAX_EVENTS} steps")


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

Event = tuple[int, CodeType, int]
"""Number of the call within the watched call, its code, offset of the instruction that runs next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of the user's code."""

    file: str
    line: int

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.source}"


@contextmanager
def watch(*, ends: bool = False) -> Iterator[list[Event]]:
    """Records the way of user code in this thread during the block. With `ends`, an endless loop raises Endless."""
    events: list[Event] = []
    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # a collection may start at any step, and its gc.callbacks would be recorded
    sys.settrace(_Recorder(events, ends))
    try:
        yield events
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()


class _Recorder:
    """Appends the way of the user's code to `events`; with `ends`, raises Endless."""

    def __init__(self, events: list[Event], ends: bool) -> None:
        self._events, self._ends, self._calls, self._started = events, ends, 0, time.thread_time()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not is_users(frame.f_code.co_filename):
            return None
        self._calls += 1
        number, events = self._calls, self._events
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "opcode":
                events.append((number, frame.f_code, frame.f_lasti))
                if not len(events) % 1024 and (len(events) > MAX_EVENTS or frame.f_code in _endless_codes):
                    self.inside(frame, event, arg)
            return step

        return step

    def inside(self, frame: FrameType, event: str, arg: Any) -> None:
        """Watches the time alone: of a long way, of a loop that did not end before, in a structured operator's
        steps."""
        code, spent = frame.f_code, time.thread_time() - self._started
        del self._events[MAX_EVENTS:]
        most = REPEAT_ENDLESS_S if code in _endless_codes else ENDLESS_S
        if self._ends and spent > most and is_users(code.co_filename):
            _endless_codes.add(code)
            del self._events[KEPT:]
            raise Endless


Edge = tuple[CodeType, int, int]
"""A code of the user, the offset of one of its instructions (-1: the entry), and of the one that ran next."""


class TooSlow(BaseException):
    """Ends a call that has no time left. No `except Exception` of the user's code holds it."""


@contextmanager
def watch_edges(seconds: float) -> Iterator[set[Edge]]:
    """Records which steps user code takes in this thread during the block, each once. Raises TooSlow after `seconds` of
    this thread, where Python code still runs."""
    edges: set[Edge] = set()
    before = sys.gettrace()
    sys.settrace(_EdgeRecorder(edges, time.thread_time() + seconds))
    try:
        yield edges
    finally:
        sys.settrace(before)


class _EdgeRecorder:
    def __init__(self, edges: set[Edge], ends: float) -> None:
        self._edges, self._ends = edges, ends

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.inside(frame, event, arg)
        if not is_users(frame.f_code.co_filename):
            return None
        code, last, steps = frame.f_code, -1, 0
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last, steps
            if event == "opcode":
                self._edges.add((code, last, frame.f_lasti))
                last, steps = frame.f_lasti, steps + 1
                if not steps % 1024:
                    self.inside(frame, event, arg)
            return step

        return step

    def inside(self, frame: FrameType, event: str, arg: Any) -> None:
        """Watches the time alone."""
        if time.thread_time() > self._ends:
            raise TooSlow


def edges_of(way: Sequence[Event]) -> set[Edge]:
    """The steps of a recorded way, each once."""
    last: dict[int, int] = {}
    edges: set[Edge] = set()
    for call, code, offset in way:
        edges.add((code, last.get(call, -1), offset))
        last[call] = offset
    return edges


_ROOTS = (
    f"{Path(__file__).resolve().parents[2]}/",
    *(sysconfig.get_path(name).rstrip("/") + "/" for name in ("stdlib", "platstdlib")),
    "<",
)
"""Code below these is Trueline's, the standard library's, or made without a file."""
_LIBRARIES = frozenset({"torch", "numpy", "onnxscript", "onnx_ir", "onnxruntime"})


@functools.cache
def is_users(file: str) -> bool:
    """Whether `file` is code that the user wrote or chose, not torch, the standard library or Trueline."""
    if file.endswith(".pyx"):  # that of a compiled library, as its errors name it
        return False
    _, in_site, inside = file.rpartition("/site-packages/")
    if in_site:
        return inside.partition("/")[0] not in _LIBRARIES  # a package may have a part called torch
    return not file.startswith(_ROOTS)


@functools.cache
def is_of_python(file: str) -> bool:
    """Whether `file` belongs to the standard library."""
    return "/site-packages/" not in file and file.startswith(_ROOTS[1:])


def users_functions(module: torch.nn.Module) -> Iterator[FunctionType]:
    """The users' functions that are methods of `module` and its parts, without `__init__`."""
    holders = {id(holder): holder for part in module.modules() for holder in (part, *type(part).__mro__)}
    for holder in holders.values():
        for name, one in list(vars(holder).items()):
            function = inspect.unwrap(getattr(one, "__func__", one)) if callable(one) else None
            if not isinstance(function, FunctionType) or name == "__init__":
                continue
            if is_users(function.__code__.co_filename):
                yield function


def is_installed(file: str) -> bool:
    """Whether `file` belongs to an installed package."""
    return "/site-packages/" in file


@functools.lru_cache(maxsize=20_000)
def names_in(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in `code` and in the functions that it makes, and texts that could be one."""
    inner = [names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    texts = [one for one in code.co_consts if isinstance(one, str) and one.isidentifier()]
    return frozenset((*code.co_names, *texts)).union(*inner)


@functools.lru_cache(maxsize=20_000)
def texts_in(code: CodeType) -> tuple[str, ...]:
    """The texts that `code` holds, in collections and in functions that it makes too."""
    found: list[str] = []
    waiting: list[object] = list(code.co_consts)
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, tuple | frozenset):
            waiting += one
        elif isinstance(one, CodeType):
            found += texts_in(one)
    return tuple(found)


@functools.lru_cache(maxsize=20_000)
def stored_in(code: CodeType) -> frozenset[str]:
    """The attributes that `code` stores into, of whatever object."""
    return frozenset(str(one.argval) for one in dis.get_instructions(code) if one.opname == "STORE_ATTR")


def brief(trace: str) -> str:
    """`layers.py:13`, the innermost of the user's lines in a stack trace; empty where there is none. A bundle keeps
    this of where a program came from, and no folder."""
    frames = [(file, line) for file, line in _FRAME.findall(trace) if is_users(file)]
    place = f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""
    return place if SOURCE_LINE.fullmatch(place) else ""


def divergence(one: Sequence[Event], other: Sequence[Event]) -> SourceLine | None:
    """The line at which two ways part; None when they are the same."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return _line_before(one, i, {a[0], b[0]})
    if len(one) != len(other):
        shorter, longer = sorted((one, other), key=len)
        return _line_before(longer, len(shorter), {longer[len(shorter)][0]})
    return None


def _line_before(events: Sequence[Event], index: int, calls: set[int]) -> SourceLine | None:
    """Line of the last instruction before `index` in one of `calls`, which is the jump; else of any call."""
    earlier = events[:index][::-1]
    events_of_calls = [event for event in earlier if event[0] in calls]
    return next((_place(code, offset) for _, code, offset in (*events_of_calls[:1], *earlier[:1])), None)


def _place(code: CodeType, offset: int) -> SourceLine:
    line = next((line for start, end, line in code.co_lines() if start <= offset < end and line), None)
    return SourceLine(file=code.co_filename, line=line or code.co_firstlineno)


def instructions(code: CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    """The instructions of `code`, each with its line."""
    lines, line = {start: number for start, _, number in code.co_lines() if number}, code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = lines.get(instruction.offset, line)
        yield instruction, line


def find_line(way: Sequence[Event], word: str) -> SourceLine | None:
    """The first line on the way with `word` in it."""
    lines = dict.fromkeys((code, offset) for _, code, offset in way)
    places = dict.fromkeys(_place(code, offset) for code, offset in lines)
    return next((place for place in places if word in place.source), None)


def forward_of(module: object) -> SourceLine | None:
    """Where the user's class defines `forward`; None for a class of torch."""
    forward: Any = getattr(type(module), "forward", None)  # that of a script is no attribute of its class
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None or not is_users(code.co_filename):
        return None
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    decorators = next((i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "async def "))), 0)
    return SourceLine(file=code.co_filename, line=code.co_firstlineno + decorators)


def users_line(error: BaseException) -> SourceLine | None:
    """The innermost line of the user's code in the traceback of `error`, or of its cause."""
    seen: BaseException | None = error
    while seen is not None:
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(seen.__traceback__)]
        places = [SourceLine(file=file, line=line) for file, line in frames if is_users(file)]
        if places:
            return places[-1]
        seen = seen.__cause__ or seen.__context__
    return None


def line_at(frame: FrameType) -> SourceLine:
    """The line that `frame` runs, or the first of its function where Python is between two lines (`f_lineno` is
    None)."""
    return SourceLine(file=frame.f_code.co_filename, line=frame.f_lineno or frame.f_code.co_firstlineno)


def current_line(*, within: str = "") -> SourceLine | None:
    """The innermost line of the user's code that this thread runs; None where code in `within` called this."""
    frame: FrameType | None = sys._getframe(1)
    caller = frame
    while frame is not None:
        if within and frame is not caller and frame.f_code.co_filename.startswith(within):
            return None
        if is_users(frame.f_code.co_filename):
            return line_at(frame)
        frame = frame.f_back
    return None


def writing_line(module: torch.nn.Module, names: Sequence[str]) -> SourceLine | None:
    """The first line of the user's class, outside of `__init__`, that writes a parameter or buffer of `names`; that of
    a part first, then those of the parts that it is in."""
    for name in names:
        owner, _, last = name.rpartition(".")
        writing = re.compile(rf"\.{re.escape(last)}\b(\.data)?(\.\w+_\(|\[.*\]\s*=|\s*[-+*/]?=(?!=))")
        paths = itertools.accumulate(owner.split("."), "{}.{}".format)
        for kind in (kind for path in (*[*paths][::-1], "") for kind in type(module.get_submodule(path)).__mro__):
            for method in vars(kind).values():
                code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
                if code is None or not is_users(code.co_filename) or code.co_name == "__init__":
                    continue
                for number in range(code.co_firstlineno, max(line or 0 for *_, line in code.co_lines()) + 1):
                    place = SourceLine(file=code.co_filename, line=number)
                    if writing.search(place.source):
                        return place
    return None
