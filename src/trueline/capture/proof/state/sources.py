"""What a model takes from outside: clocks, the environment, files, machine and process, shared generators of numbers.

Where the user's own line reads one of them, the model runs with other values: clocks are moved, variables of the
environment and what differs between processes changed, and each decision on a number that was read is taken the other
way. A time that is measured and logged does no harm. A file that is read or asked for on each call is refused: it can
change.
"""

import datetime
import gc
import os
import random
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from trueline.capture.model import code_paths, explicit_state
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.model.python_state import Memento
from trueline.capture.model.reach import KeptValue, attributes
from trueline.capture.proof.state import callers, elsewhere, picks
from trueline.capture.proof.state.datetimes import make_datetimes
from trueline.capture.proof.state.environment import find_variable, watch_environment
from trueline.capture.proof.state.files import PASSING, is_direct, is_for_user, watch_files
from trueline.capture.proof.state.influence import DECISIONS, Influence, Question
from trueline.capture.proof.state.literal_sets import Makers, find_set_makers, giving_sets
from trueline.capture.proof.state.tainted import Decisions, NotingInt, TaintedDraws, mark, marking, quietly
from trueline.capture.proof.state.tainted_text import mark_any

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
CLOCKS = tuple((time, f"{name}{unit}") for name in _CLOCKS for unit in ("", "_ns"))
TEXTS = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}
"""Functions of `time` that read the clock when an argument is left out, and how many come before it."""
_TIMES = {*(name for _, name in CLOCKS), *TEXTS, "datetime", "date"}
_COUNTS = ("active_count", "get_ident", "get_native_id")
OTHERS: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("getpid", "getppid", "getloadavg", "cpu_count")),
    *((threading, name) for name in _COUNTS),
    *((torch, name) for name in ("get_num_threads", "get_num_interop_threads", "initial_seed", "seed")),
    *((sys, name) for name in ("getrecursionlimit", "getrefcount", "getallocatedblocks")),
    *((gc, name) for name in ("get_count", "get_stats")),
    (weakref, "getweakrefcount"),
    *((torch, name) for name in ("are_deterministic_algorithms_enabled", "is_inference_mode_enabled")),
    (uuid, "getnode"),
    (torch.Tensor, "data_ptr"),
)
_ELSEWHERE = {*(name for _, name in (*OTHERS, *elsewhere.TEXTS)), "_version", "hash", "id", elsewhere.ORDER}
_ELSEWHERE |= callers.NAMES
THREADS = ((threading, "current_thread"), (threading, "currentThread"))
FILE_QUESTIONS = ("stat", "lstat", "access", "listdir", "scandir", "statvfs", "readlink")
"""Functions of `os` that ask for a path, those of `os.path` and `pathlib` among their callers."""
BYTES = tuple(
    (holder, name)
    for holder, name in ((os, "urandom"), (os, "getrandom"), (random, "_urandom"))
    if hasattr(holder, name)
)
DRAWN = frozenset(name for _, name in (*picks.DRAWS, *picks.FRESH)) | {"urandom"}
FILLS = (0, 255)
"""Of what bytes that are drawn are made, which chance makes of them once in a long time."""
FILLED = 8
"""Draws of bytes that are made of these: `secrets.randbelow` draws again until a number is small enough."""
SHIFTS_S = (0.37, 61.0, 3600.0, 5 * 3600.0, 13 * 3600.0, 86_400.0, 3 * 86_400.0, 40 * 86_400.0, 3.2e8, 3e9, 2e11)
"""Seconds by which clocks are moved."""


class Readings:
    """What one run read: the name of each source, and the first of the user's lines that read it."""

    def __init__(
        self,
        decisions: Decisions | None = None,
        shift_s: float = 0.0,
        *,
        held: bool = False,
        other_thread: bool = False,
        step: int = 0,
        fill: int | None = None,
        plain: bool = False,
    ) -> None:
        self.decisions = decisions or Decisions()
        self.shift_s = shift_s
        self.step = step
        """0, or by how much what differs between processes and machines is moved."""
        self.fill, self._filled = fill, 0
        self.pick: int | None = None
        """Which of the elements of a collection is drawn."""
        self.plain = plain
        """Whether stands are of the types of what they stand for, and note no decisions."""
        self.builtins = elsewhere.make_builtins(self.note, step, self.mark_text)
        self.other_thread = other_thread
        self._held: dict[str, Any] | None = {} if held else None
        self.asks_callers = False
        self.makers: Makers = ()
        self.changes = ""
        """How the answer is another in this run."""
        self.lines: dict[str, SourceLine | None] = {}
        self.variables: dict[str, SourceLine | None] = {}
        self.files: dict[str, SourceLine | None] = {}
        self.asked: dict[str, SourceLine | None] = {}
        """Paths that the user's code looks up."""

    def note_file(self, name: str) -> None:
        self.files.setdefault(name, code_paths.current_line())

    def note_variable(self, name: str) -> None:
        self.variables.setdefault(name, code_paths.current_line())

    def note(self, name: str) -> None:
        self.lines.setdefault(name, code_paths.current_line())

    def text(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def read(*args: Any) -> Any:
            value = function(*args)
            if not is_direct(sys._getframe(1)):
                return value
            self.note(name)
            return self.mark_text(elsewhere.move_text(value, self.step))

        return read

    def mark_text(self, value: Any) -> Any:
        return value if self.plain or self.step else mark_any(value, self.decisions)

    def hold(self, name: str, value: Any) -> Any:
        """`value`, or where sources are held still, the first one of that name."""
        return value if self._held is None else self._held.setdefault(name, value)

    def clock(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def read(*args: Any) -> Any:
            value = function(*args)
            if not is_direct(sys._getframe(1)):
                return value
            self.note(name)
            value = self.hold(name, value)
            moved = value + int(self.shift_s * 1e9) if name.endswith("_ns") else value + self.shift_s
            return moved if self.plain else mark(moved, self.decisions, (0.0, float("inf")))

        return read

    def clock_text(self, function: Callable[..., Any], name: str, before: int) -> Callable[..., Any]:
        real, local = time.time, time.localtime

        def read(*args: Any) -> Any:
            if len(args) > before or not is_direct(sys._getframe(1)):
                return function(*args)
            self.note(name)
            moment = self.hold("time", real()) + self.shift_s
            return self.mark_text(function(*args, local(moment) if name in ("asctime", "strftime") else moment))

        return read

    def thread(self, function: Callable[[], threading.Thread], name: str) -> Callable[[], threading.Thread]:
        """The main thread, or to that one another one."""

        def read() -> threading.Thread:
            value = function()
            if not is_direct(sys._getframe(1)):
                return value
            self.note(name)
            if not self.other_thread:
                return value if self.plain else callers.ThreadView(value, self.mark_text)  # type: ignore[return-value]
            main = threading.main_thread()
            return threading.Thread(name="Thread-1") if value is main else main

        return read

    def fresh(self, name: str) -> Callable[[Any], Any]:
        def give(generator: Any) -> Any:
            """A generator without a seed, or what stands in for it."""
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename == picks.__file__:
                frame = frame.f_back
            if not is_direct(frame):
                return generator
            self.note(name)
            if self._held is not None:
                return picks.seed(generator)
            return generator if self.plain and self.pick is None else TaintedDraws(generator, self.decisions, self.pick)

        return give

    def note_paths(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def ask(path: Any = ".", *args: Any, **options: Any) -> Any:
            if isinstance(path, str | bytes | os.PathLike) and is_for_user(sys._getframe(1)):
                name = os.fsdecode(path)
                if not name.startswith(PASSING):
                    self.asked.setdefault(name, code_paths.current_line())
            return function(path, *args, **options)

        return ask

    def other(self, function: Callable[..., Any], name: str, *, numbers: bool) -> Callable[..., Any]:
        drawing = marking(function, self.decisions, name) if numbers and not self.plain else function
        if self.pick is not None and name in picks.NAMES:
            drawing = picks.pick(function, name, self.pick)

        def read(*args: Any, **options: Any) -> Any:
            if numbers and not is_direct(sys._getframe(1)):
                return function(*args, **options)
            if code_paths.current_line() is not None:
                self.note(name)
            value = drawing(*args, **options)
            if numbers and self.pick is None:
                value = self.mark_text(value)
            if self.step and name not in DRAWN and isinstance(value, int):
                value = not value if isinstance(value, bool) else value + self.step
            if self.fill is not None and isinstance(value, bytes) and self._filled < FILLED:
                self._filled += 1
                value = bytes([self.fill]) * len(value)
            return value if self._held is None else self.hold(f"{name}{args}{options}", value)

        return read


def read_outside(question: Question) -> Readings:
    """What a call of the model reads; with plain stand-ins where it accepts no others (`type(names) is set`)."""
    users = explicit_state.users_own(question.eager.module)
    makers, memento, readings = find_set_makers(question.way, users), Memento(users), Readings()
    asks_callers = any(callers.NAMES & code_paths.names_in(code) for code in {code for _, code, _ in question.way})
    for plain in (False, True):
        readings = Readings(plain=plain)
        readings.makers, readings.asks_callers = makers, asks_callers
        with quietly(), _standing_in(question, readings), reading(readings, find_places(question)):
            readings.changes = question.differs(memento)
            ordered = elsewhere.ORDER in readings.lines
            if readings.changes and ordered:  # a copy of a set may have another order than the set
                readings.changes = question.differs(memento, exactly=False)
        if ordered or not readings.changes:
            break
    return readings


def find_outside_influence(question: Question, first: Readings) -> Influence | None:
    """The first thing outside of the model that changes its answer, of those that it read first, or a file that it
    reads on each call."""
    for file, line in first.files.items():
        return Influence(path=file, how="it reads that file on each call, and the content can change", place=line)
    for path, line in first.asked.items():
        return Influence(path=path, how="it asks for that path on each call, and what is there can change", place=line)
    if first.changes and elsewhere.ORDER in first.lines:
        how = f"it answers differently in another process or on another machine ({first.changes})"
        return Influence(path=elsewhere.ORDER, how=how, place=first.lines[elsewhere.ORDER])
    asked = next((name for name in first.lines if name in callers.NAMES), None)
    if first.changes and asked is not None:
        how = f"it answers differently where another calls it ({first.changes})"
        return Influence(path=asked, how=how, place=first.lines[asked])
    if first.changes or not (first.lines or first.variables):
        return None  # a stand-in is not accepted as what it stands for, or nothing is read
    memento, places = Memento(explicit_state.users_own(question.eager.module)), find_places(question)
    with quietly():
        for readings in _variants(first):
            readings.makers, readings.asks_callers = first.makers, first.asks_callers
            with _standing_in(question, readings), reading(readings, places):
                why = question.differs(memento, exactly=not readings.step and readings.pick is None)
            other_draw = readings.fill is not None or readings.pick is not None
            if why:
                lines, flip = readings.decisions.lines, readings.decisions.flip
                place = lines[flip] if flip is not None and flip < len(lines) else next(iter(first.lines.values()))
                when = "when what depends on that is decided the other way"
                if flip is None:
                    when = "in another thread" if readings.other_thread else "at another time"
                    when = "in another process or on another machine" if readings.step else when
                    when = "when another number is drawn" if other_draw else when
                how = f"it answers differently {when} ({why})"
                draws = (flip is not None or other_draw) and bool(first.lines.keys() & DRAWN)
                return Influence(path=", ".join(first.lines), how=how, place=place, draws=draws)
        with _standing_in(question, Readings()):
            return find_variable(question, memento, first.variables)


def _variants(first: Readings) -> Iterator[Readings]:
    texts = first.lines.keys() & {name for _, name in elsewhere.TEXTS}
    if texts:
        yield from (Readings(step=step, plain=first.plain) for step in elsewhere.STEPS[1:])
    for flip in range(min(len(first.decisions.lines), DECISIONS)):
        readings = Readings(Decisions(flip))
        yield readings
        while readings.decisions.goes_on():
            readings = Readings(Decisions(flip, readings.decisions.together + 1))
            yield readings
    if first.lines.keys() & (picks.NAMES | {name for _, name in picks.FRESH}):
        for at in range(picks.MOST):
            readings = Readings(plain=first.plain)
            readings.pick = at
            yield readings
    if "urandom" in first.lines:
        yield from (Readings(fill=fill, plain=first.plain) for fill in FILLS)
    if first.lines.keys() & {name for _, name in THREADS}:
        yield Readings(other_thread=True, plain=first.plain)
    if not texts and first.lines.keys() & _ELSEWHERE:
        yield from (Readings(step=step, plain=first.plain) for step in elsewhere.STEPS[1:])
    if first.lines.keys() & _TIMES:
        for shift_s in SHIFTS_S:
            yield Readings(shift_s=shift_s, plain=True)  # `type(now) is float`


def find_places(question: Question) -> list[KeptValue]:
    """Where the user's code keeps a source itself: `from time import time`, a set of texts."""
    known = {id(getattr(module, name)) for module, name in (*CLOCKS, *OTHERS, *THREADS, *elsewhere.TEXTS)}
    known |= {id(getattr(time, name)) for name in TEXTS}
    known |= {id(datetime.datetime), id(datetime.date), id(random.random), id(np.random.rand), id(os.urandom)}
    known |= {id(getattr(holder, name)) for holder, name in picks.FRESH}
    bound = {getattr(random, name) for name in picks.OF_PYTHON}
    return [
        kept
        for kept in attributes(explicit_state.users_own(question.eager.module))
        if kept.kind in ("dict", "index", "element", "cell", "attribute")
        and (
            id(kept.value) in known
            or type(kept.value) in (set, frozenset)
            or (type(kept.value).__name__ in ("method", "builtin_function_or_method") and kept.value in bound)
        )
    ]


@contextmanager
def _standing_in(question: Question, readings: Readings) -> Iterator[None]:
    """Within the block `int(time.time())` of the user's files notes decisions, as the time itself does; `hash`, `id`
    and the sets that they make are those of another process."""
    functions = code_paths.users_functions(question.eager.module)
    if readings.plain:
        yield
        return
    stands = {"int": NotingInt, **readings.builtins}
    with ExitStack() as stack:
        for function in functions:
            names = function.__globals__
            for name in (stands.keys() & set(function.__code__.co_names)) - names.keys():
                names[name] = stands[name]
                stack.callback(names.pop, name, None)
        stack.enter_context(giving_sets(readings.makers, lambda value: elsewhere.as_set(value, readings.builtins)))
        yield


@contextmanager
def reading(readings: Readings, places: list[KeptValue]) -> Iterator[None]:
    """Within the block sources are stood in for."""
    with ExitStack() as stack:
        stands: list[tuple[Any, Any]] = []

        def replace(module: Any, name: str, stand: Any) -> None:
            before = getattr(module, name)
            stands.append((before, stand))
            setattr(module, name, stand)
            stack.callback(setattr, module, name, before)

        for module, name in CLOCKS:
            replace(module, name, readings.clock(getattr(module, name), name))
        for name, before in TEXTS.items():
            replace(time, name, readings.clock_text(getattr(time, name), name, before))
        for holder, name in (*picks.DRAWS, *OTHERS):
            replace(holder, name, readings.other(getattr(holder, name), name, numbers=True))
        for holder, name in picks.FRESH:
            replace(holder, name, picks.make_fresh(getattr(holder, name), readings.fresh(name)))
        version: Any = torch.Tensor._version
        replace(torch.Tensor, "_version", property(readings.other(version.__get__, "_version", numbers=True)))
        for module, name in BYTES:
            replace(module, name, readings.other(getattr(module, name), "urandom", numbers=False))
        for module, name in elsewhere.TEXTS:
            replace(module, name, readings.text(getattr(module, name), name))
        for module, name, stand in callers.make_stands(readings.note, readings.mark_text, bool(readings.step)):
            if readings.asks_callers:
                replace(module, name, stand)
        for module, name in THREADS:
            replace(module, name, readings.thread(getattr(module, name), name))
        for name in FILE_QUESTIONS:
            replace(os, name, readings.note_paths(getattr(os, name)))
        moved, day = make_datetimes(readings)
        replace(datetime, "datetime", moved)
        replace(datetime, "date", day)
        for kept in places:
            stand = None if readings.plain else elsewhere.copy_set(kept.value, readings.builtins)
            if callable(kept.value):
                stand = next((stand for before, stand in stands if before == kept.value), None)
            if stand is not None and kept.assign(stand):
                stack.callback(kept.assign, kept.value)
        stack.enter_context(watch_environment(readings.note_variable))
        stack.enter_context(watch_files(readings.note_file))
        yield
