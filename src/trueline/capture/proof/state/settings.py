"""What is set for a whole process or machine: the time zone, the locale, how Python was started, error states.

A model whose code names one of them runs with another. Left alone is what a model is made for and a program keeps on
purpose: torch's default dtype, a decimal context, torch's version, whether there is a GPU. A number that Python writes
as the locale does (`f"{x:n}"`) is refused without a question: no other locale need be installed here.
"""

import dis
import functools
import io
import locale
import logging
import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from os import isatty
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from trueline.capture.model import code_paths, explicit_state
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.model.python_state import Memento
from trueline.capture.proof.state.influence import Influence, Question
from trueline.capture.proof.state.tainted import quietly

ZONE = "OTHER-13:37"
"""13 hours and 37 minutes east of Greenwich, in a form that needs no table of zones."""
_MARKS = {"decimal_point": ",", "thousands_sep": "'", "grouping": [3, 0], "currency_symbol": "XTL"}
_FLAGS = sys.flags
SEED = 20_011
_AS_LOCALE = re.compile(r"(.?[<>=^])?[-+ ]?z?#?0?[0-9]*(\.[0-9]+)?n")
_HAS_LOCAL = re.compile(rf"{{[^{{}}:]*:{_AS_LOCALE.pattern}}}")
FORMATS = 'f"'
"""In place of a name, of code that writes values into a text."""
ROOM = 300
"""Calls that Python allows above those that there are."""
_ZONE_NAME = re.compile(r"[A-Z]{3,5}")
Block = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSetting:
    """Something that is set for a process or machine."""

    what: str
    names: str
    """Names in code that show that it may be read."""
    others: tuple[Block, ...]
    """Each sets it otherwise within a block."""
    beside: str = ""
    """A name that is in the code, too."""


@contextmanager
def _replace(*stands: tuple[Any, str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for holder, name, value in stands:
            if hasattr(holder, name):  # not everywhere, as sched_getaffinity
                stack.callback(setattr, holder, name, getattr(holder, name))
                setattr(holder, name, value)
        yield


@contextmanager
def _other_zone(zone: str = ZONE) -> Iterator[None]:
    before = os.environ.get("TZ")
    try:
        os.environ["TZ"] = zone
        time.tzset()
        yield
    finally:
        os.environ.pop("TZ", None)
        if before is not None:
            os.environ["TZ"] = before
        time.tzset()


def _other_locale() -> AbstractContextManager[None]:
    def collate(one: str, other: str) -> int:
        one, other = one.swapcase(), other.swapcase()
        return (one > other) - (one < other)

    return _replace(
        (locale, "_setlocale", lambda category, wanted=None: "de_DE.UTF-8"),
        (locale, "strcoll", collate),
        (locale, "strxfrm", str.swapcase),
        (locale, "_override_localeconv", _MARKS),
    )


class _OtherFlags:
    """`sys.flags` of a Python that was started with other options."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(_FLAGS, name)
        return not value if isinstance(value, bool) else int(not value) if isinstance(value, int) else value


class _Version(tuple[Any, ...]):
    """`sys.version_info` of another Python."""

    __slots__ = ()

    @property
    def major(self) -> Any:
        return self[0]

    @property
    def minor(self) -> Any:
        return self[1]


def _other_version(major: int, minor: int) -> AbstractContextManager[None]:
    numbers = _Version((major, minor, 0, "final", 0))
    return _replace(
        (sys, "version_info", numbers),
        (sys, "hexversion", major << 24 | minor << 16),
        (sys, "version", f"{major}.{minor}.0"),
    )


def _other_machine() -> AbstractContextManager[None]:
    count = (os.cpu_count() or 1) + 1
    return _replace(
        (os, "uname", lambda: os.uname_result(("Other", "other", "0", "other", "other"))),
        (os, "sched_getaffinity", lambda process: set(range(count))),
        (multiprocessing, "cpu_count", lambda: count),
        (os, "getuid", lambda: 4242),
        (os, "getgid", lambda: 4242),
    )


def _other_process() -> AbstractContextManager[None]:
    process = SimpleNamespace(name="SpawnProcess-1", pid=424_242, daemon=True, authkey=b"", exitcode=None)
    return _replace(
        (multiprocessing, "current_process", lambda: process),
        (sys, "argv", ["other.py", "one", "two"]),
        (sys, "executable", "/other/python"),
    )


@contextmanager
def _other_prints() -> Iterator[None]:
    before = copy(torch._tensor_str.PRINT_OPTS)
    try:
        torch.set_printoptions(precision=2, linewidth=40, sci_mode=True)  # type: ignore[no-untyped-call]
        with np.printoptions(precision=3, suppress=True):
            yield
    finally:
        torch._tensor_str.PRINT_OPTS = before


@contextmanager
def _other_seeds() -> Iterator[None]:
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            random.seed(SEED)
            np.random.seed(SEED)
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


@contextmanager
def _other_level(level: int) -> Iterator[None]:
    root = logging.getLogger()
    before = root.level
    try:
        root.setLevel(level)
        yield
    finally:
        root.setLevel(before)


class _AllModules(dict[str, Any]):
    """`sys.modules` of a process in which everything is imported."""

    def __contains__(self, name: object) -> bool:
        return True


def _other_memory(times: float) -> AbstractContextManager[None]:
    """Numbers of bytes that are many times as large or small."""

    def scale(function: Any) -> Any:
        def ask(*args: Any) -> Any:
            found = function(*args)
            fields = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
            return SimpleNamespace(**{name: _times(value, times) for name, value in fields.items()})

        return ask

    psutil = sys.modules.get("psutil")
    process = getattr(psutil, "Process", None)
    asked = ((resource, "getrusage"), (psutil, "virtual_memory"), (process, "memory_info"))
    return _replace(*((one, name, scale(getattr(one, name))) for one, name in asked if hasattr(one, name)))


def _times(value: Any, times: float) -> Any:
    return type(value)(value * times) if isinstance(value, int | float) else value


def _other_terminal() -> AbstractContextManager[None]:
    size = os.terminal_size((217, 61))
    return _replace(
        (shutil, "get_terminal_size", lambda *args, **options: size),
        (os, "get_terminal_size", lambda *args: size),
        (os, "isatty", lambda file: not isatty(file)),
    )


class _OtherStream(io.StringIO):
    """A standard stream of another process: no terminal where there is one, and with much written to it."""

    name, encoding, errors, mode = "<other>", "ascii", "backslashreplace", "rb+"

    def __init__(self, terminal: bool) -> None:
        super().__init__("other\n")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def fileno(self) -> int:
        return 99

    def tell(self) -> int:
        return 10**9


def _other_streams(terminal: bool) -> AbstractContextManager[None]:
    names = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
    return _replace(*((sys, name, _OtherStream(terminal)) for name in names))


@contextmanager
def _other_warnings(action: Any) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        yield


@contextmanager
def _other_depth() -> Iterator[None]:
    """Room for a few hundred more calls than there are here."""
    before, frame, depth = sys.getrecursionlimit(), sys._getframe(), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    try:
        sys.setrecursionlimit(depth + ROOM)
        yield
    finally:
        sys.setrecursionlimit(before)


SETTINGS = (
    ProcessSetting(
        what="the time zone",
        names="localtime ctime strftime mktime fromtimestamp timestamp astimezone tzname timezone altzone daylight",
        others=(_other_zone,) if hasattr(time, "tzset") else (),
    ),
    ProcessSetting(
        what="the locale", names="localeconv getlocale setlocale strcoll strxfrm locale", others=(_other_locale,)
    ),
    ProcessSetting(
        what="the options with which Python was started",
        names="flags",
        beside="sys",
        others=(lambda: _replace((sys, "flags", _OtherFlags())),),
    ),
    ProcessSetting(what="the process", names="argv executable current_process", others=(_other_process,)),
    ProcessSetting(
        what="the version of Python",
        names="version_info hexversion version",
        beside="sys",
        others=(lambda: _other_version(2, 6), lambda: _other_version(99, 98)),
    ),
    ProcessSetting(
        what="the platform", names="platform", beside="sys", others=(lambda: _replace((sys, "platform", "other")),)
    ),
    ProcessSetting(
        what="the operating system", names="name", beside="os", others=(lambda: _replace((os, "name", "other")),)
    ),
    ProcessSetting(
        what="the machine", names="uname sched_getaffinity cpu_count getuid getgid", others=(_other_machine,)
    ),
    ProcessSetting(
        what="numpy's error state",
        names="geterr seterr",
        others=(lambda: np.errstate(all="ignore"), lambda: np.errstate(all="raise")),
    ),
    ProcessSetting(
        what="how torch and numpy print numbers",
        names=f"get_printoptions repr str format {FORMATS}",
        others=(_other_prints,),
    ),
    ProcessSetting(
        what="the seed of the process", names="get_rng_state getstate get_state initial_seed", others=(_other_seeds,)
    ),
    ProcessSetting(
        what="the level of logging",
        names="isEnabledFor getEffectiveLevel level",
        others=tuple(partial(_other_level, level) for level in (logging.DEBUG, logging.CRITICAL + 1)),
    ),
    ProcessSetting(
        what="what is imported",
        names="modules",
        beside="sys",
        others=(lambda: _replace((sys, "modules", {})), lambda: _replace((sys, "modules", _AllModules(sys.modules)))),
    ),
    ProcessSetting(
        what="the memory of the process",
        names="getrusage virtual_memory memory_info",
        others=(lambda: _other_memory(1e6), lambda: _other_memory(1e-6)),
    ),
    ProcessSetting(
        what="what is done with warnings",
        names="catch_warnings showwarning filters filterwarnings simplefilter __warningregistry__ Warning UserWarning "
        "DeprecationWarning RuntimeWarning FutureWarning",
        beside="warnings",
        others=tuple(partial(_other_warnings, action) for action in ("ignore", "always", "default", "error")),
    ),
    ProcessSetting(what="the depth of calls", names="RecursionError", others=(_other_depth,)),
    ProcessSetting(what="the terminal", names="get_terminal_size isatty", others=(_other_terminal,)),
    ProcessSetting(
        what="the standard streams",
        names="stdin stdout stderr __stdin__ __stdout__ __stderr__",
        beside="sys",
        others=tuple(partial(_other_streams, terminal) for terminal in (True, False)),
    ),
)


@functools.lru_cache(maxsize=20_000)
def _formats(code: CodeType) -> bool:
    """Whether it has an f-string with a value."""
    return any(one.opname == "FORMAT_VALUE" for one in dis.get_instructions(code))


@functools.lru_cache(maxsize=20_000)
def _writes_as_locale(code: CodeType) -> bool:
    """Whether it formats a value by a text that ends in `n`: `f"{x:n}"`, `format(x, "n")`, `"{:n}".format(x)`."""
    before: object = None
    for one in dis.get_instructions(code):
        if one.opname == "FORMAT_VALUE" and (one.arg or 0) & 4 and _AS_LOCALE.fullmatch(str(before)):
            return True
        before = one.argval if one.opname == "LOAD_CONST" else None
    texts = [text for text in code.co_consts if isinstance(text, str)] if "format" in code.co_names else []
    return any(_AS_LOCALE.fullmatch(text) or _HAS_LOCAL.search(text) for text in texts)


def _zones_in(codes: Iterable[CodeType]) -> list[Block]:
    """The time zones that the code names, each eight hours west of Greenwich: `tzname() == "PST"`."""
    texts = dict.fromkeys(text for code in codes for text in code_paths.texts_in(code) if _ZONE_NAME.fullmatch(text))
    return [partial(_other_zone, f"{text}8") for text in texts]


def find_setting_influence(question: Question) -> Influence | None:
    """The first setting of the process that the model's code names and its answer depends on."""
    codes = dict.fromkeys(code for _, code, _ in question.way)
    local = next((code for code in codes if _writes_as_locale(code)), None)
    if local is not None:
        how, at = "it writes a number as the locale does (':n')", local.co_firstlineno
        return Influence(path="the locale", how=how, place=SourceLine(file=local.co_filename, line=at))
    names = frozenset[str]().union(*map(code_paths.names_in, codes))
    names |= {FORMATS} if any(map(_formats, codes)) else set()
    used = [(one, names & set(one.names.split())) for one in SETTINGS if not one.beside or one.beside in names]
    if not any(words for _, words in used):
        return None
    memento = Memento(explicit_state.users_own(question.eager.module))
    with quietly():
        for setting, words in used:
            named = _zones_in(codes) if setting.others and setting.others[0] is _other_zone else []
            for other in (*setting.others, *named) if words else ():
                with other():
                    why = question.differs(memento)
                if why:
                    lines = (code_paths.find_line(question.way, word) for word in sorted(words))
                    place = next((line for line in lines if line is not None), None)
                    return Influence(path=setting.what, how=f"it answers differently where that is another ({why})",
                                     place=place)  # fmt: skip
    return None
