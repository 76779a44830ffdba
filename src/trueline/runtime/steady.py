"""Is the model a function of its inputs? Asked twice the same, it has to answer the same; else the line is named.

Random numbers are found where torch draws them (operators that are tagged as seeded), a memory in a buffer where an
operator writes into it, and a memory in Python where user code stores into an attribute while it is called, or where an
attribute is another after the call (a list that grows, a dict that is filled).
"""

from __future__ import annotations

import dis
import random
import sys
from collections import deque
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from trueline.errors import listed
from trueline.runtime import compare, explicit, first_call, paths
from trueline.runtime.explicit import Asked
from trueline.runtime.export import STATE_HINT
from trueline.runtime.paths import Event, Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trueline.runtime.eager import EagerSession

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
        if paths.is_users(frame.f_code.co_filename):
            return Place(file=frame.f_code.co_filename, line=frame.f_lineno)
        frame = frame.f_back
    return None


def unsteady(eager: EagerSession) -> Unsteady | None:
    """Asks the example twice. None when the answers agree and are numbers, and no buffer is another than before."""
    users = explicit.users_own(eager.module)
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
    kept = all(name in left and explicit.equal(value, left[name]) for name, value in before.items())
    if found.agrees and kept:
        return _changed_itself(eager) if eager.changed else None
    return searched(eager, found.reason)


def _changed_itself(eager: EagerSession) -> Unsteady:
    """Of a model that is steady now, and was another before it was called."""
    return Unsteady(
        why=f"the model changes itself when it is first called ({listed(eager.changed)}): what it answers depends on "
        "the question that came first",
        place=first_call.writing_line(explicit.users_own(eager.module), eager.changed),
        hint="call it on its data once and capture what it then is (a checkpoint of it), or write only "
        "`if self.training`",
    )


def searched(eager: EagerSession, reason: str) -> Unsteady:
    """Why a model that answers differently does so: asks once more, to see whether random numbers are drawn, or
    something is written, and where.
    """
    users = explicit.users_own(eager.module)
    watch = _Watch(list(users.buffers()))
    held, drawn = _held(users), random_states()
    with paths.watching() as way, watch:
        eager.run(eager.example)
    changed = [name for name, trace in _held(users).items() if held.get(name) != trace]
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
            place=paths.reading(way, "rand"),
            hint=OUTSIDE_HINT,
        )
    again = f"it answers differently when it is asked the same again ({reason})" if reason else "a call changes them"
    args, kwargs = eager.calling.arguments(eager.calling.example)
    plain = {key: value for key, value in kwargs.items() if not key.startswith(explicit.GIVEN)}
    buffers = () if users is not eager.module else explicit.written(users, [Asked(args, plain)])
    if buffers:
        place = next((place for place in watch.writes if place is not None), None) or _stored(
            way, {name.rpartition(".")[2] for name in buffers}
        )
        why = f"the model keeps a state in its buffers ({listed(buffers)}): {again}"
        return Unsteady(why=why, place=place, hint=f"A served program has no memory. {STATE_HINT}")
    attributes = list(dict.fromkeys(name for name, _ in _stores_on(way))) or changed
    where = f" in the Python attributes it stores ({listed(attributes)})" if attributes else ""
    place = _stored(way) or _named(way, {name.rpartition(".")[2] for name in changed})
    return Unsteady(why=f"the model keeps a state{where}: {again}", place=place, hint=ATTRIBUTE_HINT)


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


_OWN = frozenset(vars(torch.nn.Module()))
"""What every module has: no user's attribute."""
_DEPTH, _WIDTH = 4, 1000


def _held(module: torch.nn.Module) -> dict[str, object]:
    """A trace of what each attribute holds, by its name; parameters, buffers and submodules are no attributes here.

    >>> module = torch.nn.Module()
    >>> module.seen = [1]
    >>> before = _held(module)
    >>> module.seen.append(2)
    >>> before["seen"] == _held(module)["seen"]
    False
    """
    return {
        f"{prefix}.{name}" if prefix else name: _trace(value, _DEPTH)
        for prefix, one in module.named_modules()
        for name, value in vars(one).items()
        if name not in _OWN
    }


def _trace(value: Any, depth: int) -> object:
    """Something that is another when `value` has been written to, as far as it is looked into."""
    if isinstance(value, int | float | str | bytes | None):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), tuple(value.shape), value._version
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes() if value.size <= _WIDTH else id(value)
    if depth and isinstance(value, dict):
        return len(value), [(str(key), _trace(one, depth - 1)) for key, one in islice(value.items(), _WIDTH)]
    if depth and isinstance(value, list | tuple | set | frozenset | deque):
        return len(value), [_trace(one, depth - 1) for one in islice(value, _WIDTH)]
    if depth and hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module) and not callable(value):
        return id(value), _trace(vars(value), depth - 1)
    return id(value)


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
