"""The variables of the environment that a model's own lines read, one by one or all of them."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.model.python_state import Memento
from trueline.capture.proof.state.files import is_direct
from trueline.capture.proof.state.influence import Influence, Question

ALL = "*"
"""In place of a name where all variables are read."""
MOST, TEXTS = 4, 24
"""Variables that are changed, and texts of the code that each of them is set to."""
VALUES = (None, "0", "1", "true", "other", "9999")
_NAME = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*")


@contextmanager
def watch_environment(note: Callable[[str], None]) -> Iterator[None]:
    """Calls `note` with the name of each variable that the user's code reads, or ALL."""
    kind = type(os.environ)
    before, goes_through = kind.__getitem__, kind.__iter__

    def read(self: Any, name: Any) -> Any:
        if is_direct(sys._getframe(1)):
            note(os.fsdecode(name))
        return before(self, name)

    def iterate(self: Any) -> Iterator[Any]:
        if is_direct(sys._getframe(1)):
            note(ALL)
        return goes_through(self)

    kind.__getitem__, kind.__iter__ = read, iterate  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__getitem__, kind.__iter__ = before, goes_through  # type: ignore[method-assign]


def find_variable(question: Question, memento: Memento, read: Mapping[str, SourceLine | None]) -> Influence | None:
    """The first variable of those that were `read` whose other values change the answer. Where all are read, those are
    set whose names, or their beginnings, are in the code."""
    texts = list(islice(_find_texts(question), TEXTS))
    names = list(read)
    if ALL in read:
        names = [name for text in texts if _NAME.fullmatch(text) for name in (text, f"{text}OTHER")]
    for name in names[:MOST]:
        before = os.environ.get(name)
        for value in dict.fromkeys((*VALUES, *texts)):
            if value == before:
                continue
            try:
                _set_variable(name, value)
                why = question.differs(memento)
            finally:
                _set_variable(name, before)
            if why:
                how = f"it answers differently when that is {'not set' if value is None else repr(value)} ({why})"
                return Influence(path=f"the environment's {name}", how=how, place=read.get(name, read.get(ALL)))
    return None


def _find_texts(question: Question) -> Iterator[str]:
    """Short texts of the code that ran, each once."""
    codes = dict.fromkeys(code for _, code, _ in question.way)
    texts = dict.fromkeys(one for code in codes for one in code_paths.texts_in(code))
    return (one for one in texts if one and "\0" not in one and len(one) <= 40)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
