"""The families of rewrites. Each proposes edits of one statement; the proof decides whether an edit is right."""

from collections.abc import Callable, Iterable, Iterator

from trueline.doctor.rewrites import state
from trueline.doctor.rewrites.control import (
    branches,
    caches,
    effects,
    first_steps,
    folds,
    growing,
    plain_forms,
    size_choices,
    while_loops,
    windows,
)
from trueline.doctor.rewrites.loops import pairs, vectorize, whole_parts
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot
from trueline.doctor.rewrites.tensors import (
    compacted,
    longest,
    masked_reduce,
    number_lists,
    numbers,
    padded_records,
    plain_expressions,
    ragged_parts,
    selections,
    size_tables,
)

_FAMILIES: tuple[Callable[[Scope, Spot], Iterable[Candidate | None]], ...] = (
    effects.catch_by_branch,
    effects.leave_out,
    caches.leave_out,
    numbers.keep_arrays,
    number_lists.keep_lists,
    plain_forms.rewrites,
    folds.rewrites,
    plain_expressions.rewrites,
    numbers.keep_sizes,
    size_tables.rewrites,
    selections.run_all_parts,
    compacted.rewrites,
    whole_parts.take_whole,
    vectorize.scan_worklist,
    size_choices.choose_sizes,
    branches.rewrites,
    selections.slice_pieces,
    masked_reduce.rewrites,
    ragged_parts.rewrites,
    padded_records.rewrites,
    longest.bound_by_sizes,
    numbers.keep_scalars,
    while_loops.rewrites,
    windows.rewrites,
    growing.rewrites,
    first_steps.rewrites,
    pairs.map_pairs,
    vectorize.rewrites,
    plain_forms.cut_zips,
    state.keep_for_training,
    state.register_buffers,
)
"""Safest first."""


def candidates(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """Edits for the statement at `spot`, then for the statements around it, the nearest first."""
    for place in (spot, *reversed(spot.outer)):
        for family in _FAMILIES:
            yield from (candidate for candidate in family(scope, place) if candidate is not None)
