"""Watches the generators of random numbers that a loop has by name: no batch seeds them, and none of them travels.

The trial before the first step refuses a loss that follows from one. A loop may draw from it for few records, or from a
later step on, and no trial need have met these. So a step in which one moves between its batch and `job.step` ends the
job before it is applied, unless it moved in the trial too, where no loss followed from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trueline.errors import UsageError
from trueline.train.rehearsal import places

MOST = 64


def list_generators(model: torch.nn.Module, spaces: Callable[[], Iterable[tuple[str, Any]]]) -> dict[str, Any]:
    """The generators that the user's code has, by their names."""
    namespaces = list(spaces())
    seen = {id(one) for one in (*model.parameters(), *model.buffers(), *model.modules())}
    seen |= {id(space) for _, space in namespaces}
    found: dict[str, Any] = {}
    for name, room in namespaces:
        for place in places.walk(name, room, seen):
            if places.is_generator(place.value) and len(found) < MOST:
                found[place.name] = place.value
    return found


def read_state(generator: Any) -> Any:
    """Equal states mean that nothing was drawn in between.

    >>> own = np.random.default_rng(0)
    >>> before = read_state(own)
    >>> read_state(own) == before, own.random() < 1, read_state(own) == before
    (True, True, False)
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = generator if isinstance(generator, np.random.BitGenerator) else generator._bit_generator
    return str(bits.state["state"]), str(bits.state.get("has_uint32")), _read_position(bits.state)


def _read_position(state: Any) -> Any:
    inner = state["state"]
    return (inner["pos"], inner["key"].tobytes()) if "key" in inner and "pos" in inner else None


class OwnGenerators:
    """`mark()` when a batch is handed out, `expect_still()` when its loss is taken. `moves`: names that may move."""

    def __init__(self, found: dict[str, Any], moves: Collection[str] = ()) -> None:
        self._watched = {name: one for name, one in found.items() if name not in moves}
        self._before: dict[str, Any] = {}
        self._drawn = ""
        """From which one reading has drawn."""

    def mark(self) -> None:
        self._before = self._read_states()

    @contextmanager
    def watch_reading(self) -> Iterator[None]:
        """Around reading a batch, which may be that of the next step."""
        before = self._read_states()
        yield
        self._drawn = self._drawn or self._find_moved(before)

    def expect_still(self, step: int) -> None:
        """Raises UsageError if something was drawn since `mark`, or by reading."""
        name = self._drawn or self._find_moved(self._before)
        if name:
            raise UsageError(
                f"step {step} draws from {name}, a generator of its own, and the batches that were tried before "
                "the first step did not: each worker would draw other numbers, and one that joins begins again",
                hint="draw from the global generators of torch, numpy or random, which each batch seeds, or from "
                "one that is made of batch.records; what no loss uses is drawn after job.step(loss)",
            )

    def _read_states(self) -> dict[str, Any]:
        return {name: read_state(one) for name, one in self._watched.items()}

    def _find_moved(self, before: dict[str, Any]) -> str:
        return next((name for name, was in before.items() if read_state(self._watched[name]) != was), "")
