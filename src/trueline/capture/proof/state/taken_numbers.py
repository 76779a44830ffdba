"""What numbers decide that code takes out of tensors, wherever that is: in a helper that is given one, by an
attribute or a list that keeps it.

Each is replaced by a number that notes its decisions (`tainted.py`), so it does not matter on which way it comes to a
test. Followed are comparisons, and where a text or a key is made of a number that is not only printed; what else a
function in C makes of one is seen by the syntax of its file alone.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import Event, SourceLine
from trueline.capture.model.syntax import decides, nodes_of, prints, spans, tests_of
from trueline.capture.proof.limits import find_functions
from trueline.capture.proof.state import tainted
from trueline.capture.proof.state.tainted import Decisions, NotingFloat, NotingInt, mark

Taken = Callable[[torch.Tensor], bool]
"""Whether the number that is taken out of a tensor counts."""


class Outcomes(Decisions):
    """Of each instruction of the user's that compares a number, what came of it in all runs."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[SourceLine, int], set[bool]] = {}
        self._lost = dict[SourceLine, None]()

    def take(self, result: bool) -> bool:
        place = _find_place()
        if place is not None:
            self._seen.setdefault(place, set()).add(result)
        return result

    def lose(self) -> None:
        place = _find_place()
        if place is not None and not prints(place[0].file, place[0].line):
            self._lost[place[0]] = None

    def mark(self, values: Any) -> Any:
        """The same, whose numbers note what they decide."""
        return tree_map(lambda one: mark(one, self), values)

    def find_one_sided(self) -> Iterator[SourceLine]:
        """The lines that had one outcome only, without those that only raise, and those that made a text or a key."""
        yield from self._lost
        for (place, _), outcomes in self._seen.items():
            if len(outcomes) < 2 and not _only_raises(place):
                yield place


def _find_place() -> tuple[SourceLine, int] | None:
    """The user's line, and its instruction, from which a method of a number was called; None for a library's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == tainted.__file__:
        frame = frame.f_back
    file = frame.f_code.co_filename
    users = code_paths.is_users(file) and not code_paths.is_installed(file)
    return (code_paths.line_at(frame), frame.f_lasti) if users else None


@contextmanager
def watch_threads() -> Iterator[list[SourceLine]]:
    """The user's lines that start a thread in the block: neither a trace nor a watch sees what that computes."""
    lines: list[SourceLine] = []
    plain = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        place = code_paths.current_line()
        if place is not None:
            lines.append(place)
        plain(thread)

    threading.Thread.start = start  # type: ignore[method-assign, assignment]
    try:
        yield lines
    finally:
        threading.Thread.start = plain  # type: ignore[method-assign]


def _only_raises(place: SourceLine) -> bool:
    around = [node for node in nodes_of(place.file) if any(spans(test, place.line) for test in tests_of(node))]
    return bool(around) and not any(decides(node, place.line) for node in around)


@contextmanager
def marking_casts(ways: Sequence[Sequence[Event]], outcomes: Outcomes, counts: Taken) -> Iterator[None]:
    """Within the block `int(tensor)` and `float(tensor)` in the files whose code ran give numbers that note what they
    decide."""
    codes = list({code for way in ways for _, code, _ in way})
    spaces = {id(one.__globals__): one.__globals__ for one in find_functions(codes)}
    with ExitStack() as stack:
        for space in spaces.values():
            for name, kind in (("int", NotingInt), ("float", NotingFloat)):
                if name not in space:
                    space[name] = _make_cast(kind, outcomes, counts)
                    stack.callback(space.pop, name, None)
        yield


def _make_cast(kind: Any, outcomes: Outcomes, counts: Taken) -> Any:
    def make(cls: Any, *args: Any, **options: Any) -> Any:
        found = kind(*args, **options)
        taken = len(args) == 1 and isinstance(args[0], torch.Tensor) and counts(args[0])
        return outcomes.mark(found) if taken else found

    return type(kind)(kind.__name__, (kind,), {"__new__": make})
