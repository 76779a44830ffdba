"""The families of rewrites. Each proposes edits of one statement; none decides whether an edit is right: the proof
does."""

from __future__ import annotations

from collections.abc import Iterator

from trueline.doctor.rewrites.control import branches, effects, exceptions, while_loops
from trueline.doctor.rewrites.loops import vectorize, worklist
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot
from trueline.doctor.rewrites.state import attributes, unused_state
from trueline.doctor.rewrites.tensors import chunks, expert_choice, masked_reduce, masking, numpy_arrays, scalars, sizes

_FAMILIES = (
    exceptions,
    effects,
    numpy_arrays,
    sizes,
    expert_choice,
    worklist,
    branches,
    masking,
    chunks,
    masked_reduce,
    scalars,
    while_loops,
    vectorize,
    unused_state,
    attributes,
)
"""Safest first."""


def candidates(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """Edits for the statement at `spot`, then for what stands around it, the nearest first."""
    for place in (spot, *reversed(spot.outer)):
        for family in _FAMILIES:
            yield from family.rewrites(scope, place)
