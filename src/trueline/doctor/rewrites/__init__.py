"""The families of rewrites. Each proposes edits of one statement; none decides whether an edit is right: the proof
does."""

from __future__ import annotations

from collections.abc import Iterator

from trueline.doctor.rewrites import (
    arrays,
    asides,
    attributes,
    branch,
    experts,
    loops,
    masks,
    parts,
    pieces,
    scalars,
    sizes,
    state,
    tries,
    value_loops,
    worklist,
)
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot

_FAMILIES = (
    tries,
    asides,
    arrays,
    sizes,
    experts,
    worklist,
    branch,
    masks,
    pieces,
    parts,
    scalars,
    value_loops,
    loops,
    state,
    attributes,
)
"""Safest first."""


def candidates(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """Edits for the statement at `spot`, then for what stands around it, the nearest first."""
    for place in (spot, *reversed(spot.outer)):
        for family in _FAMILIES:
            yield from family.rewrites(scope, place)
