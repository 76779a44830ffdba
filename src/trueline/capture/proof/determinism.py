"""Is the model a function of its inputs? Equal inputs have to give equal answers; else the user's line is named.

Random numbers are found where torch draws them (operators that are tagged as seeded), a state in a buffer where an
operator writes into it, and a state in Python where user code stores into an attribute during a call, or where an
attribute differs after it (a list that grows, a dict that is filled).

Rare behaviour needs more calls: a model that draws from Python's or numpy's generators may drop a layer once in twenty
calls, so it is called many times; one that counts its calls is called with its counters set to large numbers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import CodeType

import numpy as np
import torch

from trueline.bundle.signature import Array
from trueline.capture.export.exported import STATE_HINT
from trueline.capture.model import code_paths, explicit_state
from trueline.capture.model.allowance import Allowance
from trueline.capture.model.arguments import Arguments
from trueline.capture.model.code_paths import Event, SourceLine
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.python_state import find_changed, random_states, state_of, take_snapshot
from trueline.capture.model.reach import attributes
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.state.find_source import find_source
from trueline.capture.proof.state.first_call import explain_change, keeps_limits
from trueline.capture.proof.state.influence import (
    BUDGET,
    Influence,
    Question,
    Restless,
    ask,
    find_influence,
    find_restless,
)
from trueline.capture.proof.state.settings import find_setting_influence
from trueline.capture.proof.state.sources import Readings, find_outside_influence, read_outside
from trueline.capture.proof.state.torch_draws import WriteWatch, find_draw_influence
from trueline.capture.proof.state.unwritten import FILLED, FillEmpty
from trueline.capture.proof.surroundings.further_inputs import choose_alike, choose_other_ways, reads_outside
from trueline.capture.proof.surroundings.influence import find_surrounding_influence
from trueline.errors import CaptureError, NotProven, join_names
from trueline.runtime import compare

UNSTEADY = "the model is not deterministic in evaluation mode"
RANDOM_HINT = (
    "draw them only `if self.training`, or take them as an input; if the answers are meant to be random, "
    "`trueline capture --allow-random` compares their distribution"
)
OUTSIDE_HINT = (
    "no program can hold a draw of Python's or numpy's: draw only `if self.training`, take the numbers as an input, or "
    "draw them with torch"
)
ATTRIBUTE_HINT = (
    "a plain attribute is no state that a program can hold: make it a buffer (register_buffer; `trueline doctor` shows "
    "the edit where it is proven) and capture with --state explicit, or write only `if self.training`"
)
EMPTY_HINT = "write torch.zeros in place of torch.empty, or write each element before it is read"
ELSEWHERE_HINT = (
    "a program depends on its inputs alone: take the value as an input, or read it once in __init__ and keep it"
)
MANY, LOOK, LIVELY, FURTHER_S = 3_000, (0.1, 50), (1.0, 400), 2.0
"""Calls of one input, and the seconds and number of cheap calls after which no further one is made, the latter for a
model in which something changes from call to call; seconds for further inputs, the first of which gets its time."""
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
NAMES, ORDERS = 5, 4
"""Names in a message; pairs of inputs of the same sizes that are given in either order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsteady:
    """Why a model is no function of its inputs, and the user's line if it was found."""

    why: str
    place: SourceLine | None
    hint: str
    random: bool = False
    """Whether random numbers of torch are the only reason."""

    def as_error(self) -> NotProven:
        return NotProven(self.why + (f"; see {self.place}" if self.place else ""), hint=self.hint)


def check_twice(eager: EagerSession) -> Unsteady | None:
    """Runs the example twice. None when the answers agree and are numbers, and no buffer has changed."""
    users = explicit_state.users_own(eager.module)
    before = {} if users is not eager.module else {name: value.clone() for name, value in users.named_buffers()}
    try:
        first = eager.run(eager.example)
        comparison = compare.compare(first, eager.run(eager.example))
    except CaptureError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's forward, which answered its example before
        return _refusing(error)
    for name, array in first.items():
        if array.dtype.kind == "f" and np.isnan(array).any():
            count = int(np.isnan(array).sum())
            return Unsteady(
                why=f"the model answers NaN to its own example, in {count} of {array.size} elements of '{name}'",
                place=None,
                hint="look at the parameters of the checkpoint and at the example: a trained model answers numbers",
            )
    after = dict(users.named_buffers())
    kept = all(name in after and explicit_state.equal(value, after[name]) for name, value in before.items())
    if not (comparison.agrees and kept):
        return find_cause(eager, comparison.reason)
    if not eager.changed or keeps_limits(eager):
        return None
    why, hint = explain_change(eager)
    return Unsteady(why=why, hint=hint, place=code_paths.writing_line(users, eager.changed))


def _refusing(error: Exception) -> Unsteady:
    """Why a model cannot be served that answered its example once: a server calls it in other threads than the one that
    made it, and more than once."""
    why = f"the model answers its example once, and raises {type(error).__name__} when it is called again, in another "
    hint = (
        "a server calls a model many times, and in threads of its own: open what belongs to one thread in that thread"
    )
    return Unsteady(why=f"{why}thread: {error}", place=code_paths.users_line(error), hint=hint)


def find_cause(eager: EagerSession, reason: str) -> Unsteady:
    """Why a model answers equal inputs differently (`reason` says how; empty: a call changes its buffers). Calls it
    once more, to see whether random numbers are drawn, or something is written, and where."""
    users = explicit_state.users_own(eager.module)
    watch = WriteWatch(list(users.buffers()))
    before, drawn = take_snapshot(users), random_states()
    with code_paths.watch() as way, watch:
        eager.run(eager.example)
    changed = find_changed(before, take_snapshot(users))
    differs = f"it answers equal inputs differently ({reason})" if reason else "a call changes them"
    if watch.draws and reason:
        operator, place = watch.draws[0]
        why = f"{UNSTEADY}: {operator} draws random numbers, and {differs}"
        return Unsteady(why=why, place=place, hint=RANDOM_HINT, random=_same_when_seeded(eager))
    if reason:
        found = _find_draws(eager, way, differs, shared=random_states() != drawn, changed=changed)
        if found is not None:
            return found
    args, kwargs = eager.calling.arguments(eager.calling.example)
    plain = {key: value for key, value in kwargs.items() if not key.startswith(explicit_state.GIVEN)}
    buffers = () if users is not eager.module else explicit_state.written_buffers(users, [Arguments(args, plain)])
    if buffers:
        names = {name.rpartition(".")[2] for name in buffers}
        place = next((place for place in watch.writes if place is not None), None) or _storing_line(way, names)
        why = f"the model keeps a state in its buffers ({join_names(buffers)}): {differs}"
        return Unsteady(why=why, place=place, hint=f"A served program has no memory. {STATE_HINT}")
    if reason and not changed:
        question = ask(eager, eager.example)
        found = _check_unwritten(question) if question is not None else None
        if found is not None:
            return found
    stored = list(dict.fromkeys(name for name, _ in _accesses(way))) or list(changed)
    where = f" in the Python attributes it stores ({join_names(stored)})" if stored else ""
    place = _storing_line(way) or _loading_line(way, changed)
    return Unsteady(why=f"the model keeps a state{where}: {differs}", place=place, hint=ATTRIBUTE_HINT)


def _find_draws(
    eager: EagerSession, way: Sequence[Event], differs: str, *, shared: bool, changed: Sequence[str]
) -> Unsteady | None:
    """What a model whose answers differ draws or reads outside of torch: from the `shared` generators of Python and
    numpy, from one of its own, or from the machine, maybe at one call in many. A clock is the cause only in a model in
    which nothing has `changed`."""
    why = f"{UNSTEADY}: it draws random numbers outside of torch"
    if shared:
        return Unsteady(why=f"{why}, and {differs}", place=code_paths.find_line(way, "rand"), hint=OUTSIDE_HINT)
    own = next(
        (
            kept
            for kept in attributes(explicit_state.users_own(eager.module))
            if kept.path.partition("[")[0] in changed and state_of(kept.value)
        ),
        None,
    )
    if own is not None:
        place = code_paths.find_line(way, own.attribute) or _loading_line(way, changed)
        return Unsteady(why=f"{why} ({own.path}), and {differs}", place=place, hint=OUTSIDE_HINT)
    source = find_source(question) if (question := ask(eager, eager.example)) is not None else None
    if source is None or (changed and not source.draws):
        return None
    if source.draws:
        return Unsteady(why=f"{why} ({source.path}), and {differs}", place=source.place, hint=OUTSIDE_HINT)
    return _beside_inputs(replace(source, how=differs))


def check_order(eager: EagerSession, observations: Sequence[Observation]) -> Unsteady | None:
    """Whether an answer depends on what the model was given before; a table that is made for a size does no harm. The
    model as before its first call answers all inputs in the opposite order, then pairs, then each alone: the answers
    have to be those that it gave."""
    answered = [seen for seen in observations if seen.outputs is not None and seen.draws is None]
    changed = eager.recall.find_changed()
    allowance = Allowance(*BUDGET)
    plain = [seen for seen in answered if not seen.probe.wild]
    for order in (plain[::-1], *_pairs(plain), *([seen] for seen in plain)) if changed else ():
        with allowance.charging():
            found = _replay(eager, order, changed)
        if found is not None:
            return found
        if not allowance.allows():
            break
    if not answered or not (changed or reads_outside(eager)):
        return None
    found = _check_further(eager, choose_other_ways(answered), math.inf if changed else FURTHER_S)
    return found or _check_further(eager, choose_alike(answered), FURTHER_S)


def _replay(eager: EagerSession, order: Sequence[Observation], changed: Sequence[str]) -> Unsteady | None:
    """Whether the model as before its first call answers the inputs in this order as it did. `changed` is what has
    changed since; the first answer may differ before anything changes again."""
    with eager.recall.as_before(), code_paths.watch() as way:
        for seen in order:
            outputs = _answer(eager, seen)
            comparison = compare.compare(seen.outputs or {}, outputs) if outputs is not None else None
            if comparison is not None and not comparison.agrees:
                names = eager.recall.find_changed() or changed
                return Unsteady(
                    why=f"the model keeps a state in the Python attributes it stores ({_some_names(names)}): it "
                    f"answers differently after another input ({comparison.reason})",
                    place=_writing_line(way, names),
                    hint=ATTRIBUTE_HINT,
                )
    return None


def _check_further(eager: EagerSession, inputs: Iterable[Mapping[str, Array]], seconds: float) -> Unsteady | None:
    """Whether what changes from call to call, or is read outside, changes the answer to further inputs."""
    found = Allowance(seconds, 0).charge_each(_find_further(eager, one) for one in inputs)
    return next((one for one in found if one is not None), None)


def _find_further(eager: EagerSession, inputs: Mapping[str, Array]) -> Unsteady | None:
    question = ask(eager, inputs)
    if question is None:
        return None
    found = _check_influence(question, find_restless(eager, inputs), read_outside(question)) or _check_draws(question)
    return found or _beside_inputs(find_surrounding_influence(question))


def _check_influence(question: Question, restless: Restless, readings: Readings) -> Unsteady | None:
    kept = find_influence(question, restless)
    found = kept or find_outside_influence(question, readings) or find_setting_influence(question)
    if found is None:
        return None
    if found.draws:
        why = f"{UNSTEADY}: it draws random numbers outside of torch ({found.path}), and {found.how}"
        return Unsteady(why=why, place=found.place, hint=OUTSIDE_HINT)
    if kept is not None:
        why = f"the model keeps a state in the Python attribute {found.path}: {found.how}"
        return Unsteady(why=why, place=found.place, hint=ATTRIBUTE_HINT)
    return _beside_inputs(found)


def _beside_inputs(found: Influence | None) -> Unsteady | None:
    why = f"the model depends on something beside its inputs ({found.path}): {found.how}" if found else ""
    return Unsteady(why=why, place=found.place, hint=ELSEWHERE_HINT) if found else None


def _some_names(names: Sequence[str]) -> str:
    return join_names(names[:NAMES]) + (f" and {len(names) - NAMES} others" if len(names) > NAMES else "")


def _writing_line(way: Sequence[Event], names: Sequence[str]) -> SourceLine | None:
    """The line that stores into one of `names`, or else loads one, or else stores any."""
    last = {path.rpartition(".")[2] for path in names}
    return _storing_line(way, last) or _loading_line(way, names) or _storing_line(way)


def _pairs(observations: Sequence[Observation]) -> Iterator[tuple[Observation, Observation]]:
    """Pairs of the same sizes and other values, each of other sizes than the last."""
    by_sizes: dict[object, list[Observation]] = {}
    for seen in observations:
        by_sizes.setdefault(tuple(value.shape for value in seen.probe.inputs.values()), []).append(seen)
    yield from islice(((some[0], some[-1]) for some in by_sizes.values() if len(some) > 1), ORDERS)


def _answer(eager: EagerSession, seen: Observation) -> dict[str, Array] | None:
    try:
        return eager.run(seen.probe.inputs)
    except Exception:  # noqa: BLE001 - the user's forward in a state that it had only once: no answer to compare
        return None


def check_rare(eager: EagerSession) -> Unsteady | None:
    """Why a model that answered twice the same is no function of its inputs; None when nothing shows it."""
    question = ask(eager, eager.example)
    if question is None:
        return None
    drawn = random_states()
    restless = find_restless(eager, eager.example)
    draws, readings = random_states() != drawn, read_outside(question)
    found = _check_influence(question, restless, readings) or _check_unwritten(question) or _check_draws(question)
    found = found or _beside_inputs(find_surrounding_influence(question))
    if found is not None:
        return found
    return _check_many_calls(question, readings, draws=draws, lively=bool(draws or restless or readings.lines))


def _check_draws(question: Question) -> Unsteady | None:
    """Whether the answer depends on what torch draws."""
    found = find_draw_influence(question)
    if found is None:
        return None
    why = f"{UNSTEADY}: {found.path} draws random numbers, and {found.how}"
    return Unsteady(why=why, place=found.place, hint=RANDOM_HINT, random=_same_when_seeded(question.eager))


def _check_unwritten(question: Question) -> Unsteady | None:
    """Whether the answer depends on memory that nothing has written."""
    answers = []
    for value in FILLED:
        watch = FillEmpty(value)
        try:
            with watch:
                answers.append(question.eager.run(question.inputs))
        except Exception:  # noqa: BLE001 - the user's forward with other numbers: no answer to compare
            return None
        if not watch.lines:
            return None
    comparison = compare.compare(*answers)
    if comparison.agrees:
        return None
    why = f"{UNSTEADY}: it reads memory that nothing has written, and its answer depends on that ({comparison.reason})"
    return Unsteady(why=why, place=next((line for line in watch.lines if line), None), hint=EMPTY_HINT)


def _check_many_calls(question: Question, readings: Readings, *, draws: bool, lively: bool) -> Unsteady | None:
    """Calls the model again and again, more often where something changes from call to call."""
    allowance, eager = Allowance(*(LIVELY if lively else LOOK)), question.eager
    for number in range(2, MANY + 1):
        with allowance.charging():
            try:
                comparison = compare.compare(question.answer, eager.run(eager.example))
            except Exception as error:  # noqa: BLE001 - the user's forward, which answered the same input before
                comparison = compare.refusal(f"it raises {type(error).__name__}: {error}")
        if not comparison.agrees:
            return _differing(question, readings, draws, f"{number} ({comparison.reason})")
        if not allowance.allows():
            break
    return None


def _differing(question: Question, readings: Readings, draws: bool, when: str) -> Unsteady:
    """Why its answer to the same input differed at a later call."""
    differs = f"its answer to the same input differed at call {when}"
    if draws or "urandom" in readings.lines:
        place = readings.lines.get("urandom") or code_paths.find_line(question.way, "rand")
        why = f"{UNSTEADY}: it draws random numbers outside of torch, and {differs}"
        return Unsteady(why=why, place=place, hint=OUTSIDE_HINT)
    names = question.eager.recall.find_changed()
    if names:
        why, hint = f"in the Python attributes it stores ({_some_names(names)})", ATTRIBUTE_HINT
    else:
        why, hint = "that none of its attributes shows, as of a library or a database", ELSEWHERE_HINT
    forward = code_paths.forward_of(explicit_state.users_own(question.eager.module))
    place = _writing_line(question.way, names) or forward
    return Unsteady(why=f"the model keeps a state {why}: {differs}", place=place, hint=hint)


def _same_when_seeded(eager: EagerSession) -> bool:
    """Whether the answer is the same from the same seed: then there is no state beside the generator's."""
    answers = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(0)
            answers.append(eager.run(eager.example))
    return compare.compare(*answers).agrees


def _storing_line(way: Sequence[Event], names: set[str] | None = None) -> SourceLine | None:
    """The first line that stores into an attribute, or, where `names` are given, into a variable of one of these."""
    stores = _accesses(way, _STORES if names else _STORES[:1])
    return next((place for name, place in stores if names is None or name in names), None)


def _loading_line(way: Sequence[Event], paths: Sequence[str]) -> SourceLine | None:
    """The first line that loads an attribute at the end of one of `paths`."""
    names = {path.rpartition(".")[2] for path in paths}
    return next((place for name, place in _accesses(way, ("LOAD_ATTR", "LOAD_GLOBAL")) if name in names), None)


def _accesses(way: Sequence[Event], operations: Sequence[str] = _STORES[:1]) -> Iterator[tuple[str, SourceLine]]:
    """Attributes that were stored into (or, by other operations, loaded), in order, and where."""
    known: dict[CodeType, dict[int, tuple[str, SourceLine]]] = {}
    for _, code, offset in way:
        if code not in known:
            known[code] = {
                instruction.offset: (str(instruction.argval), SourceLine(file=code.co_filename, line=line))
                for instruction, line in code_paths.instructions(code)
                if instruction.opname in operations
            }
        if offset in known[code]:
            yield known[code][offset]
