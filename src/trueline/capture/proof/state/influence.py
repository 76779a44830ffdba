"""Does what a model keeps change what it answers? Each value that changes from call to call is replaced by others, and
each decision that depends on it is taken the other way: see `tainted.py`.

A counter that only a log reads does no harm. One that decides at call 1,234,567 does, however seldom.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, MethodWrapperType
from typing import Any

import numpy as np
import torch

from trueline.bundle.signature import Array
from trueline.capture.model import code_paths, explicit_state, opaque, streams
from trueline.capture.model.allowance import Allowance
from trueline.capture.model.code_paths import Event, SourceLine
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.python_state import Memento, state_of, trace
from trueline.capture.model.reach import KeptValue, attributes
from trueline.capture.proof.state import next_values
from trueline.capture.proof.state.other_values import COLLECTIONS, COUNTS, make_others
from trueline.capture.proof.state.tainted import (
    ANY,
    Decisions,
    Range,
    TaintedDraws,
    TaintWatch,
    mark,
    marking,
    noting_casts,
    quietly,
)
from trueline.capture.proof.state.tainted_text import mark_any, marking_reads
from trueline.runtime import compare

BUDGET = 2.0, 300
"""Seconds of this thread for the values of one input, and cheap calls beside them."""
CONSTANTS = 60
"""Numbers in the code of the model around which a counter is set."""
DECISIONS = 40
"""Decisions that are turned, of those that depend on one value."""

Inputs = Mapping[str, Array]
Restless = Sequence[tuple[KeptValue, object]]
"""Places whose values change from call to call, each with an earlier value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """A kept value that changes the answer."""

    path: str
    how: str
    """When the answer is another, and how it differs."""
    place: SourceLine | None
    draws: bool = False
    """Whether what changes the answer is a draw of random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The model on one input, with its answer."""

    eager: EagerSession
    inputs: Inputs
    answer: Inputs
    way: Sequence[Event]

    def differs(self, memento: Memento, *, exactly: bool = True, raising: bool = False) -> str:
        """How its answer is another now; empty where it is the same, or there is none, unless `raising` counts. The
        model is then put back.

        Another last digit counts: a branch may change much elsewhere (a factor that a norm divides by again). Not so
        without `exactly`: what is added in another order rounds otherwise."""
        try:
            answer = self.eager.run(self.inputs)
        except Exception as error:  # noqa: BLE001 - the user's forward with a value that it may not know
            return f"it raises {type(error).__name__}" if raising else ""
        finally:
            memento.restore()
        comparison = compare.compare(self.answer, answer)
        if exactly and comparison.agrees and not _are_equal(self.answer, answer) and self._is_steady(memento):
            return f"output '{next(iter(answer))}' differs in its last digits"
        return "" if comparison.agrees else comparison.reason

    def _is_steady(self, memento: Memento) -> bool:
        """Whether the model answers the same bits from the same state."""
        answers = []
        for _ in range(2):
            try:
                answers.append(self.eager.run(self.inputs))
            except Exception:  # noqa: BLE001 - the user's forward may refuse a further call
                return False
            finally:
                memento.restore()
        return _are_equal(*answers)


def _are_equal(one: Inputs, other: Inputs) -> bool:
    return all(other[name].tobytes() == array.tobytes() for name, array in one.items())


def ask(eager: EagerSession, inputs: Inputs) -> Question | None:
    """None where the model does not answer the input."""
    with code_paths.watch(ends=True) as way:
        try:
            answer = eager.run(inputs)
        except Exception:  # noqa: BLE001 - the user's forward may refuse the input
            return None
    return Question(eager=eager, inputs=inputs, answer=answer, way=way)


def find_restless(eager: EagerSession, inputs: Inputs) -> list[tuple[KeptValue, object]]:
    """What changes each time that the model runs on the same input."""
    users = explicit_state.users_own(eager.module)
    seen: list[dict[str, KeptValue]] = []
    traces: list[dict[str, object]] = []
    for _ in range(3):
        if seen:
            with suppress(Exception):  # the user's forward in a state that it does not answer: later calls show it
                eager.run(inputs)
        kept = dict[str, KeptValue]()
        for one in attributes(users):
            kept.setdefault(one.path, one)
        seen.append(kept)
        traces.append({path: trace(one.value) for path, one in kept.items()})
    before, middle, after = traces
    restless = []
    for path, one in seen[-1].items():
        changes = before.get(path) != middle.get(path) or middle.get(path) != after[path]
        hidden = opaque.hides_state(one.value) or opaque.is_base(one.value) or streams.hides_place(one.value)
        if (changes or hidden) and not isinstance(one.value, torch.nn.Parameter):
            earlier = seen[1].get(path)
            restless.append((one, earlier.value if earlier is not None else None))
    return restless


def find_influence(question: Question, restless: Restless) -> Influence | None:
    """The first of the values that change whose other values change the answer."""
    if not restless:
        return None
    users = explicit_state.users_own(question.eager.module)
    memento, allowance = Memento(users), Allowance(*BUDGET)
    constants = _constants(question.way)
    with quietly():
        for kept, before in restless:
            if opaque.hides_state(kept.value):
                place = code_paths.find_line(question.way, kept.path.partition(".")[0])
                how = "each call may continue it, and nothing shows how far"
                return Influence(path=kept.path, how=how, place=place)
            asked = code_paths.find_line(question.way, kept.attribute) if opaque.is_base(kept.value) else None
            if asked is not None:
                return Influence(path=kept.path, how="it asks a database, whose content can change", place=asked)
            for why, place in allowance.charge_each(_ask(question, memento, kept, before, constants)):
                if why:
                    place = place or code_paths.find_line(question.way, kept.attribute)
                    place = place or _deciding_line(question, memento, kept)
                    return Influence(path=kept.path, how=why, place=place, draws=state_of(kept.value) is not None)
    return None


def _deciding_line(question: Question, memento: Memento, kept: KeptValue) -> SourceLine | None:
    """The first line that decides by the value."""
    stand = _taintable(kept.value, None)
    decisions = Decisions()
    if stand is not None and kept.assign(stand(decisions)[0]):
        question.differs(memento)
    return next((line for line in decisions.lines if line is not None), None)


Answer = tuple[str, SourceLine | None]


def _ask(
    question: Question, memento: Memento, kept: KeptValue, before: object, constants: Sequence[float]
) -> Iterator[Answer]:
    """Each way in which the answer changes with the value; empty words where it does not."""
    yield _with(question, memento, kept, kept.value)  # a flag that each call turns is another one now
    values = make_others(kept.value, before, constants)
    first = [value for _, value in zip(range(len(COUNTS)), values, strict=False)]
    for value in first:
        yield _with(question, memento, kept, value)
    yield from _ask_next(question, memento, kept)
    place = _taintable(kept.value, before)
    if place is not None:
        yield from _turn_decisions(question, memento, lambda decisions: _assign(kept, place(decisions)))
    owner = next((part for part in question.eager.module.modules() if vars(part) is kept.holder), None)
    if owner is not None and type(kept.value) in (int, float, str, bytes):
        within = _range_after(kept.value, before)
        yield from _turn_decisions(
            question, memento, lambda decisions: marking_reads(owner, kept.name, decisions, within)
        )
    for value in values:
        yield _with(question, memento, kept, value)


def _ask_next(question: Question, memento: Memento, kept: KeptValue) -> Iterator[Answer]:
    """Whether the answer depends on what a stream gives next, or on whether it gives anything."""
    make = next_values.stand_for(kept.value)
    plain = make(next_values.keep) if make is not None else None
    if make is None or plain is None or not kept.assign(plain):
        return
    if question.differs(memento, raising=True) or not plain.given:
        return  # the stand-in is not accepted, or nothing reads it
    if kept.assign(make(next_values.change)):
        why = question.differs(memento, raising=True)
        yield (f"it answers differently when that gives another value ({why})" if why else ""), None
    if kept.assign(iter(())):
        why = question.differs(memento)
        yield (f"it answers differently when that is at its end ({why})" if why else ""), None


def _assign(kept: KeptValue, stand: tuple[Any, TaintWatch | None]) -> AbstractContextManager[object] | None:
    """None where the value cannot be replaced."""
    value, watch = stand
    return (watch or nullcontext()) if kept.assign(value) else None


def _with(question: Question, memento: Memento, kept: KeptValue, value: Any) -> Answer:
    if not kept.assign(value):
        memento.restore()
        return "", None
    why = question.differs(memento)
    return (f"it answers differently when that is {_words(value)} ({why})" if why else ""), None


def _words(value: Any) -> str:
    if isinstance(value, COLLECTIONS):
        return f"of length {len(value)}"
    return repr(value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value)[:60]


def _turn_decisions(
    question: Question, memento: Memento, replace: Callable[[Decisions], AbstractContextManager[object] | None]
) -> Iterator[Answer]:
    """With each decision that depends on a value taken the other way. `replace` puts what notes them in its place."""
    count, flip, together = 1, -1, 1
    functions = list(code_paths.users_functions(question.eager.module))
    while flip < min(count, DECISIONS):
        decisions = Decisions(flip if flip >= 0 else None, together)
        replaced = replace(decisions)
        if replaced is None:
            return
        with noting_casts(functions), replaced:
            why = question.differs(memento)
        if flip < 0:
            if why:
                return  # the stand-in itself is not accepted as what it stands for
            count = len(decisions.lines)
        elif why:
            line = decisions.lines[flip] if flip < len(decisions.lines) else None
            yield f"it answers differently when what depends on that is decided the other way ({why})", line
        else:
            yield "", None
        flip, together = (flip, together + 1) if not why and decisions.goes_on() else (flip + 1, 1)


def _range_after(value: Any, before: object) -> Range:
    """Where later values are of what grows or shrinks from call to call."""
    if not isinstance(before, int | float) or not isinstance(value, int | float):
        return ANY
    return value if before < value else float("-inf"), value if before > value else float("inf")


Stand = Callable[[Decisions], tuple[Any, TaintWatch | None]]


def _taintable(value: Any, before: object) -> Stand | None:
    """What makes a stand-in that notes decisions; None for a value that has none."""
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        within = _range_after(value, before)
        return lambda decisions: (mark(value, decisions, within), None)
    if isinstance(value, torch.Tensor):
        copied = value.detach().clone()

        def stand(decisions: Decisions) -> tuple[Any, TaintWatch]:
            tensor = copied.clone()
            return tensor, TaintWatch(tensor, decisions)

        return stand
    make = next_values.stand_for(value)
    if make is not None:
        return lambda decisions: (make(next_values.marking_next(decisions)), None)
    if state_of(value) is not None and not isinstance(value, torch.Generator):
        return lambda decisions: (TaintedDraws(value, decisions), None)
    if type(value) in (str, bytes) or opaque.is_hash(value):
        return lambda decisions: (mark_any(value, decisions), None)
    if isinstance(value, BuiltinFunctionType | MethodWrapperType):
        return lambda decisions: (marking(value, decisions, ""), None)
    return None


def _constants(way: Sequence[Event]) -> list[float]:
    """The numbers in the code that ran, the largest first."""
    waiting: list[Any] = list(dict.fromkeys(constant for _, code, _ in way for constant in code.co_consts))
    numbers: set[float] = set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, tuple | frozenset):
            waiting += one
        elif isinstance(one, int | float) and not isinstance(one, bool) and 2 <= abs(one) < 1e15:
            numbers.add(one)
    return sorted(numbers, reverse=True)[:CONSTANTS]
