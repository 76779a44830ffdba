"""Does the answer depend on the process, the machine or the thread, whatever function tells the model of it?

The model runs in another thread with other addresses; what its lines read is replayed in another process. Each value
that is another there is given to the model, and each decision that depends on it is taken the other way. A function of
a library without arguments reads a state: its value is moved, too.
"""

import builtins
import functools
import gc
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch

from trueline.capture.model import code_paths, explicit_state
from trueline.capture.model.allowance import Allowance
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.model.python_state import Memento
from trueline.capture.model.reach import attributes
from trueline.capture.proof.state.influence import BUDGET, DECISIONS, Influence, Question
from trueline.capture.proof.state.literal_sets import running_changed
from trueline.capture.proof.state.settings import find_setting_influence
from trueline.capture.proof.state.sources import find_outside_influence, read_outside
from trueline.capture.proof.state.tainted import Decisions, quietly
from trueline.capture.proof.state.tainted_text import mark_any
from trueline.capture.proof.surroundings.events import watch_events
from trueline.capture.proof.surroundings.imports import find_import_influence
from trueline.capture.proof.surroundings.reading_log import ADDRESS, Raised, ReadingLog, Site, Step
from trueline.capture.proof.surroundings.replay import replay_elsewhere
from trueline.capture.proof.surroundings.rewritten import find_readers

HERE = "another process, machine or thread"
LAYOUTS = (3, 8)
"""How many objects of each size are kept while the model runs, so that what it makes lies elsewhere."""
STEPS = 1, 6
"""By how much numbers and addresses are moved: a remainder of one may be the same."""
SMALL = 1 << 20
"""Bytes of an input of which copies are kept."""
OF_TRACERS = frozenset(
    """is_compiling is_dynamo_compiling is_tracing is_scripting is_exporting is_in_onnx_export is_fx_tracing
    is_torchdynamo_compiling is_grad_enabled is_inference_mode_enabled is_initialized is_available device_count
    is_built is_autocast_enabled is_autocast_cpu_enabled is_autocast_cache_enabled""".split()  # noqa: SIM905 - as prose they take two lines
)
"""Of torch, what Trueline decides where it traces, proves and serves, and devices, which a program keeps on purpose."""
Elsewhere = dict[Site, list[Any]]
"""What is another elsewhere, of each place in the code, call by call."""
_WITHOUT_STATE = frozenset({"builtins", "math", "operator", "functools", "itertools", "collections", "typing", "copy"})
_OUTSIDE = frozenset(["hash", "id", "repr", "open", "str", "ascii", "list", "set", "frozenset", "iter", "__hash__"])
"""Of these modules, what may follow from a hash or an address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshQuestion(Question):
    """One whose model is called with empty caches, as in a new process."""

    caches: Sequence[Any]

    def differs(self, memento: Memento, *, exactly: bool = True, raising: bool = False) -> str:
        _clear(self.caches)
        return Question.differs(self, memento, exactly=exactly, raising=raising)


class _Asked:
    """The model with hooks in its functions; each run begins with empty caches, as in a new process."""

    def __init__(self, question: Question, caches: Sequence[Any]) -> None:
        users = explicit_state.users_own(question.eager.module)
        self.memento = Memento(users)
        self._drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()
        if caches:
            _clear(caches)
            with code_paths.watch(ends=True) as way:
                question.differs(self.memento)
            question = FreshQuestion(eager=question.eager, inputs=question.inputs, answer=question.answer, way=way,
                                     caches=caches)  # fmt: skip
        self.question = question
        self._makers = find_readers(question.way, users)

    def run(self, log: ReadingLog, *, raising: bool = False) -> str:
        """How its answer is another than before, with the same draws as in the first run."""
        pythons, numpys, torchs = self._drawn
        random.setstate(pythons)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
        with running_changed(self._makers, log.hooks()):
            return self.question.differs(self.memento, exactly=False, raising=raising)


def find_surrounding_influence(question: Question) -> Influence | None:
    """The first thing that a line reads which is another elsewhere, and changes the answer."""
    users = explicit_state.users_own(question.eager.module)
    caches = [kept.value for kept in attributes(users) if _is_users_cache(kept.value)]
    try:
        with quietly():
            asked = _Asked(question, caches)
            found = _search(asked, caches) or find_import_influence(asked.question)
        if found is None and caches:  # what a cache kept was not asked again before
            fresh = asked.question
            found = find_outside_influence(fresh, read_outside(fresh)) or find_setting_influence(fresh)
        return found
    finally:
        _clear(caches)  # they may keep what was given to the model


def reads_surroundings(question: Question) -> bool:
    """Whether a line of the model reads what may be another in another process, machine or thread."""
    log = ReadingLog()
    with quietly():
        _Asked(question, ()).run(log)
    stated = any(log.stated[site] and not _is_kept(log.words[site]) for site in log.values)
    return stated or any(map(_looks_outside, log.steps))


def _search(asked: _Asked, caches: Sequence[Any]) -> Influence | None:
    log, others, layouts = ReadingLog(), list[Elsewhere](), list[ReadingLog]()
    events = dict[str, SourceLine | None]()

    def note(what: str) -> None:
        events.setdefault(what, code_paths.current_line())

    with watch_events(note):
        why = asked.run(log, raising=True)
    for what, line in events.items():
        return Influence(path=what, how="it asks that on each call, and the answer can change", place=line)
    if why:
        return _of_caches(asked) if caches else None
    for kept in LAYOUTS:
        layouts.append(ReadingLog())
        why = _run_elsewhere(asked, layouts[-1], kept)
        others.append(_only_others(log, layouts[-1].values))
        if why:
            return _name(log, next(iter(others[-1]), None), why)
    others += _replay(log)
    stated = {site: values for site, values in log.values.items() if log.stated[site]}
    stated = {site: values for site, values in stated.items() if not _is_kept(log.words[site])}
    others += [{site: [_move(one, by) for one in values] for site, values in stated.items()} for by in STEPS]
    return _find_among(asked, log, others)


def _clear(caches: Sequence[Any]) -> None:
    for cache in caches:
        cache.cache_clear()


def _is_users_cache(value: Any) -> bool:
    inner = getattr(value, "__wrapped__", None) if isinstance(value, functools._lru_cache_wrapper) else None
    return isinstance(inner, FunctionType) and code_paths.is_users(inner.__code__.co_filename)


def _of_caches(asked: _Asked) -> Influence | None:
    why = asked.run(ReadingLog())
    how = f"it answers differently where that is empty, as in a new process ({why})"
    return Influence(path="what its caches keep", how=how, place=None) if why else None


def _run_elsewhere(asked: _Asked, log: ReadingLog, kept: int) -> str:
    """In another thread, with other addresses, and with numbers below 1e-38 as in a new process."""
    found = list[str]()
    held: list[Any] = [bytes(size) for size in range(0, 480, 8) for _ in range(kept)]
    held += [object() for _ in range(13 * kept)]
    held += [torch.empty(1 << power) for power in range(14) for _ in range(kept)]
    small = [one for one in asked.question.inputs.values() if one.nbytes < SMALL for _ in range(kept)]
    held += [(torch.from_numpy(one.copy()).clone(), one.copy()) for one in small]
    collects = gc.isenabled()

    def run() -> None:
        torch.set_flush_denormal(False)  # as in a new process; of this thread, which ends
        found.append(asked.run(log))

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    del held
    if collects:
        gc.enable()
    return found[0] if found else ""


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return repr(one) == repr(other)


def _only_others(log: ReadingLog, found: Elsewhere) -> Elsewhere:
    return {site: found[site] for site, was in log.values.items() if not _are_same(found.get(site, was), was)}


def _replay(log: ReadingLog) -> list[Elsewhere]:
    """The values that are others in another process than in one like this; and those of the one like this."""
    found: list[Elsewhere] = [{}, {}]
    if not any(_looks_outside(step) for step in log.steps):
        return found
    for number, (like, other) in enumerate(replay_elsewhere(log.steps)):
        place = log.step_of.get(number)
        if place is None or like == other:
            continue
        site, index = place
        for of, (kind, value) in zip(found, (other, like), strict=True):
            values = of.setdefault(site, list(log.values[site]))
            values[index] = value if kind == "value" else _raise(value) if kind == "raised" else object()
    return [_only_others(log, of) for of in found]


def _raise(name: str) -> Raised:
    kind = getattr(builtins, name, OSError)
    return Raised(kind("in another process") if issubclass(kind, OSError | RuntimeError | ValueError) else OSError())


def _looks_outside(step: Step) -> bool:
    """Whether more is in it than functions of values alone."""
    kind, *rest = step
    if kind == "named":
        return rest[0] not in _WITHOUT_STATE or rest[1] in _OUTSIDE
    if kind == "module":
        return rest[0] not in _WITHOUT_STATE
    if kind == "field":
        return rest[1] in _OUTSIDE or _looks_outside(rest[0])
    if kind == "call":
        return any(map(_looks_outside, (rest[0], *rest[1], *rest[2].values())))
    return kind == "plain" and type(rest[0]) in (set, frozenset)


def _is_kept(word: str) -> bool:
    return word.startswith("torch.") and word.rpartition(".")[2] in OF_TRACERS


def _move(value: Any, by: int) -> Any:
    """Another value of its kind; not the same one for another step `by`."""
    if value is None:
        return object()
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        moved = ADDRESS.sub(lambda found: hex(int(found[0], 16) ^ (by * 0x3A570)), value)
        return moved if moved != value else f"/other{value}x"
    if isinstance(value, bytes):
        return value + b"x"
    if isinstance(value, int | float | complex):
        return value + by
    if isinstance(value, dict):
        return {**value, "other": 0}
    return type(value)([*value, 0]) if isinstance(value, list | tuple | set | frozenset) else object()


def _find_among(asked: _Asked, log: ReadingLog, others: Sequence[Elsewhere]) -> Influence | None:
    """What a function tells at one place it tells at all: two identities of one object are equal elsewhere, too."""
    allowance = Allowance(*BUDGET)
    for word in dict.fromkeys(log.words[site] for site in log.values):
        named = [{site: of[site] for site in of if log.words[site] == word} for of in others]
        sites = [site for site in log.values if any(site in of for of in named)]
        turned = [] if word == "id" else sites  # whether two identities are one does not change
        for why in allowance.charge_each(_ask(asked, turned, [of for of in named if of])):
            if why:
                return _name(log, sites[0], why)
    return None


def _ask(asked: _Asked, turned: Sequence[Site], others: Sequence[Elsewhere]) -> Iterator[str]:
    """How the answer is another, with each of the other values, and each decision that follows from what is read at
    the places `turned` taken the other way."""
    for of in others:
        yield asked.run(ReadingLog(partial(_take, of)))
    for site in turned:
        yield from _turn_decisions(asked, site)


def _turn_decisions(asked: _Asked, site: Site) -> Iterator[str]:
    flip, count = -1, 1
    while flip < min(count, DECISIONS):
        decisions = Decisions(flip if flip >= 0 else None)
        why = asked.run(ReadingLog(_giving(site, partial(_mark, decisions))))
        if flip < 0:
            if why:
                return  # a marked value is not accepted
            count = len(decisions.lines)
        else:
            yield why
        flip += 1


def _take(of: Elsewhere, site: Site, number: int, value: Any) -> Any:
    values = of.get(site)
    return value if values is None else values[min(number, len(values) - 1)]


def _mark(decisions: Decisions, number: int, value: Any) -> Any:
    return mark_any(value, decisions)


def _giving(site: Site, give: Callable[[int, Any], Any]) -> Callable[[Site, int, Any], Any]:
    """Gives something else at that place alone."""
    return lambda at, number, value: give(number, value) if at == site else value


def _name(log: ReadingLog, site: Site | None, why: str) -> Influence:
    path, place = ("an address, or the thread", None) if site is None else (log.words[site], log.lines[site])
    return Influence(path=path, how=f"it answers differently in {HERE} ({why})", place=place)
