"""Notes the generators of numpy and `random` that code of the user's seeds in a batch, and where they are at its end.

    rng = np.random.default_rng(batch.step)       seeded: its state here; ended: its state after the batch
    noise = rng.normal(size=batch.inputs.shape)

What numpy draws in C is not seen; that it was drawn shows in the state. numpy's functions make their bit generators by
names of two modules, which are replaced; `random.Random` is a class of Python, whose methods are.
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.random._generator as np_generator
import numpy.random.mtrand as np_legacy
import torch

MOST = 64
"""Generators of a batch."""
_LIBRARIES = tuple({os.path.dirname(path) for path in (torch.__file__, __file__[: __file__.rindex("train")])}) + tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_KINDS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
State = tuple[str, ...]


class SeededGenerator(NamedTuple):
    """A generator in one batch."""

    seeded: State
    """Its state once it was seeded; empty: it was not seen to be."""
    ended: State
    """Its state at the end of the batch, or before something else was put into it."""
    line: str
    """Where the user's code seeds it."""


class NotedSeeds:
    """`begin()` before a batch, `end()` after it: the generators that were seeded in it, and those of `known`.

    `known`: those that the user's code has by name.
    """

    def __init__(self, known: Collection[Any] = ()) -> None:
        self._known = [random._inst, np_legacy._rand, *known]
        self._before = list[State]()
        self._open = list[tuple[Any, State, str]]()
        self._closed = list[SeededGenerator]()

    def begin(self) -> None:
        self._open, self._closed = [], []
        self._before = [_read_state(one) for one in self._known]

    def end(self) -> tuple[list[SeededGenerator], list[SeededGenerator]]:
        for one, _, _ in self._open[:]:
            self._close(one)
        return self._closed, [SeededGenerator((), _read_state(one), "") for one in self._known]

    def were_used(self) -> bool:
        """Whether a generator was seeded in the batch, or one of the user's own has moved."""
        moved = any(_read_state(one) != was for one, was in zip(self._known[2:], self._before[2:], strict=False))
        return moved or bool(self._open or self._closed)

    def note(self, generator: Any) -> None:
        """It was seeded."""
        self._close(generator)
        if len(self._open) + len(self._closed) < MOST:
            self._open.append((generator, _read_state(generator), find_line()))

    def _close(self, generator: Any) -> None:
        """Something else is about to be put into it, or the batch ends."""
        for at, (one, seeded, line) in enumerate(self._open):
            if one is generator:
                self._closed.append(SeededGenerator(seeded, _read_state(one), line))
                del self._open[at]
                return

    def list_replacements(self) -> list[tuple[Any, str, Any]]:
        """Modules or classes, a name in each, and what notes there."""
        legacy = np_legacy._rand
        kinds = {name: _make_noted(getattr(np.random, name), self.note) for name in _KINDS}
        own, plain_seed, plain_put = self, random.Random.seed, random.Random.setstate

        def seed(generator: random.Random, *given: Any, **named: Any) -> None:
            own._close(generator)
            plain_seed(generator, *given, **named)
            own.note(generator)

        def set_python(generator: random.Random, state: Any) -> None:
            own._close(generator)
            plain_put(generator, state)

        def seed_numpy(*given: Any, **named: Any) -> None:
            own._close(legacy)
            legacy.seed(*given, **named)
            own.note(legacy)

        def set_numpy(state: Any) -> None:
            own._close(legacy)
            legacy.set_state(state)

        return [
            (np_generator, "PCG64", kinds["PCG64"]), (np_legacy, "_MT19937", kinds["MT19937"]),
            *((np.random, name, kind) for name, kind in kinds.items()),
            (np.random, "seed", seed_numpy), (np.random, "set_state", set_numpy),
            (random.Random, "seed", seed), (random, "seed", lambda *a, **kw: random._inst.seed(*a, **kw)),
            (random.Random, "setstate", set_python), (random, "setstate", lambda state: random._inst.setstate(state)),
        ]  # fmt: skip


@contextmanager
def note_seeds(noted: NotedSeeds) -> Iterator[None]:
    """What code seeds in this block is noted."""
    held = [(room, name, getattr(room, name), other) for room, name, other in noted.list_replacements()]
    for room, name, _, other in held:
        setattr(room, name, other)
    try:
        yield
    finally:
        for room, name, plain, _ in held:
            setattr(room, name, plain)


def find_line() -> str:
    """The line of the user's that has led here; empty: none."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _make_noted(kind: Any, note: Callable[[Any], None]) -> Any:
    """A bit generator of numpy's `kind` that is noted when it is made. It pickles as one of `kind`."""

    class Kind(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, kind)

    def make(generator: Any, seed: Any = None) -> None:
        kind.__init__(generator, seed)
        if seed is not None:
            note(generator)

    def seed_again(generator: Any, seed: Any) -> None:
        kind._legacy_seeding(generator, seed)
        note(generator)

    def reduce(generator: Any) -> Any:
        build, given, *rest = kind.__reduce__(generator)
        return (build, tuple(kind if one is type(generator) else one for one in given), *rest)

    methods: dict[str, Any] = {"__init__": make, "__reduce__": reduce}
    if hasattr(kind, "_legacy_seeding"):
        methods["_legacy_seeding"] = seed_again
    return Kind(kind.__name__, (kind,), methods)


def _read_state(generator: Any) -> State:
    if isinstance(generator, random.Random):
        return ("",) if isinstance(generator, random.SystemRandom) else (str(hash(generator.getstate())),)
    if isinstance(generator, torch.Generator):
        return (str(hash(generator.get_state().numpy().tobytes())),)
    if isinstance(generator, np.random.RandomState):
        kept = generator.get_state(legacy=False)
        return (*_read_bits(kept), str(kept["has_gauss"]), str(kept["gauss"]))
    return _read_bits((generator if hasattr(generator, "capsule") else generator.bit_generator).state)


def _read_bits(state: Any) -> State:
    inner = state["state"]
    words = inner.values() if isinstance(inner, dict) else [inner]
    return tuple(str(hash(one.tobytes())) if isinstance(one, np.ndarray) else str(one) for one in words) + tuple(
        str(state.get(name, "")) for name in ("has_uint32", "uinteger", "buffer_pos")
    )
