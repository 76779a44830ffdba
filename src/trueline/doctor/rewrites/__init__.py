"""The families of rewrites. Each proposes edits of one statement; the proof decides whether an edit is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from trueline.doctor.rewrites import state
from trueline.doctor.rewrites.control import branches, effects, exceptions, while_loops
from trueline.doctor.rewrites.loops import vectorize, worklist
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot
from trueline.doctor.rewrites.tensors import chunks, expert_choice, masked_reduce, numbers, numpy_arrays

_FAMILIES: tuple[Callable[[Scope, Spot], Iterable[Candidate | None]], ...] = (
    exceptions.rewrites,
    effects.rewrites,
    numpy_arrays.rewrites,
    numbers.keep_sizes,
    expert_choice.rewrites,
    worklist.rewrites,
    branches.rewrites,
    chunks.rewrites,
    masked_reduce.rewrites,
    numbers.keep_scalars,
    while_loops.rewrites,
    vectorize.rewrites,
    state.keep_for_training,
    state.register_buffers,
)
"""Safest first."""


def candidates(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """Edits for the statement at `spot`, then for the statements around it, the nearest first."""
    for place in (spot, *reversed(spot.outer)):
        for family in _FAMILIES:
            yield from (candidate for candidate in family(scope, place) if candidate is not None)
