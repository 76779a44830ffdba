"""The files that a model's own code opens to read, seen by an audit hook of Python's."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trueline.capture.model import code_paths

_STRAY = (
    "linecache.py",
    "<frozen importlib",
    "<frozen zipimport",
    "inspect.py",
    "traceback.py",
    "warnings.py",
    "/logging/",
    "tokenize.py",
)
PASSING = ("/proc/", "/sys/", "/dev/")


def is_for_user(frame: FrameType | None) -> bool:
    """Whether the user's line is behind it, and nothing that looks for sources or modules by itself."""
    while frame is not None and not code_paths.is_users(frame.f_code.co_filename):
        if any(word in frame.f_code.co_filename for word in _STRAY):
            return False
        frame = frame.f_back
    return frame is not None


_watching: list[Callable[[str], None]] = []
_hooked: list[bool] = []


@contextmanager
def watch_files(note: Callable[[str], None]) -> Iterator[None]:
    """Calls `note` with the files that the user's code opens to read. An audit hook stays for good; it does nothing
    outside."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_note_file)
    _watching.append(note)
    try:
        yield
    finally:
        _watching.pop()


def _note_file(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or not _watching:
        return
    path, mode, flags = args
    reads = mode.startswith("r") if isinstance(mode, str) else not flags & (os.O_WRONLY | os.O_RDWR)
    if not reads or not isinstance(path, str | bytes | os.PathLike):
        return
    name = os.fsdecode(path)
    if not name.startswith(PASSING) and is_for_user(sys._getframe(1)):
        _watching[-1](name)
