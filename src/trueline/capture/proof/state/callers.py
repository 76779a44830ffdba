"""Frames of Python's stack that a model looks at, to see who calls it. The callers that it has in a server have other
names, files and lines, and there are more or fewer of them."""

import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from trueline.capture.model import code_paths
from trueline.capture.proof.state.files import is_direct

NAMES = frozenset({"currentframe", "_getframe", "stack", "extract_stack", "f_back"})
"""Names in code that show that it may look at them."""
Mark = Callable[[Any], Any]
"""Makes of a value one that notes decisions."""


class _CallerCode:
    def __init__(self, frame: FrameType, mark: Mark) -> None:
        self._code, self._mark = frame.f_code, mark

    def __getattr__(self, name: str) -> Any:
        held = getattr(self._code, name)
        return self._mark(held) if name in ("co_name", "co_qualname", "co_filename", "co_firstlineno") else held


class _Caller:
    """Stands in for a frame; those of the model's own code are as they are, but for what calls them."""

    def __init__(self, frame: FrameType, mark: Mark, more: int) -> None:
        self._frame, self._mark, self._more = frame, mark, more
        self._own = code_paths.is_users(frame.f_code.co_filename)

    @property
    def f_back(self) -> Any:
        back = self._frame.f_back
        if back is None:
            return _Caller(self._frame, self._mark, self._more - 1) if self._more else None
        return _Caller(back, self._mark, self._more)

    @property
    def f_code(self) -> Any:
        return self._frame.f_code if self._own else _CallerCode(self._frame, self._mark)

    @property
    def f_lineno(self) -> Any:
        return self._frame.f_lineno if self._own else self._mark(self._frame.f_lineno)

    @property
    def f_globals(self) -> Any:
        known = self._frame.f_globals
        return known if self._own else {**known, "__name__": self._mark(str(known.get("__name__")))}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._frame, name)


def make_stands(note: Callable[[str], None], mark: Mark, more: int) -> Iterator[tuple[Any, str, Any]]:
    """What gives the model frames, each with a stand-in; `more` callers than there are. Code that is not the user's
    gets them as they are."""

    def get_frame(depth: int = 0, /) -> Any:
        frame = _getframe(depth + 1)
        if not is_direct(_getframe(1)):
            return frame
        note("_getframe")
        return _Caller(frame, mark, more)

    def current_frame() -> Any:
        note("currentframe")
        return _Caller(_getframe(1), mark, more)

    def listing(function: Callable[..., Any]) -> Callable[..., Any]:
        def get(*args: Any, **options: Any) -> Any:
            found = list(function(*args, **options))[1:] if function is inspect.stack else list(function(*args))[:-1]
            if not is_direct(_getframe(1)):
                return found
            note(function.__name__)
            return [_mark_entry(one, mark) for one in [*found, *found[-1:] * more]]

        return get

    _getframe = sys._getframe
    yield sys, "_getframe", get_frame
    yield inspect, "currentframe", current_frame
    yield inspect, "stack", listing(inspect.stack)
    yield traceback, "extract_stack", listing(traceback.extract_stack)


def _mark_entry(entry: Any, mark: Mark) -> Any:
    """A line of a listing whose texts note decisions, where it is a caller's."""
    if code_paths.is_users(entry.filename):
        return entry
    if isinstance(entry, traceback.FrameSummary):
        return traceback.FrameSummary(mark(entry.filename), entry.lineno, mark(entry.name), lookup_line=False)
    return entry._replace(filename=mark(entry.filename), function=mark(entry.function), lineno=mark(entry.lineno))


class ThreadView:
    """A thread whose name notes decisions."""

    def __init__(self, thread: threading.Thread, mark: Mark) -> None:
        self._thread, self._mark = thread, mark

    def __getattr__(self, name: str) -> Any:
        held = getattr(self._thread, name)
        return self._mark(held) if name == "name" else held
