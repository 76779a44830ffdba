"""Whether requests may share a run: does an answer depend on its neighbours in the batch?

A program that normalises or attends over its batch answers otherwise in company, and the proof at capture did not ask.
Some do so only in bad company: one value that is too large for all (a scale that is taken from the whole batch, as of
activations that are quantized while it runs), one that is no number, or too many that want the same (a mixture of
experts of limited capacity). Nobody chooses who shares a run with a request, so all of that is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trueline.bundle.golden import Golden
from trueline.bundle.signature import Dim
from trueline.errors import TruelineError
from trueline.runtime.compare import compare
from trueline.runtime.session import Session

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

LOUD = 1e3
"""How many times as large as an example a neighbour may be."""
CROWD = 8
"""Requests that say the same, in one run."""
Piece = dict[str, "Array"]


def fit(rows: int, dim: Dim) -> int | None:
    """The smallest allowed size of at least `rows`; None when there is none.

    >>> fit(1, Dim(min=2, multiple_of=4)), fit(9, Dim(max=8))
    (4, None)
    """
    size = max(rows, dim.min)
    size += -size % dim.multiple_of
    return None if dim.max is not None and size > dim.max else size


def neighbours_matter(session: Session, cases: Sequence[Golden], dim: Dim) -> str:
    """Why rows must not share a run with rows of other requests; empty when they may.

    Runs pieces of the golden examples apart, together, and among neighbours that are made from them.
    """
    unit = fit(1, dim)
    pieces = [] if unit is None else _pieces(cases, unit)
    if not pieces or unit is None:
        return "the golden examples are too few rows to try it"
    pieces = pieces[:4] if len(pieces) > 1 else pieces * 2
    most = CROWD if dim.max is None else dim.max // unit
    apart = [session.run(piece) for piece in pieces]
    for who, places in _companies(pieces, most):
        company = [place if isinstance(place, dict) else pieces[place] for place in places]
        batch = {name: np.concatenate([one[name] for one in company]) for name in pieces[0]}
        try:
            together = session.run(batch)
        except (TruelineError, RuntimeError):
            if not who:
                raise
            continue  # such a batch fails as a whole, and is run again request by request
        for at, place in enumerate(places):
            if isinstance(place, dict):
                continue
            answer = {name: value[at * unit : (at + 1) * unit] for name, value in together.items()}
            found = compare(apart[place], answer)
            if not found.agrees:
                return f"an answer depends on its neighbours in the batch{who}: {found.reason}"
    return ""


def _companies(pieces: Sequence[Piece], most: int) -> Iterator[tuple[str, list[int | Piece]]]:
    """Who they are, and who stands where: a piece's number, or a neighbour whose answer nobody looks at."""
    everybody: list[int | Piece] = [*range(len(pieces))]
    yield "", everybody[:most]
    if most > 1:
        yield ", when many say the same", [0] * min(most, CROWD)
    strange = [
        (", when one of them is large", _changed(pieces[-1], lambda value: value * value.dtype.type(LOUD))),
        (", when one of them is not a number", _changed(pieces[-1], lambda value: np.full_like(value, np.nan))),
    ]
    for who, neighbour in strange:
        if neighbour is not None and most > 1:
            yield who, [0, neighbour, *everybody[1:]][:most]


def _changed(piece: Piece, change: object) -> Piece | None:
    """`piece` with other floating-point inputs; None when it has none."""
    assert callable(change)
    floats = [name for name, value in piece.items() if value.dtype.kind == "f"]
    with np.errstate(over="ignore", invalid="ignore"):  # a half may have no room for it: infinite is large as well
        return {name: change(value) if name in floats else value for name, value in piece.items()} if floats else None


def _pieces(cases: Sequence[Golden], unit: int) -> list[Piece]:
    shapes = {name: array.shape[1:] for name, array in cases[0].inputs.items()}
    pieces = []
    for case in cases:
        rows = len(next(iter(case.inputs.values())))
        if {name: array.shape[1:] for name, array in case.inputs.items()} != shapes:
            continue
        for at in range(0, rows - unit + 1, unit):
            pieces.append({name: array[at : at + unit] for name, array in case.inputs.items()})
    return pieces
