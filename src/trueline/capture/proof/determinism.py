"""Is the model a function of its inputs? Asked twice the same, it has to answer the same; else the line is named.

Random numbers are found where torch draws them (operators that are tagged as seeded), a memory in a buffer where an
operator writes into it, and a memory in Python where user code stores into an attribute while it is called, or where an
attribute is another after the call (a list that grows, a dict that is filled).
"""

from __future__ import annotations

import dis
import random
import sys
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from trueline.capture.export.exported import STATE_HINT
from trueline.capture.model import code_paths, explicit_state, first_call
from trueline.capture.model.code_paths import Event, Place
from trueline.capture.model.explicit_state import Asked
from trueline.capture.model.python_state import held
from trueline.errors import join_names
from trueline.runtime import compare

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trueline.bundle.signature import Array
    from trueline.capture.model.eager import EagerSession
    from trueline.capture.proof.observe import Observation

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsteady:
    """Why a model is no function of its inputs, and the user's line if it was found."""

    why: str
    place: Place | None
    hint: str
    random: bool = False
    """Whether random numbers are all that there is to it."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that draw random numbers or write into buffers, with the user's line that called each."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # see wild.Careful

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[tuple[str, Place | None]] = []
        self.writes: list[Place | None] = []
        self._memory = {_memory(buffer) for buffer in buffers} - {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*args, **(kwargs or {}))  # what its branches do is not watched
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws.append((str(func), _calling_line()))
        written = args[0] if args and func._schema.is_mutable else None
        if isinstance(written, torch.Tensor) and _memory(written) in self._memory:
            self.writes.append(_calling_line())
        return func(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> int:
    """Where the tensor's elements lie; 0 where that is no one place."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _calling_line() -> Place | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if code_paths.is_users(frame.f_code.co_filename):
            return Place(file=frame.f_code.co_filename, line=frame.f_lineno)
        frame = frame.f_back
    return None


def unsteady(eager: EagerSession) -> Unsteady | None:
    """Asks the example twice. None when the answers agree and are numbers, and no buffer is another than before."""
    users = explicit_state.users_own(eager.module)
    before = {} if users is not eager.module else {name: value.clone() for name, value in users.named_buffers()}
    first = eager.run(eager.example)
    found = compare.compare(first, eager.run(eager.example))
    for name, array in first.items():
        if array.dtype.kind == "f" and np.isnan(array).any():
            count = int(np.isnan(array).sum())
            return Unsteady(
                why=f"the model answers NaN to its own example, in {count} of {array.size} elements of '{name}'",
                place=None,
                hint="look at the parameters of the checkpoint and at the example: a trained model answers numbers",
            )
    left = dict(users.named_buffers())
    kept = all(name in left and explicit_state.equal(value, left[name]) for name, value in before.items())
    if found.agrees and kept:
        return _changed_itself(eager) if eager.changed else None
    return searched(eager, found.reason)


def _changed_itself(eager: EagerSession) -> Unsteady:
    """Of a model that is steady now, and was another before it was called."""
    return Unsteady(
        why=f"the model changes itself when it is first called ({join_names(eager.changed)}): what it "
        "answers depends on the question that came first",
        place=first_call.writing_line(explicit_state.users_own(eager.module), eager.changed),
        hint="call it on its data once and capture what it then is (a checkpoint of it), or write only "
        "`if self.training`",
    )


def searched(eager: EagerSession, reason: str) -> Unsteady:
    """Why a model that answers differently does so: asks once more, to see whether random numbers are drawn, or
    something is written, and where.
    """
    users = explicit_state.users_own(eager.module)
    watch = _Watch(list(users.buffers()))
    before, drawn = held(users), random_states()
    with code_paths.watching() as way, watch:
        eager.run(eager.example)
    changed = [name for name, trace in held(users).items() if before.get(name) != trace]
    if watch.draws and reason:
        operator, place = watch.draws[0]
        return Unsteady(
            why=f"the model is not deterministic in evaluation mode: {operator} draws random numbers, and it answers "
            f"differently when it is asked the same again ({reason})",
            place=place,
            hint=RANDOM_HINT,
            random=_same_when_seeded(eager),
        )
    if random_states() != drawn and reason:
        return Unsteady(
            why="the model is not deterministic in evaluation mode: it draws random numbers outside of torch, and it "
            f"answers differently when it is asked the same again ({reason})",
            place=code_paths.reading(way, "rand"),
            hint=OUTSIDE_HINT,
        )
    again = f"it answers differently when it is asked the same again ({reason})" if reason else "a call changes them"
    args, kwargs = eager.calling.arguments(eager.calling.example)
    plain = {key: value for key, value in kwargs.items() if not key.startswith(explicit_state.GIVEN)}
    buffers = () if users is not eager.module else explicit_state.written(users, [Asked(args, plain)])
    if buffers:
        place = next((place for place in watch.writes if place is not None), None) or _stored(
            way, {name.rpartition(".")[2] for name in buffers}
        )
        why = f"the model keeps a state in its buffers ({join_names(buffers)}): {again}"
        return Unsteady(why=why, place=place, hint=f"A served program has no memory. {STATE_HINT}")
    attributes = list(dict.fromkeys(name for name, _ in _stores_on(way))) or changed
    where = f" in the Python attributes it stores ({join_names(attributes)})" if attributes else ""
    place = _stored(way) or _named(way, {name.rpartition(".")[2] for name in changed})
    return Unsteady(why=f"the model keeps a state{where}: {again}", place=place, hint=ATTRIBUTE_HINT)


ORDERS = 4
"""Pairs of questions of the same sizes that are asked in either order."""


def recalled(eager: EagerSession, observations: Sequence[Observation]) -> Unsteady | None:
    """Why a model that keeps something in its attributes is no function of its inputs; None when it keeps nothing, or
    nothing that the values of a question decide, as a table that is made for a size.

    A second question is asked of the model as it was before it was ever called, and again after a first one of the same
    sizes: the answer has to be the same.
    """
    for first, second in _alike(observations):
        names = eager.recall.changed()
        if not names:
            return None
        with eager.recall.as_before():
            alone = _answer(eager, second)
        with eager.recall.as_before(), code_paths.watching() as way:
            _answer(eager, first)
            after = _answer(eager, second)
        if alone is None or after is None:
            continue
        found = compare.compare(alone, after)
        if not found.agrees:
            return Unsteady(
                why=f"the model keeps a state in the Python attributes it stores ({join_names(names)}): it answers "
                f"differently after another question of the same sizes ({found.reason})",
                place=_stored(way) or _named(way, {name.rpartition(".")[2] for name in names}),
                hint=ATTRIBUTE_HINT,
            )
    return None


def _alike(observations: Sequence[Observation]) -> Iterator[tuple[Observation, Observation]]:
    """Pairs of the same sizes and other values, each of other sizes than the last."""
    by_sizes: dict[object, list[Observation]] = {}
    for seen in observations:
        if seen.outputs is not None and seen.draws is None and not seen.probe.wild:
            by_sizes.setdefault(tuple(value.shape for value in seen.probe.inputs.values()), []).append(seen)
    yield from islice(((some[0], some[-1]) for some in by_sizes.values() if len(some) > 1), ORDERS)


def _answer(eager: EagerSession, seen: Observation) -> dict[str, Array] | None:
    try:
        return eager.run(seen.probe.inputs)
    except Exception:  # noqa: BLE001 - the user's forward in a state that it was in only once: no answer to compare
        return None


def random_states() -> tuple[object, object]:
    """Those of Python's and numpy's shared generators, in a form that can be compared."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)


def _same_when_seeded(eager: EagerSession) -> bool:
    """Whether the answer is the same from the same seed: what is left then is no state."""
    answers = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(0)
            answers.append(eager.run(eager.example))
    return compare.compare(*answers).agrees


def _stored(way: Sequence[Event], names: set[str] | None = None) -> Place | None:
    """The first line that stores into an attribute, one of `names` if they are given."""
    return next((place for name, place in _stores_on(way) if names is None or name in names), None)


def _named(way: Sequence[Event], names: set[str]) -> Place | None:
    """The first line that takes an attribute of one of `names`."""
    return next((place for name, place in _stores_on(way, "LOAD_ATTR") if name in names), None)


def _stores_on(way: Sequence[Event], operation: str = "STORE_ATTR") -> Iterator[tuple[str, Place]]:
    """Attributes that were stored into (or, by another operation, taken), in order, and where."""
    known: dict[CodeType, dict[int, tuple[str, int]]] = {}
    for _, code, offset in way:
        if code not in known:
            known[code] = _attributes(code, operation)
        if offset in known[code]:
            name, line = known[code][offset]
            yield name, Place(file=code.co_filename, line=line)


def _attributes(code: CodeType, operation: str) -> dict[int, tuple[str, int]]:
    found, line = {}, code.co_firstlineno
    lines = {start: number for start, _, number in code.co_lines() if number}
    for instruction in dis.get_instructions(code):
        line = lines.get(instruction.offset, line)
        if instruction.opname == operation:
            found[instruction.offset] = (str(instruction.argval), line)
    return found
