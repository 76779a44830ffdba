"""Is the model a function of its inputs? Equal inputs have to give equal answers; else the user's line is named.

Random numbers are found where torch draws them (operators that are tagged as seeded), a state in a buffer where an
operator writes into it, and a state in Python where user code stores into an attribute during a call, or where an
attribute differs after it (a list that grows, a dict that is filled).

Rare behaviour needs more calls: a model that draws from Python's or numpy's generators may drop a layer once in twenty
calls, so it is called many times; one that counts its calls is called with its counters set to large numbers.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from trueline.bundle.signature import Array
from trueline.capture.export.exported import STATE_HINT
from trueline.capture.model import code_paths, explicit_state
from trueline.capture.model.arguments import Arguments
from trueline.capture.model.code_paths import Event, SourceLine
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.python_state import KeptValue, attributes, defaults, take_snapshot
from trueline.capture.proof.observe import Observation
from trueline.errors import NotProven, join_names
from trueline.runtime import compare

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
MANY, BUDGET_S = 200, 2.0
"""Calls of a model that draws outside of torch, and the seconds of this thread after which no further one is made."""
WIDTH = 100
"""Numbers of a collection that are looked at."""
COUNTS = (9, 10, 99, 100, 999, 1000, 9999, 10_000, 1_000_000)
"""Values that a counter of calls is set to."""
ORDERS = 4
"""Pairs of inputs of the same sizes that are given in either order."""


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


class _WriteWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that draw random numbers or write into buffers, with the user's line that called each."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # see observe.Careful

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[tuple[str, SourceLine | None]] = []
        self.writes: list[SourceLine | None] = []
        self._memory = {_memory(buffer) for buffer in buffers} - {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*args, **(kwargs or {}))  # its branches are not watched
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws.append((str(func), code_paths.current_line()))
        written = args[0] if args and func._schema.is_mutable else None
        if isinstance(written, torch.Tensor) and _memory(written) in self._memory:
            self.writes.append(code_paths.current_line())
        return func(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> int:
    """Address of the tensor's elements; 0 where they are not in one place."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def check_twice(eager: EagerSession) -> Unsteady | None:
    """Runs the example twice. None when the answers agree and are numbers, and no buffer has changed."""
    users = explicit_state.users_own(eager.module)
    before = {} if users is not eager.module else {name: value.clone() for name, value in users.named_buffers()}
    first = eager.run(eager.example)
    comparison = compare.compare(first, eager.run(eager.example))
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
    if not eager.changed:
        return None
    return Unsteady(
        why=f"the model changes itself when it is first called ({join_names(eager.changed)}): what it answers depends "
        "on the input that came first",
        place=code_paths.writing_line(users, eager.changed),
        hint="call it on its data once and capture what it then is (a checkpoint of it), or write only "
        "`if self.training`",
    )


def find_cause(eager: EagerSession, reason: str) -> Unsteady:
    """Why a model answers equal inputs differently (`reason` says how; empty: a call changes its buffers). Calls it
    once more, to see whether random numbers are drawn, or something is written, and where."""
    users = explicit_state.users_own(eager.module)
    watch = _WriteWatch(list(users.buffers()))
    before, drawn = take_snapshot(users), random_states()
    with code_paths.watch() as way, watch:
        eager.run(eager.example)
    changed = [name for name, trace in take_snapshot(users).items() if before.get(name) != trace]
    differs = f"it answers equal inputs differently ({reason})" if reason else "a call changes them"
    unsteady = "the model is not deterministic in evaluation mode"
    if watch.draws and reason:
        operator, place = watch.draws[0]
        why = f"{unsteady}: {operator} draws random numbers, and {differs}"
        return Unsteady(why=why, place=place, hint=RANDOM_HINT, random=_same_when_seeded(eager))
    if random_states() != drawn and reason:
        why = f"{unsteady}: it draws random numbers outside of torch, and {differs}"
        return Unsteady(why=why, place=code_paths.find_line(way, "rand"), hint=OUTSIDE_HINT)
    args, kwargs = eager.calling.arguments(eager.calling.example)
    plain = {key: value for key, value in kwargs.items() if not key.startswith(explicit_state.GIVEN)}
    buffers = () if users is not eager.module else explicit_state.written_buffers(users, [Arguments(args, plain)])
    if buffers:
        names = {name.rpartition(".")[2] for name in buffers}
        place = next((place for place in watch.writes if place is not None), None) or _storing_line(way, names)
        why = f"the model keeps a state in its buffers ({join_names(buffers)}): {differs}"
        return Unsteady(why=why, place=place, hint=f"A served program has no memory. {STATE_HINT}")
    stored = list(dict.fromkeys(name for name, _ in _accesses(way))) or changed
    where = f" in the Python attributes it stores ({join_names(stored)})" if stored else ""
    place = _storing_line(way) or _loading_line(way, changed)
    return Unsteady(why=f"the model keeps a state{where}: {differs}", place=place, hint=ATTRIBUTE_HINT)


def check_order(eager: EagerSession, observations: Sequence[Observation]) -> Unsteady | None:
    """Whether the model keeps values of its inputs in its attributes; a table that is made for a size does no harm. The
    model as before its first call gets an input, and the same after another of these sizes: the answers have to
    agree."""
    for first, second in _pairs(observations):
        names = eager.recall.find_changed()
        if not names:
            return None
        with eager.recall.as_before():
            alone = _answer(eager, second)
        with eager.recall.as_before(), code_paths.watch() as way:
            _answer(eager, first)
            after = _answer(eager, second)
        if alone is None or after is None:
            continue
        comparison = compare.compare(alone, after)
        if not comparison.agrees:
            return Unsteady(
                why=f"the model keeps a state in the Python attributes it stores ({join_names(names)}): it answers "
                f"differently after another input of the same sizes ({comparison.reason})",
                place=_storing_line(way) or _loading_line(way, names),
                hint=ATTRIBUTE_HINT,
            )
    return None


def _pairs(observations: Sequence[Observation]) -> Iterator[tuple[Observation, Observation]]:
    """Pairs of the same sizes and other values, each of other sizes than the last."""
    by_sizes: dict[object, list[Observation]] = {}
    for seen in observations:
        if seen.outputs is not None and seen.draws is None and not seen.probe.wild:
            by_sizes.setdefault(tuple(value.shape for value in seen.probe.inputs.values()), []).append(seen)
    yield from islice(((some[0], some[-1]) for some in by_sizes.values() if len(some) > 1), ORDERS)


def _answer(eager: EagerSession, seen: Observation) -> dict[str, Array] | None:
    try:
        return eager.run(seen.probe.inputs)
    except Exception:  # noqa: BLE001 - the user's forward in a state that it had only once: no answer to compare
        return None


def check_rare(eager: EagerSession) -> Unsteady | None:
    """Why a model that answered twice the same is no function of its inputs; None when nothing shows it."""
    users = explicit_state.users_own(eager.module)
    drawn, counters = random_states(), _whole_numbers(users)
    with code_paths.watch() as way:
        answer = eager.run(eager.example)
    if random_states() != drawn:
        return _check_many_calls(eager, answer, way)
    before = {one.path: one.value for one in counters}
    changed = [one for one in _whole_numbers(users) if before.get(one.path) != one.value]
    return _check_counts(eager, answer, changed, way)


def _check_many_calls(eager: EagerSession, answer: dict[str, Array], way: Sequence[Event]) -> Unsteady | None:
    started = time.thread_time()
    for number in range(2, MANY + 1):
        comparison = compare.compare(answer, eager.run(eager.example))
        if not comparison.agrees:
            return Unsteady(
                why="the model is not deterministic in evaluation mode: it draws random numbers outside of torch, and "
                f"its answer to the same input differed at call {number} ({comparison.reason})",
                place=code_paths.find_line(way, "rand"),
                hint=OUTSIDE_HINT,
            )
        if time.thread_time() - started > BUDGET_S:
            break
    return None


def _whole_numbers(module: torch.nn.Module) -> list[KeptValue]:
    """KeptValue values that are a whole number, or hold one."""
    numbers: list[KeptValue] = []
    for kept in chain(attributes(module), defaults(module)):
        value = kept.value
        if type(value) is int:
            numbers.append(kept)
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        numbers += [
            KeptValue(path=f"{kept.path}[{key!r}]", holder=value, name=key, value=one)
            for key, one in islice(inside, WIDTH)
            if type(one) is int
        ]
    return numbers


def _check_counts(
    eager: EagerSession, answer: dict[str, Array], counters: Sequence[KeptValue], way: Sequence[Event]
) -> Unsteady | None:
    for counter in counters:
        for count in COUNTS:
            counter.assign(count)
            try:
                comparison = compare.compare(answer, eager.run(eager.example))
            except Exception:  # noqa: BLE001 - the user's forward at a count it may not know: no answer to compare
                continue
            finally:
                counter.assign(counter.value)
            if not comparison.agrees:
                return Unsteady(
                    why=f"the model keeps a state in the Python attribute {counter.path}: it answers differently when "
                    f"that is {count} ({comparison.reason})",
                    place=code_paths.find_line(way, counter.path.partition("[")[0].rpartition(".")[2]),
                    hint=ATTRIBUTE_HINT,
                )
    return None


def random_states() -> tuple[object, object]:
    """Those of Python's and numpy's shared generators, in a form that can be compared."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)


def _same_when_seeded(eager: EagerSession) -> bool:
    """Whether the answer is the same from the same seed: then there is no state beside the generator's."""
    answers = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(0)
            answers.append(eager.run(eager.example))
    return compare.compare(*answers).agrees


def _storing_line(way: Sequence[Event], names: set[str] | None = None) -> SourceLine | None:
    """The first line that stores into an attribute, one of `names` if they are given."""
    return next((place for name, place in _accesses(way) if names is None or name in names), None)


def _loading_line(way: Sequence[Event], paths: Sequence[str]) -> SourceLine | None:
    """The first line that loads an attribute at the end of one of `paths`."""
    names = {path.rpartition(".")[2] for path in paths}
    return next((place for name, place in _accesses(way, "LOAD_ATTR") if name in names), None)


def _accesses(way: Sequence[Event], operation: str = "STORE_ATTR") -> Iterator[tuple[str, SourceLine]]:
    """Attributes that were stored into (or, by another operation, loaded), in order, and where."""
    known: dict[CodeType, dict[int, tuple[str, SourceLine]]] = {}
    for _, code, offset in way:
        if code not in known:
            known[code] = {
                instruction.offset: (str(instruction.argval), SourceLine(file=code.co_filename, line=line))
                for instruction, line in code_paths.instructions(code)
                if instruction.opname == operation
            }
        if offset in known[code]:
            yield known[code][offset]
