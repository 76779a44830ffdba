"""The files that a model's own code opens to read, seen by an audit hook of Python's."""

import locale
import multiprocessing.context
import os
import pathlib
import posixpath
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trueline.capture.model import code_paths

_STRAY = (
    "linecache.py",
    "<frozen importlib",
    "<frozen zipimport",
    "/importlib/metadata/",
    "inspect.py",
    "traceback.py",
    "warnings.py",
    "/logging/",
    "tokenize.py",
)
PASSING = ("/proc/", "/sys/", "/dev/")
"""What torch looks up by itself; a file below these is noted where the user's own line opens it."""


def is_for_user(frame: FrameType | None) -> bool:
    """Whether the user's line is behind it, and nothing that looks for sources or modules by itself."""
    while frame is not None and not code_paths.is_users(frame.f_code.co_filename):
        if any(word in frame.f_code.co_filename for word in _STRAY):
            return False
        frame = frame.f_back
    return frame is not None


_HELPERS = frozenset(
    {
        *(module.__file__ for module in (os, posixpath, pathlib, tempfile, locale, multiprocessing.context)),
        *(f"<frozen {name}>" for name in ("os", "posixpath", "_collections_abc")),
    }
)
"""Files of the standard library whose functions read what a user asks them for."""


def is_direct(frame: FrameType | None) -> bool:
    """Whether the user's code calls, itself or by one of the helpers."""
    while frame is not None and frame.f_code.co_filename in _HELPERS:
        frame = frame.f_back
    return frame is not None and code_paths.is_users(frame.f_code.co_filename)


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
    name, frame = os.fsdecode(path), sys._getframe(1)
    if is_direct(frame) if name.startswith(PASSING) else is_for_user(frame):
        _watching[-1](name)
